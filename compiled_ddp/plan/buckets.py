"""Gradients, buckets, and the plan of one segment: what a pass is given."""

import functools
import hashlib
import itertools
import math
import operator
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from compiled_ddp.plan.riders import Riders


@dataclass(frozen=True, slots=True)  # there is one for each parameter
class GradientSpec:
    """A gradient before it has a place: which one, and what its tensor looks like.

    `index` is a graph input while a captured graph is being planned, and a position in the wrapper's list of
    trainable parameters once the graph is bound to parameters.
    """

    index: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    row: int | None = None  # where most rows are zero, of so many elements each, and those are not to be sent

    @classmethod
    def of(cls, index: int, parameter: torch.Tensor) -> "GradientSpec":
        """The gradient of `parameter`: strided like it where it is dense, contiguous where it has gaps or overlaps."""
        size, dtype = tuple(parameter.shape), gradient_dtype(parameter)
        return cls(index, size, _dense_stride(size, parameter.stride()), dtype, parameter.device)

    @property
    def numel(self) -> int:
        return math.prod(self.size)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    def by_rows(self) -> "GradientSpec":
        """The same, of which rows that are zero are not sent."""
        return replace(self, row=math.prod(self.size[1:]))


def rows_of(gradients: Iterable[GradientSpec]) -> set[int]:
    """How many elements the rows have by which some of them are sent."""
    return {gradient.row for gradient in gradients if gradient.row is not None}


def gradient_dtype(parameter: torch.Tensor) -> torch.dtype:
    """What autograd casts the gradients of a leaf to, its `grad_dtype`; where that admits any (None), its own dtype."""
    return parameter.grad_dtype or parameter.dtype


@functools.lru_cache(maxsize=1024)  # a model has many parameters of few shapes
def _dense_stride(size: tuple[int, ...], stride: tuple[int, ...]) -> tuple[int, ...]:
    """`stride` where it is dense, a contiguous tensor's otherwise."""
    return stride if _is_dense(size, stride) else contiguous_stride(size)


def contiguous_stride(size: Sequence[int]) -> tuple[int, ...]:
    """As torch has it. No tensor is made for it, which a trace around would record."""
    steps = itertools.accumulate((max(length, 1) for length in reversed(size[1:])), operator.mul, initial=1)
    return tuple(reversed([*steps])) if size else ()


def _is_dense(size: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether a tensor's elements fill their memory without gap or overlap, in some order of its dimensions."""
    expected = 1
    for length, step in sorted(((n, s) for n, s in zip(size, stride, strict=True) if n != 1), key=lambda pair: pair[1]):
        if step != expected:
            return False
        expected *= length
    return True


@dataclass(frozen=True, slots=True, repr=False)  # there is one for each parameter
class Gradient:
    """A gradient in its bucket: `size` and `stride` of the view, `offset_elements` into the flat buffer."""

    index: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset_elements: int
    numel: int

    def __repr__(self) -> str:
        """In a third of the time of a dataclass's own, for fingerprints."""
        return f"Gradient({self.index}, {self.size}, {self.stride}, {self.offset_elements}, {self.numel})"

    def view(self, flat_buffer: torch.Tensor) -> torch.Tensor:
        """This gradient as a view of `flat_buffer`."""
        return flat_buffer.as_strided(self.size, self.stride, flat_buffer.storage_offset() + self.offset_elements)


@dataclass(frozen=True)
class Bucket:
    """Gradients that one all-reduce carries, and the flat buffer they share.

    With `row` it is summed by rows of so many elements, of which zeros are not sent: `compiled_ddp.ranks.row_sums`.

    One that is scattered over several `ranks` sends each of them its share of the sum. It is a matrix with a row for
    each rank, in which a share of every gradient stands; offsets are those in a row. See `share_elements`. Where it is
    `whole`, for who sums gradients up and gathers them again, they lie in it back to back, ahead of what fills it up,
    and a row has what comes to lie there: then the shares of gradients are parts of a row of their sizes, no more.
    """

    gradients: tuple[Gradient, ...]
    dtype: torch.dtype
    device: torch.device
    numel: int  # of the flat buffer, riders included
    riders: Riders | None = None
    row: int | None = None
    ranks: int = 1  # that it is scattered over
    whole: bool = False

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        """Hash what tells buckets apart: those of one wrapper have no gradient in common."""
        return hash((self.indices, self.numel, self.dtype, self.device))

    def group_name(self, name: str) -> str:
        """What a graph calls to sum the bucket, where the wrapper's process group is called `name`."""
        return name_for_rows(name, self.row)

    @functools.cached_property
    def indices(self) -> tuple[int, ...]:
        return tuple(gradient.index for gradient in self.gradients)

    @functools.cached_property
    def shares(self) -> tuple[tuple[int, int, int], ...]:
        """Of each gradient its index, and where a share of it begins and ends in a row."""
        return tuple((each.index, each.offset_elements, self._end_of_share(each)) for each in self.gradients)

    @functools.cached_property
    def parts(self) -> Mapping[int, tuple[int, int]]:
        """Of one that is whole, for each gradient where it begins and ends."""
        numels = [each.numel for each in self.gradients]
        ends = [*itertools.accumulate(numels)]
        return {index: (end - numel, end) for index, end, numel in zip(self.indices, ends, numels, strict=True)}

    def _end_of_share(self, gradient: Gradient) -> int:
        return gradient.offset_elements + share_elements(gradient.numel, self.ranks)

    def view(self, gradient: Gradient, flat_buffer: torch.Tensor) -> torch.Tensor:
        """One of its gradients in its flat buffer; of one that is scattered by rows a copy."""
        if self.ranks == 1:
            return gradient.view(flat_buffer)
        if self.whole:
            begin, end = self.parts[gradient.index]
            return flat_buffer.view(-1)[begin:end].view(gradient.size)
        rows = flat_buffer.view(self.ranks, -1)[:, gradient.offset_elements : self._end_of_share(gradient)]
        return whole_of(rows, gradient.size)

    @functools.cached_property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @functools.cached_property
    def kept(self) -> bool:
        """True if graphs, too, fill a flat buffer that is kept from step to step, instead of allocating one.

        On the CPU, where memory that was freed and comes back costs a page fault for every 4 KiB (docs/benchmarks.md,
        "Flat buffers that stay"). CUDA's allocator keeps what was freed.
        """
        return self.device.type == "cpu"


def share_elements(numel: int, ranks: int) -> int:
    """How many elements of a tensor are each rank's, where it is scattered: the last rank's may be filled up."""
    return -(-numel // ranks)


def whole_of(rows: torch.Tensor, size: Sequence[int]) -> torch.Tensor:
    """A tensor of this size, of the rows of all ranks."""
    return rows.reshape(-1)[: math.prod(size)].view(size)


def name_for_rows(name: str, row: int | None) -> str:
    """What sums by rows of so many elements for the process group called `name`; without a row that group itself."""
    return name if row is None else f"{name}{_ROWS}{row}"


def is_called(group_name: str, name: str) -> bool:
    """Whether a graph that calls `group_name` calls the process group `name`, or what sums by rows for it."""
    return group_name == name or group_name.startswith(f"{name}{_ROWS}")


_ROWS = " rows of "

# What a reduction makes of the ranks' gradients: their mean, their sum, the mean weighted by what each rank says, or
# what a communication hook makes of undivided gradients, which is a mean too.
ReductionKind = Literal["mean", "sum", "weighted", "hook"]


@dataclass(frozen=True)
class BucketPlan:
    """The buckets of one captured segment, or of the hooks, in launch order. Immutable, printable, hashable.

    The constructor asserts what every pass and every rank relies on: each gradient stands in exactly one bucket,
    gradients fill their flat buffer without gap or overlap, and the riders name every gradient once, at the end of
    the last bucket; of a plan that is scattered in the first one, by themselves, as an update of shares asks for them.
    """

    buckets: tuple[Bucket, ...]
    world_size: int
    reduction: ReductionKind = "mean"

    def __post_init__(self) -> None:
        assert self.world_size > 0, f"world_size must be positive, got {self.world_size}"
        indices = self.indices
        assert len(set(indices)) == len(indices), f"a gradient stands in two buckets: {indices}"
        for bucket in self.buckets:
            end = 0
            for gradient in bucket.gradients:
                assert gradient.offset_elements == end, f"gradient {gradient.index} leaves a gap or overlaps"
                end += share_elements(gradient.numel, bucket.ranks)
            if bucket.riders is not None:
                assert bucket.riders.offset_elements == end, "the riders do not follow the last gradient"
                end += bucket.riders.numel
            end *= bucket.ranks
            assert bucket.numel == end, f"the flat buffer has {bucket.numel} elements, its contents {end}"
        if self.buckets:
            where = [place for place, bucket in enumerate(self.buckets) if bucket.riders is not None]
            own = self.buckets[self.place_of_riders]
            assert where == [self.place_of_riders], f"riders belong to bucket {self.place_of_riders}, found in {where}"
            assert own.dtype == torch.float32, f"riders are float32, their bucket is {own.dtype}"
            assert self.riders.indices == indices, "the riders do not name every gradient of the plan once, in order"

    @functools.cached_property
    def indices(self) -> tuple[int, ...]:
        """Every gradient of the plan, in the order in which its buckets launch."""
        return tuple(index for bucket in self.buckets for index in bucket.indices)

    @property
    def gradients(self) -> Iterator[tuple[Bucket, Gradient]]:
        for bucket in self.buckets:
            for gradient in bucket.gradients:
                yield bucket, gradient

    @functools.cached_property
    def nbytes(self) -> int:
        return sum(bucket.nbytes for bucket in self.buckets)

    @functools.cached_property
    def is_scattered(self) -> bool:
        """Whether each rank gets its share of the sums; the riders, in a bucket of their own, are everybody's."""
        return any(bucket.ranks > 1 for bucket in self.buckets)

    @property
    def is_summed(self) -> bool:
        """Whether each bucket is summed as it is, and every rank gets the sums."""
        return not self.is_scattered and self.reduction != "hook"

    @property
    def of_gradients(self) -> tuple[Bucket, ...]:
        """The buckets that have gradients."""
        return tuple(bucket for bucket in self.buckets if bucket.gradients)

    @functools.cached_property
    def places_of_gradients(self) -> tuple[int, ...]:
        """The places of those."""
        return tuple(place for place, bucket in enumerate(self.buckets) if bucket.gradients)

    @property
    def place_of_riders(self) -> int:
        """The place of the bucket that has the riders."""
        return 0 if self.is_scattered else len(self.buckets) - 1

    @functools.cached_property
    def share(self) -> float:
        """The factor of a rank's gradient in the sum over ranks; in a weighted mean its weight comes on top."""
        return 1.0 / self.world_size if self.reduction == "mean" else 1.0

    @functools.cached_property
    def riders(self) -> Riders:
        riders = self.buckets[self.place_of_riders].riders
        assert riders is not None
        return riders

    @functools.cached_property
    def fingerprint(self) -> str:
        """A hash of everything in the plan, the same on every rank and in every process."""
        return fingerprint_of(self)

    def renumbered(self, index_of: Mapping[int, int]) -> "BucketPlan":
        """The same plan with each index i replaced by `index_of[i]`, for example graph inputs by parameters."""

        def renumber(bucket: Bucket) -> Bucket:
            riders = bucket.riders
            if riders is not None:
                riders = replace(riders, indices=tuple(index_of[i] for i in riders.indices))
            gradients = tuple(replace(gradient, index=index_of[gradient.index]) for gradient in bucket.gradients)
            return replace(bucket, gradients=gradients, riders=riders)

        return replace(self, buckets=tuple(renumber(bucket) for bucket in self.buckets))


def fingerprint_of(plan: object) -> str:
    """A hash of a plan's text without the numbers of devices, which differ between the ranks of a host."""
    text = re.sub(r"(device\(type='\w+'), index=\d+\)", r"\1)", repr(plan))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
