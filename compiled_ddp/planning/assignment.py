"""Which gradient goes into which bucket: one answer for graphs, for hooks and on every rank.

A pure function of an order and of what the options say, which is a `BucketPolicy`.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from compiled_ddp.plan import Bucket, BucketPlan, Gradient, GradientSpec, ReductionKind, Riders
from compiled_ddp.planning.bucket_rule import BucketRule

MEBIBYTE = 2**20  # what sizes of buckets are given in


@dataclass(frozen=True)
class BucketPolicy:
    """What is the same for all plans of one wrapper."""

    capacities_bytes: tuple[float, ...]  # of each bucket in order; the last one is that of all further ones too
    world_size: int
    reduction: ReductionKind = "mean"
    passengers: int = 0  # how many elements of the riders are the user's
    rule: BucketRule | None = None  # in place of sizes in bytes

    def assign(self, gradients: Sequence[GradientSpec], names: Sequence[str] = ()) -> BucketPlan:
        """The buckets of `gradients`, in the order in which backward produces them.

        With a rule, which knows parameters by their names, one is called `names[gradient.index]`.
        """
        if self.rule is not None:
            return self.place(self.rule.fill(gradients, names))
        return assign_buckets(
            gradients,
            capacities_bytes=self.capacities_bytes,
            world_size=self.world_size,
            reduction=self.reduction,
            passengers=self.passengers,
        )

    def place(self, buckets: Sequence[Sequence[GradientSpec]], *, riders_apart: bool = False) -> BucketPlan:
        """The plan that has these buckets; see `place_buckets`."""
        return place_buckets(
            buckets,
            self.world_size,
            riders_apart=riders_apart,
            reduction=self.reduction,
            passengers=self.passengers,
        )


@dataclass
class _OpenBucket:
    gradients: list[GradientSpec] = field(default_factory=list)
    nbytes: int = 0
    last_position: int = -1  # in the order given: when the bucket's last gradient is ready

    def append(self, gradient: GradientSpec, position: int) -> None:
        self.gradients.append(gradient)
        self.nbytes += gradient.nbytes
        self.last_position = position


def assign_buckets(
    gradients: Sequence[GradientSpec],
    *,
    capacities_bytes: Sequence[float],
    world_size: int,
    reduction: ReductionKind = "mean",
    passengers: int = 0,
) -> BucketPlan:
    """Fill buckets with `gradients` in the order given, which is the order in which backward produces them.

    A bucket closes with the gradient that brings it to its capacity or beyond, as c10d's
    `compute_bucket_assignment_by_size` does (torch/csrc/distributed/c10d/reducer.cpp): the buckets of each (dtype,
    device) have the capacities given, in order, and the last of them from then on. Buckets launch in the order in
    which their last gradients are ready. The riders follow the last bucket, in a bucket of their own where that one is
    not float32, and where a communication hook reduces the others. With the capacity 0 it is the naive plan: every
    gradient has a bucket of its own, and so have the riders. `passengers` is how many elements of the riders are the
    user's.

    An empty sequence gives an empty plan.
    """
    open_buckets: dict[tuple[torch.dtype, torch.device], _OpenBucket] = {}
    closed: Counter[tuple[torch.dtype, torch.device]] = Counter()
    filled: list[_OpenBucket] = []
    for position, gradient in enumerate(gradients):
        kind = (gradient.dtype, gradient.device)
        bucket = open_buckets.get(kind) or open_buckets.setdefault(kind, _OpenBucket())
        bucket.append(gradient, position)
        if bucket.nbytes >= capacities_bytes[min(closed[kind], len(capacities_bytes) - 1)]:
            filled.append(open_buckets.pop(kind))
            closed[kind] += 1
    filled += open_buckets.values()
    filled.sort(key=lambda bucket: bucket.last_position)
    return place_buckets(
        [bucket.gradients for bucket in filled],
        world_size,
        riders_apart=not any(capacities_bytes),
        reduction=reduction,
        passengers=passengers,
    )


def place_buckets(
    buckets: Sequence[Sequence[GradientSpec]],
    world_size: int,
    *,
    riders_apart: bool = False,
    reduction: ReductionKind = "mean",
    passengers: int = 0,
) -> BucketPlan:
    """The plan that has these buckets in this order: gradients back to back, riders at the end.

    `riders_apart` gives the riders a bucket of their own also where the last one is float32, and so does a
    communication hook, which must not see them.
    """
    placed = [_place(gradients) for gradients in buckets]
    apart = riders_apart or reduction == "hook"
    return BucketPlan(tuple(_with_riders(placed, passengers, apart=apart)), world_size, reduction)


def _place(gradients: Sequence[GradientSpec]) -> Bucket:
    placed, offset = [], 0
    for gradient in gradients:
        numel = gradient.numel
        placed.append(Gradient(gradient.index, gradient.size, gradient.stride, offset, numel))
        offset += numel
    return Bucket(tuple(placed), gradients[0].dtype, gradients[0].device, offset)


def _with_riders(buckets: Sequence[Bucket], passengers: int, *, apart: bool) -> Sequence[Bucket]:
    if not buckets:
        return buckets
    indices = tuple(index for bucket in buckets for index in bucket.indices)
    *earlier, last = buckets
    if apart or last.dtype != torch.float32:
        earlier, last = [*buckets], Bucket((), torch.float32, last.device, 0)
    riders = Riders(last.numel, indices, passengers)
    return [*earlier, replace(last, numel=last.numel + riders.numel, riders=riders)]
