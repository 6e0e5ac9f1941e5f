"""The values of what passes have added: where there are any, and only there."""

import pytest
import torch
from torch.fx import Graph
from torch.fx.experimental.proxy_tensor import make_fx

from compiled_ddp import torch_private
from compiled_ddp.passes.graph_edit import emit
from compiled_ddp.passes.infer_values import infer_values

aten = torch.ops.aten


@pytest.fixture
def traced() -> Graph:
    """x -> add -> output, with fake values."""
    return make_fx(lambda x: x + x, tracing_mode="fake")(torch.ones(2, 3)).graph


def test_new_nodes_get_values_in_the_mode_of_the_graph(traced: Graph) -> None:
    x = next(iter(traced.nodes))
    with traced.inserting_before(traced.output_node()):
        summed = emit(traced, aten.sum.dim_IntList, x, [0])
        after_it = emit(traced, aten.cat.default, [summed, summed])
        of_nothing = emit(traced, aten.full.default, [5], 0.0, dtype=torch.float64)
    infer_values(traced)
    assert [node.meta["val"].shape for node in (summed, after_it, of_nothing)] == [(3,), (6,), (5,)]
    assert of_nothing.meta["val"].dtype == torch.float64
    assert {node.meta["val"].fake_mode for node in (summed, after_it, of_nothing)} == {x.meta["val"].fake_mode}


def test_a_view_shares_the_memory_of_what_it_shows(traced: Graph) -> None:
    add = next(node for node in traced.nodes if node.op == "call_function")
    with traced.inserting_before(traced.output_node()):
        view, copy = emit(traced, aten.view.default, add, [6]), emit(traced, aten.clone.default, add)
    infer_values(traced)

    memory = [torch_private.tensors.memory_of(node.meta["val"]) for node in (add, view, copy)]
    assert memory[0] == memory[1] != memory[2]


def test_values_that_are_there_stay(traced: Graph) -> None:
    before = {node: node.meta.get("val") for node in traced.nodes}
    infer_values(traced)
    assert {node: node.meta.get("val") for node in traced.nodes} == before


def test_a_hand_built_graph_without_values_gets_none() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    negative = emit(graph, aten.neg.default, x)
    graph.output((negative, emit(graph, aten.full.default, [2], 0.0)))
    infer_values(graph)
    assert all("val" not in node.meta for node in graph.nodes)
