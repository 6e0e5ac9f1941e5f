"""What graphs reduce, fold in and share with hooks, against the mean computed by hand, on two ranks in one process."""

import gc
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from in_process import HandRun, end_all, plan_of
from torch import Tensor
from two_ranks import assert_gradients, begin, bring, mean, two_ranks, values

from compiled_ddp.plan import MIXED, ReductionKind, Section
from compiled_ddp.step.buffers import SequenceBuffers
from compiled_ddp.step.synchronised import ReturnedGradients

BY_HOOKS = [Section(plan_of((1, 2), (0, 3)), "hooks")]
IN_A_GRAPH = [Section(plan_of((0, 3), (1, 2)), "graph")]
IN_TWO_GRAPHS = [Section(plan_of((0, 3)), "graph"), Section(plan_of((1, 2), (0, 3)), "graph")]
GRAPH_AND_OUTSIDE = [*IN_A_GRAPH, Section(plan_of((0, 3)), "hooks", MIXED)]


def run_graphs(
    *runs: HandRun, sections: Sequence[int] = (0,), outside: Sequence[Mapping[int, Tensor]] = ({}, {})
) -> None:
    """Of these sections, on all ranks; what comes from `outside` on each is added to what they return."""
    graphs = [[run.begin_graph(section, *of_graph(run, section)) for section in sections] for run in runs]
    for run, of_run, others in zip(runs, graphs, outside, strict=True):
        run.accumulate_all(*(graph.complete() for graph in of_run), others)


def of_graph(run: HandRun, section: int) -> list[Tensor]:
    return [values(run.rank.rank, index) for index in run.backward.sections[section].plan.indices]


def test_a_grad_that_a_graph_folds_in_is_given_back_as_the_same_tensor() -> None:
    ranks, existing = two_ranks(), [torch.full((3,), 10.0) for _ in range(2)]
    for rank, gradient in zip(ranks, existing, strict=True):
        rank.tensors[0].grad = gradient
    runs = begin(ranks, IN_A_GRAPH)
    run_graphs(*runs)
    end_all(*runs)
    assert_gradients(ranks, 10.0 + mean(0), mean(1))
    assert all(rank.tensors[0].grad is gradient for rank, gradient in zip(ranks, existing, strict=True))


def test_a_graph_that_broke_off_gives_back_what_it_was_to_fold_in() -> None:
    rank, _ = two_ranks()
    rank.tensors[0].grad = existing = torch.full((3,), 10.0)
    (run,) = begin([rank], IN_A_GRAPH)
    graph = run.begin_graph(0, *of_graph(run, 0), most=0)
    assert rank.tensors[0].grad is None
    graph.reserved.break_off()
    assert rank.tensors[0].grad is existing and existing.tolist() == [10.0] * 3


def test_what_no_rank_has_used_of_a_graph_keeps_its_grad() -> None:
    runs = begin(ranks := two_ranks(), IN_A_GRAPH)
    graphs = [run.begin_graph(0, values(run.rank.rank), None) for run in runs]
    for run, graph in zip(runs, graphs, strict=True):
        run.accumulate_all(means := graph.complete())
        assert means.keys() == {0}
    end_all(*runs)
    assert_gradients(ranks, mean(0), None)


@pytest.mark.parametrize("existing", [None, 10.0])
def test_what_comes_from_outside_of_what_no_rank_has_used_in_the_graph_is_found(existing: float | None) -> None:
    ranks = two_ranks()
    for rank in ranks:
        rank.tensors[1].grad = None if existing is None else torch.full((2,), existing)
    runs = begin(ranks, IN_A_GRAPH)
    graphs = [run.begin_graph(0, values(run.rank.rank), None) for run in runs]
    for run, graph, outside in zip(runs, graphs, ({}, {1: values(1, 1)}), strict=True):
        run.accumulate_all(graph.complete(), outside)
    end_all(*runs)
    assert [run.backward.observations.graph_and_eager for run in runs] == [set(), {1}]
    before = 0.0 if existing is None else existing
    assert_gradients(ranks[:1], mean(0), None if existing is None else torch.full((2,), existing))
    assert_gradients(ranks[1:], mean(0), before + values(1, 1))


@pytest.mark.parametrize("as_view", [True, False])
@pytest.mark.parametrize("graphs_run_on", [[0, 1], [0], []])
def test_a_gradient_of_several_sections_is_the_mean_of_its_sum(graphs_run_on: list[int], as_view: bool) -> None:
    """[Note: one gradient, several sections]"""
    ranks = two_ranks(gradient_as_bucket_view=as_view)
    buffers = [SequenceBuffers(IN_TWO_GRAPHS) for _ in ranks]
    for _ in range(2):  # the second one finds the values of the first one in its buffers
        runs = [rank.begin(IN_TWO_GRAPHS, own) for rank, own in zip(ranks, buffers, strict=True)]
        by_graphs = [run for run in runs if run.rank.rank in graphs_run_on]
        for run in runs:
            if run not in by_graphs:
                run.backward.reservations.leave_all_to_hooks()
                run.accumulate(0, 2 * values(run.rank.rank))
                run.accumulate(1, values(run.rank.rank, 1))
                run.backward.launch_rest()
        run_graphs(*by_graphs, sections=(0, 1), outside=[{}] * len(by_graphs))
        end_all(*runs)
        assert_gradients(ranks, 2 * mean(0), mean(1))
        for rank in ranks:
            rank.forget_gradients()


def test_a_contribution_from_outside_of_the_graph_is_found() -> None:
    runs = begin(two_ranks(), IN_A_GRAPH)
    run_graphs(*runs, outside=[{0: torch.ones(3)}, {}])
    end_all(*runs)
    assert [run.backward.observations.graph_and_eager for run in runs] == [{0}, set()]


@pytest.mark.parametrize("looks_at_values", [True, False])
def test_besides_what_several_graphs_have_brought_only_a_look_at_it_finds_another(looks_at_values: bool) -> None:
    runs = begin(two_ranks(), IN_TWO_GRAPHS, looks_at_values=looks_at_values)
    run_graphs(*runs, sections=(0, 1), outside=[{0: torch.ones(3)}, {}])
    end_all(*runs)
    assert [run.backward.observations.graph_and_eager for run in runs] == [{0} if looks_at_values else set(), set()]


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_what_is_known_to_come_from_a_graph_and_from_outside_is_reduced_again(reduction: ReductionKind) -> None:
    plans = [plan_of((0, 3), (1, 2), reduction=reduction), plan_of((0, 3), reduction=reduction)]
    runs = begin(ranks := two_ranks(), [Section(plans[0], "graph"), Section(plans[1], "hooks", MIXED)])
    run_graphs(*runs, outside=[{0: 5.0 * values(rank)} for rank in range(2)])
    end_all(*runs)
    factor = 2 if reduction == "sum" else 1
    assert_gradients(ranks, factor * 6.0 * mean(0), factor * mean(1))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_second_reduction_takes_in_what_the_first_one_has_left_out(reduction: ReductionKind) -> None:
    plans = [plan_of((0, 3), (1, 2), reduction=reduction), plan_of((0, 3), reduction=reduction)]
    runs = begin(ranks := two_ranks(), [Section(plans[0], "graph")])
    run_graphs(*runs, outside=[{0: 5.0 * values(rank)} for rank in range(2)])
    end_all(*runs)
    again = [Section(plans[1], "hooks", MIXED)]
    end_all(*(run.rank.begin(again, used_before={0}, reduces_again=run.first_reduction) for run in runs))
    factor = 2 if reduction == "sum" else 1
    assert_gradients(ranks, factor * 6.0 * mean(0), factor * mean(1))


# ---- torch.autograd.grad ---------------------------------------------------------------------------------------------


def test_a_torch_autograd_grad_sends_zeros_by_hooks_and_leaves_grad_as_it_was() -> None:
    ranks, buffers = two_ranks(), [SequenceBuffers(BY_HOOKS) for _ in range(2)]
    runs = [rank.begin(BY_HOOKS, own) for rank, own in zip(ranks, buffers, strict=True)]
    bring(*runs)
    end_all(*runs)
    before = ranks[0].gradients
    returned = [ReturnedGradients(rank.tensors, [0]) for rank in ranks]
    runs = [r.begin(BY_HOOKS, own, returned=of) for r, own, of in zip(ranks, buffers, returned, strict=True)]
    assert end_all(*runs) == [set(), set()]
    (part,) = ranks[0].communicator.port.sent[1:]
    assert not part.values[:5].any()
    assert_gradients(ranks, mean(0), mean(1))
    assert all(now is then for now, then in zip(ranks[0].gradients, before, strict=True))


def test_of_what_it_returns_only_what_graphs_have_made_has_been_reduced() -> None:
    ranks = two_ranks()
    returned = [ReturnedGradients(rank.tensors, [0, 1]) for rank in ranks]
    runs = [rank.begin(IN_A_GRAPH, returned=of) for rank, of in zip(ranks, returned, strict=True)]
    graphs = [run.begin_graph(0, *of_graph(run, 0)) for run in runs]
    for run, graph, watch in zip(runs, graphs, returned, strict=True):
        means = graph.complete()
        watch.begin()
        outputs = [MeanOf.apply(tensor, means[index]) for index, tensor in enumerate(run.rank.tensors)]
        if run.rank.rank == 1:
            outputs.append(run.rank.tensors[1].sum())  # a contribution from outside
        torch.autograd.grad(outputs, run.rank.tensors)
    assert [list(run.backward.send_rest()) for run in runs] == [[], [1]]


class MeanOf(torch.autograd.Function):
    """Brings its input the very gradient that it is given."""

    @staticmethod
    def forward(context: Any, tensor: Tensor, gradient: Tensor) -> Tensor:
        context.gradient = gradient
        return tensor.new_zeros(())

    @staticmethod
    def backward(context: Any, _: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return context.gradient, None


# ---- afterwards ------------------------------------------------------------------------------------------------------


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
def test_a_backward_that_has_ended_keeps_nothing_and_needs_no_collector_to_go() -> None:
    runs = begin(ranks := two_ranks(), GRAPH_AND_OUTSIDE)
    run_graphs(*runs)
    memory = [
        weakref.ref(gradient.untyped_storage()) for rank in ranks for gradient in rank.gradients if gradient is not None
    ]
    end_all(*runs)
    backwards = [weakref.ref(run.backward) for run in runs]
    again = [Section(plan_of((0, 3)), "hooks", MIXED)]
    end_all(*(run.rank.begin(again, used_before={0}, reduces_again=run.first_reduction) for run in runs))
    assert all(reference() is not None for reference in memory)
    del runs
    assert [reference() for reference in backwards] == [None, None]
    for rank in ranks:
        rank.forget_gradients()
    assert [reference() for reference in memory] == [None] * 4
