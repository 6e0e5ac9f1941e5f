"""A step whose ranks share the work of its update: sums are scattered over them, and what they make of these gathered.

A bucket that is scattered is a matrix with a row for each rank, in which a share of every gradient stands. Gloo's
reduce-scatter is an all-reduce of the whole (pytorch 118911), and two of its all-gathers at once corrupt memory
(`comm_hooks.Ranks`): there both are exchanges, and each rank adds up the rows that it is sent, in the order of ranks.
"""

import operator
from collections.abc import Container, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from compiled_ddp.passes.graph_edit import emit, erase_with_results, results_of
from compiled_ddp.passes.ops import (
    all_gather,
    all_reduce,
    exchange_of_all,
    exchange_of_sums,
    gather_shares,
    is_launch,
    number_of_exchange,
    optimizer_step,
    pack,
    reduce_scatter,
    sum_numbers,
    wait_tensor,
)
from compiled_ddp.passes.unfold_sums import emit_riders, replace_riders
from compiled_ddp.plan import Bucket, BucketPlan, share_elements

_aten = torch.ops.aten


def scatter_buckets(graph: Graph, plan: BucketPlan, *, reduction: Node, group_name: str) -> list[Node]:
    """Replace a scattered `sum_over_ranks` by its buckets, and with it all `sum_numbers` and `gather_shares`.

    Returns what is launched for these, in the order in which all ranks launch it, behind what `sum_over_ranks` does.

    Assumes a plan of the gradients of this `reduction`, the only one of the graph that is scattered. Then

        gradients -> sum_over_ranks -> getitem -> ... -> gather_shares -> getitem

    becomes, for each bucket on its way,

        gradient -> rows -> cat -> reduce_scatter -> wait -> slice       (gloo: exchange_of_sums)
        share -> cat -> all_gather -> wait -> slice                      (gloo: exchange_of_all)

    and the riders are summed before all buckets, so that an update knows whether their sums are sound. One in between
    becomes one of each bucket, unless it waits for all of them, as clipping does: then a bucket is updated and gathered
    while others are on their way.
    """
    split_updates(graph, plan, results_of(reduction))
    summed, gathered = (graph.find_nodes(op="call_function", target=target) for target in (sum_numbers, gather_shares))
    for node in summed:
        with graph.inserting_before(node):
            numbers = emit(graph, wait_tensor, emit(graph, all_reduce, node.args[0], "sum", group_name))
        node.replace_all_uses_with(numbers)
        graph.erase_node(node)
    for node in gathered:
        _gather(graph, plan, node, group_name)
    following = [node for node in graph.nodes if is_launch(node, group_name)]
    assert len(following) == len(summed) + len(gathered) * len(plan.of_gradients), f"{len(following)} launches follow"
    _scatter(graph, plan, reduction, group_name)
    return following


def _scatter(graph: Graph, plan: BucketPlan, reduction: Node, group_name: str) -> None:
    gradients: Sequence[Node] = reduction.args[0]  # type: ignore[assignment]
    by, results = reduction.args[7], results_of(reduction)
    riders = emit_riders(graph, plan, reduction)
    with graph.inserting_before(reduction):
        summed = emit(graph, wait_tensor, emit(graph, all_reduce, riders, "sum", group_name))
        for bucket in plan.of_gradients:
            matrix = _matrix(graph, bucket, gradients)
            if by == "reduce_scatter":
                launch = emit(graph, reduce_scatter, matrix, "sum", bucket.ranks, group_name)
                share = emit(graph, _aten.reshape.default, emit(graph, wait_tensor, launch), [-1])
            else:
                number = number_of_exchange(bucket.indices, gathers=False)
                launch = emit(graph, exchange_of_sums, matrix, bucket.ranks, number, group_name)
                share = emit(graph, wait_tensor, launch)
            for gradient, begin, end in bucket.shares:
                if gradient in results:
                    part = emit(graph, _aten.slice.Tensor, share, 0, begin, end)
                    results[gradient].replace_all_uses_with(part)
    replace_riders(graph, reduction, results, summed, len(gradients))
    erase_with_results(graph, reduction)


def _gather(graph: Graph, plan: BucketPlan, node: Node, group_name: str) -> None:
    shares: Sequence[Node] = node.args[0]  # type: ignore[assignment]
    results = results_of(node)
    with graph.inserting_before(node):
        for bucket in plan.of_gradients:
            launch, _ = emit_gather(graph, bucket, shares, group_name, str(node.args[-1]))
            matrix = emit(graph, _aten.reshape.default, emit(graph, wait_tensor, launch), [bucket.ranks, -1])
            for index, begin, end in bucket.shares:
                if index in results:
                    rows = emit(graph, _aten.slice.Tensor, matrix, 1, begin, end)
                    results[index].replace_all_uses_with(emit(graph, _aten.reshape.default, rows, [-1]))
    erase_with_results(graph, node)


def emit_gather(graph: Graph, bucket: Bucket, shares: Sequence[Any], group_name: str, by: str) -> tuple[Node, Node]:
    """What gathers this rank's shares of a bucket, and what it is given; `shares` are by the places of gradients."""
    flat = emit(graph, _aten.cat.default, [shares[index] for index in bucket.indices])
    if by == "reduce_scatter":
        return emit(graph, all_gather, flat, bucket.ranks, group_name), flat
    number = number_of_exchange(bucket.indices, gathers=True)
    return emit(graph, exchange_of_all, flat, bucket.ranks, number, group_name), flat


def split_updates(graph: Graph, plan: BucketPlan, sums: Mapping[int, Node]) -> None:
    """Let an update of parameters whose gradients are these `sums` be one for each bucket, unless it waits for all."""
    bucket_of = {sums[index]: bucket for bucket in plan.of_gradients for index in bucket.indices if index in sums}
    for node in graph.find_nodes(op="call_function", target=optimizer_step):
        params, gradients, state, steps, numbers, factor, skip, applies, *names = node.args
        buckets = [bucket_of.get(_begin_of(gradient, bucket_of)) for gradient in gradients]
        waits_for_all = factor is not None and factor.op != "placeholder"
        if waits_for_all or applies is not None or None in buckets:
            continue
        results, count = results_of(node), len(params)
        for bucket in plan.of_gradients:
            own = [place for place in range(count) if buckets[place] is bucket]
            if not own:
                continue
            of_state = [begin + place for begin in range(0, len(state), count) for place in own]
            lists = (
                [params[place] for place in own],
                [gradients[place] for place in own],
                [state[place] for place in of_state],
                [steps[place] for place in own] if steps else [],
            )
            with graph.inserting_before(node):
                updated = emit(graph, optimizer_step, *lists, numbers, factor, skip, None, *names)
                old = [*own, *(count + place for place in of_state)]
                old += [count + len(state) + place for place in own] if steps else []
                for place, before in enumerate(old):
                    if before in results:
                        results[before].replace_all_uses_with(emit(graph, operator.getitem, updated, place))
        erase_with_results(graph, node)


def _begin_of(gradient: Node, sums: Container[Node]) -> Node:
    """The sum that a gradient is made of alone, as behind a communication hook; or where it comes from otherwise."""
    while gradient not in sums and len(gradient.all_input_nodes) == 1:
        (gradient,) = gradient.all_input_nodes
    return gradient


def _matrix(graph: Graph, bucket: Bucket, gradients: Sequence[Node]) -> Node:
    """What is sent of a bucket; of one that is whole in the memory in which its gradients may be produced."""
    own = [gradients[index] for index in bucket.indices]
    if not bucket.whole:
        rows = [_rows(graph, each, of.numel, bucket.ranks) for each, of in zip(own, bucket.gradients, strict=True)]
        return emit(graph, _aten.cat.default, rows, 1)
    missing = bucket.numel - sum(each.numel for each in bucket.gradients)
    if missing:
        own.append(emit(graph, _aten.full.default, [missing], 0.0, dtype=bucket.dtype, device=bucket.device))
    return emit(graph, pack, own)


def _rows(graph: Graph, gradient: Node, numel: int, ranks: int) -> Node:
    """A gradient with a row for each rank, filled up with zeros."""
    flat = emit(graph, _aten.reshape.default, gradient, [-1])
    missing = ranks * share_elements(numel, ranks) - numel
    if missing:
        flat = emit(graph, _aten.constant_pad_nd.default, flat, [0, missing])
    return emit(graph, _aten.reshape.default, flat, [ranks, -1])
