"""What tells tensors apart in a few numbers: checksums of bits, and sums with random signs; of many tensors together.

[Note: proof by random signs] The sum of a tensor's elements, each with a random sign that is the same on all ranks, is
linear in it: that of the sum over ranks is the sum of those of the ranks, to rounding. One number for each gradient is
enough, as an error that does not know the signs is found unless it is as small as rounding.

Equal tensors have equal checksums, whatever their strides and wherever they lie in memory. Small tensors are taken
together, as calls for each would take longer than the work.
"""

import functools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from compiled_ddp import torch_private

# Elements that are looked at together, and after which the signs repeat: a prime, as rows and blocks of a power of two
# that have changed places would meet their own signs again.
CHUNK = 2**20 + 7
SIGMAS = 8.0  # how far rounding goes

_ROW = 512  # words that are added up before they are weighted
_WORD_BYTES = 8

_SMALL = 4096  # elements of a row that is taken together with others
_TOGETHER = 2**20  # elements that are taken together, about: there are some words of memory for each

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element

# ---- random signs ----------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=8)
def signs(device: torch.device) -> Tensor:
    """Random signs for `CHUNK` elements: float64, the same on every rank."""
    with torch_private.tracing.outside_of_traces():
        generator = torch.Generator().manual_seed(16)
        drawn = torch.randint(0, 2, (CHUNK,), generator=generator, dtype=torch.int64, device="cpu")
        return (2 * drawn - 1).to(device=device, dtype=torch.float64)


def as_reals(tensor: Tensor) -> Tensor:
    """The elements in a row, of a complex tensor both parts."""
    values = tensor.detach().contiguous()
    return (torch.view_as_real(values) if values.is_complex() else values).reshape(-1)


def signed_sum(row: Tensor) -> Tensor:
    """The sum with random signs of the elements in `row`, and that of their squares: float64, shape (2,)."""
    sums = torch.zeros(2, dtype=torch.float64, device=row.device)
    for chunk in as_reals(row).split(CHUNK):
        if chunk.numel():
            exact = chunk.double()
            sums += torch.stack((torch.dot(exact, signs(exact.device)[: exact.numel()]), torch.dot(exact, exact)))
    return sums


def rounding(dtype: torch.dtype, world_size: int, own_squares: Tensor, result_squares: Tensor) -> Tensor:
    """What the signed sum of a result may be off, where a reduction rounds every sum that it makes: float64.

    [Note: how far a reduction rounds] Of what the ranks brought, and of what came out, there are the sums of squares.
    The signs know nothing of the rounding errors, so the signed sum of these is some `SIGMAS` of their norm at most. A
    chain of `world_size` - 1 additions rounds partial sums, whose squares grow with the number of ranks in them for
    what is each rank's own, and with its square for what all ranks have in common. Errors of the first kind are
    independent of each other; those of the second need not be: where equal numbers are added up, each addition may
    round in the same direction. Trees round less. On top comes a factor each way: a rank's share, and that of the mean.
    """
    common = (result_squares - own_squares).clamp(min=0.0)  # squares of the part of the sum that ranks agree on
    errors = (
        (world_size / 2 + 1.0) * own_squares + (world_size / 3 + 2.0) * result_squares + world_size**2 / 24 * common
    )
    return SIGMAS * torch.finfo(dtype).eps / 2 * errors.sqrt()


def rounding_of_signed_sums(numbers: Tensor, world_size: int, signed: Tensor, squares: Tensor) -> Tensor:
    """What signed sums of so many elements are off by themselves: with gradients in float64, no less than these.

    Of n elements whose squares add up to s, the k-th partial sum has a square of some s k/n, and is rounded. `squares`
    are those of all ranks' parts and of the result, `signed` is what the ranks' sums add up to.
    """
    eps = torch.finfo(torch.float64).eps / 2
    return SIGMAS * eps * (numbers / 2 * squares).sqrt() + world_size * eps * signed.abs()


def smallest(dtype: torch.dtype) -> float:
    """What may become of a number that is denormal in this dtype: products in float16 keep it, others may drop it."""
    kind = torch.finfo(dtype)
    return float(kind.smallest_normal) * (float(kind.eps) if dtype == torch.float16 else 1.0)


# ---- checksums -------------------------------------------------------------------------------------------------------


def checksum(values: Tensor) -> Tensor:
    """A hash of the bits of `values`, one-dimensional and contiguous: int64, shape (), on its device.

    Two tensors that differ in one element differ in it, and so do practically all others that differ. A plain sum of
    int64 words modulo 2**64, in rows that are weighted by odd numbers: by far the fastest that torch has on a CPU, and
    exact, so that it does not depend on the order of summation.
    """
    if values.is_complex():
        values = torch.view_as_real(values).reshape(-1)
    if values.storage_offset() * values.element_size() % _WORD_BYTES:
        values = values.clone()  # which begins at a whole word
    raw = values.view(torch.uint8)
    words = raw[: raw.numel() // _WORD_BYTES * _WORD_BYTES].view(torch.int64)
    rows = words.numel() // _ROW
    parts = [
        words[: rows * _ROW].view(rows, _ROW).sum(1),
        words[rows * _ROW :],
        raw[words.numel() * _WORD_BYTES :],
    ]
    # Not torch.dot, which CUDA has for floating point alone.
    stream = None if values.is_cpu else torch.accelerator.current_stream(values.device)
    sums = [(_weights(part.numel(), part.device, stream) * part).sum() for part in parts if part.numel()]
    return functools.reduce(lambda before, added: 3 * before + added, sums, values.new_zeros((), dtype=torch.int64))


@functools.lru_cache(maxsize=32)
def _weights(numel: int, device: torch.device, stream: torch.Stream | None) -> Tensor:
    """Other ones for every `stream`, on which nothing waits for what another one has made."""
    return torch.arange(1, 2 * numel + 1, 2, dtype=torch.int64, device=device)


def as_row(tensor: Tensor, stride: tuple[int, ...]) -> Tensor:
    """The elements of `tensor`, one-dimensional, as they lie in memory when it has `stride`, which is dense."""
    if tuple(tensor.stride()) != stride:
        tensor = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
    return tensor.as_strided((tensor.numel(),), (1,))


# ---- many rows -------------------------------------------------------------------------------------------------------


class SmallRows:
    """One-dimensional tensors of one dtype on one device, laid back to back."""

    def __init__(self, values: Tensor, row_sizes: Sequence[int]) -> None:
        sizes = torch.tensor(row_sizes, dtype=torch.int64, device="cpu")
        if values.is_complex():
            values, sizes = torch.view_as_real(values).view(-1), 2 * sizes
        self._values, self._sizes = values, sizes.to(values.device)
        self._ends = self._sizes.cumsum(0)

    @classmethod
    def of(cls, rows: Sequence[Tensor]) -> "SmallRows":
        """A copy of rows that lie anywhere."""
        return cls(torch.cat(tuple(rows)), [row.numel() for row in rows])

    def checksums(self) -> Tensor:
        """A checksum of each row: int64, shape (rows,). It does not depend on where the row lies among others."""
        words = self._values.view(_INTEGERS[self._values.element_size()])
        return self._sums((2 * self._places() + 1) * words)

    def signed_sums(self) -> Tensor:
        """The `signed_sum` of each row: float64, shape (rows, 2). What is not finite stays in its row."""
        exact = self._values.double()
        both = torch.stack((exact * signs(exact.device)[self._places()], exact * exact), dim=1)
        rows = torch.arange(len(self._sizes), dtype=torch.int64, device=both.device)
        of_elements = rows.repeat_interleave(self._sizes, output_size=len(both))
        return torch.zeros(len(rows), 2, dtype=both.dtype, device=both.device).index_add_(0, of_elements, both)

    def _places(self) -> Tensor:
        """Each element's place in its row."""
        numel = len(self._values)
        starts = (self._ends - self._sizes).repeat_interleave(self._sizes, output_size=numel)
        return torch.arange(numel, dtype=torch.int64, device=starts.device) - starts

    def are_finite(self) -> Tensor:
        """Whether all elements of each row are: shape (rows,)."""
        return self._sums(self._values.isfinite().logical_not()) == 0

    def _sums(self, values: Tensor) -> Tensor:
        """The sum of each row: int64, modulo 2**64, so that earlier rows leave nothing in it."""
        before = torch.zeros(1, dtype=torch.int64, device=values.device)
        return torch.cat((before, values.cumsum(0)))[torch.cat((before, self._ends))].diff()


class LargeRow:
    """One tensor as a row, with the methods of `SmallRows`, in fewer passes through memory."""

    def __init__(self, row: Tensor) -> None:
        self._row = row

    def checksums(self) -> Tensor:
        return checksum(self._row).view(1)

    def signed_sums(self) -> Tensor:
        return signed_sum(self._row).view(1, 2)

    def are_finite(self) -> Tensor:
        """A sum tells it, four times as fast as a look at each element; an overflow in it counts as not finite."""
        row = torch.view_as_real(self._row) if self._row.is_complex() else self._row
        return row.sum(dtype=torch.float32 if row.element_size() < 4 else None).isfinite().view(1)


def batched(rows: Iterable[tuple[int, Tensor]]) -> Iterator[tuple[Sequence[int], SmallRows | LargeRow]]:
    """These rows, each with a number, in batches with the numbers of theirs."""
    small: defaultdict[tuple[torch.dtype, torch.device], dict[int, Tensor]] = defaultdict(dict)
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
    numbers: Sequence[int], values: Tensor, sizes: Sequence[int]
) -> Iterator[tuple[Sequence[int], SmallRows | LargeRow]]:
    """As `batched`, for rows that lie back to back in `values`; where all are small, without a look at each."""
    if sizes and max(sizes) <= _SMALL and values.numel() <= _TOGETHER:
        yield numbers, SmallRows(values, sizes)
    elif sizes:
        yield from batched(zip(numbers, values.split(sizes), strict=True))
