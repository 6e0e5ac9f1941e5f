"""Graphs of make_fx and AOTAutograd: launches behind each bucket's last gradient, waits where the sums are read."""

from typing import Any

import pytest
import torch
from functorch.compile import aot_function, make_boxed_func
from test_compile import deep_loss, deep_parameters, sgd
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from compiled_ddp import functional as ddp
from ranks import RankPool

Tree = dict[str, Tensor]


def assert_overlaps(graph: Graph) -> None:
    """Four buckets: each launched before the next gradient is computed, none awaited before an update reads it."""
    nodes = list(graph.nodes)
    place = {node: number for number, node in enumerate(nodes)}
    launches = [node for node in nodes if "_c10d_functional.all_reduce" in str(node.target)]
    waits = [node for node in nodes if "_c10d_functional.wait_tensor" in str(node.target)]
    assert len(launches) == len(waits) == 4
    assert not [node for node in nodes if "sum_over_ranks" in str(node.target)]
    matmuls = [node for node in nodes if "mm" in str(node.target)]
    for launch in launches:
        last = max(place[node] for node in inputs_of(launch) if node in matmuls)
        assert last < place[launch]
        between = [node for node in matmuls if last < place[node] < place[launch]]
        assert not between, f"{launch} is launched behind {between}, which it does not need"
    assert max(map(place.__getitem__, launches)) < min(map(place.__getitem__, waits))
    for wait in waits[:-1]:  # the last one has the riders, which nobody reads
        first_reader = min(place[node] for node in nodes if wait in inputs_of(node))
        following = min(place[other] for other in [*waits, nodes[-1]] if place[other] > place[wait])
        assert first_reader < following, f"{wait} stands before other waits than its readers"


def inputs_of(node: Node) -> set[Node]:
    """All that it is computed from."""
    found: set[Node] = set()
    ahead = [node]
    while ahead:
        for one in ahead.pop().all_input_nodes:
            if one not in found:
                found.add(one)
                ahead.append(one)
    return found


def _make_fx(rank: int, in_place: bool) -> None:
    gradient = ddp.grad_and_value(deep_loss, bucket_cap_mb=0.001, reduce_value=True)

    def step(params: Tree, x: Tensor) -> Any:
        gradients, value = gradient(params, x)
        return sgd(params, gradients, 0.01), value

    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(rank))
    expected, expected_value = step(deep_parameters(), x)
    graph = make_fx(step, tracing_mode="fake")(deep_parameters(), x)
    assert ddp.overlap(graph, in_place=in_place) is graph
    assert_overlaps(graph.graph)
    for _ in range(2):
        params, value = graph(deep_parameters(), x)
        for name, new in expected.items():
            torch.testing.assert_close(params[name], new)
        torch.testing.assert_close(value, expected_value)


@pytest.mark.parametrize("in_place", [False, True])
def test_a_graph_of_make_fx_overlaps(ranks2: RankPool, in_place: bool) -> None:
    ranks2.run(_make_fx, in_place)


def _aot_autograd(rank: int) -> None:
    gradient = ddp.grad(deep_loss, bucket_cap_mb=0.001)
    graphs = []

    def compiler(graph: GraphModule, _: object) -> Any:
        graphs.append(ddp.overlap(graph))
        return make_boxed_func(graph)

    def step(params: Tree, x: Tensor) -> Tree:
        return sgd(params, gradient(params, x), 0.01)

    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(rank))
    expected = step(deep_parameters(), x)
    found = aot_function(step, fw_compiler=compiler)(deep_parameters(), x)
    for name, new in expected.items():
        torch.testing.assert_close(found[name], new)
    (graph,) = graphs
    assert_overlaps(graph.graph)


def test_a_graph_of_aot_autograd_overlaps(ranks2: RankPool) -> None:
    ranks2.run(_aot_autograd)


def _first_call(rank: int) -> None:
    """Nothing has been reduced before the graph is traced, and eager calls go on beside it."""
    gradient = ddp.grad(deep_loss)
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(rank))
    graph = ddp.overlap(make_fx(gradient, tracing_mode="fake")(deep_parameters(), x))
    for _ in range(2):
        found, expected = graph(deep_parameters(), x), gradient(deep_parameters(), x)
        for name, mean in expected.items():
            torch.testing.assert_close(found[name], mean)


def test_a_graph_that_is_traced_before_any_call(ranks2: RankPool) -> None:
    ranks2.run(_first_call)


def _without_reduction(rank: int) -> None:
    with pytest.raises(ValueError, match="found no reduction"):
        ddp.overlap(make_fx(lambda x: x + 1)(torch.ones(2)))


def test_a_graph_without_a_reduction_is_refused_among_several_ranks(ranks2: RankPool) -> None:
    ranks2.run(_without_reduction)
    graph = make_fx(lambda x: x + 1)(torch.ones(2))
    assert ddp.overlap(graph)(torch.ones(2)).tolist() == [2.0, 2.0]
