"""Random functions of random trees: eager and compiled gradients against torch.func's, averaged by hand."""

import os
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from compiled_ddp import functional as ddp
from compiled_ddp import torch_private
from ranks import RankPool

FUNCTIONS = int(os.environ.get("COMPILED_DDP_RANDOM_FUNCTIONS", "12"))
SHAPES = ((), (1,), (4,), (3, 4), (4, 2), (2, 3, 4), (0,))
DTYPES = (torch.float32, torch.float32, torch.float64)
UNARY: tuple[Callable[[Tensor], Tensor], ...] = (
    torch.tanh,
    torch.sin,
    lambda x: x * x,
    lambda x: x.transpose(0, -1) if x.dim() else x,
    lambda x: x.detach() * x,
    lambda x: torch.func.grad(lambda y: y.sin().sum())(x),
    lambda x: torch.vmap(torch.cos)(x) if x.dim() else x.cos(),
    lambda x: ddp.all_reduce(x.tanh()),
    lambda x: ddp.all_gather(x).sum() * x,
)


def tree_of(draw: random.Random, depth: int = 0) -> Any:
    """Dicts, lists and tuples of tensors, some of which are there twice."""
    if depth == 3 or (depth and draw.random() < 0.4):
        generator = torch.Generator().manual_seed(draw.randrange(10**6))
        return torch.randn(draw.choice(SHAPES), dtype=draw.choice(DTYPES), generator=generator)
    parts = [tree_of(draw, depth + 1) for _ in range(draw.randint(1, 3))]
    if draw.random() < 0.2:
        parts.append(parts[0])
    kind = draw.randrange(3)
    return {f"k{n}": part for n, part in enumerate(parts)} if kind == 0 else parts if kind == 1 else tuple(parts)


def function_of(seed: int) -> Callable[..., Tensor]:
    """A loss that uses most leaves, by random operators, and a batch."""

    def f(*args: Any) -> Tensor:
        draw = random.Random(seed)
        *trees, x = args
        total = x.sum()
        for leaf in torch_private.trees.flatten(trees)[0]:
            value = leaf
            for _ in range(draw.randint(0, 3)):
                value = draw.choice(UNARY)(value)
            if draw.random() < 0.9:
                total = total + (value.to(x.dtype) * x.mean()).sum() * (1 + value.to(x.dtype).mean().nan_to_num())
        return total

    return f


def _differ(rank: int, seeds: list[int]) -> list[str]:
    failures = []
    for seed in seeds:
        draw = random.Random(seed)
        trees = [tree_of(draw) for _ in range(draw.randint(1, 2))]
        f = function_of(seed)
        x = torch.randn(3, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))
        argnums = draw.choice([0, tuple(range(len(trees))), len(trees) - 1])
        cap = draw.choice([None, 0, 0.0001])
        gradient = ddp.grad(f, argnums, bucket_cap_mb=cap)
        expected = _by_hand(f, argnums, [*trees, x])
        found = {
            "eager": gradient(*trees, x),
            "compiled": ddp.compile(lambda *args: gradient(*args), backend="aot_eager")(*trees, x),  # noqa: B023
        }
        for way, result in found.items():
            try:
                torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)
            except AssertionError as error:
                failures.append(f"seed {seed}, {way}: {error}")
    return failures


def _by_hand(f: Any, argnums: Any, args: list[Any]) -> Any:
    """One process's gradients of both ranks' losses: the losses' own collectives reduce, and so do these."""
    local = torch.func.grad(f, argnums)(*args)
    leaves, structure = torch_private.trees.flatten(local)
    for leaf in leaves:
        torch.distributed.all_reduce(leaf)
    return torch_private.trees.unflatten([leaf / 2 for leaf in leaves], structure)


def test_random_functions_of_random_trees(ranks2: RankPool) -> None:
    seconds = 120.0 + 3 * FUNCTIONS
    for failures in ranks2.run(_differ, list(range(FUNCTIONS)), timeout_seconds=seconds):
        assert not failures, "\n".join(failures)
