"""Buckets: one all-reduce for many gradients instead of one for each."""

from collections.abc import Mapping, Sequence

import torch
from torch.fx import Graph, Node

from compiled_ddp.passes.graph_edit import emit, output_values, set_output_values
from compiled_ddp.passes.insert_all_reduces import Reduction, read_reductions
from compiled_ddp.passes.ops import all_reduce, wait_tensor
from compiled_ddp.plan import Bucket, BucketPlan, Gradient

_aten = torch.ops.aten
_mul = _aten.mul.Tensor


def form_buckets(graph: Graph, plan: BucketPlan, *, group_name: str, output_positions: Mapping[int, int]) -> None:
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

    Does nothing for an empty plan.
    """
    if not plan.buckets:
        return
    reductions = {r.gradient.index: r for r in read_reductions(graph, plan, output_positions)}
    outputs = output_values(graph)
    riders_wait = outputs[-1]
    assert riders_wait is not None
    place = {node: number for number, node in enumerate(graph.nodes)}
    last_place, anchor = -1, riders_wait  # behind which the next bucket's reduction goes
    waits = []
    for bucket in plan.buckets:
        merged = [reductions[index] for index in bucket.indices]
        latest = max((reduction.wait for reduction in merged), key=place.__getitem__, default=None)
        if latest is not None and place[latest] > last_place:
            last_place, anchor = place[latest], latest
        with graph.inserting_before(anchor.next):
            anchor = _merge(graph, bucket, merged, riders_wait, group_name)
            waits.append(anchor)
            if bucket.riders is not None:
                anchor = _view(graph, anchor, (bucket.riders.numel,), (1,), bucket.riders.offset_elements)
                riders_wait.replace_all_uses_with(anchor)
                outputs[-1] = anchor
    for bucket, wait in zip(plan.buckets, waits, strict=True):
        merged = [reductions[index] for index in bucket.indices]
        for reduction, view in zip(merged, _views(graph, bucket, merged, wait), strict=True):
            outputs[output_positions[reduction.gradient.index]] = view
    set_output_values(graph, outputs)
    for reduction in reductions.values():
        if reduction.normalised is not None:
            graph.erase_node(reduction.normalised)
    for node in [*(reduction.wait for reduction in reductions.values()), riders_wait]:
        launch = node.args[0]
        assert isinstance(launch, Node)
        graph.erase_node(node)
        graph.erase_node(launch)


def memory_order(gradient: Gradient) -> list[int]:
    """The dimensions of a gradient from the slowest to the fastest varying in memory."""
    return sorted(range(len(gradient.size)), key=lambda dim: (-gradient.stride[dim], dim))


def _merge(graph: Graph, bucket: Bucket, merged: Sequence[Reduction], riders_wait: Node, group_name: str) -> Node:
    """Emit one bucket's reduction; returns its wait."""
    parts = [_flatten(graph, reduction) for reduction in merged]
    if bucket.riders is not None:
        riders_launch = riders_wait.args[0]
        assert isinstance(riders_launch, Node)
        parts.append(riders_launch.args[0])  # type: ignore[arg-type]
    flat = emit(graph, _aten.cat.default, parts)
    return emit(graph, wait_tensor, emit(graph, all_reduce, flat, "sum", group_name))


def _views(graph: Graph, bucket: Bucket, merged: Sequence[Reduction], wait: Node) -> list[Node]:
    """Emit the gradients' views of a reduced flat buffer; in a weighted mean, of what it is with the weights."""
    if not merged:
        return []
    normalised = merged[0].normalised
    with graph.inserting_before(wait.next if normalised is None else graph.output_node()):
        flat = wait if normalised is None else emit(graph, _mul, wait, normalised.args[1])
        return [_view(graph, flat, g.size, g.stride, g.offset_elements) for g in bucket.gradients]


def _flatten(graph: Graph, reduction: Reduction) -> Node:
    gradient = reduction.launch.args[0]
    assert isinstance(gradient, Node)
    order = memory_order(reduction.gradient)
    if order != sorted(order):
        gradient = emit(graph, _aten.permute.default, gradient, order)
    return emit(graph, _aten.reshape.default, gradient, [-1])


def _view(graph: Graph, flat: Node, size: Sequence[int], stride: Sequence[int], offset_elements: int) -> Node:
    return emit(graph, _aten.as_strided.default, flat, list(size), list(stride), offset_elements)
