"""`reduce_in_place`: the all-reduce of a packed bucket overwrites it."""

import torch
from torch.fx import Graph, Node

from compiled_ddp.passes.inline_hook import emit_flat
from compiled_ddp.passes.ops import all_reduce, all_reduce_in_place, pack, wait_tensor
from compiled_ddp.passes.reduce_in_place import reduce_in_place


def packed_graph(group_name: str = "ours") -> tuple[Graph, Node, Node]:
    """dw -> pack -> launch -> wait -> output, with the packed bucket and its launch."""
    graph = Graph()
    dw = graph.placeholder("dw")
    flat = graph.call_function(pack, ([dw],))
    launch = graph.call_function(all_reduce, (flat, "sum", group_name))
    graph.output((graph.call_function(wait_tensor, (launch,)),))
    return graph, flat, launch


def test_a_packed_bucket_is_reduced_in_its_own_memory() -> None:
    graph, flat, launch = packed_graph()
    reduce_in_place(graph, group_name="ours")
    graph.lint()
    assert launch.target is all_reduce_in_place and launch.args == (flat, "sum", "ours")


def test_a_bucket_that_something_else_reads_keeps_its_memory() -> None:
    graph, flat, launch = packed_graph()
    (output,) = graph.find_nodes(op="output")
    output.args = ((*output.args[0], flat),)
    reduce_in_place(graph, group_name="ours")
    assert launch.target is all_reduce


def test_launches_of_other_groups_and_of_what_is_not_packed_stay_as_they_are() -> None:
    graph, _, launch = packed_graph("the model's")
    reduce_in_place(graph, group_name="ours")
    assert launch.target is all_reduce

    graph = Graph()
    dw = graph.placeholder("dw")
    flat = emit_flat(graph, [graph.call_function(torch.ops.aten.reshape.default, (dw, [-1]))])
    launch = graph.call_function(all_reduce, (flat, "sum", "ours"))
    graph.output((graph.call_function(wait_tensor, (launch,)),))
    reduce_in_place(graph, group_name="ours")
    assert launch.target is all_reduce
