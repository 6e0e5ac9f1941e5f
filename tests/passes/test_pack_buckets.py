"""`pack_buckets`: the concatenation that fills a bucket becomes `compiled_ddp::pack`, or `pack_into`."""

import torch
from torch.fx import Graph, Node

from compiled_ddp.passes.inline_hook import emit_flat
from compiled_ddp.passes.ops import all_reduce, pack, pack_into, wait_tensor
from compiled_ddp.passes.pack_buckets import pack_buckets
from compiled_ddp.plan import BucketPlan, GradientSpec
from compiled_ddp.planning.assignment import assign_buckets

aten = torch.ops.aten


def plan_on(device: str) -> BucketPlan:
    """The plan of `bucket_graph`: one bucket, of a parameter and of a strided one."""
    parameters = torch.empty(2, 3, device=device), torch.empty(5, 2, device=device).t()
    specs = [GradientSpec.of(index, parameter) for index, parameter in enumerate(parameters)]
    return assign_buckets(specs, capacities_bytes=(1000, 1000), world_size=2)


PLAN = plan_on("cpu")


def bucket_graph() -> tuple[Graph, Node, Node, Node]:
    """A bucket as `form_buckets` leaves it: dw0, dw1 strided, riders -> cat -> launch -> wait. And its three parts."""
    graph = Graph()
    dw0, dw1, riders = (graph.placeholder(name) for name in ("dw0", "dw1", "riders"))
    flat0 = graph.call_function(aten.reshape.default, (dw0, [-1]))
    permuted = graph.call_function(aten.permute.default, (dw1, [1, 0]))
    flat1 = graph.call_function(aten.reshape.default, (permuted, [-1]))
    flat = emit_flat(graph, [flat0, flat1, riders])
    launch = graph.call_function(all_reduce, (flat, "sum", "ours"))
    graph.output((graph.call_function(wait_tensor, (launch,)),))
    return graph, dw0, permuted, riders


def count(graph: Graph, op: object) -> int:
    return sum(node.target is op for node in graph.nodes)


def test_gradients_enter_the_bucket_in_their_own_shape() -> None:
    graph, dw0, permuted, riders = bucket_graph()
    pack_buckets(graph, PLAN, lent=[0])
    graph.lint()
    (packed,) = graph.find_nodes(op="call_function", target=pack_into)
    (flat_buffer,) = (node for node in graph.nodes if node.name == "flat_buffer_0")
    assert packed.args == ([dw0, permuted, riders], flat_buffer)
    assert count(graph, aten.cat.default) == count(graph, aten.reshape.default) == 0


def test_exact_nodes_of_a_packed_bucket() -> None:
    graph, *_ = bucket_graph()
    pack_buckets(graph, PLAN, lent=[0])
    assert [node.name for node in graph.nodes] == [
        "dw0",
        "dw1",
        "riders",
        "flat_buffer_0",
        "permute_default",
        "pack_into_default",
        "all_reduce_default",
        "wait_tensor_default",
        "output",
    ]


def test_a_bucket_that_no_one_keeps_gets_new_memory() -> None:
    graph, dw0, permuted, riders = bucket_graph()
    pack_buckets(graph, plan_on("meta"), lent=[])
    (packed,) = graph.find_nodes(op="call_function", target=pack)
    assert packed.args == ([dw0, permuted, riders],)
    assert [node.name for node in graph.find_nodes(op="placeholder")] == ["dw0", "dw1", "riders"]


def test_flattened_gradient_that_something_else_reads_stays() -> None:
    graph, *_ = bucket_graph()
    flat0, _ = graph.find_nodes(op="call_function", target=aten.reshape.default)
    (wait,) = graph.output_node().args[0]
    graph.output_node().args = ((wait, flat0),)
    pack_buckets(graph, PLAN, lent=[0])
    graph.lint()
    assert graph.find_nodes(op="call_function", target=aten.reshape.default) == [flat0]


def test_a_cat_of_the_models_own_stays() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_function(aten.cat.default, ([x, x],)),))
    before = str(graph)
    pack_buckets(graph, BucketPlan((), 2), lent=[])
    assert str(graph) == before


# ---- the op ----------------------------------------------------------------------------------------------------------


def test_pack_lays_its_parts_back_to_back_in_a_new_tensor() -> None:
    first, second = torch.arange(6.0).reshape(2, 3), torch.arange(6.0, 8.0)
    packed = pack([first, second])
    assert packed.tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    assert packed.data_ptr() != first.data_ptr()


def test_pack_of_one_part_is_a_new_tensor_too() -> None:
    part = torch.arange(3.0)
    assert pack([part]).data_ptr() != part.data_ptr()


def test_pack_uses_the_memory_that_it_is_given() -> None:
    into = torch.full((3,), 9.0)
    packed = pack_into([torch.arange(2.0), torch.arange(1.0)], into)
    assert packed.data_ptr() == into.data_ptr()
    assert packed.tolist() == [0, 1, 0]


def test_pack_reads_a_permuted_part_in_the_order_of_its_dimensions() -> None:
    part = torch.arange(6.0).reshape(2, 3).t()
    assert pack([part]).tolist() == [0, 3, 1, 4, 2, 5]


def test_pack_tells_its_size_and_dtype_without_running() -> None:
    parts = [torch.empty(2, 3, dtype=torch.float64, device="meta"), torch.empty((), dtype=torch.float64, device="meta")]
    packed = pack(parts)
    assert (packed.shape, packed.dtype) == ((7,), torch.float64)
