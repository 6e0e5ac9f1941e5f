"""How gradients fill buckets, and what those are reduced to: one answer for graphs, for hooks and on every rank."""

from collections.abc import Sequence
from dataclasses import dataclass

from compiled_ddp.plan import BucketPlan, GradientSpec, ReductionKind
from compiled_ddp.planning.assignment import assign_buckets, place_buckets
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
