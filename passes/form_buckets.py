"""Buckets: one all-reduce for many gradients instead of one for each."""

import functools
import itertools
from collections.abc import Collection, Mapping, Sequence

import torch
from torch.fx import Graph, Node

from compiled_ddp.passes.graph_edit import (
    add_placeholders,
    emit,
    output_values,
    replace_nodes,
    set_output_values,
)
from compiled_ddp.passes.inline_hook import TracedHook, emit_flat, inline_hook
from compiled_ddp.passes.insert_all_reduces import ReducedGradient, read_reductions
from compiled_ddp.passes.ops import all_reduce, wait_tensor
from compiled_ddp.plan import Bucket, BucketPlan, Gradient

_aten = torch.ops.aten
_mul, _reshape = _aten.mul.Tensor, _aten.reshape.default


def form_buckets(
    graph: Graph,
    plan: BucketPlan,
    *,
    group_name: str,
    output_positions: Mapping[int, int],
    hooks: Sequence[TracedHook | None] = (),
) -> None:
    """Merge the all-reduces of each bucket's gradients, and of the riders, into one.

    Assumes the naive program. For each bucket,

        grad_0 -> all_reduce -> wait -> output
        grad_1 -> all_reduce -> wait -> output
        riders -> all_reduce -> wait -> output

    becomes

        grad_0 -> flatten \\                              / view -> output
        grad_1 -> flatten -- cat -> all_reduce -> wait -- view -> output
        riders ----------- /                              \\ view -> output

    Flattening keeps each gradient's memory order, so that the view of it has the parameter's strides. A bucket's
    reduction stands where its last gradient was reduced, but never before that of the bucket that launches before it.

    With `hooks`, one for each bucket, the program of a bucket's hook stands in place of its all-reduce and wait. It is
    given complex gradients as pairs of real numbers. Its state is appended to the graph's inputs, for all buckets in
    launch order, and the new state goes before the riders among the outputs.

    Does nothing for an empty plan.
    """
    if not plan.buckets:
        return
    hooks = hooks or [None] * len(plan.buckets)
    old = _add_state_placeholders(graph, hooks)
    state = _form(graph, plan, group_name, output_positions, hooks, old)
    outputs = output_values(graph)
    set_output_values(graph, [*outputs[:-1], *state, outputs[-1]])


def form_buckets_of_hooks(
    graph: Graph,
    plan: BucketPlan,
    *,
    group_name: str,
    output_positions: Mapping[int, int],
    hooks: Sequence[TracedHook | None],
    kept: Sequence[tuple[Node, Node]],
) -> None:
    """As `form_buckets`, with hooks whose state is in the graph: `kept` has a pair for each tensor of it.

    That is the node that the hook reads, and the one that stands for what becomes of it.
    """
    state = _form(graph, plan, group_name, output_positions, hooks, [each for each, _ in kept])
    replace_nodes(graph, {stand_in: new for (_, stand_in), new in zip(kept, state, strict=True)})


def _form(
    graph: Graph,
    plan: BucketPlan,
    group_name: str,
    output_positions: Mapping[int, int],
    hooks: Sequence[TracedHook | None],
    old: Sequence[Node],
) -> list[Node]:
    """Merge all; from the `old` state of hooks, which is returned as it has become."""
    reductions = {r.gradient.index: r for r in read_reductions(graph, plan, output_positions)}
    riders_wait = output_values(graph)[-1]
    assert riders_wait is not None
    waits, state = _merge_all(graph, plan, reductions, riders_wait, group_name, hooks, _by_hook(hooks, old))
    with graph.inserting_before(waits[-1].next):
        riders = _view(graph, waits[-1], (plan.riders.numel,), (1,), plan.riders.offset_elements)
    replacements = {riders_wait: riders}
    for bucket, wait in zip(plan.buckets, waits, strict=True):
        merged = [reductions[index] for index in bucket.indices]
        views = _views(graph, bucket, merged, wait)
        replacements |= {r.normalised or r.wait: view for r, view in zip(merged, views, strict=True)}
    replace_nodes(graph, replacements)
    _erase(graph, reductions.values(), riders_wait)
    return state


def memory_order(gradient: Gradient) -> list[int]:
    """The dimensions of a gradient from the slowest to the fastest varying in memory."""
    return sorted(range(len(gradient.size)), key=lambda dim: (-gradient.stride[dim], dim))


def _states(hooks: Sequence[TracedHook | None]) -> list[list[Node]]:
    """The inputs of each hook's program that are its state."""
    return [[] if hook is None else hook.graph.find_nodes(op="placeholder")[1:] for hook in hooks]


def _by_hook(hooks: Sequence[TracedHook | None], nodes: Sequence[Node]) -> list[list[Node]]:
    """The state of all hooks, taken apart."""
    rest = iter(nodes)
    states = [[*itertools.islice(rest, len(state))] for state in _states(hooks)]
    assert next(rest, None) is None, "there is more state than hooks have"
    return states


def _add_state_placeholders(graph: Graph, hooks: Sequence[TracedHook | None]) -> list[Node]:
    """Append the inputs for the state of all hooks."""
    likes = [node.meta["val"] for state in _states(hooks) for node in state]
    return add_placeholders(graph, {f"hook_state_{n}": functools.partial(_new, like) for n, like in enumerate(likes)})


def _new(like: torch.Tensor) -> torch.Tensor:
    return torch.empty(like.shape, dtype=like.dtype, device=like.device)


def _merge_all(
    graph: Graph,
    plan: BucketPlan,
    reductions: Mapping[int, ReducedGradient],
    riders_wait: Node,
    group_name: str,
    hooks: Sequence[TracedHook | None],
    states: Sequence[Sequence[Node]],
) -> tuple[list[Node], list[Node]]:
    """Emit the buckets' reductions; returns the reduced flat tensors, and the new state of all hooks."""
    place = {node: number for number, node in enumerate(graph.nodes)}
    last_place, anchor = -1, riders_wait  # behind which the next bucket's reduction goes
    waits, state = [], list[Node]()
    for bucket, hook, old in zip(plan.buckets, hooks, states, strict=True):
        merged = [reductions[index] for index in bucket.indices]
        needed = [*(reduction.wait for reduction in merged), *old]
        if bucket.riders is not None:
            needed += riders_wait.all_input_nodes[0].all_input_nodes
        latest = max(needed, key=place.__getitem__, default=None)
        if latest is not None and place[latest] > last_place:
            last_place, anchor = place[latest], latest
        behind = anchor.next
        with graph.inserting_before(behind):
            wait, new = _merge(graph, bucket, merged, riders_wait, group_name, hook, old)
        waits.append(wait)
        state += new
        anchor = behind.prev
    return waits, state


def _merge(
    graph: Graph,
    bucket: Bucket,
    merged: Sequence[ReducedGradient],
    riders_wait: Node,
    group_name: str,
    hook: TracedHook | None,
    state: Sequence[Node],
) -> tuple[Node, list[Node]]:
    """Emit one bucket's reduction; returns the reduced flat tensor, and the hook's new state."""
    parts = [_flatten(graph, reduction) for reduction in merged]
    if hook is not None and bucket.dtype.is_complex:
        parts = [emit(graph, _reshape, emit(graph, _aten.view_as_real.default, part), [-1]) for part in parts]
        reduced, new = inline_hook(graph, hook.graph, parts, state)
        pairs = emit(graph, _reshape, reduced, [-1, 2])
        return emit(graph, _aten.view_as_complex.default, pairs), new
    if hook is not None:
        return inline_hook(graph, hook.graph, parts, state)
    if bucket.riders is not None:
        riders_launch = riders_wait.args[0]
        assert isinstance(riders_launch, Node)
        parts.append(riders_launch.args[0])  # type: ignore[arg-type]
    launch = emit(graph, all_reduce, emit_flat(graph, parts), "sum", bucket.group_name(group_name))
    return emit(graph, wait_tensor, launch), []


def _views(graph: Graph, bucket: Bucket, merged: Sequence[ReducedGradient], wait: Node) -> list[Node]:
    """Emit the gradients' views of a reduced flat buffer; in a weighted mean, of what it is with the weights."""
    if not merged:
        return []
    normalised = merged[0].normalised
    with graph.inserting_before(wait.next if normalised is None else graph.output_node()):
        flat = wait if normalised is None else emit(graph, _mul, wait, normalised.args[1])
        return [_view(graph, flat, g.size, g.stride, g.offset_elements) for g in bucket.gradients]


def _erase(graph: Graph, reductions: Collection[ReducedGradient], riders_wait: Node) -> None:
    """Remove the naive program, whose results nothing reads any more."""
    for reduction in reductions:
        if reduction.normalised is not None:
            graph.erase_node(reduction.normalised)
    for node in [*(reduction.wait for reduction in reductions), riders_wait]:
        launch = node.args[0]
        assert isinstance(launch, Node)
        graph.erase_node(node)
        graph.erase_node(launch)


def _flatten(graph: Graph, reduction: ReducedGradient) -> Node:
    gradient = reduction.launch.args[0]
    assert isinstance(gradient, Node)
    order = memory_order(reduction.gradient)
    if order != sorted(order):
        gradient = emit(graph, _aten.permute.default, gradient, order)
    return emit(graph, _reshape, gradient, [-1])


def _view(graph: Graph, flat: Node, size: Sequence[int], stride: Sequence[int], offset_elements: int) -> Node:
    return emit(graph, _aten.as_strided.default, flat, list(size), list(stride), offset_elements)
