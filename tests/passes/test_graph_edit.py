"""What every pass edits graphs with: new nodes, inputs, and outputs by position."""

import pytest
import torch
from torch import Tensor
from torch.fx import Graph
from torch.fx.experimental.proxy_tensor import make_fx

from compiled_ddp import torch_private
from compiled_ddp.passes.graph_edit import (
    add_placeholders,
    emit,
    fake_mode_of,
    output_values,
    replace_nodes,
    set_output_values,
)

aten = torch.ops.aten


def doubled(x: Tensor, y: Tensor) -> tuple[Tensor, None]:
    return x + x, None


@pytest.fixture
def traced() -> Graph:
    """x, y -> add -> output (add, None), with fake values."""
    return make_fx(doubled, tracing_mode="fake")(torch.ones(2, 3), torch.ones(4)).graph


@pytest.fixture
def hand_built() -> Graph:
    """The same graph without values."""
    graph = Graph()
    x, _ = graph.placeholder("x"), graph.placeholder("y")
    graph.output((graph.create_node("call_function", aten.add.Tensor, (x, x), name="add"), None))
    return graph


def names(graph: Graph) -> list[str]:
    return [node.name for node in graph.nodes]


def test_emitted_node_stands_at_the_insertion_point(traced: Graph) -> None:
    x = next(iter(traced.nodes))
    (add,) = traced.find_nodes(op="call_function", target=aten.add.Tensor)
    with traced.inserting_before(add):
        node = emit(traced, aten.sum.dim_IntList, x, [0], dtype=torch.float64)
    traced.lint()
    assert node.next is add
    assert (node.args, node.kwargs) == ((x, [0]), {"dtype": torch.float64})


def test_mode_of_a_graph_is_active_inside_and_only_inside(traced: Graph) -> None:
    with fake_mode_of(traced) as fake:
        inside = torch.empty(1)
    assert fake
    assert type(inside) is not Tensor
    assert type(torch.empty(1)) is Tensor


def test_graph_without_values_has_no_mode(hand_built: Graph) -> None:
    with fake_mode_of(hand_built) as fake:
        assert not fake
        assert type(torch.empty(1)) is Tensor


def test_added_placeholders_follow_all_other_inputs(hand_built: Graph) -> None:
    first, second = add_placeholders(hand_built, {"riders": unused, "memory": unused})
    hand_built.lint()
    assert names(hand_built) == ["x", "y", "riders", "memory", "add", "output"]
    assert "val" not in first.meta and "val" not in second.meta


def unused() -> Tensor:
    raise AssertionError("a graph without values needs none")


def test_added_placeholders_have_values_in_the_mode_of_the_graph(traced: Graph) -> None:
    x = next(iter(traced.nodes))
    (node,) = add_placeholders(traced, {"riders": lambda: torch.empty(7, dtype=torch.float64)})
    assert (node.meta["val"].shape, node.meta["val"].dtype) == ((7,), torch.float64)
    assert node.meta["val"].fake_mode is x.meta["val"].fake_mode


def test_outputs_are_read_and_replaced_by_position(hand_built: Graph) -> None:
    x, _, add, output = hand_built.nodes
    output.meta["desc"] = "what the positions mean"
    assert output_values(hand_built) == [add, None]
    set_output_values(hand_built, [None, x, add])
    hand_built.lint()
    assert output_values(hand_built) == [None, x, add]
    assert output.meta == {"desc": "what the positions mean"}


def test_list_of_outputs_is_a_copy(hand_built: Graph) -> None:
    output_values(hand_built).clear()
    assert len(output_values(hand_built)) == 2


def test_nodes_are_replaced_wherever_they_are_read_and_the_outputs_at_once(hand_built: Graph) -> None:
    x, y, add, output = hand_built.nodes
    with hand_built.inserting_before(output):
        product = emit(hand_built, aten.mul.Tensor, add, add)
    set_output_values(hand_built, [add, None, x, add, product])
    output.meta["desc"] = "what the positions mean"
    with torch_private.for_tests.noting_edits() as edits:
        replace_nodes(hand_built, {add: y, product: x})
    hand_built.lint()
    assert product.args == (y, y)
    assert output_values(hand_built) == [y, None, x, y, x]
    assert output.meta == {"desc": "what the positions mean"}
    assert len(edits) == 2, "of the product, and of the outputs"
