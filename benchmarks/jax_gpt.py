"""A rank of the GPT of models.py in JAX, for beside_jax.py: jit of a shard_map, over gloo's collectives.

It runs in an environment of its own and imports nothing of this project.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
place, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
if os.cpu_count() and len(os.sched_getaffinity(0)) >= size:
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[place]})

import json  # noqa: E402

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import NamedSharding, PartitionSpec  # noqa: E402

HEADS = 7
Params = dict[str, jax.Array]


def layer_norm(x: jax.Array, params: Params, name: str) -> jax.Array:
    centred = x - x.mean(-1, keepdims=True)
    normal = centred / jnp.sqrt(jnp.square(centred).mean(-1, keepdims=True) + 1e-5)
    return normal * params[f"{name}.weight"] + params[f"{name}.bias"]


def attention(x: jax.Array, params: Params, name: str) -> jax.Array:
    batch, context, width = x.shape
    qkv = (x @ params[f"{name}.qkv.weight"].T).reshape(batch, context, 3, HEADS, width // HEADS)
    q, k, v = (qkv[:, :, part].swapaxes(1, 2) for part in range(3))
    scores = q @ k.swapaxes(-1, -2) / np.sqrt(width // HEADS)
    causal = jnp.tril(jnp.ones((context, context), dtype=bool))
    weights = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf), axis=-1)
    return (weights @ v).swapaxes(1, 2).reshape(batch, context, width) @ params[f"{name}.projection.weight"].T


def loss_of(params: Params, x: jax.Array, y: jax.Array) -> jax.Array:
    hidden = params["token.weight"][x] + params["position.weight"]
    layers = sum(name.endswith(".attention.qkv.weight") for name in params)
    for number in range(layers):
        block = f"blocks.{number}"
        hidden = hidden + attention(layer_norm(hidden, params, f"{block}.attention_norm"), params, f"{block}.attention")
        up = layer_norm(hidden, params, f"{block}.mlp_norm") @ params[f"{block}.expand.weight"].T
        hidden = hidden + jax.nn.gelu(up, approximate=False) @ params[f"{block}.contract.weight"].T
    logits = layer_norm(hidden, params, "norm") @ params["head.weight"].T
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits, axis=-1), y[..., None], axis=-1)
    return -chosen.mean()


def adamw(params: Params, gradients: Params, state: dict[str, Any], *, lr: float, decay: float) -> tuple[Params, Any]:
    """torch.optim.AdamW's, with its betas and epsilon."""
    count = state["count"] + 1
    first = {name: 0.9 * state["first"][name] + 0.1 * g for name, g in gradients.items()}
    second = {name: 0.999 * state["second"][name] + 0.001 * g * g for name, g in gradients.items()}
    rate, scale = lr / (1 - 0.9**count), 1 / jnp.sqrt(1 - 0.999**count)
    new = {
        name: p * (1 - lr * decay) - rate * first[name] / (jnp.sqrt(second[name]) * scale + 1e-8)
        for name, p in params.items()
    }
    return new, {"count": count, "first": first, "second": second}


class Training:
    """The GPT, sharded over all ranks by its batches."""

    def __init__(self, given: dict[str, np.ndarray], batches: dict[str, np.ndarray], optimizer: dict[str, float]):
        mesh = jax.make_mesh((size,), ("ranks",))
        everywhere, self._by_rank = (NamedSharding(mesh, spec) for spec in (PartitionSpec(), PartitionSpec("ranks")))

        def replicated(array: np.ndarray) -> jax.Array:
            return jax.make_array_from_process_local_data(everywhere, array)

        def step(params: Params, state: Any, x: jax.Array, y: jax.Array) -> tuple[Params, Any, jax.Array]:
            value, gradients = jax.value_and_grad(loss_of)(params, x, y)
            gradients = jax.lax.pmean(gradients, "ranks")
            params, state = adamw(params, gradients, state, **optimizer)
            return params, state, value[None]

        specs = (PartitionSpec(), PartitionSpec(), PartitionSpec("ranks"), PartitionSpec("ranks"))
        outputs = (PartitionSpec(), PartitionSpec(), PartitionSpec("ranks"))
        sharded = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=outputs, check_vma=False)
        self._step = jax.jit(sharded, donate_argnums=(0, 1))
        self._params = {name: replicated(array) for name, array in given.items()}
        moments = [{name: replicated(np.zeros_like(array)) for name, array in given.items()} for _ in range(2)]
        self._state = {"count": replicated(np.zeros((), np.float32)), "first": moments[0], "second": moments[1]}
        self._batches = zip(batches["x"], batches["y"], strict=True)

    def step(self) -> tuple[float, float]:
        """Seconds, and this rank's loss."""
        x, y = (jax.make_array_from_process_local_data(self._by_rank, part) for part in next(self._batches))
        begin = time.perf_counter()
        self._params, self._state, value = self._step(self._params, self._state, x, y)
        jax.block_until_ready((self._params, self._state, value))
        return time.perf_counter() - begin, float(value.addressable_shards[0].data[0])


def main() -> None:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{os.environ['MASTER_PORT']}", size, place)
    folder, optimizer = Path(sys.argv[1]), json.loads(sys.argv[2])
    given, batches = np.load(folder / "weights.npz"), np.load(folder / f"batches{place}.npz")
    training = Training(dict(given), dict(batches), optimizer)
    for line in sys.stdin:
        _, steps = line.rsplit(maxsplit=1)
        print("@" + json.dumps([training.step() for _ in range(int(steps))]), flush=True)


if __name__ == "__main__":
    main()
