"""A step that leaves its last collectives under way, and awaits those of the step before where it reads them.

So what ranks have made of their shares of parameters is gathered while the next forward computes, layer by layer, as in
DeAR (arXiv 2302.12445).
"""

import operator
from collections.abc import Sequence

import torch
from torch.fx import Graph, Node

from compiled_ddp.passes import ops
from compiled_ddp.passes.graph_edit import (
    emit,
    erase_with_results,
    output_values,
    results_of,
    set_output_values,
)
from compiled_ddp.passes.ops import all_gather, all_to_all, gathered_before, put_together, wait_tensor
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

        arrived -> wait -> put_together -> getitem -> ...          ... -> share -> cat -> all_gather -> output

    (gloo: repeat -> all_to_all, see `scatter_buckets`). Behind the outputs of all buckets stands, of each, what is
    gathered: memory that nothing else may come to lie in before the wait.
    """
    (before,) = graph.find_nodes(op="call_function", target=gathered_before)
    params: Sequence[Node] = before.args[0]
    results, count = results_of(before), len(plan.indices)
    with graph.inserting_before(before):
        for bucket, gathered in zip(buckets_to_gather(plan), arrived, strict=True):
            awaited, own = emit(graph, wait_tensor, gathered), [params[index] for index in bucket.indices]
            made = emit(graph, put_together, awaited, own, bucket.ranks)
            for number, index in enumerate(bucket.indices):
                if index in results:
                    results[index].replace_all_uses_with(emit(graph, operator.getitem, made, number))
    erase_with_results(graph, before)
    outputs = output_values(graph)
    shares = outputs[len(outputs) - count :]
    place = {node: number for number, node in enumerate(graph.nodes)}
    latest = max(filter(None, shares), key=place.__getitem__)
    with graph.inserting_before(latest.next):  # what mutates stays behind everything else
        pairs = [_launch(graph, bucket, shares, group_name, by) for bucket in buckets_to_gather(plan)]
    launched, sent = zip(*pairs, strict=True)
    set_output_values(graph, [*outputs[: len(outputs) - count], *launched, *sent])


def _launch(graph: Graph, bucket: Bucket, shares: Sequence[Node | None], group_name: str, by: str) -> tuple[Node, Node]:
    """What gathers the shares of a bucket, and what it is given."""
    flat = emit(graph, _aten.cat.default, [shares[each.index] for each in bucket.gradients])
    if by == "reduce_scatter":
        return emit(graph, all_gather, flat, bucket.ranks, group_name), flat
    splits = [bucket.numel // bucket.ranks] * bucket.ranks
    sent = emit(graph, _aten.repeat.default, flat, [bucket.ranks])
    return emit(graph, all_to_all, sent, splits, splits, group_name), sent


def put_together_in_place(graph: Graph) -> None:
    """Let what arrives be put together where the parameters are, and be read there.

    Assumes that what mutates an input stands behind everything else, as AOTAutograd leaves it, and that nothing is
    moved any more. Then

        put_together(gathered, inputs) -> getitem -> ..., copy_(input, getitem)

    becomes

        put_together_(gathered, inputs), input -> ...

    where `put_together` stood. One with an input that is read elsewhere stays as it is.
    """
    for node in graph.find_nodes(op="call_function", target=put_together):
        params: Sequence[Node] = node.args[1]
        results = results_of(node)
        copies = {place: _copies(results[place], param) for place, param in enumerate(params) if place in results}
        is_read_here = all(
            {*param.users} <= {node, *copies.get(place, ())} and param.op == "placeholder"
            for place, param in enumerate(params)
        )
        if not is_read_here or not all(copies.get(place) for place in range(len(params))):
            continue
        with graph.inserting_before(node):
            emit(graph, ops.put_together_in_place, *node.args)
        for place, param in enumerate(params):
            for copy in reversed(copies[place]):
                graph.erase_node(copy)
            results[place].replace_all_uses_with(param)
        erase_with_results(graph, node)


def _copies(result: Node, into: Node) -> list[Node]:
    """The nodes by which a result is written into an input, and nothing else is read of; empty where it is not."""
    found, value = list[Node](), result
    while not found or found[-1].target is not _aten.copy_.default:
        copies = [user for user in value.users if user.target in _COPIES and user.args[:2] == (into, value)]
        if len(copies) != 1:
            return []
        found, value = [*found, copies[0]], copies[0]
    return [] if found[-1].users else found


_COPIES = (_aten.copy.default, _aten.copy_.default)
