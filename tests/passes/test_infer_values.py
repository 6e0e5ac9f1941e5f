"""The values of what is launched: where the graph has any, and only there."""

import pytest
import torch
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import make_fx

from compiled_ddp.passes.graph_edit import emit
from compiled_ddp.passes.infer_values import infer_values
from compiled_ddp.passes.ops import all_reduce, wait_tensor

aten = torch.ops.aten


def reduced(graph: Graph) -> dict[str, Node]:
    """Emit, at the graph's end: add -> mul -> reshape -> cat -> all_reduce -> wait -> view, and a sum beside it."""
    add = next(node for node in graph.nodes if node.op == "call_function")
    nodes = {}
    with graph.inserting_before(graph.output_node()):
        nodes["beside it"] = emit(graph, aten.sum.default, add)
        nodes["mean"] = emit(graph, aten.mul.Tensor, add, 0.5)
        nodes["part"] = emit(graph, aten.reshape.default, nodes["mean"], [-1])
        zeros = emit(graph, aten.full.default, [4], 0.0, dtype=torch.float32, device="cpu")
        nodes["flat"] = emit(graph, aten.cat.default, [nodes["part"], zeros])
        nodes["launch"] = emit(graph, all_reduce, nodes["flat"], "sum", "ours")
        nodes["wait"] = emit(graph, wait_tensor, nodes["launch"])
        nodes["view"] = emit(graph, aten.as_strided.default, nodes["wait"], [2, 3], [3, 1], 0)
    return nodes


@pytest.fixture
def traced() -> Graph:
    """x -> add -> output, with fake values."""
    return make_fx(lambda x: x + x, tracing_mode="fake")(torch.ones(2, 3)).graph


def test_what_is_launched_gets_a_value_in_the_mode_of_the_graph_and_nothing_behind_it_does(traced: Graph) -> None:
    x = next(iter(traced.nodes))
    nodes = reduced(traced)
    infer_values(traced)
    assert [name for name, node in nodes.items() if "val" in node.meta] == ["mean", "part", "flat"]
    value = nodes["flat"].meta["val"]
    assert (value.shape, value.dtype) == ((10,), torch.float32)
    assert value.fake_mode is x.meta["val"].fake_mode


def test_values_that_are_there_stay(traced: Graph) -> None:
    reduced(traced)
    before = {node: node.meta["val"] for node in traced.nodes if "val" in node.meta}
    infer_values(traced)
    assert before and all(node.meta["val"] is value for node, value in before.items())


def test_a_graph_that_launches_nothing_gets_none(traced: Graph) -> None:
    with traced.inserting_before(traced.output_node()):
        product = emit(traced, aten.mul.Tensor, next(iter(traced.nodes)), 0.5)
    infer_values(traced)
    assert "val" not in product.meta


def test_a_hand_built_graph_without_values_gets_none() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    negative = emit(graph, aten.neg.default, x)
    graph.output(emit(graph, wait_tensor, emit(graph, all_reduce, negative, "sum", "ours")))
    infer_values(graph)
    assert all("val" not in node.meta for node in graph.nodes)
