"""Which gradients share a bucket: by sizes, or by when a backward ends. The third planner is `bucket_rule`."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch

from compiled_ddp.plan import GradientSpec
from compiled_ddp.planning.calibration import Calibration
from compiled_ddp.planning.cost_model import BackwardWork, Compute, Link, Readiness, rows_may_pay
from compiled_ddp.planning.optimal import optimal_buckets

MEBIBYTE = 2**20  # what sizes of buckets are given in

Names = Mapping[int, str] | Sequence[str]  # of parameters, by the numbers of their gradients
Kind = tuple[torch.dtype, torch.device, int | None]  # a bucket holds gradients of one; see `GradientSpec`


def _sent(gradients: Sequence[GradientSpec]) -> int:
    """The bytes of all that are sent whole; of all, where none is."""
    whole = [gradient.nbytes for gradient in gradients if gradient.row is None]
    return sum(whole) or sum(gradient.nbytes for gradient in gradients)


def _kind(gradient: GradientSpec) -> Kind:
    return gradient.dtype, gradient.device, gradient.row


class Planner(Protocol):
    """Fills buckets. A pure function of what is the same on every rank: ranks compare the plans' fingerprints."""

    @property
    def naive(self) -> bool:
        """True where every gradient, and the riders too, are to have an all-reduce of their own."""

    @property
    def goes_by_names(self) -> bool:
        """True where equal graphs of other parameters may have other buckets."""

    def fill(
        self, gradients: Sequence[GradientSpec], names: Names, work: BackwardWork | None
    ) -> list[list[GradientSpec]]:
        """Buckets in launch order, of `gradients` in the order in which backward produces them.

        A gradient is called `names[gradient.index]`, where names are known; `work` is what backward computes until
        each is ready, None if it has not been captured.
        """

    def sends_rows(self, name: str, rows: int, nbytes: int) -> bool:
        """Whether of the gradient of an embedding's weight, which is called so, the rows that are not zero are sent."""

    def __str__(self) -> str:
        """A sentence for `explain()`."""


# ---- by sizes --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SizedBuckets:
    """A bucket closes with the gradient that brings it to its capacity or beyond.

    As c10d's `compute_bucket_assignment_by_size` has it (torch/csrc/distributed/c10d/reducer.cpp): the buckets of each
    `Kind` have the capacities given, in order, and the last of them from then on. Buckets launch in the order
    in which their last gradients are ready. With the capacity 0 it is the naive plan.
    """

    capacities_bytes: tuple[float, ...]

    @property
    def naive(self) -> bool:
        return not any(self.capacities_bytes)

    @property
    def goes_by_names(self) -> bool:
        return False

    def fill(
        self, gradients: Sequence[GradientSpec], names: Names = (), work: BackwardWork | None = None
    ) -> list[list[GradientSpec]]:
        open_buckets: dict[Kind, _OpenBucket] = {}
        closed: Counter[Kind] = Counter()
        filled: list[_OpenBucket] = []
        for position, gradient in enumerate(gradients):
            kind = _kind(gradient)
            bucket = open_buckets.get(kind) or open_buckets.setdefault(kind, _OpenBucket())
            bucket.append(gradient, position)
            if bucket.nbytes >= self.capacities_bytes[min(closed[kind], len(self.capacities_bytes) - 1)]:
                filled.append(open_buckets.pop(kind))
                closed[kind] += 1
        filled += open_buckets.values()
        return _in_launch_order(filled)

    def sends_rows(self, name: str, rows: int, nbytes: int) -> bool:
        return False

    def __str__(self) -> str:
        if self.naive:
            return "The naive program: an all-reduce for each gradient."
        sizes = [f"{capacity / MEBIBYTE:g}" for capacity in self.capacities_bytes]
        if len(sizes) != 2:
            return f"Buckets close at {', '.join(sizes)} MiB, in order, and all further ones at the last of these."
        return f"A bucket closes at {sizes[-1]} MiB; the first one at {sizes[0]} MiB."


@dataclass
class _OpenBucket:
    gradients: list[GradientSpec] = field(default_factory=list)
    nbytes: int = 0
    last_position: int = -1  # in the order given: when the bucket's last gradient is ready

    def append(self, gradient: GradientSpec, position: int) -> None:
        self.gradients.append(gradient)
        self.nbytes += gradient.nbytes
        self.last_position = position


def _in_launch_order(buckets: Sequence[_OpenBucket]) -> list[list[GradientSpec]]:
    return [bucket.gradients for bucket in sorted(buckets, key=lambda bucket: bucket.last_position)]


# ---- by when a backward ends -----------------------------------------------------------------------------------------

# A bucket's memory is taken when its first gradient is written, while activations are still alive, so that a large one
# raises the peak. From so many buckets on, their number costs next to nothing.
_LARGEST_BYTES, _MOST_OF_ALL = 64 * MEBIBYTE, 1 / 16

# So many times longer or shorter than counted a backward may be. On a GPU the rate that was measured, in float32, says
# too little of products in 16 bits: there only the proportions count.
_UNCERTAIN = 2.0

# So many times what it was measured to cost by itself a bucket has to be worth, as beside a backward threads wait for
# processors, too. Without a graph Python launches it and writes back: so much was measured, on an Intel Xeon.
_DEARER, _PYTHON_SECONDS = 2.0, 1e-4


@dataclass(frozen=True)
class OptimalBuckets:
    """The partition with which the backward ends earliest in the model of `cost_model`: see `optimal`.

    Exact for each `Kind` by itself, which has the share of the link that it has of the bytes.
    """

    link: Link
    compute: Compute
    first_bytes: float | None = None  # where the first bucket closes, if that was asked for

    @classmethod
    def of(cls, calibration: Calibration, first_bytes: float | None = None) -> "OptimalBuckets":
        """For a machine as it was measured, rounded: plans stand in the keys of compiled graphs."""
        return cls(calibration.link.rounded(), calibration.compute.rounded(), first_bytes)

    def of_shares(self) -> "OptimalBuckets":
        """For buckets of which each rank is sent its shares alone."""
        return replace(self, link=self.link.of_shares())

    @property
    def naive(self) -> bool:
        return False

    @property
    def goes_by_names(self) -> bool:
        return False

    def fill(
        self, gradients: Sequence[GradientSpec], names: Names = (), work: BackwardWork | None = None
    ) -> list[list[GradientSpec]]:
        nbytes = _sent(gradients)
        within = _UNCERTAIN if all(gradient.device.type == "cpu" for gradient in gradients) else math.inf
        readiness = self.readiness(gradients, work).hardest(self.link, nbytes, within=within)
        link = self.link.with_host(_PYTHON_SECONDS) if work is None else self.link
        return replace(self, link=link.dearer(_DEARER)).fill_for(gradients, readiness)

    def fill_for(self, gradients: Sequence[GradientSpec], readiness: Readiness) -> list[list[GradientSpec]]:
        """Buckets as `fill` has them, where it is known when the gradients are ready."""
        of_kind: dict[Kind, list[int]] = {}
        for place, gradient in enumerate(gradients):
            of_kind.setdefault(_kind(gradient), []).append(place)
        nbytes = _sent(gradients)
        filled: list[_OpenBucket] = []
        for places in of_kind.values():
            own = [gradients[place].nbytes for place in places]
            share = min(1.0, sum(own) / nbytes) if sum(own) else 1.0  # a dtype may have empty gradients alone
            link = replace(self.link, bytes_per_second=self.link.bytes_per_second * share)
            first = self._first(own)
            largest = max(_LARGEST_BYTES, sum(own) * _MOST_OF_ALL)
            lengths = optimal_buckets(own[first:], readiness.only(places[first:]), link, largest_bytes=largest)
            position = 0
            for length in [*([first] if first else []), *lengths]:
                bucket = _OpenBucket()
                for place in places[position : position + length]:
                    bucket.append(gradients[place], place)
                filled.append(bucket)
                position += length
        return _in_launch_order(filled)

    def readiness(self, gradients: Sequence[GradientSpec], work: BackwardWork | None) -> Readiness:
        """When the gradients are ready, as far as that is known."""
        nbytes = [gradient.nbytes for gradient in gradients]
        computed = Readiness.by_sizes(nbytes, self.link) if work is None else work.readiness(self.compute)
        return computed.beside(self.link, sum(nbytes))

    def _first(self, nbytes: Sequence[int]) -> int:
        """How many gradients the first bucket has, as that was asked for; 0 if it was not."""
        if self.first_bytes is None:
            return 0
        filled = 0
        for number, size in enumerate(nbytes, start=1):
            filled += size
            if filled >= self.first_bytes:
                return number
        return len(nbytes)

    def sends_rows(self, name: str, rows: int, nbytes: int) -> bool:
        return rows_may_pay(rows, nbytes, self.link, self.compute)

    def __str__(self) -> str:
        if math.isinf(self.link.bytes_per_second):
            return "As few buckets as memory allows: there is no other rank."
        return f"Buckets are those with which the backward ends earliest, where an all-reduce takes {self.link}."
