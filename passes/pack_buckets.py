"""Zero copy: gradients are produced inside their bucket instead of being copied into it."""

from collections.abc import Sequence

import torch
from torch.fx import Graph, Node

from compiled_ddp.passes.graph_edit import add_placeholder, emit, fake_mode_of
from compiled_ddp.passes.inline_hook import flat_buffers
from compiled_ddp.passes.ops import pack
from compiled_ddp.plan import Bucket, BucketPlan

_aten = torch.ops.aten


def pack_buckets(graph: Graph, plan: BucketPlan, *, lent: Sequence[int]) -> None:
    """Replace the concatenation that fills each bucket by `compiled_ddp::pack`.

    Assumes buckets as `form_buckets` leaves them:

        grad -> reshape([-1]) -> cat -> all_reduce        becomes        grad -> pack -> all_reduce

    `pack` takes gradients in their own shape, so that the compiler may hand each producer its place in the bucket.

    Appends one input for each bucket in `lent`, by place in the plan, in launch order: the memory to pack it into.
    """
    for number, (bucket, flat) in enumerate(zip(plan.buckets, flat_buffers(graph), strict=True)):
        flattened: list[Node] = flat.args[0]  # type: ignore[assignment]
        parts = [part.args[0] if part.target is _aten.reshape.default else part for part in flattened]
        into = [_add_flat_placeholder(graph, bucket, number)] if number in lent else []
        with graph.inserting_before(flat):
            packed = emit(graph, pack, parts, *into)
        flat.replace_all_uses_with(packed)
        graph.erase_node(flat)
        for part in flattened:
            if part.target is _aten.reshape.default and not part.users:
                graph.erase_node(part)


def _add_flat_placeholder(graph: Graph, bucket: Bucket, number: int) -> Node:
    with fake_mode_of(graph) as fake:
        value = torch.empty(bucket.numel, dtype=bucket.dtype, device=bucket.device) if fake else None
    return add_placeholder(graph, f"flat_buffer_{number}", value)
