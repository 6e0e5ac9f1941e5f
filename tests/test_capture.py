"""What a captured forward graph tells: the order of its gradients, and from it the exact buckets."""

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from compiled_ddp import torch_private
from compiled_ddp.graph.capture import (
    OVERWRITTEN,
    calls_torch_alone,
    gradient_order,
    outputs_reached,
    with_own_outputs,
)
from compiled_ddp.options import NAIVE, Options
from compiled_ddp.plan import BucketPlan, GradientSpec
from compiled_ddp.planning.planners import MEBIBYTE

# What each input of `forward_graph` is, by its position: registration order, which is not the order of use.
HEAD, NORM, EMBEDDING, X, WEIGHT, BIAS, SCALE = range(7)
PARAMETERS = (HEAD, NORM, EMBEDDING, WEIGHT, BIAS, SCALE)


def forward_graph() -> Graph:
    """x -> EMBEDDING -> * SCALE -> WEIGHT and BIAS, in one node -> * NORM -> * SCALE, again -> HEAD -> output"""
    graph = Graph()
    inputs = [graph.placeholder(name) for name in ("head", "norm", "embedding", "x", "weight", "bias", "scale")]

    def call(*arguments: Node) -> Node:
        return graph.call_function(operator.mul, arguments)

    embedded = call(inputs[X], inputs[EMBEDDING])
    scaled = call(embedded, inputs[SCALE])
    hidden = call(scaled, inputs[WEIGHT], inputs[BIAS])
    normed = call(hidden, inputs[NORM])
    scaled_again = call(normed, inputs[SCALE])
    graph.output((call(scaled_again, inputs[HEAD]),))
    graph.lint()
    return graph


def specs(dtypes: dict[int, torch.dtype] | None = None, numel: int = 2) -> dict[int, GradientSpec]:
    """Gradients of `numel` elements each, float32 where `dtypes` says nothing else."""
    return {
        index: GradientSpec.of(index, torch.empty(numel, dtype=(dtypes or {}).get(index, torch.float32)))
        for index in PARAMETERS
    }


def options(*, first_bytes: int, cap_bytes: int) -> Options:
    return Options(first_bucket_mb=first_bytes / MEBIBYTE, bucket_cap_mb=cap_bytes / MEBIBYTE)


def planned(gradients: dict[int, GradientSpec], options: Options, world_size: int) -> BucketPlan:
    order = gradient_order(forward_graph(), list(gradients))
    return options.bucket_policy(world_size).assign([gradients[index] for index in order])


def indices(plan: BucketPlan) -> list[tuple[int, ...]]:
    return [bucket.indices for bucket in plan.buckets]


# ---- order -----------------------------------------------------------------------------------------------------------


def test_gradients_come_in_the_reverse_order_of_first_use_not_of_registration() -> None:
    order = gradient_order(forward_graph(), [HEAD, NORM, EMBEDDING, WEIGHT])
    assert order == [HEAD, NORM, WEIGHT, EMBEDDING]


def test_parameter_used_twice_is_complete_after_its_first_use_has_run_backward() -> None:
    assert gradient_order(forward_graph(), [SCALE, NORM, WEIGHT, EMBEDDING]) == [NORM, WEIGHT, SCALE, EMBEDDING]


def test_parameters_read_by_the_same_node_keep_the_reverse_order_of_the_inputs() -> None:
    assert gradient_order(forward_graph(), [WEIGHT, BIAS]) == [BIAS, WEIGHT]


@pytest.mark.parametrize("given", [PARAMETERS, PARAMETERS[::-1]], ids=["as registered", "reversed"])
def test_order_does_not_depend_on_the_order_in_which_parameters_are_named(given: tuple[int, ...]) -> None:
    assert gradient_order(forward_graph(), given) == [HEAD, NORM, BIAS, WEIGHT, SCALE, EMBEDDING]


def test_input_that_is_not_a_parameter_has_no_place_in_the_order() -> None:
    assert X not in gradient_order(forward_graph(), PARAMETERS)


def test_parameters_without_a_reader_come_last() -> None:
    graph = Graph()
    unused, also_unused, used = (graph.placeholder(name) for name in ("unused", "also_unused", "used"))
    graph.output((graph.call_function(operator.neg, (used,)),))
    assert not unused.users and not also_unused.users
    assert gradient_order(graph, [0, 1, 2]) == [2, 1, 0]


def test_parameter_that_is_an_output_itself_comes_first() -> None:
    graph = Graph()
    returned, used = graph.placeholder("returned"), graph.placeholder("used")
    graph.output((graph.call_function(operator.neg, (used,)), returned))
    assert gradient_order(graph, [0, 1]) == [0, 1]


# ---- buckets ---------------------------------------------------------------------------------------------------------


def test_buckets_follow_the_reverse_topological_order() -> None:
    plan = planned(specs(), options(first_bytes=8, cap_bytes=16), world_size=2)
    assert indices(plan) == [(HEAD,), (NORM, BIAS), (WEIGHT, SCALE), (EMBEDDING,)]
    assert plan.riders.indices == (HEAD, NORM, BIAS, WEIGHT, SCALE, EMBEDDING)
    assert plan.world_size == 2


def test_first_bucket_size_and_cap_hold_for_each_dtype() -> None:
    dtypes = {NORM: torch.float16, WEIGHT: torch.float16, SCALE: torch.float16, HEAD: torch.float64}
    plan = planned(specs(dtypes), options(first_bytes=4, cap_bytes=8), world_size=2)
    assert indices(plan) == [(HEAD,), (NORM,), (BIAS,), (WEIGHT, SCALE), (EMBEDDING,)]
    assert [bucket.dtype for bucket in plan.buckets] == [
        torch.float64,
        torch.float16,
        torch.float32,
        torch.float16,
        torch.float32,
    ]


def test_riders_have_a_bucket_of_their_own_where_the_last_gradient_is_not_float32() -> None:
    dtypes = {EMBEDDING: torch.float16, BIAS: torch.float16}
    plan = planned(specs(dtypes), options(first_bytes=64, cap_bytes=64), world_size=2)
    assert indices(plan) == [(HEAD, NORM, WEIGHT, SCALE), (BIAS, EMBEDDING), ()]


def test_each_device_has_buckets_of_its_own() -> None:
    gradients = specs()
    for index in (NORM, SCALE):
        gradients[index] = GradientSpec.of(index, torch.empty(2, device="meta"))
    plan = planned(gradients, options(first_bytes=8, cap_bytes=16), world_size=2)
    assert indices(plan) == [(HEAD,), (NORM,), (BIAS, WEIGHT), (SCALE,), (EMBEDDING,)]


def test_first_bucket_is_never_larger_than_the_cap() -> None:
    plan = planned(specs(), options(first_bytes=1000, cap_bytes=16), world_size=2)
    assert indices(plan) == [(HEAD, NORM), (BIAS, WEIGHT), (SCALE, EMBEDDING)]


def test_naive_option_gives_every_gradient_a_bucket() -> None:
    plan = planned(specs(), Options(options={NAIVE: True}), world_size=2)
    assert indices(plan) == [(HEAD,), (NORM,), (BIAS,), (WEIGHT,), (SCALE,), (EMBEDDING,), ()]


def test_same_graph_and_options_give_the_same_plan() -> None:
    def plan(world_size: int) -> BucketPlan:
        return planned(specs(), options(first_bytes=8, cap_bytes=16), world_size)

    assert plan(2) == plan(2)
    assert plan(2).fingerprint != plan(3).fingerprint


def test_graph_without_parameters_has_an_empty_plan() -> None:
    assert planned({}, Options(bucket_cap_mb=1.0), world_size=2) == BucketPlan((), 2)


# ---- which outputs an input reaches ----------------------------------------------------------------------------------


def captured(function: Callable[..., Any], *inputs: Tensor) -> Graph:
    """The graph that Dynamo captures of `function`."""
    graphs: list[Graph] = []

    def keep(module: GraphModule, _: object) -> Callable[..., Any]:
        graphs.append(module.graph)
        return lambda *_: (None,) * len(module.graph.output_node().args[0])  # type: ignore[arg-type]

    torch.compiler.reset()
    torch.compile(function, backend=keep, fullgraph=True)(*inputs)
    torch.compiler.reset()
    return graphs[0]


def weights(count: int) -> list[Tensor]:
    return [torch.ones(3, requires_grad=True) for _ in range(count)]


def reached(function: Callable[..., Any], *inputs: Tensor) -> dict[str, set[int]] | None:
    """By the names of the function's arguments."""
    graph = captured(function, *inputs)
    names = [node.name.removeprefix("l_").removesuffix("_") for node in graph.find_nodes(op="placeholder")]
    found = outputs_reached(graph)
    return None if found is None else {names[place]: set(outputs) for place, outputs in found.items()}


def test_inputs_that_reach_the_output_through_detach_alone_have_no_gradient() -> None:
    assert reached(lambda a, b: (a * 2).exp().detach() + b, *weights(2)) == {"a": set(), "b": {0}}


def test_an_input_that_is_also_read_without_detach_has_a_gradient() -> None:
    assert reached(lambda a, b: a.detach() + b * a, *weights(2)) == {"a": {0}, "b": {0}}


def test_inputs_read_or_overwritten_without_grad_alone_have_no_gradient() -> None:
    def function(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        with torch.no_grad():
            a.mul_(0.9).add_(b, alpha=0.1)
            scale = a.abs().sum()
        return b * c * scale

    assert reached(function, *weights(3)) == {"a": set(), "b": {0}, "c": {0}}


def test_an_input_that_a_gradient_taken_inside_does_not_depend_on_has_none() -> None:
    def function(a: Tensor, b: Tensor) -> Tensor:
        return torch.func.grad(lambda x: (x * a.tanh() + b).sum())(torch.ones(3))

    assert reached(function, *weights(2)) == {"a": {0}, "b": set()}


def test_inputs_of_transforms_reach_their_results() -> None:
    def function(a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, ...]:
        return (*torch.func.jvp(lambda x: x * a + b, (c.detach(),), (c.detach(),)), torch.vmap(torch.tanh)(c))

    assert reached(function, *weights(3)) == {"a": {0, 1}, "b": {0}, "c": {2}}


def test_operands_of_a_checkpoint_that_it_detaches_have_no_gradient() -> None:
    def body(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return a.detach() + b.exp() * checkpoint(lambda x, y: x.exp() * y.detach(), b, c, use_reentrant=False)

    def function(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return checkpoint(body, a * 2, b, c, use_reentrant=False) + a[0].detach()

    assert reached(function, *weights(3)) == {"a": set(), "b": {0}, "c": set()}


def test_inputs_that_reach_the_output_by_mutation_have_a_gradient() -> None:
    def function(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        out = torch.zeros(3)
        view = out.view(3, 1)
        view.add_(a.view(3, 1)).detach()
        out[0] = b[0]
        return out * c.sum()

    assert reached(function, *weights(3)) == {"a": {0}, "b": {0}, "c": {0}}


def test_inputs_that_feed_some_outputs_alone_are_told_with_these() -> None:
    assert reached(lambda a, b, c: (a * c, b.exp() * c), *weights(3)) == {"a": {0}, "b": {1}, "c": {0, 1}}
    assert reached(lambda a, b: (a * b, b.detach() * 2), *weights(2)) == {"a": {0}, "b": {0}}
    assert reached(lambda a, b, c: (a * b.detach(), b * 2, c.argmax()), *weights(3)) == {"a": {0}, "b": {1}, "c": set()}


def test_operators_with_several_results_bind_their_inputs_together() -> None:
    function = lambda a, b: ((a * b).split(2)[0], (a * b).split(2)[1])  # noqa: E731
    assert reached(function, *weights(2)) == {"a": {0, 1}, "b": {0, 1}}


def test_what_a_checkpoint_detaches_reaches_nothing_through_it() -> None:
    def function(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return checkpoint(lambda x, y: x.exp() * y.detach(), a, b, use_reentrant=False), b * 2

    assert reached(function, *weights(2)) == {"a": {0}, "b": {1}}


@pytest.mark.skipif(torch.__version__ < (2, 13), reason="Dynamo breaks the graph at a tensor hook")
def test_a_hook_binds_what_it_is_given_to_and_not_what_it_reads() -> None:
    def function(a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        hooked = a * 2
        hooked.register_hook(lambda gradient: gradient * b)
        return hooked * 3, b * c

    graph = captured(function, *weights(3))
    assert any(torch_private.dynamo.name_of_higher_order(node.target) == "register_hook" for node in graph.nodes)
    assert reached(function, *weights(3)) == {"a": {0}, "b": {1}, "c": {1}}


@pytest.mark.parametrize("how", ["setitem", "method", "iadd", "view"])
def test_overwritten_memory_is_followed(how: str) -> None:
    def function(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        left, right = a * 2, b * 2
        if how == "setitem":
            left[0] = right[0]
        elif how == "method":
            left.add_(right)
        elif how == "iadd":
            left += right
        else:
            left[0].add_(right[0])
        return left, right

    assert reached(function, *weights(2)) == {"a": {0}, "b": {0, 1}}


def test_overwriting_what_has_no_gradient_hides_nothing() -> None:
    def function(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        counted = torch.zeros(3)
        counted.add_(1)
        counted[0] = 2
        return a * counted, b * 2

    assert reached(function, *weights(2)) == {"a": {0}, "b": {1}}


@pytest.mark.parametrize("requires_grad", [True, False])
def test_what_is_written_into_an_input_may_be_used_there(requires_grad: bool) -> None:
    """As the result of an earlier part of the model, which what follows reads again; or a buffer."""

    def function(a: Tensor, b: Tensor, early: Tensor) -> tuple[Tensor, Tensor]:
        early.add_(a)
        return a * 2, b * 2

    early = weights(1)[0] * 2 if requires_grad else torch.ones(3)
    found = reached(function, *weights(2), early)
    assert found == {"a": {0, OVERWRITTEN}, "b": {1}, "early": {OVERWRITTEN} if requires_grad else set()}


def test_inputs_that_are_no_leaves_are_told_apart() -> None:
    """Views of one tensor are not."""
    early, base = weights(1)[0] * 2, weights(1)[0] * 2
    found = reached(lambda a, b, c, d: (a * d, b * 2, c * 2), early, base[:2], base[1:], torch.ones(3))
    assert found is not None and found["a"] == {0} and found["d"] == set()
    assert found["b"] >= {1} and found["c"] >= {2}


def test_nothing_is_told_of_an_operator_with_code_of_its_own() -> None:
    def function(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return torch.cond(a.sum() > 0, torch.sin, torch.cos, (a,)), b * 2

    assert reached(function, *weights(2)) is None
    assert reached(lambda a, b: checkpoint(function, a, b, use_reentrant=False), *weights(2)) is None


def test_nothing_is_told_of_a_graph_that_dynamo_has_not_captured() -> None:
    graph = Graph()
    graph.placeholder("unused")
    graph.output((graph.placeholder("used"),))
    assert outputs_reached(graph) is None


def test_nothing_is_told_where_a_leaf_is_made_inside() -> None:
    graph = captured(lambda a: (a * 2,), *weights(1))
    graph.output_node().args[0][0].meta["example_value"] = weights(1)[0] * 2  # type: ignore[index, union-attr]
    assert outputs_reached(graph) is None


def test_those_that_reach_every_output_are_left_out() -> None:
    found = {0: frozenset({0}), 1: frozenset({0, 1}), 2: frozenset({0, OVERWRITTEN}), 3: frozenset({1})}
    assert with_own_outputs({place: found[place] for place in (0, 1, 3)}, [0, 1, 3]) == {0: {0}, 3: {1}}
    assert with_own_outputs(found, [0, 2]) == {0: {0}}, "what is used through memory is not known"


def test_a_graph_is_traced_again_with_the_attention_kernels_of_its_capture() -> None:
    """`sdpa_kernel` has ended where a backward traces its graph again: another kernel would save other tensors."""
    usual = torch.backends.cuda.flash_sdp_enabled()
    with sdpa_kernel(SDPBackend.MATH):
        state = torch_private.dynamo.CaptureState(["cpu"])
    with state.restored():
        assert torch.backends.cuda.math_sdp_enabled() and not torch.backends.cuda.flash_sdp_enabled()
    assert torch.backends.cuda.flash_sdp_enabled() is usual


# ---- whose operators -------------------------------------------------------------------------------------------------


@torch.library.custom_op("compiled_ddp_capture_tests::twice", mutates_args=())
def twice(x: Tensor) -> Tensor:
    return x * 2


twice.register_fake(torch.empty_like)


@torch.compiler.allow_in_graph
def left_in_the_graph(x: Tensor) -> Tensor:
    return x * 2


class OfTorch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.nn.functional.gelu(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient


class InTheBackwardAlone(OfTorch):
    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return twice(gradient)


allowed_function = torch.compiler.allow_in_graph(InTheBackwardAlone.apply)


@pytest.mark.parametrize(
    ("function", "alone"),
    [
        (lambda x: torch.nn.functional.linear(x, x).relu() @ torch.ops.aten.sin.default(x) + 1, True),
        (lambda x: checkpoint(lambda y: torch.relu(y) * 2, x, use_reentrant=False), True),
        (OfTorch.apply, True),
        (lambda x: twice(x) + 1, False),
        (lambda x: torch.ops.compiled_ddp_capture_tests.twice.default(x), False),
        (lambda x: checkpoint(lambda y: twice(y) * 2, x, use_reentrant=False), False),
        (InTheBackwardAlone.apply, False),
        (lambda x: left_in_the_graph(x) + 1, False),
        pytest.param(
            lambda x: allowed_function(x) + 1,
            False,
            marks=pytest.mark.skipif(torch.__version__ >= "2.15", reason="torch 2.15 finds no module for its `apply`"),
        ),
    ],
    ids=[
        "torch",
        "checkpoint",
        "Function",
        "custom",
        "overload",
        "custom in a checkpoint",
        "in backward",
        "allowed",
        "allowed Function",
    ],
)
def test_it_is_told_whether_a_graph_calls_torch_alone(function: Callable[..., Any], alone: bool) -> None:
    x = torch.ones(2, 2, requires_grad=True)
    assert calls_torch_alone(captured(function, x), [x, 3]) is alone


def test_a_tensor_subclass_among_its_inputs_may_call_anything() -> None:
    graph = captured(torch.relu, torch.ones(2))
    assert calls_torch_alone(graph, [torch.ones(2), torch.nn.Parameter(torch.ones(2))])
    assert not calls_torch_alone(graph, [torch.ones(2).as_subclass(type("Own", (Tensor,), {}))])
