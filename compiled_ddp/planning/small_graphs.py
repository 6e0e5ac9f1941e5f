"""Which captured graphs are too small for an all-reduce of their own.

What a graph that reduces costs by itself (a reservation, riders, an all-reduce in which each rank waits for the others)
does not depend on its size. A small one cannot win that back by overlap: hooks reduce it, in buckets that such graphs
share. They do not where it is the only graph of the backward, as its all-reduce is the only one either way.
"""

from collections.abc import Sequence

from compiled_ddp.plan import BucketPlan


def large_enough(plans: Sequence[BucketPlan], smallest_bytes: float) -> list[bool]:
    """Whether each of the graphs that a backward runs is to reduce its gradients itself; `plans` are over parameters.

    So does what shares parameters with a graph that does: hooks cannot take what a graph reduces in part.
    """
    if len(plans) < 2:
        return [True] * len(plans)
    kept = [plan.nbytes >= smallest_bytes for plan in plans]
    while True:
        reduced = {index for plan, is_kept in zip(plans, kept, strict=True) if is_kept for index in plan.indices}
        found = [not reduced.isdisjoint(plan.indices) for plan in plans]
        if found == kept:
            return kept
        kept = found
