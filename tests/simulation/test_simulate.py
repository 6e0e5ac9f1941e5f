"""A step on other numbers of ranks: beside its limit and DDP's buckets, with and without overlap."""

import pytest

from compiled_ddp.planning.cost_model import Readiness
from compiled_ddp.planning.step_model import Job
from compiled_ddp.tools.simulation.algorithms import Hop, Network
from compiled_ddp.tools.simulation.jobs import ready_by_sizes, transformer
from compiled_ddp.tools.simulation.simulate import RANKS, ddps_buckets, simulate, told_of_overlap

NBYTES = transformer(124e6, 12, 4, 38e6)
JOB = Job(NBYTES, ready_by_sizes(NBYTES, 0.033), 0.016, 0.002)
NETWORK = Network("ring", Hop(12e-6, 25e9), Hop(3e-6, 150e9), ranks_per_host=8)


def test_a_step_by_hand() -> None:
    job = Job((100, 300), Readiness((1.0, 2.0), 3.0), 10.0, 5.0)
    (step,) = simulate(job, Network("ring", Hop(0.5, 100.0)), [2])
    # Start-up 1 s, 100 B/s: in two buckets 1 + 1 + 1 = 3, then 3 + 1 + 3 = 7; in one 2 + 1 + 4 = 7.
    assert (step.buckets, step.seconds, step.fixed_seconds) == (1, 22.0, 22.0)
    assert (step.compute_seconds, step.exposed_seconds, step.efficiency) == (18.0, 4.0, 18 / 22)
    assert (step.limit_seconds, step.communication_seconds, step.window_seconds) == (21.0, 5.0, 2.0)
    assert step.is_link_bound and step.ratio_to_fixed == 1


def test_no_step_is_below_its_limit_and_none_falls_with_ranks() -> None:
    steps = simulate(JOB, NETWORK)
    assert [step.ranks for step in steps] == [*RANKS] and RANKS[-1] == 65_536
    assert all(step.compute_seconds <= step.limit_seconds <= step.seconds * (1 + 1e-12) for step in steps)
    limits = [step.limit_seconds for step in steps]
    assert limits == sorted(limits)


def test_plans_differ_by_the_link_where_ddps_buckets_do_not() -> None:
    steps = simulate(JOB, NETWORK)
    assert len({step.buckets for step in steps}) > 3 and len({step.fixed_buckets for step in steps}) == 1
    assert all(step.ratio_to_fixed <= 1.005 + 1e-12 for step in steps), "the planner's tolerance"
    assert steps[-1].ratio_to_fixed < 0.5


def test_ddps_buckets_close_at_one_mebibyte_and_then_at_25() -> None:
    mebibyte = 2**20
    assert ddps_buckets([mebibyte // 2] * 2 + [10 * mebibyte] * 4) == [2, 3, 1]
    assert ddps_buckets([1000]) == [1]


def test_a_link_is_the_bound_from_where_communication_is_longer_than_the_backward() -> None:
    steps = simulate(JOB, NETWORK)
    bound = [step.is_link_bound for step in steps]
    assert bound == sorted(bound) and {*bound} == {False, True}
    assert told_of_overlap(steps, overlap=True).startswith("On 32 ranks communication alone takes 35.")
    assert "shorter than the backward" in told_of_overlap(steps[:1], overlap=True)


def test_without_overlap_all_communication_is_exposed_in_one_bucket() -> None:
    for step in simulate(JOB, NETWORK, overlap=False):
        assert step.buckets == 1 and step.is_link_bound
        assert step.exposed_seconds == pytest.approx(step.communication_seconds)
    assert told_of_overlap([], overlap=False) == (
        "Communication is not overlapped: it begins when the backward has ended."
    )


def test_without_overlap_a_longer_backward_hides_nothing() -> None:
    shorter, longer = (
        simulate(JOB.scaled(seconds), NETWORK, [16], overlap=False)[0].exposed_seconds for seconds in (0.01, 10.0)
    )
    assert shorter == pytest.approx(longer)


def test_shares_are_updated_by_their_ranks_and_gathered_behind_the_backward_or_in_the_next_step() -> None:
    slow = Network("ring", Hop(12e-6, 6.25e9))
    plain, sharded, pipelined = (
        simulate(JOB, slow, [8, 64], mode=mode) for mode in ("all-reduced", "sharded", "pipelined")
    )
    for one, other, last in zip(plain, sharded, pipelined, strict=True):
        assert other.compute_seconds == last.compute_seconds < one.compute_seconds
        assert last.seconds < min(one.seconds, other.seconds), "what is gathered is hidden by the next forward"
        assert all(step.limit_seconds <= step.seconds for step in (one, other, last))
        assert one.fixed_seconds == other.fixed_seconds == last.fixed_seconds, "of DDP's step"
    assert "the other is not" in told_of_overlap(sharded, overlap=True, mode="sharded")
    assert "ms of forward and backward to hide it" in told_of_overlap(pipelined, overlap=True, mode="pipelined")
