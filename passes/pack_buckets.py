"""Zero copy: gradients are produced inside their bucket instead of being copied into it."""

import torch
from torch.fx import Graph, Node

from compiled_ddp.passes.graph_edit import emit
from compiled_ddp.passes.ops import all_reduce, pack

_aten = torch.ops.aten


def pack_buckets(graph: Graph, *, group_name: str) -> None:
    """Replace the concatenation that fills each bucket by `compiled_ddp::pack`.

    Assumes buckets as `form_buckets` leaves them:

        grad -> reshape([-1]) -> cat -> all_reduce        becomes        grad -> pack -> all_reduce

    `pack` takes gradients in their own shape, so that the compiler may hand each producer its place in the bucket.

    Does nothing to a `cat` that is not the input of an all-reduce on the group `group_name`.
    """
    for launch in graph.find_nodes(op="call_function", target=all_reduce):
        flat = launch.args[0]
        if launch.args[2] != group_name or flat.target is not _aten.cat.default:
            continue
        flattened: list[Node] = flat.args[0]
        parts = [part.args[0] if part.target is _aten.reshape.default else part for part in flattened]
        with graph.inserting_before(flat):
            packed = emit(graph, pack, parts)
        flat.replace_all_uses_with(packed)
        graph.erase_node(flat)
        for part in flattened:
            if part.target is _aten.reshape.default and not part.users:
                graph.erase_node(part)
