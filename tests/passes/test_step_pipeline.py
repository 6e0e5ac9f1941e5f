"""The passes of a whole functional step, on graphs built by hand."""

import operator

import pytest
import torch
from torch.fx import Graph, Node

from compiled_ddp.passes.ops import WAITS, all_reduce, is_launch, pack, sum_over_ranks, wait_tensor
from compiled_ddp.passes.schedule_step import schedule_step
from compiled_ddp.passes.step_pipeline import StepPipeline
from compiled_ddp.passes.unfold_sums import arrival_order, drop_outputs, find_sums, unfold_sum
from compiled_ddp.plan import FIRST_USED, BucketPlan, GradientSpec
from compiled_ddp.planning.assignment import assign_buckets

aten = torch.ops.aten
NEEDS_WAIT_TENSORS = pytest.mark.skipif(len(WAITS) < 2, reason="this torch awaits each result by itself")
CPU = torch.device("cpu")


def plan_of(capacity_bytes: float, order: tuple[int, ...] = (1, 0)) -> BucketPlan:
    specs = [GradientSpec(index, (2, 2), (2, 1), torch.float32, CPU) for index in order]
    return assign_buckets(specs, capacities_bytes=[capacity_bytes], world_size=2, reduction="sum", passengers=1)


def step_graph(*, mutates: bool = False, returns_sums: bool = False) -> Graph:
    """Two gradients, the second one first, and a value; both are added to a parameter, which may be written to."""
    graph = Graph()
    x, param, leading = (graph.placeholder(name) for name in ("x", "param", "leading"))
    leading.meta["val"] = torch.empty(FIRST_USED, device="meta")
    value = graph.call_function(aten.sum.default, (x,))
    value.meta["val"] = torch.empty((), device="meta")
    second = graph.call_function(aten.mm.default, (x, param))
    between = graph.call_function(aten.relu.default, (second,))
    first = graph.call_function(aten.mm.default, (between, x))
    arguments = ([first, second], [value], leading, [1, 0], [0.0], 2, "g")
    sums = graph.call_function(sum_over_ranks, arguments)
    parts = [graph.call_function(operator.getitem, (sums, index)) for index in range(4)]
    new = [graph.call_function(aten.add.Tensor, (param, part)) for part in parts[:2]]
    if mutates:
        graph.call_function(aten.copy_.default, (param, new[0]))
    graph.output((*(parts[:2] if returns_sums else new), parts[2], parts[3]))
    return graph


def targets(graph: Graph) -> list[object]:
    return [node.target for node in graph.nodes if node.op == "call_function"]


def rewritten(capacity_bytes: float, *, mutates: bool = False) -> Graph:
    graph = step_graph(mutates=mutates)
    StepPipeline(((plan_of(capacity_bytes), "g"),), in_place=True).run(graph)
    return graph


def test_gradients_are_ordered_as_the_graph_produces_them() -> None:
    (reduction,) = find_sums(step_graph())
    assert arrival_order(reduction) == [1, 0]


def test_unfolding_reduces_every_gradient_where_it_is_produced() -> None:
    graph = step_graph()
    (reduction,) = find_sums(graph)
    positions = unfold_sum(graph, plan_of(0.0), reduction=reduction, group_name="g")
    graph.lint()
    assert positions == {0: 4, 1: 5}
    assert targets(graph).count(all_reduce) == targets(graph).count(wait_tensor) == 3
    for launch in [node for node in graph.nodes if is_launch(node, "g")]:
        assert launch.prev is launch.args[0]
    drop_outputs(graph, 3)
    assert len(graph.output_node().args[0]) == 4


def test_pipeline_packs_each_bucket_and_launches_behind_its_last_gradient() -> None:
    graph = rewritten(1.0)
    assert targets(graph).count(pack) == 2
    launches = [node for node in graph.nodes if is_launch(node, "g")]
    assert len(launches) == 2
    for launch in launches:
        assert launch.prev is launch.args[0]
    first_launch, relu = launches[0], next(node for node in graph.nodes if node.target is aten.relu.default)
    order = list(graph.nodes)
    assert order.index(first_launch) < order.index(relu)


def test_sums_that_a_step_returns_as_they_are_become_views_of_their_bucket() -> None:
    graph = step_graph(returns_sums=True)
    StepPipeline(((plan_of(1000.0), "g"),), in_place=True).run(graph)
    first, second = graph.output_node().args[0][:2]
    assert first.target is second.target is aten.as_strided.default
    assert first.args[0] is second.args[0] and first.args[0].target is wait_tensor


def test_each_wait_stands_where_its_sum_is_read() -> None:
    order = [node for node in rewritten(1.0).nodes if node.target in (wait_tensor, aten.add.Tensor)]
    assert [node.target for node in order] == [wait_tensor, aten.add.Tensor, wait_tensor, aten.add.Tensor]


def test_what_writes_to_an_argument_stays_at_the_end() -> None:
    *_, last, _ = rewritten(1.0, mutates=True).nodes
    assert last.target is aten.copy_.default


def test_a_graph_that_writes_in_its_middle_and_one_without_launches_stay_as_they_are() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    launch = graph.call_function(all_reduce, (x, "sum", "g"))
    written = graph.call_function(aten.add_.Tensor, (x, 1))
    graph.output((graph.call_function(wait_tensor, (launch,)), graph.call_function(aten.neg.default, (written,))))
    for names in (["g"], ["another"]):
        before: list[Node] = list(graph.nodes)
        schedule_step(graph, group_names=names)
        assert list(graph.nodes) == before


@pytest.mark.parametrize("waits_at_once", [False, pytest.param(True, marks=NEEDS_WAIT_TENSORS)])
def test_a_launch_is_not_put_behind_the_wait_of_a_users_collective_that_it_does_not_read(waits_at_once: bool) -> None:
    graph = Graph()
    x = graph.placeholder("x")
    sent = [[x, x], "sum", "users"]
    early = graph.call_function(torch.ops._c10d_functional.all_reduce_coalesced.default, tuple(sent))
    parts = [graph.call_function(operator.getitem, (early, index)) for index in range(2)]
    if waits_at_once:
        awaited = graph.call_function(torch.ops._c10d_functional.wait_tensors.default, (parts,))
        read = [graph.call_function(operator.getitem, (awaited, index)) for index in range(2)]
    else:
        awaited, _ = read = [graph.call_function(wait_tensor, (part,)) for part in parts]
    second = graph.call_function(wait_tensor, (graph.call_function(all_reduce, (x, "sum", "users")),))
    launch = graph.call_function(all_reduce, (second, "sum", "g"))
    graph.output((*read, graph.call_function(wait_tensor, (launch,))))
    schedule_step(graph, group_names=["g"])
    graph.lint()
    order = list(graph.nodes)
    assert order.index(early) < order.index(second) < order.index(launch) < order.index(awaited)


def test_random_numbers_are_drawn_in_their_old_order() -> None:
    """Though the launch needs the second draw first."""
    graph = Graph()
    x = graph.placeholder("x")
    first, second = (graph.call_function(torch.ops.aten.rand_like.default, (x,)) for _ in range(2))
    product = graph.call_function(torch.ops.aten.mul.Tensor, (second, x))
    launch = graph.call_function(all_reduce, (graph.call_function(operator.add, (product, first)), "sum", "any"))
    graph.output((graph.call_function(wait_tensor, (launch,)),))
    schedule_step(graph, group_names=["any"])
    assert [node for node in graph.nodes if node.target is torch.ops.aten.rand_like.default] == [first, second]


def test_identity_depends_on_the_plan_the_group_and_the_backend() -> None:
    one, other = plan_of(1.0), plan_of(0.0)
    pipelines = [
        StepPipeline(((one, "g"),)),
        StepPipeline(((other, "g"),)),
        StepPipeline(((one, "h"),)),
        StepPipeline(((one, "g"),), in_place=True),
        StepPipeline(()),
    ]
    assert len({pipeline.cache_identity for pipeline in pipelines}) == len(pipelines)
    assert StepPipeline(((plan_of(1.0), "g"),)).cache_identity == pipelines[0].cache_identity


def test_a_step_is_left_alone_where_draws_and_other_collectives_exclude_each_other() -> None:
    # Other collectives keep their order, and a draw before the waits would come before one that follows a wait.
    graph = Graph()
    a, b = graph.placeholder("a"), graph.placeholder("b")

    def reduced(value: Node, group_name: str) -> Node:
        return graph.call_function(wait_tensor, (graph.call_function(all_reduce, (value, "sum", group_name)),))

    late = graph.call_function(aten.bernoulli.p, (reduced(a, "g"), 0.5))
    first = reduced(late, "other")
    early = graph.call_function(aten.bernoulli.p, (reduced(b, "other"), 0.5))
    graph.output((first, reduced(early, "g")))
    before = list(graph.nodes)
    schedule_step(graph, group_names=["g"])
    assert list(graph.nodes) == before
    graph.lint()
