"""A rank of the GPT under this project's wrappers, for beside_jax.py: each a whole step, as JAX's is."""

import json
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.tasks import GPT
from benchmarks.variants import make_variants
from compiled_ddp import functional as ddp
from compiled_ddp.tools.comparison.ranks import joined_rank

Batches = Iterator[tuple[Tensor, Tensor]]


class WrappedStep:
    """A variant of compare.py, with torch's fused optimizer behind it."""

    def __init__(self, variant: str, batches: Batches) -> None:
        self._module = make_variants()[variant].wrap(GPT.build_model("wrapped", torch.device("cpu")))
        self._optimizer, self._batches = GPT.optimizer(self._module.parameters()), batches

    def step(self) -> tuple[float, float]:
        """Seconds, and this rank's loss."""
        batch = next(self._batches)
        begin = time.perf_counter()
        value = self._module(*batch)
        value.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return time.perf_counter() - begin, value.item()


class FunctionalStep:
    """The loss, its gradients and AdamW as one graph."""

    def __init__(self, batches: Batches, optimizer: dict[str, float]) -> None:
        model = GPT.build_model("functional", torch.device("cpu"))
        gradient = ddp.grad_and_value(lambda params, x, y: torch.func.functional_call(model, params, (x, y)))

        def step(params: dict[str, Tensor], state: Any, x: Tensor, y: Tensor) -> Any:
            gradients, value = gradient(params, x, y)
            return *adamw(params, gradients, state, **optimizer), value

        self._step = ddp.compile(step, donate=("params", "state"))
        self._params = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        moments = [{name: torch.zeros_like(value) for name, value in self._params.items()} for _ in range(2)]
        self._state = {"count": torch.zeros(()), "first": moments[0], "second": moments[1]}
        self._batches = batches

    def step(self) -> tuple[float, float]:
        """Seconds, and this rank's loss."""
        batch = next(self._batches)
        begin = time.perf_counter()
        self._params, self._state, value = self._step(self._params, self._state, *batch)
        return time.perf_counter() - begin, value.item()


def adamw(
    params: dict[str, Tensor], gradients: dict[str, Tensor], state: Any, *, lr: float, decay: float
) -> tuple[dict[str, Tensor], Any]:
    """torch.optim.AdamW's, with its betas and epsilon."""
    count = state["count"] + 1
    first = {name: 0.9 * state["first"][name] + 0.1 * g for name, g in gradients.items()}
    second = {name: 0.999 * state["second"][name] + 0.001 * g * g for name, g in gradients.items()}
    rate, scale = lr / (1 - 0.9**count), (1 - torch.exp(count * math.log(0.999))).rsqrt()
    new = {
        name: p * (1 - lr * decay) - rate * first[name] / (second[name].sqrt() * scale + 1e-8)
        for name, p in params.items()
    }
    return new, {"count": count, "first": first, "second": second}


def _batches(folder: Path, rank: int) -> Batches:
    with np.load(folder / f"batches{rank}.npz") as saved:
        xs, ys = (torch.from_numpy(saved[name]) for name in ("x", "y"))
    return zip(xs, ys, strict=True)


def main() -> None:
    folder, optimizer = Path(sys.argv[1]), json.loads(sys.argv[2])
    with joined_rank("cpu") as rank:
        contenders: dict[str, WrappedStep | FunctionalStep] = {
            name: WrappedStep(name, _batches(folder, rank.index)) for name in ("torch DDP", "compile_ddp")
        }
        contenders["functional, compiled"] = FunctionalStep(_batches(folder, rank.index), optimizer)
        for line in sys.stdin:
            name, steps = line.rsplit(maxsplit=1)
            rank.barrier()
            print("@" + json.dumps([contenders[name].step() for _ in range(int(steps))]), flush=True)


if __name__ == "__main__":
    main()
