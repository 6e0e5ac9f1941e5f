"""`inline_hook`: a communication hook's program in place of a bucket's all-reduce."""

import pytest
import torch
from torch.fx import Graph, Node

from compiled_ddp.comm_hooks import Ranks, TopK, bf16_compress
from compiled_ddp.passes.graph_edit import output_values
from compiled_ddp.passes.inline_hook import emit_flat, flat_buffers, inline_hook
from compiled_ddp.passes.ops import PACKS, all_reduce, is_launch, wait_tensor
from compiled_ddp.passes.pipeline import Pipeline
from compiled_ddp.plan import GradientSpec
from compiled_ddp.planning.assignment import assign_buckets
from compiled_ddp.reducers.traced_hook import BucketHook

aten = torch.ops.aten
to_dtype = torch.ops.prims.convert_element_type.default
RANKS = Ranks(2, "ours")
PLAN = assign_buckets(
    [GradientSpec.of(index, torch.empty(2, 3)) for index in range(3)],
    capacities_bytes=(2 * 24, 2 * 24),
    world_size=2,
    reduction="hook",
)


def programs(hook: object) -> tuple[object, ...]:
    traced_hook = BucketHook(hook, RANKS)
    return tuple(traced_hook.program(bucket) for bucket in PLAN.buckets)


def backward_graph() -> Graph:
    """Three gradients, one after the other."""
    graph = Graph()
    tangent = graph.placeholder("tangents_1")
    node = tangent
    gradients = []
    for number in range(3):
        node = graph.create_node("call_function", aten.neg.default, (node,), name=f"dw{number}")
        gradients.append(node)
    graph.output(tuple(gradients))
    return graph


def rewritten(hook: object) -> Graph:
    graph = backward_graph()
    Pipeline(PLAN, "ours", hooks=programs(hook)).run(graph, output_positions={0: 0, 1: 1, 2: 2})
    return graph


def test_the_hooks_buckets_leave_the_riders_to_a_bucket_of_their_own() -> None:
    assert [len(bucket.gradients) for bucket in PLAN.buckets] == [2, 1, 0]
    assert programs(bf16_compress)[2] is None


def test_each_part_is_cast_before_it_is_packed() -> None:
    graph = rewritten(bf16_compress)
    first, second, riders = (node for node in graph.nodes if node.target in PACKS)
    for packed, count in ((first, 2), (second, 1)):
        parts = packed.args[0]
        assert [part.target for part in parts] == [to_dtype] * count
        assert all(part.args[0].args == (part.args[0].args[0], 2) for part in parts), "divided by the number of ranks"
        (launch,) = packed.users
        assert launch.target is all_reduce
    assert [part.name for part in riders.args[0]] == ["riders"]
    assert not graph.find_nodes(op="call_function", target=aten.cat.default)


def test_launches_come_in_the_order_of_buckets_and_before_the_waits() -> None:
    graph = rewritten(bf16_compress)
    order = [node.target for node in graph.nodes if node.target in (all_reduce, wait_tensor)]
    assert order == [all_reduce] * 3 + [wait_tensor] * 3


def test_state_is_appended_to_the_inputs_and_comes_back_before_the_riders() -> None:
    graph = rewritten(TopK(0.5))
    inputs = [node.name for node in graph.find_nodes(op="placeholder")]
    assert inputs == ["tangents_1", "riders", "hook_state_0", "hook_state_1", "flat_buffer_2"], (
        "the riders' own is lent"
    )
    *gradients, first, second, riders = output_values(graph)
    assert len(gradients) == 3
    assert first.target is second.target is not aten.as_strided.default
    assert riders.target is aten.as_strided.default
    assert sum(is_launch(node, "ours") for node in graph.nodes) == 2 * 2 + 1, "values and indices, and the riders"


def test_a_graph_that_lost_a_collective_of_its_hook_is_found() -> None:
    graph = backward_graph()
    pipeline = Pipeline(PLAN, "ours", hooks=programs(TopK(0.5)))

    def lose(name: str, rewritten: Graph) -> None:
        if name == "schedule_collectives":
            launch = next(node for node in rewritten.nodes if is_launch(node, "ours"))
            launch.replace_all_uses_with(launch.args[0])
            rewritten.erase_node(launch)

    with pytest.raises(AssertionError, match="4 launches for 3 buckets"):
        pipeline.run(graph, output_positions={0: 0, 1: 1, 2: 2}, observe=lose)


def test_what_only_begins_element_wise_is_moved_only_that_far() -> None:
    hook = Graph()
    flat = hook.placeholder("flat")
    doubled = hook.call_function(aten.mul.Tensor, (flat, 2.0))
    squared = hook.call_function(aten.mul.Tensor, (doubled, doubled))
    hook.output((squared,))
    graph = Graph()
    parts = [graph.placeholder(name) for name in ("x", "y")]
    end = graph.output(())
    with graph.inserting_before(end):
        reduced, state = inline_hook(graph, hook, parts, [])
    (flat_buffer,) = flat_buffers(graph)
    assert [part.args[1] for part in flat_buffer.args[0]] == [2.0, 2.0]
    assert reduced.args == (flat_buffer, flat_buffer) and state == []


def test_only_marked_concatenations_are_flat_buffers() -> None:
    graph = Graph()
    x: Node = graph.placeholder("x")
    graph.call_function(aten.cat.default, ([x, x],))
    ours = emit_flat(graph, [x])
    assert flat_buffers(graph) == [ours]


def test_another_hook_is_another_identity() -> None:
    identities = {Pipeline(PLAN, "ours", hooks=programs(hook)).cache_identity for hook in (bf16_compress, TopK(0.5))}
    assert len(identities | {Pipeline(PLAN, "ours").cache_identity}) == 3
    assert Pipeline(PLAN, "ours", hooks=programs(TopK(0.5))).cache_identity in identities


COMPLEX = assign_buckets(
    [GradientSpec.of(index, torch.empty(2, 3, dtype=torch.complex64)) for index in range(3)],
    capacities_bytes=(2 * 48, 2 * 48),
    world_size=2,
    reduction="hook",
)


def test_a_hook_is_given_complex_gradients_as_pairs_of_real_ones() -> None:
    """part -> view_as_real -> pack -> ... -> view_as_complex -> view -> output"""
    graph = backward_graph()
    hook = BucketHook(TopK(0.5), RANKS)
    hooks = tuple(hook.program(bucket) for bucket in COMPLEX.buckets)
    Pipeline(COMPLEX, "ours", hooks=hooks).run(graph, output_positions={0: 0, 1: 1, 2: 2})
    first, second, _ = (node for node in graph.nodes if node.target in PACKS)
    assert [part.target for part in (*first.args[0], *second.args[0])] == [aten.view_as_real.default] * 3
    gradients = output_values(graph)[:3]
    assert [gradient.args[0].target for gradient in gradients] == [aten.view_as_complex.default] * 3
    assert gradients[0].args[0] is gradients[1].args[0] is not gradients[2].args[0]
    state = [node.meta for node in hooks[0].graph.find_nodes(op="placeholder")][1]["val"]
    assert state.shape == (24,) and state.dtype == torch.float32
