"""A step whose ranks share its update, and updates in place, on graphs built by hand."""

import operator

import pytest
import torch
from torch.fx import Graph, Node

from compiled_ddp.functional.operator import plan_of, spec_of
from compiled_ddp.passes.ops import (
    LAUNCHES,
    all_gather,
    all_reduce,
    exchange_of_all,
    exchange_of_sums,
    gather_shares,
    optimizer_step,
    optimizer_step_in_place,
    reduce_scatter,
    sum_numbers,
    sum_over_ranks,
    wait_tensor,
)
from compiled_ddp.passes.step_pipeline import StepPipeline
from compiled_ddp.passes.update_in_place import update_in_place
from compiled_ddp.plan import FIRST_USED, BucketPlan

aten = torch.ops.aten
CPU = torch.device("cpu")


def plan(lengths: tuple[int, ...], sizes: tuple[int, ...] = (4, 5), ranks: int = 2) -> BucketPlan:
    specs = tuple(spec_of(index, (size,), torch.float32, CPU) for index, size in enumerate(sizes))
    return plan_of(specs, (1, 0), (*lengths, 0), ranks, 0, is_scattered=True)


def step_graph(scattered_by: str, *, clips: bool = False) -> Graph:
    """Two gradients, the second one first; their shares update those of two parameters, which are gathered."""
    graph = Graph()
    x, share, other, state, step, leading, numbers = map(
        graph.placeholder, ("x", "share", "other", "state", "step", "leading", "numbers")
    )
    leading.meta["val"] = torch.empty(FIRST_USED, device="meta")
    second = graph.call_function(aten.relu.default, (x,))
    first = graph.call_function(aten.neg.default, (second,))
    sums = graph.call_function(sum_over_ranks, ([first, second], [], leading, [1, 0], [1, 1], 2, "", scattered_by))
    shares = [graph.call_function(operator.getitem, (sums, index)) for index in range(2)]
    riders = graph.call_function(operator.getitem, (sums, 2))
    factor = None
    if clips:
        norm = graph.call_function(aten.linalg_vector_norm.default, (shares[0],))
        factor = graph.call_function(sum_numbers, (norm, ""))
    updated = graph.call_function(
        optimizer_step,
        ([share, other], shares, [state, state], [step, step], numbers, factor, None, None, "Adam", "", "lr"),
    )
    new = [graph.call_function(operator.getitem, (updated, index)) for index in range(6)]
    gathered = graph.call_function(gather_shares, (new[:2], [0, 1], [1, 1], 2, "", scattered_by))
    params = [graph.call_function(operator.getitem, (gathered, index)) for index in range(2)]
    graph.output((*params, *new[2:], riders))
    return graph


def targets(graph: Graph, among: tuple[object, ...]) -> list[object]:
    return [node.target for node in graph.nodes if node.target in among]


@pytest.mark.parametrize(
    ("by", "scatters", "gathers"),
    [("exchange", exchange_of_sums, exchange_of_all), ("reduce_scatter", reduce_scatter, all_gather)],
)
def test_each_bucket_is_scattered_updated_and_gathered(by: str, scatters: object, gathers: object) -> None:
    graph = step_graph(by)
    StepPipeline(((plan((1, 1)), "g"),)).run(graph)
    assert targets(graph, LAUNCHES) == [all_reduce, scatters, scatters, gathers, gathers]
    assert all(node.args[-1] == "g" for node in graph.nodes if node.target in LAUNCHES)
    # Riders come first. The first bucket is on its way back before the second one is awaited, and what has come back is
    # awaited last.
    order = targets(graph, (*LAUNCHES, wait_tensor, optimizer_step))
    of_a_bucket = [wait_tensor, optimizer_step, gathers]
    assert order[3:] == [wait_tensor, *of_a_bucket, *of_a_bucket, wait_tensor, wait_tensor]


def test_one_bucket_of_both_is_updated_at_once() -> None:
    graph = step_graph("exchange")
    StepPipeline(((plan((2,)), "g"),)).run(graph)
    assert targets(graph, LAUNCHES) == [all_reduce, exchange_of_sums, exchange_of_all]
    (update,) = graph.find_nodes(op="call_function", target=optimizer_step)
    assert len(update.args[0]) == 2


def test_clipping_waits_for_all_and_comes_before_the_gathers() -> None:
    graph = step_graph("exchange", clips=True)
    StepPipeline(((plan((1, 1)), "g"),)).run(graph)
    scatters, gathers = [exchange_of_sums] * 2, [exchange_of_all] * 2
    assert targets(graph, LAUNCHES) == [all_reduce, *scatters, all_reduce, *gathers]
    assert len(graph.find_nodes(op="call_function", target=optimizer_step)) == 1


def test_a_scattered_bucket_is_a_row_of_shares_for_each_rank() -> None:
    riders, bucket = plan((2,)).buckets
    assert riders.riders is not None and not riders.gradients
    assert bucket.numel == 2 * (3 + 2)  # of 5 elements 3 and 2 filled up, of 4 elements 2 and 2
    rows = torch.tensor([[0.0, 1, 2, 10, 11], [3, 4, -1, 12, 13]])
    second, first = bucket.gradients
    assert bucket.view(second, rows).tolist() == [0, 1, 2, 3, 4]
    assert bucket.view(first, rows).tolist() == [10, 11, 12, 13]


# ---- in place --------------------------------------------------------------------------------------------------------


def update_graph() -> tuple[Graph, list[Node]]:
    graph = Graph()
    inputs = [graph.placeholder(name) for name in ("param", "gradient", "state", "step", "numbers")]
    param, gradient, state, step, numbers = inputs
    updated = graph.call_function(
        optimizer_step, ([param], [gradient], [state], [step], numbers, None, None, None, "Adam", "", "lr")
    )
    new = [graph.call_function(operator.getitem, (updated, index)) for index in range(3)]
    copied = graph.call_function(aten.copy.default, (param, new[0]))
    graph.call_function(aten.copy_.default, (param, copied))
    for into, value in zip((state, step), new[1:], strict=True):
        graph.call_function(aten.copy_.default, (into, value))
    return graph, new


def test_what_is_written_into_its_own_inputs_is_updated_there() -> None:
    graph, _ = update_graph()
    graph.output(())
    update_in_place(graph)
    graph.lint()
    assert [node.target for node in graph.nodes if node.op == "call_function"] == [optimizer_step_in_place]


@pytest.mark.parametrize("leaves", [0, 1, 2])
def test_an_update_whose_result_goes_elsewhere_too_stays_as_it_is(leaves: int) -> None:
    graph, new = update_graph()
    graph.output((new[leaves],))
    update_in_place(graph)
    assert optimizer_step in [node.target for node in graph.nodes]


def test_another_input_is_no_place_for_it() -> None:
    graph, new = update_graph()
    copy = next(node for node in graph.nodes if node.target is aten.copy_.default and node.args[1] is new[1])
    copy.args = (copy.args[0].next, copy.args[1])
    graph.output(())
    update_in_place(graph)
    assert optimizer_step in [node.target for node in graph.nodes]


def shared_graph(*, reads_behind: bool = False) -> Graph:
    """An update of a share that the graph makes, and of a state that it is given; the share goes on from there."""
    graph = Graph()
    inputs = [graph.placeholder(name) for name in ("param", "rank", "gradient", "state", "numbers", "skip")]
    param, rank, gradient, state, numbers, skip = inputs
    row = graph.call_function(aten.index_select.default, (param, 0, rank))
    share, flat = (graph.call_function(aten.view.default, (each, [-1])) for each in (row, state))
    other = graph.call_function(aten.t.default, (state,))
    lists = [share], [gradient], [flat], []
    updated = graph.call_function(optimizer_step, (*lists, numbers, None, skip, None, "SGD", "", "lr"))
    new = [graph.call_function(operator.getitem, (updated, index)) for index in range(2)]
    sent = graph.call_function(aten.cat.default, ([new[0]],))
    before = graph.call_function(aten.neg.default, (other,))
    shaped = graph.call_function(aten.view.default, (new[1], [1, 3]))
    graph.call_function(aten.copy_.default, (state, shaped))
    graph.output((sent, before))
    if not reads_behind:
        updated.prepend(before)
    return graph


def test_a_share_and_its_state_are_updated_where_the_share_is_read() -> None:
    graph = shared_graph()
    update_in_place(graph)
    graph.lint()
    found = [node.target for node in graph.nodes if node.op == "call_function"]
    view = aten.view.default
    made = [aten.index_select.default, view, view, aten.t.default, aten.neg.default]
    assert found == [*made, optimizer_step_in_place, aten.cat.default]
    (sent,) = graph.find_nodes(op="call_function", target=aten.cat.default)
    assert sent.args[0][0].args[0].target is aten.index_select.default


def test_an_update_stays_as_it_is_where_its_old_state_is_read_behind_it() -> None:
    graph = shared_graph(reads_behind=True)
    update_in_place(graph)
    assert graph.find_nodes(op="call_function", target=optimizer_step)
