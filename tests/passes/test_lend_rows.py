"""Memory that is kept for what is scattered and gathered, on graphs built by hand."""

import torch
from test_gather_later import deferred_graph, plan, step_graph, with_memory
from torch.fx import Graph, Node

from compiled_ddp.passes.graph_edit import emit
from compiled_ddp.passes.ops import (
    all_reduce,
    exchange_of_all,
    exchange_of_all_into,
    exchange_of_sums,
    exchange_of_sums_into,
    fill_rows,
    pack_into,
    wait_tensor,
)
from compiled_ddp.passes.step_pipeline import StepPipeline

aten = torch.ops.aten
INTO = (exchange_of_sums_into, exchange_of_all_into)


def named(node: Node) -> str:
    """What a node is, is packed into, or awaits."""
    if node.target is wait_tensor:
        return f"awaited {node.args[0]}"
    return "riders" if node.target is all_reduce else str(node.args[1] if node.target is pack_into else node)


def launches_of(graph: Graph) -> list[tuple[object, ...]]:
    """From where, to where, and behind what."""
    launches = [node for node in graph.nodes if node.target in INTO]
    return [
        (named(sent), *(each.name for each in into), [*map(named, after)])
        for sent, *into, after, _ in (node.args for node in launches)
    ]


def lent_graph(graph: Graph, *, whole: bool = False) -> Graph:
    planned = plan(whole=whole)
    with_memory(graph, planned)
    StepPipeline(((planned, "g"),), lent=True).run(graph)
    assert not any(node.target in (exchange_of_sums, exchange_of_all) for node in graph.nodes)
    return graph


def test_what_is_sent_and_what_comes_lies_in_memory_that_is_lent() -> None:
    graph = lent_graph(step_graph("exchange"))
    assert launches_of(graph) == [
        ("sent_0", "received_0", "sums_0", ["riders"]),  # scattered in the order of gradients
        ("sent_1", "received_1", "sums_1", ["sums_0"]),
        ("own_row_1", "received_1", ["sums_1"]),  # gathered in that of the next forward
        ("own_row_0", "received_0", ["received_1"]),
    ]
    assert {node.args[-1] for node in graph.nodes if node.target in INTO} == {"g"}
    fills = graph.find_nodes(op="call_function", target=fill_rows)
    assert [node.args[1].name for node in fills] == ["sent_0", "sent_1"]
    (outputs,) = graph.output_node().args
    assert [each.name for each in outputs[2:6]] == ["received_1", "received_0", "own_row_1", "own_row_0"]


WHOLE = [
    ("sent_0", "received_0", "own_row_0", ["riders"]),
    ("sent_1", "received_1", "own_row_1", ["own_row_0"]),
]


def test_sums_of_a_bucket_that_is_whole_are_gathered_from_where_they_are() -> None:
    """And gradients are produced in memory that nothing else has."""
    graph = lent_graph(deferred_graph(plan(whole=True)), whole=True)
    assert launches_of(graph) == [
        *WHOLE,
        ("awaited own_row_1", "received_1", ["own_row_1"]),
        ("awaited own_row_0", "received_0", ["received_1"]),
    ]
    assert not graph.find_nodes(op="call_function", target=fill_rows)
    packed = graph.find_nodes(op="call_function", target=pack_into)
    assert [node.args[1].name for node in packed] == ["sent_0", "sent_1"]


def test_what_a_hook_makes_of_the_sums_is_packed_where_they_are() -> None:
    graph = deferred_graph(plan(whole=True))
    for launch in graph.find_nodes(op="call_function", target=exchange_of_all):
        flat = launch.args[0]
        with graph.inserting_before(flat):
            flat.args = ([emit(graph, aten.mul.Tensor, each, 2.0) for each in flat.args[0]],)
    graph = lent_graph(graph, whole=True)
    assert launches_of(graph) == [
        *WHOLE,
        ("own_row_1", "received_1", ["own_row_1"]),
        ("own_row_0", "received_0", ["received_1"]),
    ]


def test_rows_are_what_is_sent_without_lent_memory() -> None:
    parts = [torch.arange(4.0).view(2, 2), torch.arange(6.0).view(2, 3) + 10]
    into = torch.empty(10)
    fill_rows(parts, into, 2)
    assert torch.equal(into, torch.cat(parts, 1).flatten())
