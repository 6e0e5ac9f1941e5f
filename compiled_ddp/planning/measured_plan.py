"""The plan for a backward as it was measured: `ddp.measured_plan()`.

A bucket is launched when its last gradient is ready, so launches tell when that is, and what else the device had to do
until then. Of several ranks the last one counts: no all-reduce is done before it has launched. Durations of collectives
tell little, as they contain the waiting for other ranks (pytorch 194908), and are not used.
"""

import itertools
from collections.abc import Callable, Sequence

from compiled_ddp.plan import BucketPlan, GradientSpec, ReductionSequence
from compiled_ddp.plan.sequence import described
from compiled_ddp.planning.cost_model import BackwardWork, Compute, Link, Readiness
from compiled_ddp.planning.optimal import predict_plan
from compiled_ddp.planning.planners import OptimalBuckets
from compiled_ddp.planning.saved_plan import SavedPlan

_WORTH = 0.01  # of the backward: a plan that gains less is none to change for, as changed graphs are compiled anew


def plan_from_launches(
    sequence: ReductionSequence,
    gradients: Sequence[GradientSpec],
    launches: Sequence[float],
    computed: float,
    link: Link,
    work_of: Callable[[BucketPlan], BackwardWork | None],
) -> SavedPlan:
    """The buckets that end a backward earliest, whose buckets of `sequence` were launched at these times.

    `computed` is when nothing but waiting is left, `gradients` are those of the parameters by index. `work_of` is as
    for `predict_sequence`. It is the sequence's own plan where another one would gain less than a hundredth.
    Raises RuntimeError for a parameter that several graphs reduce.
    """
    sections = [section for section in sequence.launched if not section.reduces_again]
    order = [index for section in sections for index in section.plan.indices]
    if len({*order}) < len(order):
        raise RuntimeError("measured_plan() knows no buckets for a parameter that several graphs reduce.")
    readiness = _readiness(sequence, launches, computed, link, work_of)
    specs = [gradients[index] for index in order]
    nbytes = [spec.nbytes for spec in specs]
    planned = OptimalBuckets(link, Compute(0.0, 0.0)).fill_for(specs, readiness)
    present = [[gradients[i] for i in bucket.indices] for s in sections for bucket in s.plan.buckets if bucket.indices]

    def end(buckets: Sequence[Sequence[GradientSpec]]) -> float:
        place = {spec.index: place for place, spec in enumerate(specs)}
        sent = [place[spec.index] for bucket in buckets for spec in bucket]
        lengths = [len(bucket) for bucket in buckets]
        return predict_plan(lengths, [nbytes[at] for at in sent], readiness.only(sent), link).seconds

    best = planned if end(planned) < (1 - _WORTH) * end(present) else present
    never = [[gradients[i] for i in bucket.indices] for s in sequence.unused for bucket in s.plan.buckets]
    name = sequence.parameter_names.__getitem__
    every = sorted((spec for bucket in (*best, *never) for spec in bucket), key=lambda spec: spec.index)
    return SavedPlan(
        tuple((name(spec.index), described(spec.size, spec.dtype)) for spec in every),
        tuple(tuple(name(spec.index) for spec in bucket) for bucket in (*best, *never) if bucket),
        sequence.launched[0].plan.world_size,
        tuple(name(spec.index) for spec in every if spec.row is not None),
    )


def _readiness(
    sequence: ReductionSequence,
    launches: Sequence[float],
    computed: float,
    link: Link,
    work_of: Callable[[BucketPlan], BackwardWork | None],
) -> Readiness:
    """Of each gradient, in launch order. Inside a bucket they are as far apart as counted, or else by their bytes."""
    seconds, before, position = list[float](), 0.0, 0
    for section in sequence.launched:
        work = work_of(section.plan) if section.origin == "graph" else None
        sizes = [gradient.numel * bucket.dtype.itemsize for bucket, gradient in section.plan.gradients]
        counted = [*itertools.accumulate(sizes)] if work is None else [each.flops for each in work.until_ready]
        first, counted_before = 0, 0.0
        for bucket in section.plan.buckets:
            # What launching the earlier ones has taken, the model adds by itself.
            at = max(launches[position] - position * link.host_seconds, before)
            position += 1
            own = counted[first : first + len(bucket.gradients)]
            first += len(own)
            if own and not section.reduces_again:
                whole = max(own) - counted_before
                shares = [max(each - counted_before, 0.0) / whole if whole > 0 else 1.0 for each in own]
                seconds += itertools.accumulate((before + share * (at - before) for share in shares), max)
            if own:
                before, counted_before = at, max(own)
    return Readiness(tuple(seconds), max(computed - position * link.host_seconds, before), "as it was measured")
