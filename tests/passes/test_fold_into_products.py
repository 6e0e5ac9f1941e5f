"""`fold_into_products`: a matrix product adds the gradient that is pending, and scales it."""

from collections.abc import Callable

import pytest
import torch
from torch.fx import Graph, Node

from compiled_ddp.passes.fold_into_products import fold_into_products
from compiled_ddp.passes.graph_edit import output_values
from compiled_ddp.passes.insert_all_reduces import insert_all_reduces
from compiled_ddp.passes.ops import all_reduce, wait_tensor
from compiled_ddp.passes.place_mean import place_mean
from compiled_ddp.plan import BucketPlan, GradientSpec, ReductionKind
from compiled_ddp.planning.assignment import assign_buckets

aten = torch.ops.aten
addmm = aten.addmm.default
POSITIONS = {0: 0, 1: 1}


def backward_graph(*, product_is_read: bool = False) -> Graph:
    """Gradient 0 is a product, gradient 1 is none; the last output may be made of the product."""
    graph = Graph()
    tangent, saved = graph.placeholder("tangents_1"), graph.placeholder("saved")
    product = graph.create_node("call_function", aten.mm.default, (tangent, saved), name="dw0")
    other = graph.create_node("call_function", aten.neg.default, (tangent,), name="dw1")
    more = graph.create_node("call_function", aten.neg.default, (product,), name="more") if product_is_read else None
    graph.output((product, other, more))
    for node in graph.nodes:
        node.meta["val"] = torch.empty(2, 2, device="meta")
    return graph


def folding(
    graph: Graph,
    *,
    mean_on_tangents: bool = True,
    reduction: ReductionKind = "mean",
    fold: bool = True,
) -> BucketPlan:
    """Make it the naive program that folds, on four ranks; its plan."""
    specs = [GradientSpec.of(index, torch.empty(2, 2)) for index in POSITIONS]
    plan = assign_buckets(specs, capacities_bytes=(1000.0,), world_size=4, reduction=reduction)
    insert_all_reduces(graph, plan, group_name="ours", output_positions=POSITIONS, fold=fold)
    if mean_on_tangents:
        tangents = [node for node in graph.find_nodes(op="placeholder") if node.name == "tangents_1"]
        place_mean(graph, plan, group_name="ours", tangents=tangents, output_positions=POSITIONS)
    return plan


def run_alone(graph: Graph, *inputs: torch.Tensor) -> list[torch.Tensor]:
    """As if all ranks had nothing to add."""
    values: dict[Node, object] = dict(zip(graph.find_nodes(op="placeholder"), inputs, strict=True))
    alone = {all_reduce: lambda tensor, *_: tensor, wait_tensor: lambda tensor: tensor}
    for node in graph.nodes:
        if node.op == "call_function":
            args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = alone.get(node.target, node.target)(*args, **kwargs)
    return [values[node] for node in output_values(graph) if node is not None]


@pytest.mark.parametrize(
    ("mean_on_tangents", "reduction", "beta", "alpha"),
    [(True, "mean", 0.25, 1.0), (False, "mean", 0.25, 0.25), (False, "sum", 1.0, 1.0)],
    ids=["mean on the tangents", "mean on the gradients", "sum"],
)
def test_a_product_adds_the_share_of_what_is_pending(
    mean_on_tangents: bool, reduction: ReductionKind, beta: float, alpha: float
) -> None:
    graph = backward_graph()
    plan = folding(graph, mean_on_tangents=mean_on_tangents, reduction=reduction)
    inputs = [torch.randn(2, 2), torch.randn(2, 2), torch.ones(plan.riders.numel), torch.randn(2, 2), torch.randn(2, 2)]
    before = run_alone(graph, *inputs)
    fold_into_products(graph, plan, output_positions=POSITIONS)
    graph.lint()
    (product,) = graph.find_nodes(op="call_function", target=addmm)
    assert product.args[0].name == "pending_0"
    assert product.kwargs == {"beta": beta, "alpha": alpha}
    assert [user.target for user in product.users] == [all_reduce]
    assert not graph.find_nodes(op="call_function", target=aten.mm.default)
    assert len(graph.find_nodes(op="call_function", target=aten.add.Tensor)) == 1, "the other gradient is no product"
    torch.testing.assert_close(run_alone(graph, *inputs), before)


def _unfolded() -> tuple[Graph, BucketPlan]:
    graph = backward_graph()
    return graph, folding(graph, fold=False)


def _read_by_another() -> tuple[Graph, BucketPlan]:
    graph = backward_graph(product_is_read=True)
    return graph, folding(graph)


def _weighted() -> tuple[Graph, BucketPlan]:
    graph = backward_graph()
    return graph, folding(graph, reduction="weighted")


@pytest.mark.parametrize("make", [_unfolded, _read_by_another, _weighted], ids=lambda make: make.__name__.strip("_"))
def test_is_a_no_op_without_what_is_pending_where_the_product_is_read_and_for_weights(
    make: Callable[[], tuple[Graph, BucketPlan]],
) -> None:
    graph, plan = make()
    before = str(graph)
    fold_into_products(graph, plan, output_positions=POSITIONS)
    assert str(graph) == before
