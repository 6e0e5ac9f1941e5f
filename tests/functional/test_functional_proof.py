"""Reductions prove themselves in the first launches: a planted fault is found by name, on every rank."""

import math
from collections.abc import Callable
from typing import Any, cast
from unittest import mock

import pytest
import torch
from test_grad import assert_same, by_hand, loss, parameters, rows
from torch import Tensor
from torch.fx import Graph

from compiled_ddp import functional as ddp
from compiled_ddp.checks.proof import Account, conclude_together, exchange
from compiled_ddp.checks.sums import signed_sum
from compiled_ddp.functional import communicator, operator
from compiled_ddp.functional.transforms import GradientFunction
from compiled_ddp.passes.ops import all_reduce_in_place, is_launch
from compiled_ddp.passes.step_pipeline import StepPipeline
from ranks import RankPool

CAP = 0.0002  # the first two in launch order share a bucket
NAMED = "of grad(loss) with respect to argument 0['head']"


def _error(step: Any, rank: int) -> str:
    with pytest.raises(RuntimeError) as error:
        step(parameters(), rows(rank))
    return str(error.value)


def _eager_fault(rank: int, fault: str, wrong_rank: int | None) -> str:
    launched = []

    def faulty(flat: Tensor, *arguments: Any) -> Tensor:
        launched.append(flat.numel())
        is_here = len(launched) == 2 and wrong_rank in (None, rank)
        local = flat.clone()
        reduced = all_reduce_in_place(flat, *arguments)
        if is_here and fault == "twice":
            return all_reduce_in_place(torch.ops._c10d_functional.wait_tensor(reduced), *arguments)
        if is_here and fault == "left out":
            torch.ops._c10d_functional.wait_tensor(reduced).copy_(local)
        return reduced

    step = ddp.grad(loss, bucket_cap_mb=0)
    with mock.patch.object(operator, "all_reduce_in_place", faulty):
        message = _error(step, rank)
    assert_same(step(parameters(), rows(rank)), by_hand(loss, 2))
    return message


@pytest.mark.parametrize(("fault", "wrong_rank"), [("twice", None), ("left out", None), ("left out", 1)])
def test_a_fault_of_an_eager_reduction_is_named_on_every_rank(
    ranks2: RankPool, fault: str, wrong_rank: int | None
) -> None:
    for message in ranks2.run(_eager_fault, fault, wrong_rank):
        assert f"{NAMED} are not the sum over ranks" in message, message


def _graph_fault(rank: int, fault: str, first_call: bool) -> str:
    run = StepPipeline.run

    def faulty(self: StepPipeline, graph: Graph, **options: Any) -> None:
        run(self, graph, **options)
        (_, group_name), *_ = self.reductions
        launch = [node for node in graph.nodes if is_launch(node, group_name)][1]
        if fault == "left out":
            launch.replace_all_uses_with(launch.args[0])
            graph.erase_node(launch)
            return
        (wait,) = launch.users
        with graph.inserting_after(launch):
            between = graph.call_function(wait.target, (launch,))
        with graph.inserting_after(between):
            again = graph.call_function(launch.target, (between, *launch.args[1:]))
        wait.args = (again,)

    gradient = ddp.grad(loss, bucket_cap_mb=0)
    if not first_call:  # the reduction has been proven, the graph not
        for _ in range(4):
            gradient(parameters(), rows(rank))
    step = ddp.compile(gradient, backend="aot_eager")
    with mock.patch.object(StepPipeline, "run", faulty):
        if not first_call:
            step(parameters(), rows(rank))
        return _error(step, rank)


@pytest.mark.parametrize("first_call", [True, False])
@pytest.mark.parametrize("fault", ["twice", "left out"])
def test_a_fault_of_a_graph_is_named_on_every_rank(ranks2: RankPool, fault: str, first_call: bool) -> None:
    for message in ranks2.run(_graph_fault, fault, first_call):
        name = "bias" if first_call else "head"  # the second one in the order of the graph, or of the leaves
        assert f"with respect to argument 0['{name}'] are not the sum over ranks" in message, message


def _wrong_division(rank: int, compiles: bool) -> list[str]:
    """On rank 1 alone, and on both."""
    messages = []
    for wrong_rank in (1, None):
        step = ddp.compile(ddp.grad(loss), backend="aot_eager") if compiles else ddp.grad(loss)
        patch = mock.patch.object(GradientFunction, "_share", 1.0)
        if wrong_rank in (None, rank):
            with patch:
                messages.append(_error(step, rank))
        else:
            messages.append(_error(step, rank))
        assert_same(step(parameters(), rows(rank)), by_hand(loss, 2))
    return messages


@pytest.mark.parametrize("compiles", [False, True])
def test_a_wrong_division_is_named_on_every_rank(ranks2: RankPool, compiles: bool) -> None:
    for messages in ranks2.run(_wrong_division, compiles):
        for message in messages:
            assert "would return 2 times the mean over ranks" in message and "argument 0['first']" in message, message


def _exchanges(rank: int, ways: tuple[str, str]) -> tuple[list[int], int]:
    """How often ranks compare, also where one runs several reductions as a graph and the other one by one."""
    shared = ddp.Communicator()
    one = ddp.grad(loss, process_group=shared, bucket_cap_mb=CAP)
    other = ddp.grad(lambda params, x: loss(params, x).sin(), process_group=shared)

    def step(params: dict[str, Tensor], x: Tensor) -> Any:
        between = one(params, x)
        return between, one(between, x), other(between, x)

    compared = []
    conclude = conclude_together

    def counted(own: Any, recorded: Any) -> None:
        compared[-1] += bool(recorded)
        conclude(own, recorded)

    call = ddp.compile(step, backend="aot_eager") if ways[rank] == "compiled" else step
    with mock.patch.object(communicator, "conclude_together", counted):
        for number in range(24):
            compared.append(0)
            expected = (step if number < 12 else call)(parameters(), rows(rank))
    for found, means in zip(call(parameters(), rows(rank)), expected, strict=True):
        assert_same(found, means)
    return compared, shared._calls


@pytest.mark.parametrize("ways", [("eager", "eager"), ("eager", "compiled"), ("compiled", "compiled")])
def test_ranks_compare_in_the_first_launches_and_behind_a_new_graph(ranks2: RankPool, ways: tuple[str, str]) -> None:
    (first, calls), (second, other_calls) = ranks2.run(_exchanges, ways, timeout_seconds=200)
    assert [bool(n) for n in first] == [bool(n) for n in second] and calls == other_calls
    assert first[0] and not any(first[9:13])
    assert any(first[13:]) == ("compiled" in ways) and not any(first[22:])


class _TwoRanks:
    """The first of two, which find the same; the other brings `theirs`."""

    world_size = 2

    def __init__(self, theirs: Tensor) -> None:
        self._theirs = theirs

    def all_reduce(self, sums: Tensor) -> Any:
        sums += self._theirs
        return mock.Mock()

    def maximum(self, values: Tensor) -> None:
        pass


@pytest.mark.parametrize(
    ("found", "is_off"),
    [
        (lambda own, other: own + other, False),
        (lambda own, other: own, True),
        (lambda own, other: 2 * (own + other), True),
        (lambda own, other: torch.full((9,), math.nan), False),  # not finite is not off
    ],
)
def test_signs_find_what_rounding_does_not_explain(found: Callable[..., Tensor], is_off: bool) -> None:
    own, other = (torch.randn(9, generator=torch.Generator().manual_seed(rank)) for rank in range(2))
    accounts = [
        torch.tensor((*signed_sum(each).tolist(), 0.0), dtype=torch.float64).view(3, 1) for each in (own, other)
    ]
    result = signed_sum(found(own, other)).view(2, 1)
    account = Account(accounts[0], result, *torch.zeros(2, 1, dtype=torch.int64), [(torch.float32, 9)], 1.0)
    verdict = exchange(cast(Any, _TwoRanks(accounts[1])), account)
    assert bool(verdict.are_off) == is_off and not verdict.results_differ and bool(verdict.have_values)


def _launches_from_cpp(rank: int) -> None:
    """What cannot be looked at is not held for wrong, on ranks that see theirs neither."""
    options = {"cpp_wrapper": True} if rank else {}
    step = ddp.compile(ddp.grad(loss), options=options)
    for _ in range(2):
        assert_same(step(parameters(), rows(rank)), by_hand(loss, 2))


@pytest.mark.inductor
def test_launches_from_cpp_are_not_held_for_wrong(ranks2: RankPool) -> None:
    ranks2.run(_launches_from_cpp, timeout_seconds=400, collective_timeout_seconds=200)
