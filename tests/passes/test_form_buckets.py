"""`form_buckets`: the all-reduces of a bucket's gradients, and of the riders, become one."""

import pytest
import torch
from torch import Tensor
from torch.fx import Graph

from compiled_ddp.passes.form_buckets import form_buckets, memory_order
from compiled_ddp.passes.graph_edit import output_values
from compiled_ddp.passes.insert_all_reduces import insert_all_reduces
from compiled_ddp.passes.ops import all_reduce, wait_tensor
from compiled_ddp.plan import BucketPlan, Gradient, GradientSpec
from compiled_ddp.planning.assignment import assign_buckets

aten = torch.ops.aten


def naive_program(plan: BucketPlan, *order: int) -> Graph:
    """Gradients produced in this order, each reduced on its own; output i is the gradient of input i."""
    graph = Graph()
    tangent = graph.placeholder("tangents_1")
    gradients = {
        index: graph.create_node("call_function", aten.neg.default, (tangent,), name=f"dw{index}") for index in order
    }
    graph.output(tuple(gradients[index] for index in sorted(gradients)))
    insert_all_reduces(graph, plan, group_name="ours", output_positions=identity(plan))
    return graph


def identity(plan: BucketPlan) -> dict[int, int]:
    return {index: index for index in plan.indices}


def plan_of(*parameters: tuple[int, Tensor], cap_bytes: int = 16) -> BucketPlan:
    specs = [GradientSpec.of(index, parameter) for index, parameter in parameters]
    return assign_buckets(specs, capacities_bytes=(cap_bytes, cap_bytes), world_size=2)


def form(graph: Graph, plan: BucketPlan) -> None:
    form_buckets(graph, plan, group_name="ours", output_positions=identity(plan))
    graph.lint()


def order(graph: Graph) -> list[str]:
    """Gradients and collectives in the order of the graph; what a launch carries stands in brackets."""
    words = []
    for node in graph.nodes:
        if node.target is all_reduce:
            words.append(f"launch{carried(node)}")
        elif node.target is wait_tensor:
            words.append("wait")
        elif node.name.startswith("dw"):
            words.append(node.name)
    return words


def carried(launch: torch.fx.Node) -> list[str]:
    """The gradients, and riders, that a launch's flat buffer is made of: through flatten, permute and mean."""
    sources = []
    for part in launch.args[0].args[0]:
        while part.op != "placeholder" and not part.name.startswith("dw"):
            part = part.args[0]
        sources.append(part.name)
    return sources


def test_bucket_has_one_launch_and_one_wait_where_its_last_gradient_was_reduced() -> None:
    plan = plan_of((2, torch.empty(2)), (1, torch.empty(2)), (0, torch.empty(3)))
    graph = naive_program(plan, 2, 1, 0)
    form(graph, plan)
    assert order(graph) == ["dw2", "dw1", "launch['dw2', 'dw1']", "wait", "dw0", "launch['dw0', 'riders']", "wait"]


def test_exact_nodes_of_a_bucket() -> None:
    plan = plan_of((0, torch.empty(2, 2)), (1, torch.empty(3, 2).t()), cap_bytes=1000)
    graph = naive_program(plan, 0, 1)
    form(graph, plan)
    assert [node.name for node in graph.nodes] == [
        "tangents_1",
        "riders",
        "dw0",
        "mul_tensor",
        "dw1",
        "mul_tensor_1",
        "reshape_default",
        "permute_default",
        "reshape_default_1",
        "cat_default",
        "all_reduce_default_3",
        "wait_tensor_default_3",
        "as_strided_default_1",
        "as_strided_default_2",
        "as_strided_default",
        "output",
    ]


def test_outputs_are_views_of_the_wait_at_the_planned_places() -> None:
    plan = plan_of((0, torch.empty(2, 2)), (1, torch.empty(3, 2).t()), cap_bytes=1000)
    graph = naive_program(plan, 0, 1)
    form(graph, plan)
    (wait,) = graph.find_nodes(op="call_function", target=wait_tensor)
    assert [view.args for view in output_values(graph)] == [
        (wait, [2, 2], [2, 1], 0),
        (wait, [2, 3], [1, 2], 4),
        (wait, [plan.riders.numel], [1], 10),
    ]


def test_strided_gradient_is_flattened_in_its_memory_order() -> None:
    parameter = torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last)
    plan = plan_of((0, parameter))
    graph = naive_program(plan, 0)
    form(graph, plan)
    (permute,) = graph.find_nodes(op="call_function", target=aten.permute.default)
    assert permute.args[1] == [0, 2, 3, 1]


@pytest.mark.parametrize(
    ("parameter", "order"),
    [
        pytest.param(torch.empty(2, 3, 4), [0, 1, 2], id="contiguous"),
        pytest.param(torch.empty(()), [], id="scalar"),
        pytest.param(torch.empty(2, 3).t(), [1, 0], id="transposed"),
        pytest.param(torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last), [0, 2, 3, 1], id="channels_last"),
        pytest.param(torch.empty(2, 3, 4).permute(2, 0, 1), [1, 2, 0], id="rotated"),
        pytest.param(torch.empty(1, 1, 3), [0, 1, 2], id="equal strides keep the order of dimensions"),
    ],
)
def test_memory_order_goes_from_the_slowest_to_the_fastest_dimension(parameter: Tensor, order: list[int]) -> None:
    spec = GradientSpec.of(0, parameter)
    assert memory_order(Gradient(0, spec.size, spec.stride, 0, spec.numel)) == order


@pytest.mark.parametrize(
    "parameter",
    [
        pytest.param(torch.randn(2, 3, 4), id="contiguous"),
        pytest.param(torch.randn(()), id="scalar"),
        pytest.param(torch.randn(2, 3).t(), id="transposed"),
        pytest.param(torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last), id="channels_last"),
        pytest.param(torch.randn(2, 3, 1, 1).to(memory_format=torch.channels_last), id="channels_last of one pixel"),
        pytest.param(torch.randn(1, 3).as_strided((1, 3), (99, 1)), id="any stride where the size is 1"),
        pytest.param(torch.randn(2, 3, 4).permute(2, 0, 1), id="rotated"),
        pytest.param(torch.randn(0, 3), id="no elements"),
    ],
)
def test_gradient_flattened_in_memory_order_is_seen_unchanged_through_its_view(parameter: Tensor) -> None:
    spec = GradientSpec.of(0, parameter)
    gradient = Gradient(0, spec.size, spec.stride, 0, spec.numel)
    flat = parameter.contiguous().permute(memory_order(gradient)).reshape(-1)
    assert torch.equal(gradient.view(flat), parameter)


def test_bucket_never_launches_before_its_predecessor() -> None:
    plan = plan_of((0, torch.empty(4)), (1, torch.empty(4)), (2, torch.empty(3)))
    graph = naive_program(plan, 2, 1, 0)
    form(graph, plan)
    assert order(graph) == [
        "dw2",
        "dw1",
        "dw0",
        "launch['dw0']",
        "wait",
        "launch['dw1']",
        "wait",
        "launch['dw2', 'riders']",
        "wait",
    ]


def test_bucket_whose_gradients_were_early_follows_its_predecessor_at_once() -> None:
    plan = plan_of((0, torch.empty(4)), (1, torch.empty(4)), (2, torch.empty(3)))
    graph = naive_program(plan, 1, 0, 2)
    form(graph, plan)
    assert order(graph) == [
        "dw1",
        "dw0",
        "launch['dw0']",
        "wait",
        "launch['dw1']",
        "wait",
        "dw2",
        "launch['dw2', 'riders']",
        "wait",
    ]


def test_each_dtype_is_reduced_in_a_bucket_of_its_own_and_the_riders_apart() -> None:
    plan = plan_of((0, torch.empty(2, dtype=torch.float64)), (1, torch.empty(2)), (2, torch.empty(1).half()))
    graph = naive_program(plan, 0, 1, 2)
    form(graph, plan)
    assert order(graph) == [
        "dw0",
        "launch['dw0']",
        "wait",
        "dw1",
        "launch['dw1']",
        "wait",
        "dw2",
        "launch['dw2']",
        "wait",
        "launch['riders']",
        "wait",
    ]


def test_naive_plan_keeps_a_launch_per_gradient() -> None:
    plan = plan_of((0, torch.empty(2)), (1, torch.empty(2)), cap_bytes=0)
    graph = naive_program(plan, 0, 1)
    form(graph, plan)
    assert order(graph) == ["dw0", "launch['dw0']", "wait", "dw1", "launch['dw1']", "wait", "launch['riders']", "wait"]


def test_buckets_launch_in_plan_order_where_two_gradients_are_one_value() -> None:
    plan = plan_of((0, torch.empty(4)), (1, torch.empty(4)))
    graph = Graph()
    gradient = graph.create_node("call_function", aten.neg.default, (graph.placeholder("tangents_1"),), name="dw")
    graph.output((gradient, gradient))
    insert_all_reduces(graph, plan, group_name="ours", output_positions=identity(plan))
    form(graph, plan)
    assert order(graph) == ["dw", "launch['dw']", "wait", "launch['dw', 'riders']", "wait"]


def test_outputs_and_collectives_that_are_not_ours_stay() -> None:
    plan = plan_of((0, torch.empty(2)))
    graph = Graph()
    tangent = graph.placeholder("tangents_1")
    theirs = graph.call_function(all_reduce, (tangent, "sum", "theirs"))
    theirs = graph.call_function(wait_tensor, (theirs,))
    gradient = graph.create_node("call_function", aten.neg.default, (theirs,), name="dw0")
    graph.output((gradient, theirs, None))
    insert_all_reduces(graph, plan, group_name="ours", output_positions=identity(plan))
    form(graph, plan)
    assert output_values(graph)[1:3] == [theirs, None]
    assert [launch.args[2] for launch in graph.find_nodes(op="call_function", target=all_reduce)] == ["theirs", "ours"]


def test_program_that_is_not_naive_is_refused() -> None:
    plan = plan_of((0, torch.empty(2)))
    graph = Graph()
    graph.output((graph.call_function(aten.neg.default, (graph.placeholder("tangents_1"),)), None))
    with pytest.raises(AssertionError, match="gradient 0 is not waited for"):
        form_buckets(graph, plan, group_name="ours", output_positions=identity(plan))


def test_nothing_happens_for_an_empty_plan() -> None:
    graph = Graph()
    graph.output((graph.call_function(aten.neg.default, (graph.placeholder("tangents_1"),)),))
    before = str(graph)
    form_buckets(graph, BucketPlan((), 2), group_name="ours", output_positions={})
    assert str(graph) == before
