"""[Note: every rank launches in the same order], on two ranks in one process."""

from collections.abc import Sequence
from itertools import combinations, permutations
from typing import Any

import pytest
import torch
from in_process import HandRun, Rank, end_all, plan_of
from torch import Tensor
from torch.futures import Future
from wire import Wire

from compiled_ddp.plan import ABORTED, HOOK_FAILED, BucketPlan, ReductionKind, Section
from compiled_ddp.reducers.ddp_hook import TorchCommHook

SIZES = (5, 4, 2, 1)  # of the gradients
ORDERS = list(permutations(range(4)))
SUBSETS = [set(chosen) for number in range(5) for chosen in combinations(range(4), number)]


def three_buckets(reduction: ReductionKind = "mean") -> BucketPlan:
    """Gradients 3 and 2, then 1, then 0 with the riders: each bucket has a size of its own."""
    plan = plan_of((3, 1), (2, 2), (1, 4), (0, 5), capacity_bytes=12, reduction=reduction)
    assert [bucket.indices for bucket in plan.buckets[:3]] == [(3, 2), (1,), (0,)]
    return plan


def by_hooks() -> list[Section]:
    return [Section(three_buckets(), "hooks")]


def with_graph() -> list[Section]:
    """Gradient 3 by hooks, then 2 and 1 in a graph of two buckets, then 0 by hooks."""
    graph = plan_of((2, 2), (1, 4), capacity_bytes=8)
    return [Section(plan_of((3, 1)), "hooks"), Section(graph, "graph"), Section(plan_of((0, 5)), "hooks")]


def two(sections: Sequence[Section]) -> tuple[Wire, HandRun, HandRun]:
    wire = Wire(2)
    one, other = (Rank(wire, rank, SIZES).begin(sections) for rank in range(2))
    return wire, one, other


def bring(run: HandRun, indices: Sequence[int] | set[int]) -> None:
    for index in indices:
        run.accumulate(index, gradient_of(run, index))


def gradient_of(run: HandRun, index: int) -> Tensor:
    return torch.full((SIZES[index],), 2.0 * index + 4.0 * run.rank.rank + 2.0)


def sent(wire: Wire, rank: int = 0) -> list[int]:
    return [part.values.numel() for part in wire.sent[rank]]


def sizes(sections: Sequence[Section]) -> list[int]:
    return [bucket.numel for section in sections for bucket in section.plan.buckets]


def assert_sent_in_order(wire: Wire, sections: Sequence[Section]) -> None:
    assert sent(wire, 0) == sent(wire, 1) == sizes(sections)


# ---- hooks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_whatever_order_gradients_come_in_both_ranks_launch_the_same_in_the_order_of_the_sequence(
    order: tuple[int, ...],
) -> None:
    for order_there in ORDERS[::5]:
        wire, here, there = two(sections := by_hooks())
        bring(here, order)
        bring(there, order_there)
        assert_sent_in_order(wire, sections)  # before the backward has ended
        end_all(here, there)
        for index, gradients in enumerate(zip(here.rank.gradients, there.rank.gradients, strict=True)):
            mean = (gradient_of(here, index) + gradient_of(there, index)) / 2
            assert all(gradient is not None and torch.equal(gradient, mean) for gradient in gradients)


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_a_bucket_goes_out_as_soon_as_it_and_all_before_it_are_complete(order: tuple[int, ...]) -> None:
    wire, here, _ = two(by_hooks())
    come: set[int] = set()
    for index in order:
        bring(here, [index])
        come.add(index)
        complete = [{2, 3} <= come, 1 in come, 0 in come]
        first_incomplete = (*complete, False).index(False)
        assert sent(wire) == sizes(by_hooks())[:first_incomplete]


@pytest.mark.parametrize("come_there", SUBSETS, ids=str)
def test_what_is_missing_goes_out_as_zeros_in_its_place(come_there: set[int]) -> None:
    for come_here in SUBSETS:
        wire, here, there = two(sections := by_hooks())
        bring(here, come_here)
        bring(there, come_there)
        end_all(here, there)
        assert_sent_in_order(wire, sections)
        for bucket, part in zip(sections[0].plan.buckets, wire.sent[1], strict=True):
            for gradient in bucket.gradients:
                share = 0.5 if gradient.index in come_there else 0.0
                assert torch.equal(gradient.view(part.values), share * gradient_of(there, gradient.index))


def test_riders_of_their_own_go_out_with_the_last_bucket_before_them() -> None:
    plan = plan_of((1, 4), (0, 5), capacity_bytes=0)
    assert [bucket.indices for bucket in plan.buckets] == [(1,), (0,), ()]
    wire, here, _ = two([Section(plan, "hooks")])
    bring(here, [1])
    assert sent(wire) == [4]
    bring(here, [0])
    assert sent(wire) == [4, 5, plan.riders.numel]


# ---- graphs ----------------------------------------------------------------------------------------------------------


def graph_of(run: HandRun, **how: Any) -> Any:
    return run.begin_graph(1, gradient_of(run, 2), gradient_of(run, 1), **how)


@pytest.mark.parametrize("before", [[3], []])
def test_a_reservation_moves_past_its_section_and_sends_zeros_for_what_is_missing_before_it(before: list[int]) -> None:
    wire, here, there = two(sections := with_graph())
    bring(here, before)
    assert here.backward.is_next(1) == bool(before)
    graph = graph_of(here)
    assert sent(wire) == sizes(sections[:2])
    assert here.backward.has_launched(1) and not here.backward.has_launched(2)
    # The other rank reduces the same by hooks, none of which comes in order.
    there.backward.reservations.leave_all_to_hooks()
    bring(there, [0, 1, 2, 3])
    here.accumulate_all(graph.complete())
    bring(here, [0])
    end_all(here, there)
    assert_sent_in_order(wire, sections)
    mean = (gradient_of(here, 2) + gradient_of(there, 2)) / 2
    assert all(torch.equal(run.rank.tensors[2].grad, mean) for run in (here, there))  # type: ignore[arg-type]


def test_a_graph_waits_for_what_hooks_launch_before_it() -> None:
    _, here, _ = two(with_graph())
    assert not here.backward.is_next(1)
    bring(here, [3])
    assert here.backward.is_next(1)
    graph_of(here)
    assert not here.backward.is_next(1)


def test_a_section_that_is_released_is_launched_by_hooks_and_reserved_by_no_graph_any_more() -> None:
    wire, here, there = two(sections := with_graph())
    bring(here, [3])
    here.backward.reserve(1)
    here.backward.release(1)
    assert not here.backward.is_next(1) and not here.backward.has_launched(1)
    bring(here, [2, 1, 0])
    assert sent(wire) == sizes(sections)
    end_all(here, there)
    assert_sent_in_order(wire, sections)


def test_hooks_wait_in_vain_before_a_section_where_nothing_still_comes_and_no_graph() -> None:
    _, here, _ = two([*with_graph()[:1], *with_graph()[1:2], Section(plan_of((0, 5)), "graph")])
    launcher = here.backward
    assert launcher.waits_in_vain_before(1, comes=lambda index: index != 3)
    assert not launcher.waits_in_vain_before(1, comes=lambda index: index == 3)
    assert not launcher.waits_in_vain_before(2, comes=lambda _: False)  # a graph comes in between
    bring(here, [3])
    assert not launcher.waits_in_vain_before(1, comes=lambda _: False)  # it is its turn
    here.backward.reservations.leave_all_to_hooks()
    assert not launcher.waits_in_vain_before(2, comes=lambda _: False)  # no graph may have it


# ---- an exception ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("launched", range(4))
def test_after_an_exception_the_rest_follows_however_many_hooks_had_launched(launched: int) -> None:
    wire, here, there = two(sections := by_hooks())
    bring(here, [3, 2, 1, 0])
    bring(there, [[], [3, 2], [3, 2, 1], [3, 2, 1, 0]][launched])
    assert len(wire.sent[1]) == launched
    there.backward.break_off()
    assert there.backward.riders_are_known
    assert there.backward.has_rest() == (launched < 3)
    there.backward.launch_rest()
    here.backward.send_rest()
    here.backward.launches.wait()
    there.backward.launches.wait(results=False)
    assert_sent_in_order(wire, sections)
    riders = [run.backward.launches.riders()[0] for run in (here, there)]
    assert [float(of_rank[ABORTED]) for of_rank in riders] == [float(launched < 3)] * 2


@pytest.mark.parametrize("lent", [True, False])
@pytest.mark.parametrize("launched", range(3))
def test_after_an_exception_in_a_graph_the_rest_follows_if_its_riders_can_be_read(launched: int, lent: bool) -> None:
    wire, here, there = two(sections := with_graph())
    bring(there, [3])
    graph_of(there, most=launched, lent=lent)
    assert sent(wire, 1) == sizes(sections)[: 1 + launched]
    there.backward.break_off()
    # Those that the graph has launched in memory of its own are known to nobody.
    assert there.backward.riders_are_known == (lent or launched < 2)
    if there.backward.riders_are_known:
        bring(here, [3])
        graph = graph_of(here)
        there.backward.launch_rest()
        graph.complete()
        end_all(here)
        assert_sent_in_order(wire, sections)


def test_an_exception_between_reservation_and_launch_leaves_the_section_to_hooks() -> None:
    wire, _, there = two(sections := with_graph())
    there.backward.reserve(1)
    there.backward.break_off()
    assert there.backward.reservations.incomplete() == [] and there.backward.riders_are_known
    there.backward.launch_rest()
    assert sent(wire, 1) == sizes(sections)


@pytest.mark.parametrize("in_graph", [False, True])
def test_where_the_count_tells_nothing_only_hooks_leave_riders_that_are_known(in_graph: bool) -> None:
    _, here, there = two(by_hooks())
    for run in (here, there):
        run.rank.communicator.all_reduce(torch.zeros(1))  # somebody else launches on the communicator
    end_all(here, there)
    assert not there.rank.communicator.progress.counts_launches
    again = there.rank.begin(with_graph())
    bring(again, [3])
    if in_graph:
        graph_of(again, most=1)
    again.backward.break_off()
    assert again.backward.riders_are_known == (not in_graph)


class Failing:
    """A communication hook of torch's kind that raises from its bucket number `from_bucket` on."""

    def __init__(self, from_bucket: int) -> None:
        self.from_bucket, self.handed = from_bucket, 0

    def __call__(self, _: object, bucket: Any) -> Future[Tensor]:
        self.handed += 1
        if bucket.index() >= self.from_bucket:
            raise ValueError("the user's mistake")
        future: Future[Tensor] = Future()
        future.set_result(bucket.buffer())
        return future


@pytest.mark.parametrize("from_bucket", range(3))
def test_a_reducer_that_fails_midway_sends_riders_alone(from_bucket: int) -> None:
    wire, plan, hook = Wire(2), three_buckets("hook"), Failing(from_bucket)
    rank = Rank(wire, 0, SIZES)
    timeout = rank.communicator.ranks.timeout
    rank.reduction.register_comm_hook(TorchCommHook(None, hook, name="hook", timeout=timeout))
    run = rank.begin([Section(plan, "hooks")])
    with pytest.raises(ValueError, match="the user's mistake") as raised:
        bring(run, [3, 2, 1, 0])
    assert raised.value.__notes__ == [
        f"the communication hook hook failed for {rank.communicator.progress.bucket(from_bucket)} on rank 0"
    ]
    assert hook.handed == from_bucket + 1
    assert sent(wire) == [plan.riders.numel]
    riders = wire.sent[0][0].values
    assert float(riders[ABORTED]) == float(riders[HOOK_FAILED]) == 1.0
