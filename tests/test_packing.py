"""Which gradients may be produced inside their bucket: those that nothing else reads."""

import operator

import pytest
import torch
from torch.fx import Graph, Node

from compiled_ddp.passes.ops import pack
from compiled_ddp.torch_private.packing import is_read_elsewhere

_aten = torch.ops.aten


def _graph() -> tuple[Graph, Node]:
    graph = Graph()
    x = graph.placeholder("x")
    return graph, graph.call_function(_aten.mm.default, (x, x))


def _packed(graph: Graph, part: Node) -> bool:
    packed = graph.call_function(pack, ([part],))
    graph.output((packed,))
    return is_read_elsewhere(part, packed)


@pytest.mark.parametrize("view", [_aten.t.default, _aten._unsafe_view.default, _aten._to_copy.default])
def test_what_only_the_bucket_reads_is_produced_in_it(view: object) -> None:
    graph, gradient = _graph()
    graph.call_function(_aten.t.default, (gradient,))  # which nobody reads
    assert not _packed(graph, graph.call_function(view, (gradient,)))


@pytest.mark.parametrize("view", [_aten.t.default, _aten._unsafe_view.default, _aten.split.Tensor])
def test_a_reader_of_any_view_of_it_counts(view: object) -> None:
    graph, gradient = _graph()
    seen = graph.call_function(view, (gradient,))
    if view is _aten.split.Tensor:
        seen = graph.call_function(operator.getitem, (seen, 0))
    graph.call_function(_aten.sum.default, (seen,))
    assert _packed(graph, graph.call_function(_aten.permute.default, (gradient, [1, 0])))


def test_an_output_and_another_bucket_count_as_readers() -> None:
    graph, gradient = _graph()
    packs = [graph.call_function(pack, ([gradient],)) for _ in range(2)]
    assert all(is_read_elsewhere(gradient, packed) for packed in packs)
    graph, gradient = _graph()
    packed = graph.call_function(pack, ([gradient],))
    graph.output((packed, gradient))
    assert is_read_elsewhere(gradient, packed)


def test_what_is_computed_from_the_same_does_not_count() -> None:
    graph, gradient = _graph()
    scaled = graph.call_function(_aten.mul.Tensor, (gradient, 0.5))
    graph.call_function(_aten.sum.default, (gradient,))
    assert not _packed(graph, scaled)
