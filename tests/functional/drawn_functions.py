"""Random losses of random trees, each computed in two ways: on a rank, and in one process that has all ranks' rows.

A loss takes each leaf through a chain of operators. In one process a chain has a value for every rank: a local operator
is applied to each, a collective of ours is replaced by what it means, in plain torch.
"""

import collections
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from compiled_ddp import functional as ddp
from compiled_ddp import torch_private

SHAPES = ((), (1,), (4,), (3, 4), (4, 2), (2, 3, 4), (0,), (3, 0))
DTYPES = (
    (torch.float32,) * 4 + (torch.float64,) * 2 + (torch.bfloat16, torch.float16, torch.complex64, torch.complex128)
)


class Pair(NamedTuple):
    one: Any
    other: Any


@dataclass
class Record:
    one: Any
    other: Any


torch.export.register_dataclass(Record)


# ---- trees -----------------------------------------------------------------------------------------------------------


def tree_of(draw: random.Random, *, with_others: bool, depth: int = 0) -> Any:
    """Containers of tensors, of which some are empty and some are there twice; `with_others`, of anything else too."""
    if depth == 3 or (depth and draw.random() < 0.4):
        return draw.choice((None, 3, "text", torch.arange(3))) if with_others and draw.random() < 0.3 else _leaf(draw)
    parts = [tree_of(draw, with_others=with_others, depth=depth + 1) for _ in range(draw.randint(0, 3))]
    parts += [] if depth else [_leaf(draw)]
    if parts and draw.random() < 0.2:
        parts.append(parts[0])
    kinds: list[Callable[[], Any]] = [
        lambda: parts,
        lambda: tuple(parts),
        lambda: {f"k{n}": part for n, part in enumerate(parts)},
        lambda: collections.OrderedDict((n, part) for n, part in enumerate(reversed(parts))),
        lambda: collections.deque(parts),
    ]
    if len(parts) == 2:
        kinds += [lambda: Pair(*parts), lambda: Record(*parts)] * 2
    return draw.choice(kinds)()


def _leaf(draw: random.Random) -> Tensor:
    generator = torch.Generator().manual_seed(draw.randrange(10**6))
    shape, dtype = draw.choice(SHAPES), draw.choice(DTYPES)
    drawn = torch.randn(shape, dtype=torch.complex128 if dtype.is_complex else torch.float64, generator=generator)
    leaf = drawn.to(dtype)
    match draw.randrange(6) if leaf.dim() else None:
        case 0:
            return leaf.transpose(0, -1)
        case 1:
            return torch.cat([leaf, leaf])[::2]
        case 2:
            return leaf[:1].expand(leaf.shape) if leaf.shape[0] else leaf
    return leaf


# ---- operators: of the values on these ranks, each with the rank's number --------------------------------------------

Operator = Callable[[list[Tensor], Sequence[int]], list[Tensor]]


def _local(f: Callable[[Tensor], Tensor]) -> Operator:
    return lambda values, _: [f(value) for value in values]


def _real(x: Tensor) -> Tensor:
    return x.real + 2 * x.imag if x.is_complex() else x


def _in_place(x: Tensor) -> Tensor:
    y = x.clone()
    y[..., :1].mul_(2) if y.dim() else y.mul_(2)
    return y


def _unlike(values: list[Tensor], ranks: Sequence[int]) -> list[Tensor]:
    """Other Python on each rank."""
    return [value.sin() if rank else value * 2 for value, rank in zip(values, ranks, strict=True)]


LOCAL: tuple[Operator, ...] = (
    _unlike,
    *map(
        _local,
        (
            torch.tanh,
            torch.sin,
            lambda x: x * x.tanh(),
            lambda x: x.transpose(0, -1) if x.dim() else x,
            lambda x: x[::2] if x.dim() else x,
            lambda x: x.detach() * x,
            lambda x: x @ x.mT / 4 if x.dim() > 1 else x,
            lambda x: torch.func.grad(lambda y: _real(y.sin()).sum())(x),
            lambda x: torch.func.jvp(torch.sin, (x,), (x,))[1],
            lambda x: torch.func.vmap(torch.cos)(x) if x.dim() and x.shape[0] else x.cos(),
            _in_place,
        ),
    ),
)


def _across(on_a_rank: Callable[[Tensor], Tensor], together: Callable[[list[Tensor]], Tensor]) -> Operator:
    def operator(values: list[Tensor], ranks: Sequence[int]) -> list[Tensor]:
        return [on_a_rank(values[0])] if len(ranks) == 1 else [together(values)] * len(ranks)

    return operator


ACROSS: tuple[Operator, ...] = (
    _across(ddp.all_reduce, lambda values: sum(values) / len(values)),
    _across(lambda x: ddp.all_reduce(x, "sum").tanh(), lambda values: sum(values).tanh()),
    _across(ddp.all_gather, lambda values: torch.cat(values) if values[0].dim() else torch.stack(values)),
    _across(lambda x: ddp.broadcast({"x": x}, src=1)["x"], lambda values: values[1]),
    _across(
        lambda x: torch.func.vmap(ddp.all_reduce)(x) if x.dim() and x.shape[0] else ddp.all_reduce(x),
        lambda values: sum(values) / len(values),
    ),
)


# ---- losses ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Chain:
    operators: tuple[Operator, ...]
    is_used_on: Callable[[int], bool]

    @staticmethod
    def of(draw: random.Random) -> "_Chain":
        operators = tuple(draw.choice(LOCAL if draw.random() < 0.8 else ACROSS) for _ in range(draw.randint(0, 3)))
        if draw.random() < 0.75 or not set(operators).isdisjoint(ACROSS):
            return _Chain(operators, lambda _: True)  # every rank has to reach a collective's derivative
        return _Chain(operators, draw.choice([lambda _: False, bool, lambda rank: rank == 0]))


@dataclass(frozen=True)
class DrawnLoss:
    """A loss of trees, and last of this rank's rows; the sums of chains are weighed by the rows."""

    seed: int

    def __call__(self, *args: Any) -> Tensor:
        """On a rank."""
        return self._losses(args[:-1], [args[-1]], [ddp.rank()])[0]

    def together(self, trees: Sequence[Any], rows: list[Tensor]) -> list[Tensor]:
        """Every rank's loss, by plain torch."""
        return self._losses(trees, rows, range(len(rows)))

    def _losses(self, trees: Sequence[Any], rows: list[Tensor], ranks: Sequence[int]) -> list[Tensor]:
        draw = random.Random(self.seed)
        totals = [x.sum() for x in rows]
        for leaf in torch_private.trees.flatten(list(trees))[0]:
            if not isinstance(leaf, Tensor) or leaf.dtype == torch.int64:
                continue
            chain, values = _Chain.of(draw), [leaf for _ in ranks]
            for operator in chain.operators:
                values = operator(values, ranks)
            reals = [_real(value).to(torch.float64) for value in values]
            totals = [
                total + x.mean() * real.sum() + real.square().sum() / 4 if chain.is_used_on(rank) else total
                for total, real, x, rank in zip(totals, reals, rows, ranks, strict=True)
            ]
        return totals
