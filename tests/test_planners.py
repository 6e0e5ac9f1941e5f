"""The planned buckets: the best of all partitions, by brute force; what they are for, and what noise moves."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compiled_ddp.plan import GradientSpec
from compiled_ddp.planning.assignment import BucketPolicy
from compiled_ddp.planning.cost_model import BackwardWork, Compute, Link, Readiness, Work, predict
from compiled_ddp.planning.optimal import lower_bound, optimal_buckets, predict_plan
from compiled_ddp.planning.planners import OptimalBuckets

GIGABIT = Link(2e-4, 110e6)
COMPUTE = Compute(5e10, 1e10)


def partitions(count: int) -> list[list[int]]:
    """All lengths of contiguous buckets."""
    found = []
    for cuts in itertools.product((False, True), repeat=count - 1):
        lengths = [1]
        for cut in cuts:
            if cut:
                lengths.append(1)
            else:
                lengths[-1] += 1
        found.append(lengths)
    return found


def fits(lengths: Sequence[int], nbytes: Sequence[int], largest_bytes: float) -> bool:
    sizes = iter(nbytes)
    buckets = [[*itertools.islice(sizes, length)] for length in lengths]
    return all(len(bucket) == 1 or sum(bucket) <= largest_bytes for bucket in buckets)


sizes = st.lists(st.sampled_from([1, 7, 40, 300, 2000]), min_size=1, max_size=8)
seconds = st.sampled_from([0.0, 0.01, 0.1, 1.0])


@settings(max_examples=300, deadline=None)
@given(sizes, st.data(), seconds, st.sampled_from([10.0, 1e3, 1e5, math.inf]), seconds, seconds)
def test_no_partition_ends_earlier(
    nbytes: list[int], data: st.DataObject, startup: float, bandwidth: float, host: float, latency: float
) -> None:
    times = st.floats(0.0, 5.0)
    ready = sorted(data.draw(st.lists(times, min_size=len(nbytes), max_size=len(nbytes))))
    readiness = Readiness(tuple(ready), ready[-1] + data.draw(times))
    link = Link(startup, bandwidth, host, latency)
    largest = data.draw(st.sampled_from([1.0, 50.0, 500.0, math.inf]))
    chosen = optimal_buckets(nbytes, readiness, link, tolerance=0.0, largest_bytes=largest)
    allowed = [lengths for lengths in partitions(len(nbytes)) if fits(lengths, nbytes, largest)]
    assert chosen in allowed
    best = min(predict_plan(lengths, nbytes, readiness, link).seconds for lengths in allowed)
    assert predict_plan(chosen, nbytes, readiness, link).seconds == pytest.approx(best, rel=1e-9)
    assert lower_bound(nbytes, readiness, link) <= best * (1 + 1e-9)


def evenly(count: int, backward_seconds: float) -> Readiness:
    return Readiness(tuple(backward_seconds * (n + 1) / count for n in range(count)), backward_seconds)


def test_among_equal_ends_the_plan_with_fewest_buckets_is_taken() -> None:
    link = Link(0.0, 1e12)  # so fast that nothing is exposed but what comes last
    assert optimal_buckets([1000] * 20, evenly(20, 1.0), link) == [20]


def test_a_start_up_that_costs_more_than_it_hides_makes_one_bucket() -> None:
    assert optimal_buckets([4000] * 10, evenly(10, 1e-4), Link(1e-3, 1e9)) == [10]


def test_where_the_link_is_the_bottleneck_the_first_bucket_is_small_and_later_ones_grow() -> None:
    lengths = optimal_buckets([1_000_000] * 40, evenly(40, 0.1), GIGABIT)
    assert lengths[0] < 4 < lengths[-1]
    assert lengths == sorted(lengths)


def test_where_computing_is_the_bottleneck_the_last_bucket_is_small() -> None:
    lengths = optimal_buckets([1_000_000] * 40, evenly(40, 2.0), GIGABIT)
    assert lengths[-1] == 1
    assert lengths[0] > 4


def test_a_prediction_says_when_each_bucket_is_on_the_link() -> None:
    link = Link(1.0, 10.0, host_seconds=0.5, latency_seconds=0.25)
    made = predict([20, 40], [1.0, 2.0], 4.0, link)
    assert [(t.ready, t.start, t.end) for t in made.transfers] == [(1.0, 1.0, 4.0), (2.5, 4.0, 9.0)]
    assert (made.backward_seconds, made.seconds, made.exposed_seconds) == (5.0, 9.25, 4.25)


# ---- buckets of gradients --------------------------------------------------------------------------------------------


def specs(*numels: int, dtype: torch.dtype = torch.float32, first: int = 0) -> list[GradientSpec]:
    made = [torch.empty(numel, dtype=dtype, device="meta") for numel in numels]
    return [GradientSpec.of(first + index, tensor) for index, tensor in enumerate(made)]


def indices(buckets: Sequence[Sequence[GradientSpec]]) -> list[tuple[int, ...]]:
    return [tuple(gradient.index for gradient in bucket) for bucket in buckets]


def test_each_dtype_has_buckets_of_its_own_which_launch_as_they_are_full() -> None:
    halves, singles = specs(500_000, 500_000, dtype=torch.bfloat16), specs(300_000, 300_000, first=2)
    mixed = [halves[0], singles[0], halves[1], singles[1]]
    planned = OptimalBuckets(GIGABIT, COMPUTE).fill(mixed)
    for bucket in planned:
        assert len({gradient.dtype for gradient in bucket}) == 1
    places = [max(mixed.index(gradient) for gradient in bucket) for bucket in planned]
    assert places == sorted(places)
    assert sorted(itertools.chain.from_iterable(indices(planned))) == [0, 1, 2, 3]


def test_empty_gradients_have_buckets_too() -> None:
    empty = specs(0, dtype=torch.bfloat16, first=1)
    assert sorted(indices(OptimalBuckets(GIGABIT, COMPUTE).fill([*specs(10), *empty]))) == [(0,), (1,)]
    assert indices(OptimalBuckets(GIGABIT, COMPUTE).fill(specs(0, 0))) == [(0, 1)]


def test_without_other_ranks_there_is_one_bucket() -> None:
    alone = OptimalBuckets(Link(0.0, math.inf), COMPUTE)
    assert indices(alone.fill(specs(10, 20, 30))) == [(0, 1, 2)]
    assert "no other rank" in str(alone)


def test_a_large_bucket_is_a_sixteenth_of_all_at_most_as_its_memory_is_taken_early() -> None:
    planned = OptimalBuckets(Link(1e-5, 1e12), COMPUTE).fill(specs(*[10_000_000] * 64))
    assert max(sum(gradient.nbytes for gradient in bucket) for bucket in planned) <= 64 * 40_000_000 / 16


def test_a_first_bucket_that_was_asked_for_closes_there() -> None:
    planner = OptimalBuckets(GIGABIT, COMPUTE, first_bytes=8000)
    assert indices(planner.fill(specs(*[1000] * 6)))[0] == (0, 1)
    assert indices(OptimalBuckets(GIGABIT, COMPUTE, first_bytes=1e9).fill(specs(*[1000] * 6))) == [(0, 1, 2, 3, 4, 5)]


def test_a_captured_graphs_work_tells_when_gradients_are_ready() -> None:
    """The first gradients take nearly all of the time: what follows is sent at once."""
    gradients = specs(*[250_000] * 4)
    late = BackwardWork(tuple(Work(flops) for flops in (4.9e9, 4.92e9, 4.95e9, 5e9)), Work(5e9))
    even = BackwardWork(tuple(Work(flops) for flops in (1.25e9, 2.5e9, 3.75e9, 5e9)), Work(5e9))
    planner = OptimalBuckets(GIGABIT, COMPUTE)
    assert len(planner.fill(gradients, (), late)) < len(planner.fill(gradients, (), even))


def test_a_plan_hides_the_link_behind_a_longer_backward_than_was_counted() -> None:
    """What was counted may be short of what is; some buckets more cost next to nothing."""
    gradients = specs(*[300_000] * 40)
    nbytes = [gradient.nbytes for gradient in gradients]
    communication = sum(nbytes) / GIGABIT.bytes_per_second
    work = BackwardWork(
        tuple(Work((n + 1) / 40 * communication / 1.8 * 5e10) for n in range(40)), Work(communication / 1.8 * 5e10)
    )
    lengths = [len(bucket) for bucket in OptimalBuckets(GIGABIT, COMPUTE).fill(gradients, (), work)]
    naively = optimal_buckets(nbytes, work.readiness(COMPUTE), GIGABIT)
    for longer, allowed in ((1.0, 1.02), (1.5, 1.02), (1.9, 1.06)):
        actual = evenly(40, communication / 1.8 * longer)
        bound = lower_bound(nbytes, actual, GIGABIT)
        assert predict_plan(lengths, nbytes, actual, GIGABIT).seconds <= allowed * bound
    assert predict_plan(naively, nbytes, actual, GIGABIT).seconds > 1.06 * bound


def test_a_bucket_is_worth_twice_what_it_costs() -> None:
    """Four gradients, each of a second to compute and to send."""
    work = BackwardWork(tuple(Work(float(n + 1)) for n in range(4)), Work(4.0))

    def buckets(startup: float, host: float) -> int:
        link = Link(startup, 1000.0, host)
        return len(OptimalBuckets(link, Compute(1.0, 1.0)).fill(specs(*[250] * 4), (), work))

    assert buckets(0.0, 0.0) == 4
    # One bucket ends at 8. Of two the second's host is done at 4 + 2 * 2 * 0.9, or 1.1.
    assert [buckets(0.0, host) for host in (0.9, 1.1)] == [2, 1]
    # One ends at 8 + 2 * 1.4 = 10.8, or at 11.2; two at 2 + 2.8, behind which as much and 3 are left: at 10.6, or 11.4.
    assert [buckets(startup, 0.0) for startup in (1.4, 1.6)] == [2, 1]


def test_by_hooks_a_bucket_takes_python_too() -> None:
    """Twice a tenth of a millisecond, which no graph takes: a backward of a millisecond is not cut in five."""
    link, gradients = Link(0.0, 1e6), specs(*[25] * 10)
    work = BackwardWork(tuple(Work(1e-4 * (n + 1)) for n in range(10)), Work(1e-3))
    assert len(OptimalBuckets(link, Compute(1.0, 1.0)).fill(gradients, (), work)) == 10
    assert len(OptimalBuckets(link, Compute(1.0, 1.0)).fill(gradients)) == 2


def test_the_hardest_backward_is_as_long_as_its_communication_as_far_as_the_count_may_be_wrong() -> None:
    link = Link(0.0, 10.0)
    assert evenly(4, 3.0).hardest(link, 40, within=2.0).seconds == (1.0, 2.0, 3.0, 4.0)
    assert evenly(4, 1.0).hardest(link, 40, within=2.0).backward_seconds == 2.0
    assert evenly(4, 16.0).hardest(link, 40, within=2.0).backward_seconds == 8.0
    assert evenly(4, 16.0).hardest(link, 40, within=math.inf).backward_seconds == 4.0


def test_on_a_gpu_only_the_proportions_of_the_count_matter() -> None:
    """How fast it multiplies in 16 bits, under autocast, was not measured."""
    on_gpu = [replace(gradient, device=torch.device("cuda")) for gradient in specs(*[250_000] * 16)]

    def planned(flops: float) -> list[tuple[int, ...]]:
        work = BackwardWork(tuple(Work(flops * (n + 1)) for n in range(16)), Work(flops * 16))
        return indices(OptimalBuckets(GIGABIT, COMPUTE).fill(on_gpu, (), work))

    assert planned(1e6) == planned(1e12)


def test_noise_in_what_was_measured_leaves_the_plan_as_it_is() -> None:
    def plan(startup: float, bandwidth: float) -> str:
        link = Link(startup, bandwidth).rounded()
        policy = BucketPolicy(OptimalBuckets(link, COMPUTE.rounded()), world_size=2)
        return policy.assign(specs(*[250_000] * 40)).fingerprint

    assert len({plan(2e-4 * f, 110e6 * g) for f in (0.9, 1.0, 1.1) for g in (0.9, 1.0, 1.1)}) == 1


def test_ten_thousand_gradients_are_planned_in_steps_that_grow_with_their_number() -> None:
    """n gradients and k buckets take n times k steps; nothing here grows with the square of n."""
    nbytes = [1000 * (1 + n % 400) for n in range(10_000)]
    readiness = Readiness.by_sizes(nbytes, Link(2e-4, 1e9))
    lengths = optimal_buckets(nbytes, readiness, Link(2e-4, 1e9))
    assert sum(lengths) == 10_000
    assert predict_plan(lengths, nbytes, readiness, Link(2e-4, 1e9)).seconds <= 1.03 * lower_bound(
        nbytes, readiness, Link(2e-4, 1e9)
    )


def test_shares_are_half_of_what_an_all_reduce_sends() -> None:
    assert OptimalBuckets(Link(2e-4, 50e6), COMPUTE).of_shares() == OptimalBuckets(Link(2e-4, 100e6), COMPUTE)
