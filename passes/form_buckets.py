"""Buckets: one all-reduce for many gradients instead of one for each."""

from collections.abc import Mapping, Sequence

import torch
from torch.fx import Graph, Node

from compiled_ddp.passes.graph_edit import emit, output_values, set_output_values
from compiled_ddp.passes.insert_all_reduces import Reduction, read_reductions
from compiled_ddp.passes.ops import all_reduce, wait_tensor
from compiled_ddp.plan import Bucket, BucketPlan, Gradient

_aten = torch.ops.aten


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
    for bucket in plan.buckets:
        merged = [reductions[index] for index in bucket.indices]
        latest = max((reduction.wait for reduction in merged), key=place.__getitem__, default=None)
        if latest is not None and place[latest] > last_place:
            last_place, anchor = place[latest], latest
        with graph.inserting_before(anchor.next):
            views, rider_view = _merge(graph, bucket, merged, riders_wait, group_name)
        anchor = rider_view or views[-1]
        for index, view in zip(bucket.indices, views, strict=True):
            outputs[output_positions[index]] = view
        if rider_view is not None:
            outputs[-1] = rider_view
    set_output_values(graph, outputs)
    for node in [*(reduction.wait for reduction in reductions.values()), riders_wait]:
        launch = node.args[0]
        assert isinstance(launch, Node)
        graph.erase_node(node)
        graph.erase_node(launch)


def memory_order(gradient: Gradient) -> list[int]:
    """The dimensions of a gradient from the slowest to the fastest varying in memory."""
    return sorted(range(len(gradient.size)), key=lambda dim: (-gradient.stride[dim], dim))


def _merge(
    graph: Graph, bucket: Bucket, merged: Sequence[Reduction], riders_wait: Node, group_name: str
) -> tuple[list[Node], Node | None]:
    """Emit one bucket's reduction; returns the gradients' views and the riders' view, if it carries them."""
    parts = [_flatten(graph, reduction) for reduction in merged]
    if bucket.riders is not None:
        riders_launch = riders_wait.args[0]
        assert isinstance(riders_launch, Node)
        parts.append(riders_launch.args[0])  # type: ignore[arg-type]
    flat = emit(graph, _aten.cat.default, parts)
    wait = emit(graph, wait_tensor, emit(graph, all_reduce, flat, "sum", group_name))
    views = [_view(graph, wait, g.size, g.stride, g.offset_elements) for g in bucket.gradients]
    if bucket.riders is None:
        return views, None
    return views, _view(graph, wait, (bucket.riders.numel,), (1,), bucket.riders.offset_elements)


def _flatten(graph: Graph, reduction: Reduction) -> Node:
    gradient = reduction.launch.args[0]
    assert isinstance(gradient, Node)
    order = memory_order(reduction.gradient)
    if order != sorted(order):
        gradient = emit(graph, _aten.permute.default, gradient, order)
    return emit(graph, _aten.reshape.default, gradient, [-1])


def _view(graph: Graph, flat: Node, size: Sequence[int], stride: Sequence[int], offset_elements: int) -> Node:
    return emit(graph, _aten.as_strided.default, flat, list(size), list(stride), offset_elements)
