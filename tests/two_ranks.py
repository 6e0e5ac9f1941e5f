"""Two ranks in one process with two parameters, and the mean of their gradients by hand."""

from collections.abc import Sequence
from typing import Any

import torch
from in_process import HandRun, Rank
from torch import Tensor
from wire import Wire

from compiled_ddp.plan import Section

SIZES = (3, 2)


def two_ranks(**options: Any) -> list[Rank]:
    wire = Wire(2)
    return [Rank(wire, rank, SIZES, **options) for rank in range(2)]


def begin(ranks: Sequence[Rank], sections: Sequence[Section], **each: Any) -> list[HandRun]:
    return [rank.begin(sections, **each) for rank in ranks]


def values(rank: int, index: int = 0) -> Tensor:
    return torch.arange(1.0, SIZES[index] + 1) * (1 + 2 * rank) + index


def mean(index: int = 0) -> Tensor:
    return (values(0, index) + values(1, index)) / 2


def bring(*runs: HandRun, indices: Sequence[int] = (0, 1)) -> None:
    for run in runs:
        for index in indices:
            run.accumulate(index, values(run.rank.rank, index))


def assert_gradients(ranks: Sequence[Rank], *expected: Tensor | None) -> None:
    for rank in ranks:
        for gradient, wanted in zip(rank.gradients, expected, strict=True):
            assert (gradient is None) == (wanted is None)
            if gradient is not None and wanted is not None:
                assert torch.equal(gradient, wanted), (rank.rank, gradient, wanted)
