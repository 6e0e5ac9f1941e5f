"""What ranks tell each other of reduced gradients, in two collectives: whether results are equal, and the sums.

The first adds up what ranks have brought: [Note: proof by random signs]. The second takes maxima: of what each rank
finds by it, and of checksums, which are equal where their maximum is their minimum.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from compiled_ddp.checks.signs import rounding, smallest
from compiled_ddp.ranks.communicator import Communicator


@dataclass(frozen=True)
class Account:
    """Of a number of gradients, what this rank has seen; each tensor has a number for each, on one device.

    `brought` is float64 of shape (3, gradients): the signed sum of what it put into the reduction, the sum of squares,
    and of the squares of what the first may be off. `results` are the signed sums of what came out, float64, and
    `checksums` are of that, int64. `kinds` are dtypes and numbers of elements. A result times `factor` is the sum of
    what ranks have brought; None where nothing makes it that.
    """

    brought: Tensor
    results: Tensor
    checksums: Tensor
    kinds: Sequence[tuple[torch.dtype, int]]
    factor: float | None


@dataclass(frozen=True)
class Verdict:
    """The same on every rank: on the CPU, by gradient; `others` are the maxima of what each rank added."""

    have_values: Tensor  # some rank brought more than zeros, and all ranks finite numbers
    brought_differ: Tensor
    results_differ: Tensor
    are_off: Tensor  # on some rank the result is something else than the sum; not of what is not finite
    others: Sequence[Tensor]


def exchange(communicator: Communicator, account: Account, *others: Tensor) -> Verdict:
    """Compare the accounts of all ranks. `others` are int64, a number for each gradient, of which ranks take maxima."""
    expected = account.brought.clone()
    communicator.all_reduce(expected).wait()
    off = _are_off(account, expected, communicator.world_size).to(torch.int64)
    own = account.brought[0].view(torch.int64)
    shared = torch.stack((*_to_compare(own), *_to_compare(account.checksums), off, *others))
    communicator.maximum(shared)
    have_values = ((expected[1] > 0) & expected[:2].isfinite().all(0)).cpu()
    before, before_inverted, after, after_inverted, off, *found = shared.cpu()
    return Verdict(
        have_values, _are_unequal(before, before_inverted), _are_unequal(after, after_inverted), off != 0, found
    )


def _are_off(account: Account, expected: Tensor, world_size: int) -> Tensor:
    results, factor = account.results, account.factor
    if factor is None:
        return torch.zeros_like(results, dtype=torch.bool)
    sizes = [(rounding(dtype, world_size), smallest(dtype) * max(numel, 1) ** 0.5) for dtype, numel in account.kinds]
    relative, absolute = torch.tensor(sizes, dtype=torch.float64, device=results.device).view(-1, 2).t()
    signed, squares, slack = expected
    allowed = relative * squares.sqrt() + 4.0 * slack.sqrt() + world_size * absolute
    are_off: Tensor = (results * factor - signed).abs() > allowed
    return are_off


def _to_compare(values: Tensor) -> tuple[Tensor, Tensor]:
    """Two rows whose maxima over ranks tell whether the ranks' values are equal. Unlike -x, ~x cannot overflow."""
    return values, ~values


def _are_unequal(most: Tensor, most_inverted: Tensor) -> Tensor:
    return most != ~most_inverted
