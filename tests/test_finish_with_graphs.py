"""How backwards end in which graphs have reduced sections, on two ranks in one process."""

from collections.abc import Iterator

import pytest
import torch
from run_times import (
    Broken,
    RunTime,
    Two,
    assert_steps_well,
    forget_gradients,
    makes_two_ranks,
    mean,
    refined,
    together,
    uses,
)

from compiled_ddp.step.agreed_sequence import BEGINNINGS_UNSEEN

pytestmark = pytest.mark.filterwarnings("ignore:gradients of")  # some are reduced by hooks

GRAPH = uses(2, graph=(1, 0))


@pytest.fixture
def two() -> Iterator[Two]:
    with makes_two_ranks() as make:
        yield make


def origins(rank: RunTime) -> list[tuple[str, tuple[int, ...]]]:
    assert rank.agreed.sequence is not None
    return [(section.origin, section.plan.indices) for section in rank.agreed.sequence.sections]


def test_graphs_and_hooks_share_a_backward(two: Two) -> None:
    ranks = refined(two, GRAPH)
    assert all(set(origins(rank)) == {("graph", (1, 0)), ("hooks", (2,))} for rank in ranks)
    assert_steps_well(*ranks, step=GRAPH)


def test_where_graphs_reduce_everything_no_parameter_is_watched_after_the_first_backward(two: Two) -> None:
    ranks = two()
    for _ in range(2):
        assert_steps_well(*ranks, step=uses(graph=(2, 1, 0)))
    assert not any(rank.reduction.hooks.everywhere for rank in ranks)


@pytest.mark.parametrize("skips", ["other graphs", "no graph on one rank"])
def test_after_a_step_without_its_graphs_the_hooks_rest_again(two: Two, skips: str) -> None:
    graph = uses(graph=(2, 1, 0))
    one, other = ranks = refined(two, graph)
    if skips == "other graphs":
        assert_steps_well(*ranks, step=uses(2, 1, graph=(0,)))
    else:
        forget_gradients(*ranks)
        assert together(ranks, uses(2, 1, 0), graph) == [None, None]
    assert one.reduction.hooks.everywhere
    for _ in range(2):  # in the first one graphs run again, and in the next one nothing else is to be expected
        assert_steps_well(*ranks, step=graph)
    assert not any(rank.reduction.hooks.everywhere for rank in ranks)
    assert {rank.agreed.beginnings for rank in ranks} == {0}
    assert_steps_well(one, other, step=graph)


def test_hooks_do_not_rest_while_a_forward_waits_that_called_other_graphs(two: Two) -> None:
    """Its backward comes with that of a forward that called them, on both ranks."""
    graph = uses(graph=(2, 1, 0))
    ranks = refined(two, graph)
    assert_steps_well(*ranks, step=graph)

    def step(rank: RunTime) -> None:
        first = rank.forward(2, 1, 0)
        (first + rank.forward(graph=(2, 1, 0))).backward()

    forget_gradients(*ranks)
    errors = together(ranks, step)
    assert all("got a gradient from outside of its captured graph" in str(error) for error in errors), errors
    assert all(rank.reduction.hooks.everywhere for rank in ranks)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_what_one_rank_has_used_outside_of_the_graph_too_is_reduced_again_in_the_first_backward(
    two: Two, reduction: str
) -> None:
    one, other = two(reduction=reduction)
    factor = 2 if reduction == "sum" else 1
    for number in range(2):
        forget_gradients(one, other)
        assert together([one, other], GRAPH, uses(2, 0, graph=(1, 0))) == [None, None], number
        for rank in (one, other):
            assert torch.equal(rank.tensors[0].grad, factor * (mean(0) + other.values(0) / 2))  # type: ignore[arg-type]
            assert torch.equal(rank.tensors[1].grad, factor * mean(1))  # type: ignore[arg-type]
            assert origins(rank)[-1] == ("hooks", (0,)) and rank.agreed.by_hooks[-1].reduces_again


def test_what_turns_out_later_to_be_used_outside_too_is_an_error_that_the_others_are_told_of(two: Two) -> None:
    ranks = refined(two, GRAPH, verify="off")
    here, there = together(ranks, GRAPH, uses(2, 0, graph=(1, 0)))
    assert here is None
    assert "parameter p0 got a gradient from outside of its captured graph" in str(there)
    for error in together(ranks, GRAPH):
        assert "an exception ended the one before it on 1 rank(s)" in str(error)
    assert_steps_well(*ranks, step=GRAPH)


def test_where_the_proof_looks_on_it_is_an_error_on_all_ranks(two: Two) -> None:
    ranks = refined(two, GRAPH, verify="always")
    for error in together(ranks, GRAPH, uses(2, 0, graph=(1, 0))):
        assert "the gradient of p0 differs between the ranks after it was reduced" in str(error)
    assert_steps_well(*ranks, step=GRAPH)


@pytest.mark.parametrize("most", [0, 1])
def test_an_exception_in_the_graph_gives_grad_back_and_is_told_at_once_if_anything_was_left_to_send(
    two: Two, most: int
) -> None:
    ranks, graph = two(bucket_cap_mb_list=[8 / 2**20]), uses(graph=(2, 1, 0))
    assert_steps_well(*ranks, step=graph)
    existing = [[tensor.grad for tensor in rank.tensors] for rank in ranks]
    here, there = together(ranks, graph, uses(graph=(2, 1, 0), most=most))
    assert isinstance(there, Broken) and "broke off on 1 other rank(s)" in str(here)
    for rank, gradients in zip(ranks, existing, strict=True):
        assert all(tensor.grad is gradient for tensor, gradient in zip(rank.tensors, gradients, strict=True))
    assert all(torch.equal(tensor.grad, mean(index)) for index, tensor in enumerate(ranks[1].tensors))  # type: ignore[arg-type]
    assert_steps_well(*ranks, step=graph)


def test_a_rank_that_skips_sends_zeros_by_hooks_for_the_graph_that_others_run(two: Two) -> None:
    ranks = refined(two, GRAPH)
    assert together(ranks, GRAPH, lambda rank: rank.skip()) == [None, None]
    assert all(torch.equal(rank.tensors[0].grad, ranks[0].values(0) / 2) for rank in ranks)  # type: ignore[arg-type]
    assert_steps_well(*ranks, step=GRAPH)


def test_a_sequence_whose_graphs_fit_on_no_rank_is_left_after_two_backwards(two: Two) -> None:
    ranks, others = refined(two, GRAPH), uses(2, 1, graph=(0,))
    for beginnings in (0, 1):
        assert_steps_well(*ranks, step=others)
        assert {rank.agreed.beginnings for rank in ranks} == {beginnings}
    assert_steps_well(*ranks, step=others)
    assert all(("graph", (0,)) in origins(rank) for rank in ranks)


def test_a_rank_whose_backward_broke_when_all_was_sent_leaves_the_sequence_with_the_others(two: Two) -> None:
    ranks, others = refined(two, GRAPH), uses(2, 1, graph=(0,))
    assert_steps_well(*ranks, step=others)
    here, there = together(ranks, others, uses(2, 1, graph=(0,), breaks_after=True))
    assert here is None and isinstance(there, Broken)
    assert {rank.agreed.beginnings for rank in ranks} == {1}
    assert all("an exception ended the one before it" in str(error) for error in together(ranks, GRAPH))
    assert_steps_well(*ranks, step=GRAPH)


def test_a_sequence_whose_graphs_fit_on_some_rank_stays(two: Two) -> None:
    ranks = refined(two, GRAPH)
    for _ in range(BEGINNINGS_UNSEEN + 2):
        forget_gradients(*ranks)
        assert together(ranks, GRAPH, uses(2, 1, graph=(0,))) == [None, None]
    assert {rank.agreed.beginnings for rank in ranks} == {0}


# ---- torch.autograd.grad ---------------------------------------------------------------------------------------------


def returns(rank: RunTime) -> None:
    """Of what a graph has reduced."""
    first, second = torch.autograd.grad(rank.forward(graph=(1, 0)), rank.tensors[:2])
    assert torch.equal(first, mean(0)) and torch.equal(second, mean(1))


def returns_own(rank: RunTime) -> None:
    torch.autograd.grad(rank.forward(2, graph=(1, 0)), rank.tensors)


def test_a_torch_autograd_grad_returns_the_mean_and_leaves_grad_alone(two: Two) -> None:
    ranks = refined(two, GRAPH)
    for rank in ranks:
        for index, tensor in enumerate(rank.tensors):
            tensor.grad = rank.values(index)
    assert together(ranks, returns) == [None, None]
    assert all(torch.equal(t.grad, rank.values(i)) for rank in ranks for i, t in enumerate(rank.tensors))  # type: ignore[arg-type]
    assert_steps_well(*ranks, step=GRAPH)


def test_a_torch_autograd_grad_of_what_no_graph_reduces_is_an_error_on_all_ranks(two: Two) -> None:
    ranks = refined(two, GRAPH)
    for error in together(ranks, returns_own):
        assert "torch.autograd.grad would return this rank's own gradient of p2" in str(error)
    here, there = together(ranks, GRAPH, returns_own)
    assert "broke off on 1 other rank(s) and was not reduced" in str(here)
    assert "torch.autograd.grad would return this rank's own gradient of p2" in str(there)
    assert_steps_well(*ranks, step=GRAPH)
