"""The nouns of compiled_ddp, each defined once, as plain immutable data.

gradient
    One parameter's gradient and its place in a flat buffer.
bucket
    Gradients of one dtype and device that are reduced by one all-reduce.
flat buffer
    The one-dimensional tensor a bucket's gradients live in, back to back.
launch
    The asynchronous all-reduce of a bucket's flat buffer. It returns at once.
wait
    The point after which a launched bucket may be read.
riders
    A few float32 elements at the end of a plan's last bucket that carry what ranks must share.
plan
    All buckets of one captured segment (or of the hooks), in launch order: `BucketPlan`.
sequence
    The plans of a whole backward, in launch order, the same on every rank: `ReductionSequence`.

Sizes are in elements where a name ends in `_elements`, in bytes where it ends in `_bytes`.
"""

import hashlib
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch


@dataclass(frozen=True)
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

    @classmethod
    def of(cls, index: int, parameter: torch.Tensor) -> "GradientSpec":
        """The gradient of `parameter`: strided like it where it is dense, contiguous where it has gaps or overlaps."""
        size, stride = tuple(parameter.shape), tuple(parameter.stride())
        if not _is_dense(size, stride):
            stride = torch.empty(size, dtype=parameter.dtype, device="meta").stride()
        return cls(index, size, stride, parameter.dtype, parameter.device)

    @property
    def numel(self) -> int:
        return math.prod(self.size)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


def _is_dense(size: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether a tensor's elements fill their memory without gap or overlap, in some order of its dimensions."""
    expected = 1
    for length, step in sorted(((n, s) for n, s in zip(size, stride, strict=True) if n != 1), key=lambda pair: pair[1]):
        if step != expected:
            return False
        expected *= length
    return True


@dataclass(frozen=True)
class Gradient:
    """A gradient in its bucket: `size` and `stride` of the view, `offset_elements` into the flat buffer."""

    index: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset_elements: int
    numel: int

    def view(self, flat_buffer: torch.Tensor) -> torch.Tensor:
        """This gradient as a view of `flat_buffer`."""
        return flat_buffer.as_strided(self.size, self.stride, flat_buffer.storage_offset() + self.offset_elements)


# What each leading rider element carries; one element per gradient of the plan follows them, and then the user's own.
FORWARD_COUNT = 0
FORWARD_COUNT_SQUARED = 1
RETURNED_COUNT = 2
RETURNED_COUNT_SQUARED = 3
GIVEN_UP_COUNT = 4
GIVEN_UP_COUNT_SQUARED = 5
ABORTED = 6
LOST = 7
VERIFY = 8
ANNOUNCED = 9
MISFIT = 10
WEIGHT = 11
HOOK_FAILED = 12
STATE_LOST = 13
FIRST_USED = 14

COUNT_MODULUS = 64  # sums of squares stay exact in float32 up to 4096 ranks


@dataclass(frozen=True)
class Riders:
    """Layout of the float32 elements that travel at the end of a plan's last bucket.

    | element | value on each rank, summed over ranks |
    |---|---|
    | `FORWARD_COUNT` | forwards begun to be synchronised, modulo `COUNT_MODULUS` |
    | `FORWARD_COUNT_SQUARED` | its square: the counts agree if and only if the variance over ranks is zero |
    | `RETURNED_COUNT`, `..._SQUARED` | the same without the forwards that raised; [Note: forwards that are no step] |
    | `GIVEN_UP_COUNT`, `..._SQUARED` | forwards since the last backward that raised, or whose output was thrown away |
    | `ABORTED` | 1 where the backward broke off and the rest of it goes out as zeros |
    | `LOST` | 1 where the backward before broke off when everything of it had been sent |
    | `STATE_LOST` | 1 where that one has left no state of a traced communication hook that fits the other ranks' |
    | `VERIFY` | 1 where a rank wishes to prove the reduction |
    | `ANNOUNCED` | how many parameters of "unused" sections this rank has used after all |
    | `MISFIT` | 1 where the graphs of the backward do not fit the sequence |
    | `HOOK_FAILED` | 1 where the communication hook raised, and no further bucket was handed to it |
    | `WEIGHT` | this rank's weight in a weighted mean |
    | `FIRST_USED + k` | 1 where the k-th gradient of the plan was produced on this rank |
    | the last `passengers` | what the user gives to `piggyback` |

    Riders are never scaled, compressed or handed to a communication hook.
    """

    offset_elements: int
    indices: tuple[int, ...]  # the plan's gradients in order: whose `used` element stands where
    passengers: int = 0

    @property
    def numel(self) -> int:
        return FIRST_USED + len(self.indices) + self.passengers

    def view(self, flat_buffer: torch.Tensor) -> torch.Tensor:
        """The rider elements as a view of `flat_buffer`, shape (numel,)."""
        return flat_buffer.narrow(0, self.offset_elements, self.numel)


@dataclass(frozen=True)
class Bucket:
    """Gradients that one all-reduce carries, and the flat buffer they share."""

    gradients: tuple[Gradient, ...]
    dtype: torch.dtype
    device: torch.device
    numel: int  # of the flat buffer, riders included
    riders: Riders | None = None

    @property
    def indices(self) -> tuple[int, ...]:
        return tuple(gradient.index for gradient in self.gradients)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    def kept(self) -> bool:
        """Whether graphs too fill a flat buffer that is kept from step to step, instead of allocating one.

        On the CPU, where memory that was freed and comes back costs a page fault for every 4 KiB (docs/benchmarks.md,
        "Flat buffers that stay"). CUDA's allocator keeps what was freed.
        """
        return self.device.type == "cpu"


# What a reduction makes of the ranks' gradients: their mean, their sum, the mean weighted by what each rank says, or
# what a communication hook makes of undivided gradients, which is a mean too.
ReductionKind = Literal["mean", "sum", "weighted", "hook"]


@dataclass(frozen=True)
class BucketPlan:
    """The buckets of one captured segment, or of the hooks, in launch order. Immutable, printable, hashable.

    The constructor asserts what every pass and every rank relies on: each gradient stands in exactly one bucket,
    gradients fill their flat buffer without gap or overlap, and the riders name every gradient once, at the end of
    the last bucket.
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
                end += gradient.numel
            if bucket.riders is not None:
                assert bucket.riders.offset_elements == end, "the riders do not follow the last gradient"
                end += bucket.riders.numel
            assert bucket.numel == end, f"the flat buffer has {bucket.numel} elements, its contents {end}"
        if self.buckets:
            *earlier, last = self.buckets
            assert all(bucket.riders is None for bucket in earlier), "riders belong to the last bucket alone"
            assert last.riders is not None, "the last bucket has no riders"
            assert last.dtype == torch.float32, f"riders are float32, their bucket is {last.dtype}"
            assert last.riders.indices == indices, "the riders do not name every gradient of the plan once, in order"

    @property
    def indices(self) -> tuple[int, ...]:
        """Every gradient of the plan, in the order in which its buckets launch."""
        return tuple(index for bucket in self.buckets for index in bucket.indices)

    @property
    def gradients(self) -> Iterator[tuple[Bucket, Gradient]]:
        for bucket in self.buckets:
            for gradient in bucket.gradients:
                yield bucket, gradient

    @property
    def nbytes(self) -> int:
        return sum(bucket.nbytes for bucket in self.buckets)

    @property
    def share(self) -> float:
        """The factor of a rank's gradient in the sum over ranks; in a weighted mean its weight comes on top."""
        return 1.0 / self.world_size if self.reduction == "mean" else 1.0

    @property
    def riders(self) -> Riders:
        riders = self.buckets[-1].riders
        assert riders is not None
        return riders

    @property
    def fingerprint(self) -> str:
        """A hash of everything in the plan, the same on every rank and in every process."""
        return _fingerprint(self)

    def renumbered(self, index_of: Mapping[int, int]) -> "BucketPlan":
        """The same plan with each index i replaced by `index_of[i]`, for example graph inputs by parameters."""

        def renumber(bucket: Bucket) -> Bucket:
            riders = bucket.riders
            if riders is not None:
                riders = replace(riders, indices=tuple(index_of[i] for i in riders.indices))
            gradients = tuple(replace(gradient, index=index_of[gradient.index]) for gradient in bucket.gradients)
            return replace(bucket, gradients=gradients, riders=riders)

        return replace(self, buckets=tuple(renumber(bucket) for bucket in self.buckets))


Origin = Literal["graph", "hooks", "unused"]

# Why parameters are the hooks'.
NOT_CAPTURED = "not in a captured graph: used in eager code, or unused"
NOT_CALLED = (
    "the captured graphs of the first backward that hold them were not called in this forward (eager code: Dynamo's "
    "recompile limit, a stance, or switched off; or other control flow)"
)
AMONG_COLLECTIVES = (
    "the model communicates by itself, and a rank does not run the graphs of the others, which would wait for it there "
    "while it waits in the model's own collectives"
)
MIXED = "used both inside a captured graph and outside of it"
ADMITTED = "not used in the first backward"


@dataclass(frozen=True)
class Section:
    """One stretch of the sequence: a plan over the wrapper's parameters and what launches it where all goes well.

    `origin` is "graph" where a captured segment's backward graph launches the buckets and "hooks" where gradient
    hooks do. A rank that cannot follow a "graph" section in a graph launches the same buckets by hooks. The buckets of
    an "unused" section, whose parameters no rank has used, are not launched until one of them is.
    """

    plan: BucketPlan
    origin: Origin
    reason: str = ""  # why hooks, in words; empty for a graph

    @property
    def reduces_again(self) -> bool:
        """Whether its parameters stand in a graph's section too, whose result is averaged together with the rest.

        The mean of a mean is that mean, so reducing all of .grad again is right.
        """
        return self.reason == MIXED


@dataclass(frozen=True)
class ReductionSequence:
    """Every launch of a synchronised backward, in the order that all ranks keep.

    A parameter that several captured segments use stands once in each of their sections; the sum of its means is the
    mean of its sum. Every trainable parameter stands in at least one section (asserted).

    Sections of parameters that no rank has used come last.
    """

    sections: tuple[Section, ...]
    parameter_names: tuple[str, ...]

    def __post_init__(self) -> None:
        planned = {index for section in self.sections for index in section.plan.indices}
        expected = set(range(len(self.parameter_names)))
        assert planned == expected, f"parameters without a bucket or unknown: {sorted(planned ^ expected)}"
        assert self.sections == (*self.launched, *self.unused), "unused sections do not come last"

    @property
    def launched(self) -> tuple[Section, ...]:
        """The sections that every backward launches."""
        return tuple(section for section in self.sections if section.origin != "unused")

    @property
    def unused(self) -> tuple[Section, ...]:
        """The sections that are launched only in a backward in which a rank has used one of their parameters."""
        return tuple(section for section in self.sections if section.origin == "unused")

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """Every bucket that a backward launches, in launch order."""
        return tuple(bucket for section in self.launched for bucket in section.plan.buckets)

    @property
    def nbytes(self) -> int:
        return sum(bucket.nbytes for bucket in self.buckets)

    @property
    def fingerprint(self) -> str:
        """A hash of everything in the sequence, the same on every rank and in every process."""
        return _fingerprint(self)


def _fingerprint(plan: object) -> str:
    """A hash of a plan's text without the numbers of devices, which differ between the ranks of a host."""
    text = re.sub(r"(device\(type='\w+'), index=\d+\)", r"\1)", repr(plan))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
