"""Memory that is kept for what is scattered and gathered, on graphs built by hand."""

import pytest
import torch
from test_gather_later import deferred_graph, plan, step_graph
from torch.fx import Graph, Node

from compiled_ddp.passes.lend_rows import lend_rows
from compiled_ddp.passes.ops import all_reduce, exchange, exchange_into, fill_rows, pack_into, wait_tensor
from compiled_ddp.passes.step_pipeline import StepPipeline

aten = torch.ops.aten
SENT, RECEIVED, SHARES = ("sent_0", "sent_1"), ("received_0", "received_1"), ("share_0", "share_1")


def with_memory(graph: Graph) -> list[Node]:
    """Inputs behind all others: of two buckets, of which the first has the gradient of the second parameter."""
    *_, last = graph.find_nodes(op="placeholder")
    for name in reversed((*SENT, *RECEIVED, *SHARES)):
        with graph.inserting_after(last):
            graph.placeholder(name)
    return graph.find_nodes(op="placeholder")[-6:]


def names(nodes: object) -> list[str]:
    return [each.name for each in nodes]  # type: ignore[attr-defined]


def named(node: Node) -> str:
    """What a node is, or is packed into."""
    return "riders" if node.target is all_reduce else str(node.args[1] if node.target is pack_into else node)


def launches_of(graph: Graph) -> list[tuple[object, ...]]:
    """From where, to where, whether that gathers, its number, and behind what."""
    launches = graph.find_nodes(op="call_function", target=exchange_into)
    return [(named(each.args[0]), each.args[1].name, *each.args[2:4], [*map(named, each.args[4])]) for each in launches]


LAUNCHES = [
    # Scattered in the order of gradients, behind the riders, and the share that the step before has sent.
    ("sent_0", "received_0", False, 3, ["riders", "gathered_1"]),
    ("sent_1", "received_1", False, 1, ["received_0", "gathered_0"]),
    ("share_1", "received_1", True, 2, ["received_1"]),  # gathered in that of the next forward
    ("share_0", "received_0", True, 4, ["received_1"]),
]


def test_what_is_sent_and_what_comes_lies_in_memory_that_is_lent() -> None:
    graph = step_graph("exchange")
    with_memory(graph)
    StepPipeline(((plan(), "g"),), lent=True).run(graph)
    assert not graph.find_nodes(op="call_function", target=exchange)
    assert launches_of(graph) == LAUNCHES
    assert {node.args[5] for node in graph.find_nodes(op="call_function", target=exchange_into)} == {"g"}
    fills = graph.find_nodes(op="call_function", target=fill_rows)
    assert names(node.args[1] for node in fills) == [*SENT]
    (outputs,) = graph.output_node().args
    assert names(outputs[2:6]) == ["received_1", "received_0", "share_1", "share_0"]


def test_gradients_of_a_bucket_that_is_whole_are_produced_in_memory_that_nothing_else_has() -> None:
    graph, planned = deferred_graph(plan(whole=True)), plan(whole=True)
    with_memory(graph)
    StepPipeline(((planned, "g"),), lent=True).run(graph)
    assert launches_of(graph) == LAUNCHES
    assert not graph.find_nodes(op="call_function", target=fill_rows)
    packed = graph.find_nodes(op="call_function", target=pack_into)
    assert names(node.args[1] for node in packed) == [*SENT, *reversed(SHARES)]


@pytest.mark.parametrize("make", [lambda: step_graph("exchange"), deferred_graph], ids=["shares", "sums"])
def test_nothing_is_filled_before_what_the_step_before_has_sent_of_it_is_there(make: object) -> None:
    graph = make()  # type: ignore[operator]
    with_memory(graph)
    StepPipeline(((plan(), "g"),), lent=True).run(graph)
    place = {node: number for number, node in enumerate(graph.nodes)}
    scatters = [node for node in graph.find_nodes(op="call_function", target=exchange_into) if not node.args[2]]
    assert len(scatters) == 2
    for scatter in scatters:
        arrived = scatter.args[4][-1]
        (wait,) = [user for user in arrived.users if user.target is wait_tensor]
        assert place[wait] < place[scatter]


def test_where_one_would_be_filled_too_early_each_keeps_its_own_memory() -> None:
    """No forward reads its parameters: nothing waits for them before the backward."""
    graph, planned = step_graph("exchange"), plan()
    StepPipeline(((planned, "g"),)).run(graph)
    memory = with_memory(graph)
    (wait,) = [node for node in graph.nodes if node.target is wait_tensor and node.args[0].name == "gathered_1"]
    reads = [*wait.users]
    graph.output_node().prepend(wait)
    for node in reads:
        node.replace_input_with(wait, graph.find_nodes(op="placeholder")[0])
    lend_rows(graph, planned, memory=memory, group_names=("g",))
    assert len(graph.find_nodes(op="call_function", target=exchange)) == 4
    assert not graph.find_nodes(op="call_function", target=fill_rows)


def test_rows_are_what_is_sent_without_lent_memory() -> None:
    parts = [torch.arange(4.0).view(2, 2), torch.arange(6.0).view(2, 3) + 10]
    into = torch.empty(10)
    fill_rows(parts, into, 2)
    assert torch.equal(into, torch.cat(parts, 1).flatten())
