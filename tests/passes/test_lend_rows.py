"""Memory that is kept for what is scattered and gathered, on graphs built by hand."""

import pytest
import torch
from test_gather_later import deferred_graph, plan, step_graph
from torch.fx import Graph, Node

from compiled_ddp.passes.lend_rows import lend_rows
from compiled_ddp.passes.ops import (
    all_to_all,
    all_to_all_into,
    fill_rows,
    optimizer_step_in_place,
    pack_into,
    repeated,
    wait_tensor,
)
from compiled_ddp.passes.step_pipeline import StepPipeline

aten = torch.ops.aten
SENT, RECEIVED, GATHERED = ("sent_0", "sent_1"), ("received_0", "received_1"), ("gathered_into_0", "gathered_into_1")


def with_memory(graph: Graph, memory: tuple[str, ...] = (*SENT, *RECEIVED)) -> list[Node]:
    """Inputs behind all others: of two buckets, of which the first has the gradient of the second parameter."""
    *_, last = graph.find_nodes(op="placeholder")
    for name in reversed(memory):
        with graph.inserting_after(last):
            graph.placeholder(name)
    return graph.find_nodes(op="placeholder")[-len(memory) :]


def names(nodes: object) -> list[str]:
    return [each.name for each in nodes]  # type: ignore[attr-defined]


def launches_of(graph: Graph) -> list[tuple[object, ...]]:
    """From where, to where, whether that gathers, and behind what."""
    launches = graph.find_nodes(op="call_function", target=all_to_all_into)
    return [(*names(node.args[:2]), node.args[2], names(node.args[3])) for node in launches]


def test_what_is_sent_and_what_comes_lies_in_memory_that_is_lent() -> None:
    graph = step_graph("all_to_all")
    with_memory(graph)
    StepPipeline(((plan(), "g"),), lent=True).run(graph)
    assert not graph.find_nodes(op="call_function", target=all_to_all)
    assert launches_of(graph) == [
        # Scattered in the order of gradients, behind the riders, and what the step before has gathered.
        ("sent_0", "received_0", False, ["getitem_6", "all_reduce_default"]),
        ("sent_1", "received_1", False, ["getitem_5", "received_0"]),
        ("sent_1", "received_1", True, ["received_1"]),  # gathered in that of the next forward
        ("sent_0", "received_0", True, ["received_1"]),
    ]
    assert {node.args[4] for node in graph.find_nodes(op="call_function", target=all_to_all_into)} == {"g"}
    fills = graph.find_nodes(op="call_function", target=fill_rows)
    assert [(node.args[1].name, node.args[3]) for node in fills] == [
        ("sent_0", False),
        ("sent_1", False),
        ("sent_1", True),
        ("sent_0", True),
    ]
    (outputs,) = graph.output_node().args
    assert names(outputs[2:6]) == ["received_1", "received_0", "sent_1", "sent_0"]


@pytest.mark.parametrize("make", [lambda: step_graph("all_to_all"), deferred_graph], ids=["shares", "sums"])
def test_nothing_is_filled_before_what_the_step_before_has_left_there_is_read(make: object) -> None:
    graph = make()  # type: ignore[operator]
    with_memory(graph)
    StepPipeline(((plan(), "g"),), lent=True).run(graph)
    place = {node: number for number, node in enumerate(graph.nodes)}
    fills = [fill for fill in graph.find_nodes(op="call_function", target=fill_rows) if not fill.args[3]]
    assert [fill.args[1].name for fill in fills] == ["sent_0", "sent_1"]
    for fill, arrived in zip(fills, ("gathered_1", "gathered_0"), strict=True):
        (copied,) = fill.args[4]
        wait = copied.args[0].args[0]
        assert wait.target is wait_tensor and wait.args[0].name == arrived
        assert place[copied] < place[fill]


def whole_graph() -> Graph:
    planned = plan(whole=True)
    graph = deferred_graph(planned)
    with_memory(graph, (*SENT, *RECEIVED, *GATHERED))
    StepPipeline(((planned, "g"),), lent=True).run(graph)
    return graph


def test_gradients_of_a_bucket_that_is_whole_are_produced_in_memory_that_nothing_else_has() -> None:
    graph = whole_graph()
    packed = graph.find_nodes(op="call_function", target=pack_into)
    assert [node.args[1].name for node in packed] == [*SENT]
    assert [node[:3] for node in launches_of(graph)] == [
        (packed[0].name, "received_0", False),
        (packed[1].name, "received_1", False),
        ("received_1", "gathered_into_1", True),
        ("received_0", "gathered_into_0", True),
    ]
    (outputs,) = graph.output_node().args
    assert names(outputs[2:6]) == ["gathered_into_1", "gathered_into_0", "received_1", "received_0"]


def test_what_has_been_gathered_is_read_by_an_update_before_anything_comes_into_that_memory() -> None:
    """`received`, from which the step before has gathered it, and so behind that also where it has come."""
    graph = whole_graph()
    updates = graph.find_nodes(op="call_function", target=optimizer_step_in_place)
    assert [node.args[0] for node in updates] == [[graph_input(graph, "first")], [graph_input(graph, "second")]]
    scatters = [node for node in graph.find_nodes(op="call_function", target=all_to_all_into) if not node.args[2]]
    for scatter, param in zip(scatters, ("second", "first"), strict=True):
        assert graph_input(graph, param) in scatter.args[3], "which the update has written"


def graph_input(graph: Graph, name: str) -> Node:
    return next(node for node in graph.find_nodes(op="placeholder") if node.name == name)


def test_an_update_that_comes_late_keeps_its_memory() -> None:
    """As that of a parameter which no forward reads."""
    planned = plan(whole=True)
    graph = deferred_graph(planned)
    memory = with_memory(graph, (*SENT, *RECEIVED, *GATHERED))
    StepPipeline(((planned, "g"),)).run(graph)
    update = graph.find_nodes(op="call_function", target=optimizer_step_in_place)[1]
    graph.output_node().prepend(update)
    lend_rows(graph, planned, memory=memory, group_names=("g",))
    assert len(graph.find_nodes(op="call_function", target=all_to_all)) == 4


def test_where_one_would_be_filled_too_early_each_keeps_its_own_memory() -> None:
    """No forward reads its parameters: nothing waits for them before the backward."""
    graph, planned = step_graph("all_to_all"), plan()
    StepPipeline(((planned, "g"),)).run(graph)
    memory = with_memory(graph)
    (wait,) = [node for node in graph.nodes if node.target is wait_tensor and node.args[0].name == "gathered_1"]
    reads = [*wait.users]
    graph.output_node().prepend(wait)
    for node in reads:
        node.replace_input_with(wait, graph.find_nodes(op="placeholder")[0])
    lend_rows(graph, planned, memory=memory, group_names=("g",))
    assert len(graph.find_nodes(op="call_function", target=all_to_all)) == 4
    assert not graph.find_nodes(op="call_function", target=fill_rows)


def test_rows_are_what_is_sent_without_lent_memory() -> None:
    parts = [torch.arange(4.0).view(2, 2), torch.arange(6.0).view(2, 3) + 10]
    into = torch.empty(10)
    fill_rows(parts, into, 2, False, [])
    assert torch.equal(into, torch.cat(parts, 1).flatten())
    shares = [torch.arange(2.0), torch.arange(3.0) + 5]
    fill_rows(shares, into, 2, True, [])
    assert torch.equal(into, repeated(shares, 2)) and torch.equal(into, torch.cat([*shares, *shares]))
