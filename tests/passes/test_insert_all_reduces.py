"""`insert_all_reduces`: the naive program, one all-reduce and one wait for every gradient."""

from collections.abc import Callable

import pytest
import torch
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import make_fx

from compiled_ddp.passes.graph_edit import output_values
from compiled_ddp.passes.insert_all_reduces import insert_all_reduces, read_reductions
from compiled_ddp.passes.ops import all_reduce, wait_tensor
from compiled_ddp.plan import FIRST_USED, BucketPlan, GradientSpec
from compiled_ddp.planning.assignment import assign_buckets

aten = torch.ops.aten

# Graph input -> place among the outputs: not in the plan's order.
POSITIONS = {5: 1, 3: 0}


def backward_graph() -> Graph:
    """dw of input 5, then the data gradient, then dw of input 3; the last output is an activation's gradient."""
    graph = Graph()
    tangent, saved, weight = (graph.placeholder(name) for name in ("tangents_1", "saved", "weight"))
    dw5 = graph.create_node("call_function", aten.mm.default, (tangent, saved), name="dw5")
    dx = graph.create_node("call_function", aten.mm.default, (tangent, weight), name="dx")
    dw3 = graph.create_node("call_function", aten.mm.default, (dx, saved), name="dw3")
    graph.output((dw3, dw5, dx))
    return graph


def plan_of(*indices: int, world_size: int = 4, dtype: torch.dtype = torch.float32) -> BucketPlan:
    specs = [GradientSpec.of(index, torch.empty(2, 3, dtype=dtype)) for index in indices]
    return assign_buckets(specs, capacities_bytes=(1000, 1000), world_size=world_size)


def inputs_of(graph: Graph) -> list[str]:
    return [node.name for node in graph.find_nodes(op="placeholder")]


def names(graph: Graph) -> list[str]:
    return [node.name for node in graph.nodes]


def replace_outputs(graph: Graph, *values: Node | None) -> None:
    graph.output_node().args = (values,)
    graph.eliminate_dead_code()


def test_each_gradient_is_scaled_reduced_and_waited_for_right_where_it_is_produced() -> None:
    graph = backward_graph()
    insert_all_reduces(graph, plan_of(5, 3), group_name="ours", output_positions=POSITIONS)
    graph.lint()
    assert names(graph) == [
        "tangents_1",
        "saved",
        "weight",
        "riders",
        "dw5",
        "mul_tensor",
        "all_reduce_default",
        "wait_tensor_default",
        "dx",
        "dw3",
        "mul_tensor_1",
        "all_reduce_default_1",
        "wait_tensor_default_1",
        "all_reduce_default_2",
        "wait_tensor_default_2",
        "output",
    ]


def test_outputs_keep_their_positions_and_the_riders_come_last() -> None:
    graph = backward_graph()
    insert_all_reduces(graph, plan_of(5, 3), group_name="ours", output_positions=POSITIONS)
    assert [str(value) for value in output_values(graph)] == [
        "wait_tensor_default_1",
        "wait_tensor_default",
        "dx",
        "wait_tensor_default_2",
    ]


def test_every_launch_sums_over_the_given_group() -> None:
    graph = backward_graph()
    insert_all_reduces(graph, plan_of(5, 3), group_name="ours", output_positions=POSITIONS)
    launches = graph.find_nodes(op="call_function", target=all_reduce)
    assert len(launches) == len(graph.find_nodes(op="call_function", target=wait_tensor)) == 3
    assert {launch.args[1:] for launch in launches} == {("sum", "ours")}


def test_riders_are_not_scaled() -> None:
    graph = backward_graph()
    insert_all_reduces(graph, plan_of(5, 3), group_name="ours", output_positions=POSITIONS)
    *_, riders_wait = output_values(graph)
    assert riders_wait.args[0].args[0].name == "riders"


def test_gradients_are_divided_by_the_world_size() -> None:
    graph = backward_graph()
    insert_all_reduces(graph, plan_of(5, 3, world_size=4), group_name="ours", output_positions=POSITIONS)
    assert [node.args[1] for node in graph.find_nodes(op="call_function", target=aten.mul.Tensor)] == [0.25, 0.25]


def test_with_fold_each_gradient_gets_a_pending_input_in_plan_order() -> None:
    graph = backward_graph()
    insert_all_reduces(graph, plan_of(5, 3), group_name="ours", output_positions=POSITIONS, fold=True)
    graph.lint()
    assert inputs_of(graph) == ["tangents_1", "saved", "weight", "riders", "pending_5", "pending_3"]


def test_pending_share_is_scaled_and_added_before_the_reduction() -> None:
    graph = backward_graph()
    insert_all_reduces(graph, plan_of(5, world_size=4), group_name="ours", output_positions=POSITIONS, fold=True)
    assert [node.name for node in graph.nodes if node.op == "call_function"][:6] == [
        "dw5",
        "mul_tensor",
        "mul_tensor_1",
        "add_tensor",
        "all_reduce_default",
        "wait_tensor_default",
    ]
    (add,) = graph.find_nodes(op="call_function", target=aten.add.Tensor)
    assert [(str(share.args[0]), share.args[1]) for share in add.args] == [("dw5", 0.25), ("pending_5", 0.25)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradient_known_to_be_zero_is_reduced_as_zeros_of_its_own_shape_and_dtype(dtype: torch.dtype) -> None:
    graph = backward_graph()
    dw3, _, dx = output_values(graph)
    replace_outputs(graph, dw3, None, dx)
    insert_all_reduces(graph, plan_of(5, 3, dtype=dtype), group_name="ours", output_positions=POSITIONS)
    graph.lint()
    (zeros,) = graph.find_nodes(op="call_function", target=aten.full.default)
    assert zeros.args == ([2, 3], 0.0)
    assert zeros.kwargs == {"dtype": dtype, "device": torch.device("cpu")}
    _, reduced, *_ = output_values(graph)
    assert reduced.args[0].args[0].args[0] is zeros


def test_gradient_that_is_an_input_of_the_graph_is_reduced_after_all_inputs() -> None:
    graph = backward_graph()
    dw3, _, dx = output_values(graph)
    replace_outputs(graph, dw3, next(iter(graph.nodes)), dx)
    insert_all_reduces(graph, plan_of(5, 3), group_name="ours", output_positions=POSITIONS)
    graph.lint()
    assert names(graph)[3:7] == ["riders", "mul_tensor", "all_reduce_default", "wait_tensor_default"]


def test_gradients_that_are_one_and_the_same_value_are_reduced_each_on_its_own() -> None:
    graph = backward_graph()
    dw3, _, dx = output_values(graph)
    replace_outputs(graph, dw3, dw3, dx)
    insert_all_reduces(graph, plan_of(5, 3), group_name="ours", output_positions=POSITIONS)
    graph.lint()
    first, second, *_ = output_values(graph)
    assert first is not second
    assert first.args[0].args[0].args[0] is second.args[0].args[0].args[0] is dw3


def test_other_readers_of_a_gradient_still_see_the_local_one() -> None:
    graph = backward_graph()
    dw3, dw5, _ = output_values(graph)
    replace_outputs(graph, dw3, dw5, dw5)
    insert_all_reduces(graph, plan_of(5, 3), group_name="ours", output_positions=POSITIONS)
    assert output_values(graph)[2] is dw5


def test_added_inputs_have_values_where_the_graph_has_values() -> None:
    graph = make_fx(lambda tangents: (tangents + tangents,), tracing_mode="fake")(torch.ones(2, 3)).graph
    insert_all_reduces(graph, plan_of(5), group_name="ours", output_positions={5: 0}, fold=True)
    _, riders, pending = graph.find_nodes(op="placeholder")
    assert (riders.meta["val"].shape, riders.meta["val"].dtype) == ((FIRST_USED + 1,), torch.float32)
    assert pending.meta["val"].shape == (2, 3)


def test_nothing_happens_for_an_empty_plan() -> None:
    graph = backward_graph()
    insert_all_reduces(graph, BucketPlan((), 2), group_name="ours", output_positions={}, fold=True)
    assert str(graph) == str(backward_graph())


# ---- reading the naive program back ----------------------------------------------------------------------------------


@pytest.mark.parametrize("fold", [False, True])
def test_reductions_are_matched_back_in_plan_order(fold: bool) -> None:
    graph = backward_graph()
    plan = plan_of(5, 3)
    dw3, dw5, _ = output_values(graph)
    insert_all_reduces(graph, plan, group_name="ours", output_positions=POSITIONS, fold=fold)
    outputs = output_values(graph)
    reductions = read_reductions(graph, plan, POSITIONS)
    assert [reduction.gradient.index for reduction in reductions] == [5, 3]
    assert [reduction.local for reduction in reductions] == [dw5, dw3]
    assert [reduction.wait for reduction in reductions] == [outputs[1], outputs[0]]
    for reduction in reductions:
        assert reduction.mean is not None
        assert (reduction.fold is not None) == fold
        assert reduction.launch.args[0] is (reduction.fold or reduction.mean)


def test_gradient_that_is_not_waited_for_is_refused() -> None:
    with pytest.raises(AssertionError, match="gradient 5 is not waited for"):
        read_reductions(backward_graph(), plan_of(5, 3), POSITIONS)


def test_gradient_that_is_not_reduced_is_refused() -> None:
    graph = backward_graph()
    dw3, dw5, dx = output_values(graph)
    with graph.inserting_before(graph.output_node()):
        wait = graph.call_function(wait_tensor, (dw5,))
    replace_outputs(graph, dw3, wait, dx)
    with pytest.raises(AssertionError, match="gradient 5 is not reduced"):
        read_reductions(graph, plan_of(5, 3), POSITIONS)


def traced(gradient: Callable[[torch.Tensor], torch.Tensor], tangent: torch.dtype = torch.float32) -> Graph:
    """A backward graph with values, of one gradient that is made of a tangent of shape (2, 3)."""

    def backward(tangents_1: torch.Tensor) -> tuple[torch.Tensor]:
        return (gradient(tangents_1),)

    return make_fx(backward, tracing_mode="fake")(torch.ones(2, 3, dtype=tangent)).graph


def test_a_gradient_is_taken_from_before_a_cast_that_undoes_itself_and_the_cast_goes() -> None:
    graph = traced(lambda tangent: (tangent * tangent).bfloat16())
    insert_all_reduces(graph, plan_of(0), group_name="ours", output_positions={0: 0})
    graph.lint()
    (reduction,) = read_reductions(graph, plan_of(0), {0: 0})
    assert reduction.local.target == aten.mul.Tensor
    assert reduction.local.meta["val"].dtype == torch.float32
    assert not graph.find_nodes(op="call_function", target=aten._to_copy.default)


def test_a_gradient_of_another_dtype_is_cast_to_its_buckets_before_it_is_scaled() -> None:
    for cast_before in (False, True):
        graph = traced(lambda tangent: tangent.double() if cast_before else tangent + tangent)  # noqa: B023
        plan = plan_of(0, dtype=torch.bfloat16)
        insert_all_reduces(graph, plan, group_name="ours", output_positions={0: 0})
        graph.lint()
        (reduction,) = read_reductions(graph, plan, {0: 0})
        assert reduction.local.target == torch.ops.prims.convert_element_type.default
        assert reduction.local.meta["val"].dtype == torch.bfloat16
        assert reduction.mean is not None and reduction.mean.args[0] is reduction.local
        reads = reduction.local.all_input_nodes[0]
        assert reads.meta["val"].dtype == (torch.float64 if cast_before else torch.float32)


def test_a_gradient_of_its_buckets_dtype_is_not_cast() -> None:
    graph = traced(lambda tangent: tangent + tangent)
    insert_all_reduces(graph, plan_of(0), group_name="ours", output_positions={0: 0})
    assert not graph.find_nodes(op="call_function", target=torch.ops.prims.convert_element_type.default)
