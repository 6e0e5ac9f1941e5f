"""Zero copy: gradients are produced inside their bucket instead of being copied into it."""

import functools
from collections.abc import Sequence

import torch
from torch.fx import Graph, Node

from compiled_ddp.passes.graph_edit import add_placeholders, emit
from compiled_ddp.passes.inline_hook import flat_buffers
from compiled_ddp.passes.ops import pack, pack_into
from compiled_ddp.plan import Bucket, BucketPlan

_aten = torch.ops.aten


def pack_buckets(graph: Graph, plan: BucketPlan, *, lent: Sequence[int]) -> None:
    """Replace the concatenation that fills each bucket by `compiled_ddp::pack`.

    Assumes buckets as `form_buckets` leaves them:

        grad -> reshape([-1]) -> cat -> all_reduce        becomes        grad -> pack -> all_reduce

    `pack` takes gradients in their own shape, so that the compiler may hand each producer its place in the bucket.

    Appends one input for each bucket in `lent`, by place in the plan, in launch order: the memory to pack it into,
    by `compiled_ddp::pack_into`.
    """
    intos = _add_flat_placeholders(graph, plan, lent)
    for number, (_, flat) in enumerate(zip(plan.buckets, flat_buffers(graph), strict=True)):
        flattened: list[Node] = flat.args[0]  # type: ignore[assignment]
        parts = [part.args[0] if part.target is _aten.reshape.default else part for part in flattened]
        with graph.inserting_before(flat):
            packed = emit(graph, pack_into, parts, intos[number]) if number in intos else emit(graph, pack, parts)
        flat.replace_all_uses_with(packed)
        graph.erase_node(flat)
        for part in flattened:
            if part.target is _aten.reshape.default and not part.users:
                graph.erase_node(part)


def _add_flat_placeholders(graph: Graph, plan: BucketPlan, lent: Sequence[int]) -> dict[int, Node]:
    values = {f"flat_buffer_{number}": functools.partial(_like, plan.buckets[number]) for number in lent}
    return dict(zip(lent, add_placeholders(graph, values), strict=True))


def _like(bucket: Bucket) -> torch.Tensor:
    return torch.empty(bucket.numel, dtype=bucket.dtype, device=bucket.device)
