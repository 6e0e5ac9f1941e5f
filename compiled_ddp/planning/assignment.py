"""The plan of some gradients: one answer for graphs, for hooks and on every rank.

A pure function of an order and of what the options say, which is a `BucketPolicy`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from compiled_ddp.plan import Bucket, BucketPlan, Gradient, GradientSpec, ReductionKind, Riders, share_elements
from compiled_ddp.planning.cost_model import BackwardWork
from compiled_ddp.planning.planners import Names, Planner, SizedBuckets


@dataclass(frozen=True)
class BucketPolicy:
    """What is the same for all plans of one wrapper."""

    planner: Planner
    world_size: int
    reduction: ReductionKind = "mean"
    passengers: int = 0  # how many elements of the riders are the user's

    def assign(
        self, gradients: Sequence[GradientSpec], names: Names = (), work: BackwardWork | None = None
    ) -> BucketPlan:
        """The buckets of `gradients`, in the order in which backward produces them; see `Planner.fill`."""
        return self.place(self.planner.fill(gradients, names, work), riders_apart=self.planner.naive)

    def place(self, buckets: Sequence[Sequence[GradientSpec]], *, riders_apart: bool = False) -> BucketPlan:
        """The plan that has these buckets; see `place_buckets`."""
        return place_buckets(
            buckets,
            self.world_size,
            riders_apart=riders_apart,
            reduction=self.reduction,
            passengers=self.passengers,
        )


def assign_buckets(
    gradients: Sequence[GradientSpec],
    *,
    capacities_bytes: Sequence[float],
    world_size: int,
    reduction: ReductionKind = "mean",
    passengers: int = 0,
) -> BucketPlan:
    """The plan with buckets of these sizes, of `gradients` in the order in which backward produces them.

    See `SizedBuckets`. `passengers` is how many elements of the riders are the user's. An empty sequence gives an empty
    plan.
    """
    planner = SizedBuckets(tuple(capacities_bytes))
    return BucketPolicy(planner, world_size, reduction, passengers).assign(gradients)


def place_buckets(
    buckets: Sequence[Sequence[GradientSpec]],
    world_size: int,
    *,
    riders_apart: bool = False,
    reduction: ReductionKind = "mean",
    passengers: int = 0,
    is_scattered: bool = False,
    whole: bool = False,
) -> BucketPlan:
    """The plan that has these buckets in this order, of gradients back to back.

    The riders follow the last bucket, in a bucket of their own where that one is not float32, or is summed by rows.
    `riders_apart` gives them one everywhere, and so does a communication hook, which must not see them. In a plan that
    is scattered, of which each rank sees its share, that is the first one; it may have gradients `whole`.
    """
    placed = [_place(gradients, world_size if is_scattered else 1, whole) for gradients in buckets]
    apart = riders_apart or reduction == "hook" or is_scattered
    first = is_scattered and world_size > 1
    return BucketPlan(tuple(_with_riders(placed, passengers, apart=apart, first=first)), world_size, reduction)


def _place(gradients: Sequence[GradientSpec], ranks: int, whole: bool) -> Bucket:
    placed, offset = [], 0
    for gradient in gradients:
        numel = gradient.numel
        placed.append(Gradient(gradient.index, gradient.size, gradient.stride, offset, numel))
        offset += share_elements(numel, ranks)
    rows = {gradient.row for gradient in gradients}
    row = rows.pop() if len(rows) == 1 else None  # a plan that was given may have put anything together
    numel, whole = offset * ranks, whole and ranks > 1
    return Bucket(tuple(placed), gradients[0].dtype, gradients[0].device, numel, row=row, ranks=ranks, whole=whole)


def _with_riders(buckets: Sequence[Bucket], passengers: int, *, apart: bool, first: bool) -> Sequence[Bucket]:
    if not buckets:
        return buckets
    indices = tuple(index for bucket in buckets for index in bucket.indices)
    *earlier, last = buckets
    if apart or last.dtype != torch.float32 or last.row is not None:
        earlier, last = [*buckets], Bucket((), torch.float32, last.device, 0)
    riders = Riders(last.numel, indices, passengers)
    last = replace(last, numel=last.numel + riders.numel, riders=riders)
    return [last, *earlier] if first else [*earlier, last]
