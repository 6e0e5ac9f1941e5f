"""Readers behind a region's results read copies of its nodes."""

import torch
from torch.fx import Graph, Node

from compiled_ddp.passes.recompute_regions import REGION, RESULT, recompute_after, recompute_regions

aten = torch.ops.aten


def step(*, has_gradient: bool = True) -> tuple[Graph, Node]:
    """x -> relu -> sin (of a region: cos -> exp, the result) -> neg, a gradient; and its product with `cos`."""
    graph = Graph()
    x = graph.placeholder("x")
    given = graph.call_function(aten.relu.default, (x,))
    read = graph.call_function(aten.cos.default, (given,))
    result = graph.call_function(aten.exp.default, (read,))
    read.meta["custom"] = {REGION: 1}
    result.meta["custom"] = {REGION: 1, RESULT: "exp"}
    gradient = graph.call_function(aten.neg.default, (result if has_gradient else x,))
    product = graph.call_function(aten.mul.Tensor, (gradient, read))
    graph.output((product, result))
    return graph, product


def run(graph: Graph) -> tuple[torch.Tensor, ...]:
    graph.lint()
    return torch.fx.GraphModule({}, graph)(torch.arange(4.0))


def test_a_reader_reads_a_copy_that_waits_for_the_gradient() -> None:
    graph, product = step()
    expected = run(graph)
    recompute_regions(graph)
    gradient, copy = product.args
    assert copy.target is aten.cos.default
    (delayed,) = graph.find_nodes(op="call_function", target=recompute_after)
    assert delayed.args[1] is gradient
    assert [node.target for node in delayed.args[0]] == [aten.relu.default]
    assert graph.find_nodes(op="call_function", target=aten.exp.default)[0].args[0] is not copy
    assert all(torch.equal(one, other) for one, other in zip(run(graph), expected, strict=True))


def test_a_region_is_left_alone_whose_results_lead_to_none_of_its_readers() -> None:
    graph, _ = step(has_gradient=False)
    nodes = list(graph.nodes)
    recompute_regions(graph)
    assert list(graph.nodes) == nodes


def test_results_and_collectives_are_kept() -> None:
    graph, product = step()
    collective = torch.ops._c10d_functional.all_reduce.default
    read = product.args[1]
    read.target, read.args = collective, (read.args[0], "sum", "group")
    nodes = list(graph.nodes)
    recompute_regions(graph)
    assert list(graph.nodes) == nodes


def test_a_graph_without_regions_is_left_alone() -> None:
    graph, _ = step()
    for node in graph.nodes:
        node.meta.clear()
    nodes = list(graph.nodes)
    recompute_regions(graph)
    assert list(graph.nodes) == nodes
