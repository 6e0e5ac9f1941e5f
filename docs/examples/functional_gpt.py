"""Train a small byte-level GPT by plain functions: its parameters are a dict, its optimizer a function.

    torchrun --standalone --nproc-per-node 2 docs/examples/functional_gpt.py --steps 200

The whole step (loss, gradients, their mean over ranks, AdamW) is one compiled graph. It trains on the Python standard
library's own source, saves a checkpoint when it ends, and goes on from it, to the last bit, when started again.
"""

import argparse
import os
import sysconfig
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from compiled_ddp import functional as ddp

Params = dict[str, Tensor]


def init(options: argparse.Namespace) -> Params:
    """The same on every rank: all draw from one seed."""
    generator = torch.Generator().manual_seed(options.seed)
    width = options.width

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator) * 0.02

    params = {"token": normal(256, width), "position": normal(options.context, width)}
    for n in range(options.layers):
        params |= {
            f"{n}.norm1": torch.ones(width),
            f"{n}.qkv": normal(3 * width, width),
            f"{n}.projection": normal(width, width),
            f"{n}.norm2": torch.ones(width),
            f"{n}.up": normal(4 * width, width),
            f"{n}.down": normal(width, 4 * width),
        }
    return params | {"norm": torch.ones(width), "head": normal(256, width)}


def loss(params: Params, x: Tensor, y: Tensor, *, layers: int, heads: int) -> Tensor:
    hidden = params["token"][x] + params["position"]
    for n in range(layers):
        normed = F.layer_norm(hidden, hidden.shape[-1:], params[f"{n}.norm1"])
        q, k, v = (
            part.unflatten(-1, (heads, -1)).transpose(1, 2)
            for part in F.linear(normed, params[f"{n}.qkv"]).chunk(3, dim=-1)
        )
        attention = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        hidden = hidden + F.linear(attention.transpose(1, 2).flatten(2), params[f"{n}.projection"])
        normed = F.layer_norm(hidden, hidden.shape[-1:], params[f"{n}.norm2"])
        hidden = hidden + F.linear(F.gelu(F.linear(normed, params[f"{n}.up"])), params[f"{n}.down"])
    logits = F.linear(F.layer_norm(hidden, hidden.shape[-1:], params["norm"]), params["head"])
    return F.cross_entropy(logits.flatten(0, 1), y.flatten())


def adamw(params: Params, gradients: Params, state: dict[str, Any], lr: float = 1e-3) -> tuple[Params, dict[str, Any]]:
    """Decoupled weight decay (Loshchilov, Hutter, 2019), with betas 0.9 and 0.95."""
    count = state["count"] + 1
    first = {name: 0.9 * state["first"][name] + 0.1 * g for name, g in gradients.items()}
    second = {name: 0.95 * state["second"][name] + 0.05 * g * g for name, g in gradients.items()}
    rate, scale = lr / (1 - 0.9**count), 1 / (1 - 0.95**count)
    new = {
        name: value * (1 - 0.1 * lr) - rate * first[name] / ((second[name] * scale).sqrt() + 1e-8)
        for name, value in params.items()
    }
    return new, {"count": count, "first": first, "second": second}


def batch(text: Tensor, step: int, options: argparse.Namespace) -> tuple[Tensor, Tensor]:
    """This rank's windows of a step: what a resumed run sees is what it would have seen."""
    number = step * dist.get_world_size() + dist.get_rank()
    generator = torch.Generator().manual_seed(options.seed + 1 + number)
    begins = torch.randint(len(text) - options.context - 1, (options.batch,), generator=generator)
    windows = torch.stack([text[begin : begin + options.context + 1] for begin in begins]).long()
    return windows[:, :-1], windows[:, 1:]


def save(path: Path, checkpoint: dict[str, Any]) -> None:
    """Rank 0 writes for all: after a step every rank holds the same."""
    if dist.get_rank() == 0:
        unfinished = path.with_suffix(".tmp")
        torch.save(checkpoint, unfinished)
        os.replace(unfinished, path)


def train(options: argparse.Namespace) -> float:
    source = b"".join(path.read_bytes() for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")))
    text = torch.frombuffer(bytearray(source), dtype=torch.uint8)
    gradient = ddp.grad_and_value(loss, reduce_value=True)

    def step(params: Params, state: dict[str, Any], x: Tensor, y: Tensor) -> tuple[Params, dict[str, Any], Tensor]:
        gradients, value = gradient(params, x, y, layers=options.layers, heads=options.heads)
        params, state = adamw(params, gradients, state)
        return params, state, value

    compiled = ddp.compile(step, donate=("params", "state"), backend=options.backend)
    if options.checkpoint.exists():
        params, state = torch.load(options.checkpoint, weights_only=True).values()
    else:
        params = init(options)
        zeros = [{name: torch.zeros_like(value) for name, value in params.items()} for _ in range(2)]
        state = {"count": torch.zeros(()), "first": zeros[0], "second": zeros[1]}
    value = torch.zeros(())
    for number in range(int(state["count"]), options.steps):
        params, state, value = compiled(params, state, *batch(text, number, options))
        if dist.get_rank() == 0 and number % 20 == 0:
            print(f"step {number:5d}  loss {value.item():.4f}", flush=True)
    save(options.checkpoint, {"params": params, "state": state})
    return value.item()


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in {
        "steps": 200,
        "batch": 8,
        "context": 64,
        "width": 128,
        "layers": 4,
        "heads": 4,
        "seed": 0,
    }.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--backend", default="inductor", help="aot_eager needs no C++ compiler")
    parser.add_argument("--checkpoint", type=Path, default=Path("functional_gpt.pt"))
    return parser.parse_args(arguments)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    try:
        train(parse())
    finally:
        dist.destroy_process_group()
