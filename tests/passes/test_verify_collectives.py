"""`verify_collectives`: each of its assertions fires on a graph that was broken on purpose."""

from collections.abc import Callable

import pytest
import torch
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import make_fx

from compiled_ddp.passes.form_buckets import form_buckets
from compiled_ddp.passes.graph_edit import output_values, set_output_values
from compiled_ddp.passes.infer_values import infer_values
from compiled_ddp.passes.insert_all_reduces import insert_all_reduces
from compiled_ddp.passes.ops import all_reduce, pack_into, wait_tensor
from compiled_ddp.passes.pack_buckets import pack_buckets
from compiled_ddp.passes.schedule_collectives import schedule_collectives
from compiled_ddp.passes.verify_collectives import verify_collectives
from compiled_ddp.plan import BucketPlan, GradientSpec
from compiled_ddp.planning.assignment import assign_buckets

aten = torch.ops.aten

# Two buckets of two gradients each; the riders are in the second. Output i is the gradient of input i.
POSITIONS = {index: index for index in range(4)}


def plan_of(*indices: int, cap_bytes: int = 16) -> BucketPlan:
    specs = [GradientSpec.of(index, torch.empty(2)) for index in indices]
    return assign_buckets(specs, capacities_bytes=(cap_bytes, cap_bytes), world_size=2)


PLAN = plan_of(3, 2, 1, 0)


def local() -> Graph:
    """A backward with four gradients and no collective."""
    graph = Graph()
    tangent = graph.placeholder("tangents_1")
    graph.output(tuple(graph.call_function(aten.neg.default, (tangent,)) for _ in range(4)))
    return graph


def reduced(graph: Graph, plan: BucketPlan = PLAN) -> Graph:
    """The whole rewrite, without verification."""
    insert_all_reduces(graph, plan, group_name="ours", output_positions=POSITIONS)
    form_buckets(graph, plan, group_name="ours", output_positions=POSITIONS)
    pack_buckets(graph, plan, lent=range(len(plan.buckets)))
    schedule_collectives(graph, group_name="ours")
    infer_values(graph)
    return graph


@pytest.fixture
def graph() -> Graph:
    return reduced(local())


def verify(graph: Graph, plan: BucketPlan = PLAN) -> None:
    verify_collectives(graph, plan, group_name="ours", output_positions=POSITIONS)


def nodes(graph: Graph, op: Callable[..., object]) -> list[Node]:
    return list(graph.find_nodes(op="call_function", target=op))


# ---- what holds ------------------------------------------------------------------------------------------------------


def test_rewritten_graph_holds(graph: Graph) -> None:
    verify(graph)


def test_graph_before_packing_and_scheduling_holds() -> None:
    graph = local()
    insert_all_reduces(graph, PLAN, group_name="ours", output_positions=POSITIONS)
    form_buckets(graph, PLAN, group_name="ours", output_positions=POSITIONS)
    verify(graph)
    pack_buckets(graph, PLAN, lent=range(len(PLAN.buckets)))
    verify(graph)


def test_verification_rewrites_nothing(graph: Graph) -> None:
    before = str(graph)
    verify(graph)
    assert str(graph) == before


def test_graph_without_collectives_holds_for_an_empty_plan() -> None:
    graph = Graph()
    graph.output((graph.placeholder("tangents_1"),))
    verify_collectives(graph, BucketPlan((), 2), group_name="ours", output_positions={})


@pytest.mark.parametrize("operation", ["sum", "max"])
def test_collective_of_another_group_is_left_alone(graph: Graph, operation: str) -> None:
    with graph.inserting_before(nodes(graph, pack_into)[0]):
        theirs = graph.call_function(all_reduce, (next(iter(graph.nodes)), operation, "theirs"))
        graph.call_function(aten.neg.default, (theirs,))
    verify(graph)


# ---- launches --------------------------------------------------------------------------------------------------------


def test_missing_launch_is_found(graph: Graph) -> None:
    launch = nodes(graph, all_reduce)[0]
    launch.replace_all_uses_with(launch.args[0])
    graph.erase_node(launch)
    with pytest.raises(AssertionError, match="1 launches for 2 buckets"):
        verify(graph)


def test_launch_on_another_group_is_missed(graph: Graph) -> None:
    nodes(graph, all_reduce)[0].update_arg(2, "theirs")
    with pytest.raises(AssertionError, match="1 launches for 2 buckets"):
        verify(graph)


def test_launch_too_many_is_found(graph: Graph) -> None:
    with graph.inserting_before(graph.output_node()):
        launch = graph.call_function(all_reduce, (nodes(graph, pack_into)[0], "sum", "ours"))
        graph.call_function(wait_tensor, (launch,))
    with pytest.raises(AssertionError, match="3 launches for 2 buckets"):
        verify(graph)


def test_launches_of_equal_size_in_another_order_are_found() -> None:
    plan = plan_of(3, 2, 1, 0, cap_bytes=8)
    graph = reduced(local(), plan)
    verify(graph, plan)
    first, second, *_ = nodes(graph, all_reduce)
    second.append(first)
    graph.lint()
    with pytest.raises(AssertionError, match="is a view of"):
        verify(graph, plan)


def test_launches_of_a_plan_with_other_buckets_are_found(graph: Graph) -> None:
    with pytest.raises(AssertionError, match=r"2 launches for 1 buckets"):
        verify(graph, plan_of(3, 2, 1, 0, cap_bytes=1000))


def test_reduction_that_is_no_sum_is_found(graph: Graph) -> None:
    nodes(graph, all_reduce)[1].update_arg(1, "max")
    with pytest.raises(AssertionError, match="reduces by max"):
        verify(graph)


# ---- waits -----------------------------------------------------------------------------------------------------------


def test_launched_value_that_is_read_before_its_wait_is_found(graph: Graph) -> None:
    launch = nodes(graph, all_reduce)[0]
    with graph.inserting_after(launch):
        graph.call_function(aten.neg.default, (launch,))
    with pytest.raises(AssertionError, match="is read before its wait"):
        verify(graph)


def test_launch_without_a_wait_is_found(graph: Graph) -> None:
    wait = nodes(graph, wait_tensor)[0]
    wait.replace_all_uses_with(wait.args[0])
    graph.erase_node(wait)
    with pytest.raises(AssertionError, match="is read before its wait"):
        verify(graph)


def test_second_wait_is_found(graph: Graph) -> None:
    wait = nodes(graph, wait_tensor)[0]
    with graph.inserting_after(wait):
        graph.call_function(wait_tensor, wait.args)
    with pytest.raises(AssertionError, match="is read before its wait"):
        verify(graph)


# ---- flat buffers ----------------------------------------------------------------------------------------------------


def test_launch_of_something_else_than_a_flat_buffer_is_found(graph: Graph) -> None:
    nodes(graph, all_reduce)[0].update_arg(0, next(iter(graph.nodes)))
    with pytest.raises(AssertionError, match="has no bucket"):
        verify(graph)


def test_flat_buffer_with_another_reader_is_found(graph: Graph) -> None:
    with graph.inserting_before(graph.output_node()):
        graph.call_function(aten.neg.default, (nodes(graph, pack_into)[0],))
    with pytest.raises(AssertionError, match="has other readers"):
        verify(graph)


def test_memory_that_two_buckets_are_packed_into_is_found(graph: Graph) -> None:
    first, second = nodes(graph, pack_into)
    second.update_arg(1, first.args[1])
    with pytest.raises(AssertionError, match="memory that others read"):
        verify(graph)


@pytest.mark.parametrize("bucket", [0, 1], ids=["gradient missing", "riders missing"])
def test_flat_buffer_with_a_part_missing_is_found(graph: Graph, bucket: int) -> None:
    packed = nodes(graph, pack_into)[bucket]
    packed.update_arg(0, packed.args[0][:-1])
    with pytest.raises(AssertionError, match=r"carries \d parts, planned are \d"):
        verify(graph)


def traced() -> Graph:
    """The same program with fake values: four gradients of a tangent of two elements."""

    def backward(tangents: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return -tangents, tangents + 1, tangents * 3, tangents.exp()

    return reduced(make_fx(backward, tracing_mode="fake")(torch.ones(2)).graph)


def test_graph_with_values_holds() -> None:
    verify(traced())


def test_flat_buffer_of_another_size_is_found_where_values_are_known() -> None:
    graph = traced()
    packed = nodes(graph, pack_into)[0]
    packed.meta["val"] = packed.meta["val"].new_empty(5)
    with pytest.raises(AssertionError, match="5 elements"):
        verify(graph)


def test_flat_buffer_of_another_dtype_is_found_where_values_are_known() -> None:
    graph = traced()
    packed = nodes(graph, pack_into)[0]
    packed.meta["val"] = packed.meta["val"].double()
    with pytest.raises(AssertionError, match=r"torch\.float64"):
        verify(graph)


# ---- views -----------------------------------------------------------------------------------------------------------


def test_output_that_is_not_a_view_of_a_bucket_is_found(graph: Graph) -> None:
    outputs = output_values(graph)
    set_output_values(graph, [next(iter(graph.nodes)), *outputs[1:]])
    with pytest.raises(AssertionError, match="tangents_1 is not a view of a bucket"):
        verify(graph)


def test_output_that_is_none_is_found(graph: Graph) -> None:
    set_output_values(graph, [None, *output_values(graph)[1:]])
    with pytest.raises(AssertionError, match="None is not a view of a bucket"):
        verify(graph)


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        pytest.param(3, 2, "lies at", id="of one bucket"),
        pytest.param(3, 1, "is a view of", id="of two buckets"),
    ],
)
def test_gradients_that_changed_places_are_found(graph: Graph, first: int, second: int, message: str) -> None:
    outputs = output_values(graph)
    outputs[first], outputs[second] = outputs[second], outputs[first]
    set_output_values(graph, outputs)
    with pytest.raises(AssertionError, match=message):
        verify(graph)


@pytest.mark.parametrize(("argument", "value"), [(1, [1]), (2, [2]), (3, 1)], ids=["size", "stride", "offset"])
@pytest.mark.parametrize("output", [3, -1], ids=["gradient", "riders"])
def test_view_of_another_place_is_found(graph: Graph, output: int, argument: int, value: object) -> None:
    output_values(graph)[output].update_arg(argument, value)
    with pytest.raises(AssertionError, match="lies at"):
        verify(graph)


def test_riders_that_are_not_the_last_output_are_found(graph: Graph) -> None:
    set_output_values(graph, output_values(graph)[:-1])
    with pytest.raises(AssertionError, match=r"lies at|is a view of"):
        verify(graph)


def test_plan_with_another_riders_layout_is_found(graph: Graph) -> None:
    with pytest.raises(AssertionError, match=r"is a view of|lies at"):
        verify(graph, PLAN.renumbered({3: 3, 2: 2, 1: 0, 0: 1}))


def test_broken_graph_is_found(graph: Graph) -> None:
    view = output_values(graph)[0]
    view.args[0].prepend(view)
    with pytest.raises(RuntimeError, match="before it has been defined"):
        verify(graph)
