"""Checksums of many gradients: small ones are taken together, as calls for each would take longer than the work."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

import torch

from compiled_ddp.checks.checksum import checksum
from compiled_ddp.checks.signs import signed_sum, signs

_SMALL = 4096  # elements of a row that is taken together with others
_TOGETHER = 2**20  # elements that are taken together, about: there are some words of memory for each

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element


class SmallRows:
    """One-dimensional tensors of one dtype on one device, laid back to back."""

    def __init__(self, values: torch.Tensor, row_sizes: Sequence[int]) -> None:
        sizes = torch.tensor(row_sizes, dtype=torch.int64, device="cpu")
        if values.is_complex():
            values, sizes = torch.view_as_real(values).view(-1), 2 * sizes
        self._values, self._sizes = values, sizes.to(values.device)
        self._ends = self._sizes.cumsum(0)

    @classmethod
    def of(cls, rows: Sequence[torch.Tensor]) -> "SmallRows":
        """A copy of rows that lie anywhere."""
        return cls(torch.cat(tuple(rows)), [row.numel() for row in rows])

    def checksums(self) -> torch.Tensor:
        """Of each row: int64, shape (rows,). It depends on nothing but the row, wherever that lies among others."""
        words = self._values.view(_INTEGERS[self._values.element_size()])
        return self._sums((2 * self._places() + 1) * words)

    def signed_sums(self) -> torch.Tensor:
        """Of each row, see `signed_sum`: float64, shape (rows, 2). What is not finite stays in its row."""
        exact = self._values.double()
        both = torch.stack((exact * signs(exact.device)[self._places()], exact * exact), dim=1)
        rows = torch.arange(len(self._sizes), dtype=torch.int64, device=both.device)
        of_elements = rows.repeat_interleave(self._sizes, output_size=len(both))
        return torch.zeros(len(rows), 2, dtype=both.dtype, device=both.device).index_add_(0, of_elements, both)

    def _places(self) -> torch.Tensor:
        """Of each element in its row."""
        numel = len(self._values)
        starts = (self._ends - self._sizes).repeat_interleave(self._sizes, output_size=numel)
        return torch.arange(numel, dtype=torch.int64, device=starts.device) - starts

    def are_finite(self) -> torch.Tensor:
        """Whether all elements of each row are: shape (rows,)."""
        return self._sums(self._values.isfinite().logical_not()) == 0

    def _sums(self, values: torch.Tensor) -> torch.Tensor:
        """Of each row: int64, modulo 2**64, so that what came before a row leaves nothing in it."""
        before = torch.zeros(1, dtype=torch.int64, device=values.device)
        return torch.cat((before, values.cumsum(0)))[torch.cat((before, self._ends))].diff()


class LargeRow:
    """The same of one tensor, in fewer passes through memory."""

    def __init__(self, row: torch.Tensor) -> None:
        self._row = row

    def checksums(self) -> torch.Tensor:
        return checksum(self._row).view(1)

    def signed_sums(self) -> torch.Tensor:
        return signed_sum(self._row).view(1, 2)

    def are_finite(self) -> torch.Tensor:
        """A sum tells it, four times as fast as a look at each element; an overflow in it counts as not finite."""
        row = torch.view_as_real(self._row) if self._row.is_complex() else self._row
        return row.sum(dtype=torch.float32 if row.element_size() < 4 else None).isfinite().view(1)


def batched(rows: Iterable[tuple[int, torch.Tensor]]) -> Iterator[tuple[Sequence[int], SmallRows | LargeRow]]:
    """These rows, each with a number, in batches with the numbers of theirs."""
    small: defaultdict[tuple[torch.dtype, torch.device], dict[int, torch.Tensor]] = defaultdict(dict)
    elements: defaultdict[tuple[torch.dtype, torch.device], int] = defaultdict(int)
    for number, row in rows:
        numel = row.numel()
        if numel > _SMALL:
            yield [number], LargeRow(row)
            continue
        kind = row.dtype, row.device
        small[kind][number] = row
        elements[kind] += numel
        if elements[kind] >= _TOGETHER:
            together = small.pop(kind)
            del elements[kind]
            yield list(together), SmallRows.of(list(together.values()))
    for together in small.values():
        yield list(together), SmallRows.of(list(together.values()))


def batched_in_place(
    numbers: Sequence[int], values: torch.Tensor, sizes: Sequence[int]
) -> Iterator[tuple[Sequence[int], SmallRows | LargeRow]]:
    """The same of rows that lie back to back in `values`; where all are small, without a look at each."""
    if sizes and max(sizes) <= _SMALL and values.numel() <= _TOGETHER:
        yield numbers, SmallRows(values, sizes)
    elif sizes:
        yield from batched(zip(numbers, values.split(sizes), strict=True))
