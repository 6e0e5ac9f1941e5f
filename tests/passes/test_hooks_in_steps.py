"""Programs of communication hooks in a whole step, on graphs built by hand: where they go, and in which order."""

import operator
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch.fx import Graph, Node

from compiled_ddp.comm_hooks import CommHook, Ranks, StatefulHook
from compiled_ddp.functional.on_buckets import in_launch_order
from compiled_ddp.passes.inline_hook import HOOKS_GROUP
from compiled_ddp.passes.ops import LAUNCHES, is_launch, sum_over_ranks, wait_tensor
from compiled_ddp.passes.step_pipeline import StepPipeline
from compiled_ddp.plan import FIRST_USED, BucketPlan, GradientSpec
from compiled_ddp.planning.assignment import assign_buckets
from compiled_ddp.reducers.traced_hook import HookProgram, example, initial_state

aten = torch.ops.aten
CPU = torch.device("cpu")


class Twice(StatefulHook):
    """Two sums, of which the second one needs the first one's result; keeps what it has returned."""

    def initial_state(self, gradients: Tensor) -> tuple[Tensor, ...]:
        return (torch.zeros_like(gradients),)

    def __call__(self, gradients: Tensor, ranks: Ranks, *state: Tensor) -> tuple[Tensor, ...]:
        (last,) = state
        mean = ranks.all_reduce(ranks.all_reduce(gradients + last) / ranks.size) / ranks.size
        return mean, mean.clone()


def once(gradients: Tensor, ranks: Ranks) -> Tensor:
    return ranks.all_reduce(gradients.half()).to(gradients.dtype) / ranks.size


def planned() -> BucketPlan:
    """Two buckets, of a gradient each, and the riders'; the second gradient is ready first."""
    specs = [GradientSpec(index, (2, 2), (2, 1), torch.float32, CPU) for index in (1, 0)]
    return assign_buckets(specs, capacities_bytes=[1.0], world_size=2, reduction="hook")


def programs_of(hook: CommHook, plan: BucketPlan) -> list[HookProgram | None]:
    flats = [example(bucket.numel, bucket.dtype, bucket.device) for bucket in plan.buckets]
    kinds = zip(plan.buckets, flats, strict=True)
    ranks = Ranks(2, HOOKS_GROUP)
    return [HookProgram(hook, ranks, f, initial_state(hook, f)) if bucket.gradients else None for bucket, f in kinds]


def step_graph(kept: int, *, changes: bool = False) -> Graph:
    """Two gradients and so many tensors that are kept, which go into the outputs; `changes` them before."""
    graph = Graph()
    x, param, leading, *state = (graph.placeholder(n) for n in ("x", "param", "leading", *"ab"[:kept]))
    leading.meta["val"] = torch.empty(FIRST_USED, device="meta")
    second = graph.call_function(aten.mm.default, (x, param))
    between = graph.call_function(aten.relu.default, (second,))
    first = graph.call_function(aten.mm.default, (between, x))
    given = [graph.call_function(aten.neg.default, (each,)) for each in state] if changes else state
    sums = graph.call_function(sum_over_ranks, ([first, second], [], leading, [1, 0], [1, 1], 2, "g", "", False, given))
    parts = [graph.call_function(operator.getitem, (sums, index)) for index in range(3 + kept)]
    new = [graph.call_function(aten.add.Tensor, (param, part)) for part in parts[:2]]
    graph.output((*new, *parts[2:]))
    return graph


def rewritten(hook: CommHook, kept: int, *, changes: bool = False) -> tuple[Graph, list[HookProgram | None]]:
    plan = planned()
    graph, programs = step_graph(kept, changes=changes), programs_of(hook, plan)
    StepPipeline(((plan, "g"),), in_place=True, lent=True, hooks={0: programs}).run(graph)
    return graph, programs


def sent_by(graph: Graph) -> list[Node]:
    return [node for node in graph.nodes if node.target in LAUNCHES]


@pytest.mark.parametrize(("hook", "kept"), [(once, 0), (Twice(), 2)])
def test_every_launch_is_on_the_group_and_in_the_order_that_ranks_expect(hook: CommHook, kept: int) -> None:
    graph, programs = rewritten(hook, kept)
    launches, expected = sent_by(graph), in_launch_order(programs)
    assert all(is_launch(node, "g") for node in launches)
    assert len(launches) == len(expected) == (5 if kept else 3)
    assert [place for place, _ in expected] == ([0, 1, 0, 1, 2] if kept else [0, 1, 2])
    riders = launches[-1].args[0]
    assert isinstance(riders, Node) and "leading" in str(_reads(riders)), "the riders come last"


def _reads(node: Node) -> set[str]:
    found, ahead = set[str](), [node]
    while ahead:
        each = ahead.pop()
        found.add(each.name)
        ahead += each.all_input_nodes
    return found


def test_what_can_be_launched_at_once_is_before_any_wait() -> None:
    graph, _ = rewritten(Twice(), 2)
    order = ["launch" if n.target in LAUNCHES else "wait" for n in graph.nodes if n.target in (*LAUNCHES, wait_tensor)]
    assert order[:4] == ["launch", "launch", "wait", "launch"], order
    assert order.count("launch") == order.count("wait") == 5


@pytest.mark.parametrize("changes", [False, True])
def test_what_is_kept_is_read_from_the_graph_and_goes_where_its_result_was_read(changes: bool) -> None:
    graph, _ = rewritten(Twice(), 2, changes=changes)
    assert len(graph.find_nodes(op="placeholder")) == 5, "no input was added, and no memory lent"
    (outputs,) = graph.output_node().args
    assert isinstance(outputs, Sequence)
    for name, new in zip("ab", outputs[3:], strict=True):
        assert _reads(new) & {"a", "b"} == {name}, "of its own bucket alone"
        assert any("neg" in each for each in _reads(new)) == changes
