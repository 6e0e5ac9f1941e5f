"""Random functions of random trees: what ranks compute together, against plain torch in one process with all the data.

COMPILED_DDP_RANDOM_FUNCTIONS says how many, COMPILED_DDP_FIRST_FUNCTION where to begin.
"""

import os
import random
import traceback
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from drawn_functions import DrawnLoss, tree_of
from torch import Tensor

from compiled_ddp import functional as ddp
from compiled_ddp import torch_private
from ranks import RankPool

FUNCTIONS = int(os.environ.get("COMPILED_DDP_RANDOM_FUNCTIONS", "16"))
FIRST = int(os.environ.get("COMPILED_DDP_FIRST_FUNCTION", "0"))
A_RUN = 20  # as many functions, each with a communicator of its own, as are made in one process group
WORLD = 2
ROWS = [torch.randn(3, dtype=torch.float64, generator=torch.Generator().manual_seed(rank)) for rank in range(WORLD)]


@dataclass(frozen=True)
class Case:
    """A loss, and how its gradient is asked for."""

    loss: DrawnLoss
    trees: list[Any]
    argnums: int | tuple[int, ...]
    options: dict[str, Any]  # of grad_and_value
    weights: list[float] | None
    members: int  # of an ensemble; 0 for none
    is_compiled: bool

    @staticmethod
    def of(seed: int) -> "Case":
        draw = random.Random(seed)
        trees = [tree_of(draw, with_others=False) for _ in range(draw.randint(1, 3))]
        everything = tuple(range(len(trees)))
        argnums = draw.choice([0, len(trees) - 1, -2, everything, everything[::-1], (everything[-1],)])
        reduction = draw.choice(["mean", "mean", "sum", "weighted"])
        options = {
            "has_aux": draw.random() < 0.3,
            "reduction": reduction,
            "bucket_cap_mb": draw.choice([None, 0, 0.0001]),
            "reduce_value": draw.random() < 0.5,
        }
        members = draw.choice([0, 0, 0, 2])
        if not members:
            trees.append(tree_of(draw, with_others=True))
            argnums = argnums if argnums != -2 else len(trees) - 2
        weights = draw.choice([[3.0, 1.0], [0.0, 2.0], [0.5, 0.0], [0.0, 0.0]]) if reduction == "weighted" else None
        return Case(DrawnLoss(seed), trees, argnums, options, weights, members, draw.random() < 0.3)

    def on_rank(self, rank: int) -> tuple[Any, Tensor, Any]:
        """The gradients, the value, and what came with it: of an ensemble all stacked."""

        def f(*args: Any) -> Any:
            value = self.loss(*args)
            return (value, {"own": value * 2}) if self.options["has_aux"] else value

        gradient = ddp.grad_and_value(f, self.argnums, **self.options)
        weight = {} if self.weights is None else {"weight": self.weights[rank]}

        def step(*args: Any) -> Any:
            gradients, result = gradient(*args, **weight)
            value, aux = result if self.options["has_aux"] else (result, {"own": result})
            return gradients, value, aux["own"]

        if self.members:
            args = [_stacked([_member(tree, n) for n in range(self.members)]) for tree in self.trees]
            step = torch.func.vmap(step, in_dims=(*(0 for _ in args), None))
        else:
            args = self.trees
        return (ddp.compile(step, backend="aot_eager") if self.is_compiled else step)(*args, ROWS[rank])

    def alone(self, rank: int) -> tuple[Any, Tensor, Any]:
        """The same by plain torch; aux is that of `rank`."""
        if self.members:
            return _stacked([self._alone([_member(tree, n) for tree in self.trees], rank) for n in range(self.members)])
        return self._alone(self.trees, rank)

    def _alone(self, trees: list[Any], rank: int) -> tuple[Any, Tensor, Any]:
        leaves, structure = torch_private.trees.flatten(trees)
        leaves = [leaf.clone().requires_grad_() if _is_float(leaf) else leaf for leaf in leaves]
        trees = torch_private.trees.unflatten(leaves, structure)
        losses = self.loss.together(trees, ROWS)
        objective = sum(share * loss for share, loss in zip(self._shares(), losses, strict=True) if share)
        argnums = (self.argnums,) if isinstance(self.argnums, int) else self.argnums
        chosen, inner = torch_private.trees.flatten(tuple([*trees, None][number] for number in argnums))
        found: Any = [None] * len(chosen)
        if isinstance(objective, Tensor) and objective.requires_grad:
            found = torch.autograd.grad(objective, chosen, allow_unused=True)
        flat = [torch.zeros_like(leaf) if g is None else g for g, leaf in zip(found, chosen, strict=True)]
        gradients = torch_private.trees.unflatten(flat, inner)
        own = losses[rank].detach()
        value = torch.as_tensor(objective, dtype=own.dtype).detach() if self.options["reduce_value"] else own
        own = own * 2 if self.options["has_aux"] else value
        return gradients[0] if isinstance(self.argnums, int) else gradients, value, own

    def _shares(self) -> list[float]:
        """What each rank's loss counts for."""
        if self.weights is not None:
            return [weight / (sum(self.weights) or 1.0) for weight in self.weights]
        return [1.0 / WORLD if self.options["reduction"] == "mean" else 1.0] * WORLD


def _is_float(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())


def _member(tree: Any, number: int) -> Any:
    leaves, structure = torch_private.trees.flatten(tree)
    return torch_private.trees.unflatten([leaf / (number + 1) for leaf in leaves], structure)


def _stacked(trees: list[Any]) -> Any:
    flat = [torch_private.trees.flatten(tree) for tree in trees]
    leaves = [
        torch.stack([torch.as_tensor(part) for part in parts]) for parts in zip(*(f[0] for f in flat), strict=True)
    ]
    return torch_private.trees.unflatten(leaves, flat[0][1])


def _difference(found: Any, expected: Any) -> str:
    """What differs by more than some roundings of its largest element; nothing if nothing does."""
    flat, structure = torch_private.trees.flatten(found)
    expected_flat, expected_structure = torch_private.trees.flatten(expected)
    if structure != expected_structure:
        return f"{structure} is not {expected_structure}"
    for number, (one, other) in enumerate(zip(flat, expected_flat, strict=True)):
        if (one.shape, one.dtype) != (other.shape, other.dtype):
            return f"leaf {number}: {one.dtype} {list(one.shape)} is not {other.dtype} {list(other.shape)}"
        eps = torch.finfo(torch.float32 if number >= len(flat) - 2 else one.dtype).eps  # a value rides in float32
        finite = other.isfinite()
        if not one.isfinite().equal(finite):
            return f"leaf {number}: not finite in other places ({other.dtype})"
        if finite.any():
            one, other = one[finite], other[finite]
            distance, largest = float((one - other).abs().max()), float(other.abs().max())
            if not distance <= 128 * eps * largest:  # 33 have been found, where two ranks' terms nearly cancel
                return f"leaf {number}: {distance:.1e} apart, the largest is {largest:.1e} ({other.dtype})"
    return ""


def _differ(rank: int, seeds: list[int]) -> list[str]:
    failures = []
    for seed in seeds:
        case = Case.of(seed)
        try:
            why = _difference(case.on_rank(rank), case.alone(rank))
        except Exception:  # on every rank, unless it is a failure that the next case will show too
            why = traceback.format_exc()
        if why:
            failures.append(f"seed {seed}: {why}: {case}")
    return failures


@pytest.mark.parametrize(
    "seeds",
    [
        range(FIRST, FIRST + FUNCTIONS),
        pytest.param(range(FIRST + FUNCTIONS, FIRST + 4 * FUNCTIONS), marks=pytest.mark.slow),
    ],
)
def test_random_functions_of_random_trees(ranks2: RankPool, seeds: range) -> None:
    for first in seeds[::A_RUN]:
        few = [seed for seed in seeds if first <= seed < first + A_RUN]
        for failures in ranks2.run(_differ, few, timeout_seconds=200.0):
            assert not failures, "\n".join(failures)
