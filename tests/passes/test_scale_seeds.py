"""The mean of a step's reductions moves to the seed of their derivative where nothing else changes."""

import operator
from collections.abc import Callable

import pytest
import torch
from torch.fx import Graph, GraphModule, Node

from compiled_ddp.passes.finish_gradients import finish_gradients
from compiled_ddp.passes.ops import sum_over_ranks
from compiled_ddp.passes.scale_seeds import scale_seeds
from compiled_ddp.passes.unfold_sums import arrival_order

aten = torch.ops.aten
FLOAT = torch.empty((), dtype=torch.float32, device="meta")
X = torch.tensor([1.0, -2.0, 3.0])


def call(graph: Graph, target: Callable[..., object], *args: object, name: str | None = None) -> Node:
    node = graph.create_node("call_function", target, args, name=name)
    node.meta["val"] = FLOAT
    return node


def node_called(graph: Graph, name: str) -> Node:
    return next(node for node in graph.nodes if node.name == name)


def step(
    *,
    factors: tuple[float, float] = (0.5, 0.5),
    between: Callable[[Graph, Node], Node] | None = None,
    returns: str = "",
    rides: str = "loss",
) -> Graph:
    """The gradients of sum(x * x) by x and by 3 x, each times a factor, summed over ranks beside what `rides`."""
    graph = Graph()
    x, leading = graph.placeholder("x"), graph.placeholder("leading")
    x.meta["val"] = leading.meta["val"] = FLOAT
    values = {"loss": call(graph, aten.sum.default, call(graph, aten.mul.Tensor, x, x))}
    values["seed"] = call(graph, aten.ones_like.default, values["loss"], name="seed")
    cotangent = between(graph, values["seed"]) if between else values["seed"]
    values["gradient"] = call(graph, aten.mul.Tensor, cotangent, x, name="gradient")
    other = call(graph, aten.mul.Tensor, values["gradient"], 3.0, name="other")
    scaled = [
        call(graph, aten.mul.Tensor, gradient, factor)
        for gradient, factor in zip((values["gradient"], other), factors, strict=True)
    ]
    sums = graph.call_function(sum_over_ranks, (scaled, [values[rides]], leading, [1, 0], [0.0], 2, "g"))
    results = [call(graph, operator.getitem, sums, index) for index in range(3)]
    graph.output((*results, *([values[returns]] if returns else [])))
    return graph


def run(graph: Graph) -> tuple[torch.Tensor, ...]:
    """What is given to the reduction, as if there were one rank; and what else is returned."""
    graph.lint()
    for node in graph.find_nodes(op="call_function", target=sum_over_ranks):
        node.target = lambda gradients, passengers, *_: [*gradients, *passengers]
    found: tuple[torch.Tensor, ...] = GraphModule({}, graph)(X, torch.zeros(5))
    return found


def multiplied(graph: Graph) -> list[str]:
    """What is multiplied by a half, in order."""
    halves = [node for node in graph.nodes if node.target is aten.mul.Tensor and node.args[1] == 0.5]
    return [str(node.args[0]) for node in halves]


def test_what_a_derivative_writes_for_itself_is_no_hindrance() -> None:
    """As SiLU's, of which every Llama has some; where it does not come from the seed."""

    def one_minus_x(graph: Graph, seed: Node) -> Node:
        (x,) = [node for node in graph.nodes if node.name == "x"]
        ones = call(graph, aten.fill_.Scalar, call(graph, aten.empty_like.default, x), 1.0)
        return call(graph, aten.mul.Tensor, seed, call(graph, aten.sub_.Tensor, ones, x))

    graph = step(between=one_minus_x)
    scale_seeds(graph)
    assert multiplied(graph) == ["seed"]
    torch.testing.assert_close(run(graph)[0], 0.5 * X * (1 - X))


def test_factor_moves_to_the_seed_and_nothing_else_changes() -> None:
    graph = step(returns="loss")
    scale_seeds(graph)
    assert multiplied(graph) == ["seed"]
    expected = (0.5 * X, 1.5 * X, (X * X).sum(), (X * X).sum())
    for found, value in zip(run(graph), expected, strict=True):
        assert torch.equal(found, value)


def clamped(graph: Graph, seed: Node) -> Node:
    return call(graph, aten.clamp.default, seed, -1.0, 1.0)


@pytest.mark.parametrize(
    "options",
    [{"between": clamped}, {"returns": "seed"}, {"returns": "gradient"}, {"rides": "gradient"}],
    ids=["not linear", "the seed is returned", "a local gradient is returned", "a local gradient rides along"],
)
def test_without_a_proof_each_gradient_is_multiplied_where_it_is_produced(options: dict[str, object]) -> None:
    expected = run(step(**options))  # type: ignore[arg-type]
    graph = step(**options)  # type: ignore[arg-type]
    scale_seeds(graph)
    finish_gradients(graph)
    assert multiplied(graph) == ["gradient", "other"]
    for node in graph.nodes:
        if node.target is aten.mul.Tensor and node.args[1] == 0.5:
            assert node.prev is node.args[0]
    for found, value in zip(run(graph), expected, strict=True):
        assert torch.equal(found, value)


@pytest.mark.parametrize("factors", [(0.5, 0.25), (0.5, 3)])
def test_gradients_of_several_factors_stay_as_they_are(factors: tuple[float, float]) -> None:
    graph = step(factors=factors)
    before = str(graph)
    scale_seeds(graph)
    assert str(graph) == before


def test_factor_stays_behind_what_writes_to_the_gradient() -> None:
    """As a trace holds it where a view of a leaf was written to in the loss."""
    graph = step(returns="seed")  # so that the seed stays as it is
    gradient = node_called(graph, "gradient")
    with graph.inserting_after(gradient):
        call(graph, aten.mul_.Tensor, gradient, 2.0)
    scale_seeds(graph)
    finish_gradients(graph)
    assert multiplied(graph) == ["gradient", "other"]
    found = run(graph)
    assert torch.equal(found[0], X) and torch.equal(found[1], 3 * X)


def test_a_result_lies_in_what_it_was_written_to() -> None:
    """By name, as `out`: not in the first argument."""
    graph = step(returns="seed")
    gradient = node_called(graph, "gradient")
    with graph.inserting_before(gradient):
        own = call(graph, aten.empty_like.default, *gradient.args[1:])
    gradient.target, gradient.kwargs = aten.mul.out, {"out": own}
    with graph.inserting_after(gradient):
        call(graph, aten.mul_.Tensor, own, 2.0)
    finish_gradients(graph)
    found = run(graph)
    assert torch.equal(found[0], X) and torch.equal(found[1], 3 * X)


def test_what_is_written_elsewhere_holds_nothing_back() -> None:
    """As the derivative of SiLU, which fills memory of its own, and subtracts in it."""
    graph = step(returns="seed")
    other = node_called(graph, "other")
    with graph.inserting_after(other):
        own = call(graph, aten.empty_like.default, other, name="own")
    with graph.inserting_after(own):
        filled = call(graph, aten.fill_.Scalar, own, 1.0)
    with graph.inserting_after(filled):
        flat = call(graph, aten.view.default, filled, [-1])
    with graph.inserting_after(flat):
        call(graph, aten.sub_.Tensor, flat, 0.5)
    finish_gradients(graph)
    order = [node.name for node in graph.nodes]
    for scaled in graph.find_nodes(op="call_function", target=aten.mul.Tensor)[-2:]:
        assert order.index(scaled.name) < order.index("own")


def test_what_is_done_to_gradients_at_the_end_is_done_where_they_are_produced() -> None:
    """As a trace holds it: all derivatives, then for each gradient what was held, a share, and a conversion."""
    graph = Graph()
    names = ("x", "leading", "held_0", "held_1", "share")
    x, leading, *held, share = map(graph.placeholder, names)
    second = call(graph, aten.mm.default, x, x, name="second")
    first = call(graph, aten.mm.default, second, x, name="first")
    sent = []
    for number, gradient in enumerate((first, second)):
        added = call(graph, aten.add.Tensor, held[number], gradient)
        shared = call(graph, aten.mul.Tensor, added, call(graph, aten._to_copy.default, share))
        sent.append(call(graph, aten._to_copy.default, shared))
    sums = graph.call_function(sum_over_ranks, (sent, [], leading, [1, 0], [1, 1], 2, "g"))
    graph.output((sums,))
    assert arrival_order(sums) == [0, 1]
    finish_gradients(graph)
    graph.lint()
    assert arrival_order(sums) == [1, 0]
    order = [node for node in graph.nodes if node.op == "call_function"]
    assert order[0] is second and order[4] is sent[1] and order[5] is first and order[9] is sent[0]
