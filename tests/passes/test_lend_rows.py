"""Memory that is kept for what is scattered and gathered, on graphs built by hand."""

import pytest
import torch
from test_gather_later import deferred_graph, plan, step_graph
from torch.fx import Graph, Node

from compiled_ddp.passes.lend_rows import lend_rows
from compiled_ddp.passes.ops import all_to_all, all_to_all_into, fill_rows, repeated, wait_tensor
from compiled_ddp.passes.step_pipeline import StepPipeline

aten = torch.ops.aten
SENT, RECEIVED = ("sent_0", "sent_1"), ("received_0", "received_1")


def with_memory(graph: Graph) -> list[Node]:
    """Inputs behind all others: of two buckets, of which the first has the gradient of the second parameter."""
    *_, last = graph.find_nodes(op="placeholder")
    for name in reversed((*SENT, *RECEIVED)):
        with graph.inserting_after(last):
            graph.placeholder(name)
    return graph.find_nodes(op="placeholder")[-4:]


def names(nodes: object) -> list[str]:
    return [each.name for each in nodes]  # type: ignore[attr-defined]


def test_what_is_sent_and_what_comes_lies_in_memory_that_is_lent() -> None:
    graph = step_graph("all_to_all")
    with_memory(graph)
    StepPipeline(((plan(), "g"),), lent=True).run(graph)
    launches = graph.find_nodes(op="call_function", target=all_to_all_into)
    assert not graph.find_nodes(op="call_function", target=all_to_all)
    assert [(*names(node.args[:2]), node.args[2], node.args[3].name) for node in launches] == [
        ("sent_0", "received_0", False, "all_reduce_default"),  # scattered in the order of gradients, behind the riders
        ("sent_1", "received_1", False, "received_0"),
        ("sent_1", "received_1", True, "received_1"),  # gathered in that of the next forward
        ("sent_0", "received_0", True, "received_1"),
    ]
    assert {node.args[4] for node in launches} == {"g"}
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
def test_nothing_is_filled_before_what_the_step_before_has_sent_of_it_is_there(make: object) -> None:
    graph = make()  # type: ignore[operator]
    with_memory(graph)
    StepPipeline(((plan(), "g"),), lent=True).run(graph)
    place = {node: number for number, node in enumerate(graph.nodes)}
    fills = graph.find_nodes(op="call_function", target=fill_rows)
    arrived = {"sent_0": "gathered_1", "sent_1": "gathered_0"}
    assert len(fills) == 4
    for fill in fills:
        assert fill.args[4].name == arrived[fill.args[1].name]
        (wait,) = [user for user in fill.args[4].users if user.target is wait_tensor]
        assert place[wait] < place[fill]


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
    fill_rows(parts, into, 2, False, None)
    assert torch.equal(into, torch.cat(parts, 1).flatten())
    shares = [torch.arange(2.0), torch.arange(3.0) + 5]
    fill_rows(shares, into, 2, True, None)
    assert torch.equal(into, repeated(shares, 2)) and torch.equal(into, torch.cat([*shares, *shares]))
