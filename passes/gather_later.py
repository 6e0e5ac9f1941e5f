"""A step that leaves its last collectives under way, and awaits those of the step before where it reads them.

So what ranks have made of their shares of parameters is gathered while the next forward computes, layer by layer, as in
DeAR (arXiv 2302.12445).
"""

from collections.abc import Sequence

import torch
from torch.fx import Graph, Node

from compiled_ddp.passes.graph_edit import (
    emit,
    erase_with_results,
    output_values,
    results_of,
    set_output_values,
)
from compiled_ddp.passes.ops import all_gather, all_to_all, gathered_before, wait_tensor
from compiled_ddp.plan import Bucket, BucketPlan

_aten = torch.ops.aten


def buckets_to_gather(plan: BucketPlan) -> tuple[Bucket, ...]:
    """Those of a scattered plan that have gradients, in the order in which all ranks gather them.

    That is the reverse of the order in which they are scattered: the parameters that a forward reads first have their
    gradients last.
    """
    *buckets, _ = plan.buckets  # the last one has the riders alone
    return tuple(reversed(buckets))


def gather_later(graph: Graph, plan: BucketPlan, *, arrived: Sequence[Node], group_name: str, by: str) -> None:
    """Let a step begin with what the one before has left under way, and leave its own so.

    Assumes that the last outputs are shares of parameters, in the order of the plan's gradients, and one input for each
    of `buckets_to_gather` that nothing reads yet. With these, `arrived`,

        params -> gathered_before -> getitem -> ...                ... -> share -> output

    becomes, for each bucket,

        arrived -> wait -> slice -> view -> ...                    ... -> share -> cat -> all_gather -> output

    (gloo: repeat -> all_to_all, see `scatter_buckets`). Behind the outputs of all buckets stands, of each, what is
    gathered: memory that nothing else may come to lie in before the wait.
    """
    (before,) = graph.find_nodes(op="call_function", target=gathered_before)
    results, count = results_of(before), len(plan.indices)
    with graph.inserting_before(before):
        for bucket, gathered in zip(buckets_to_gather(plan), arrived, strict=True):
            _read(graph, bucket, gathered, results)
    erase_with_results(graph, before)
    outputs = output_values(graph)
    shares = outputs[len(outputs) - count :]
    place = {node: number for number, node in enumerate(graph.nodes)}
    latest = max(filter(None, shares), key=place.__getitem__)
    with graph.inserting_before(latest.next):  # what mutates stays behind everything else
        pairs = [_launch(graph, bucket, shares, group_name, by) for bucket in buckets_to_gather(plan)]
    launched, sent = zip(*pairs, strict=True)
    set_output_values(graph, [*outputs[: len(outputs) - count], *launched, *sent])


def _read(graph: Graph, bucket: Bucket, gathered: Node, results: dict[int, Node]) -> None:
    matrix = emit(graph, _aten.reshape.default, emit(graph, wait_tensor, gathered), [bucket.ranks, -1])
    for gradient, (index, begin, end) in zip(bucket.gradients, bucket.shares, strict=True):
        if index in results:
            flat = emit(graph, _aten.reshape.default, emit(graph, _aten.slice.Tensor, matrix, 1, begin, end), [-1])
            whole = emit(graph, _aten.slice.Tensor, flat, 0, 0, gradient.numel)
            results[index].replace_all_uses_with(emit(graph, _aten.reshape.default, whole, list(gradient.size)))


def _launch(graph: Graph, bucket: Bucket, shares: Sequence[Node | None], group_name: str, by: str) -> tuple[Node, Node]:
    """What gathers the shares of a bucket, and what it is given."""
    flat = emit(graph, _aten.cat.default, [shares[each.index] for each in bucket.gradients])
    if by == "reduce_scatter":
        return emit(graph, all_gather, flat, bucket.ranks, group_name), flat
    splits = [bucket.numel // bucket.ranks] * bucket.ranks
    sent = emit(graph, _aten.repeat.default, flat, [bucket.ranks])
    return emit(graph, all_to_all, sent, splits, splits, group_name), sent
