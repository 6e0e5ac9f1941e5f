"""A step that leaves its last collectives under way, and awaits those of the step before where it reads them.

So what ranks have made of their shares of parameters is gathered while the next forward computes, layer by layer; or,
where each rank updates all of them, their shares of the sums of gradients, as in DeAR (arXiv 2302.12445).
"""

import functools
import itertools
import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch.fx import Graph, Node

from compiled_ddp.passes.graph_edit import (
    copies_into,
    emit,
    erase_with_results,
    is_view_of,
    output_values,
    results_of,
    set_output_values,
)
from compiled_ddp.passes.ops import (
    gathered_before,
    optimizer_step,
    optimizer_step_in_place,
    put_together,
    put_together_in_place,
    sum_numbers,
    summed_before,
    taken_apart,
    wait_tensor,
)
from compiled_ddp.passes.scatter_buckets import emit_gather, split_updates
from compiled_ddp.plan import Bucket, BucketPlan


def departing(graph: Graph, count: int) -> list[Node]:
    """What a step leaves of `count` gradients, by their places: shares of parameters, or of the gradients' sums.

    Sums as they were sent: where a hook has widened them, what has come is widened, which is as exact and takes fewer
    bytes.
    """
    shares: list[Node] = output_values(graph)[-1 - count : -1]  # type: ignore[assignment]
    are_sums = graph.find_nodes(op="call_function", target=summed_before)
    return [*map(_before_widening, shares)] if are_sums else shares


def _before_widening(share: Node) -> Node:
    while share.target is _convert:
        source, dtype = share.args
        assert isinstance(source, Node) and isinstance(dtype, torch.dtype)
        narrow = source.meta["val"].dtype
        if not narrow.is_floating_point or torch.promote_types(narrow, dtype) != dtype:
            break
        share = source
    return share


def buckets_to_gather(plan: BucketPlan, dtypes: Sequence[torch.dtype]) -> tuple[Bucket, ...]:
    """Those of a scattered plan that have gradients, in the order in which all ranks gather them, and as what.

    That is the reverse of the order in which they are scattered: the parameters that a forward reads first have their
    gradients last. `dtypes` are those of the shares, by the places of gradients; each bucket is of the one that holds
    all of its own, and may have been scattered in another one.
    """
    return tuple(
        replace(bucket, dtype=functools.reduce(torch.promote_types, (dtypes[index] for index in bucket.indices)))
        for bucket in reversed(plan.of_gradients)
    )


def gather_later(
    graph: Graph,
    plan: BucketPlan,
    buckets: Sequence[Bucket],
    *,
    arrived: Sequence[Node],
    group_name: str,
    by: str,
) -> None:
    """Let a step begin with what the one before has left under way, and leave its own so.

    Assumes that the last outputs are shares, of parameters or of their gradients' sums, in the order of the plan's
    gradients, and then whether they are sound; and inputs that nothing reads yet, one for each of the `buckets` of
    `buckets_to_gather` and one for that. With these, `arrived`,

        params -> gathered_before -> getitem -> ...                ... -> share -> output

    becomes, for each bucket,

        arrived -> wait -> put_together -> getitem -> ...          ... -> share -> cat -> all_gather -> output

    (gloo: exchange_of_all). The last outputs are what is launched of all buckets, of each what is gathered, which is
    memory that nothing else may come to lie in before the wait, and whether that is sound.

    In the same way `summed_before` becomes `taken_apart`, or parts of what has arrived of a bucket that is whole, and
    an update that is made of its results one of each bucket.
    """
    shares = departing(graph, len(plan.indices))
    for before in graph.find_nodes(op="call_function", target=gathered_before):
        _put_together(graph, before, buckets, arrived)
    for before in graph.find_nodes(op="call_function", target=summed_before):
        split_updates(graph, plan, _take_apart(graph, before, buckets, arrived))
    *others, is_sound = output_values(graph)
    others = others[: -len(shares)]
    place = {node: number for number, node in enumerate(graph.nodes)}
    numbers = graph.find_nodes(op="call_function", target=sum_numbers)  # which all ranks sum before
    latest = max((*shares, *numbers), key=place.__getitem__)
    with graph.inserting_before(latest.next):  # what mutates stays behind everything else
        pairs = [emit_gather(graph, bucket, shares, group_name, by) for bucket in buckets]
    launched, sent = zip(*pairs, strict=True)
    set_output_values(graph, [*others, *launched, *sent, is_sound])


def _put_together(graph: Graph, before: Node, buckets: Sequence[Bucket], arrived: Sequence[Node]) -> None:
    """Parameters that have been gathered, for `gathered_before`."""
    params: Sequence[Node] = before.args[0]  # type: ignore[assignment]
    results, (*gathered, was_sound) = results_of(before), arrived
    with graph.inserting_before(before):
        for bucket, one in zip(buckets, gathered, strict=True):
            own = [params[index] for index in bucket.indices]
            made = emit(graph, put_together, emit(graph, wait_tensor, one), was_sound, own, bucket.ranks)
            for number, index in enumerate(bucket.indices):
                if index in results:
                    results[index].replace_all_uses_with(emit(graph, operator.getitem, made, number))
    erase_with_results(graph, before)


def _take_apart(graph: Graph, before: Node, buckets: Sequence[Bucket], arrived: Sequence[Node]) -> Mapping[int, Node]:
    """The sums of gradients that have been gathered, by the places of these, for `summed_before`."""
    results, sums = results_of(before), dict[int, Node]()
    *gathered, was_sound = arrived
    with graph.inserting_before(before):
        for bucket, one in zip(buckets, gathered, strict=True):
            parts = _parts(graph, bucket, emit(graph, wait_tensor, one))
            for flat, index in zip(parts, bucket.indices, strict=True):
                like = results[index].meta["val"]
                if like.dtype != bucket.dtype:
                    flat = emit(graph, _convert, flat, like.dtype)
                sums[index] = emit(graph, torch.ops.aten.view.default, flat, [*like.shape])
    for index, result in results.items():
        result.replace_all_uses_with(sums.get(index, was_sound))
    erase_with_results(graph, before)
    return sums


def _parts(graph: Graph, bucket: Bucket, arrived: Node) -> list[Node]:
    """The gradients of a bucket, flat; of one that is whole they are where they have arrived."""
    if bucket.whole:
        return [emit(graph, torch.ops.aten.slice.Tensor, arrived, 0, *bucket.parts[index]) for index in bucket.indices]
    apart = emit(graph, taken_apart, arrived, [each.numel for each in bucket.gradients], bucket.ranks)
    return [emit(graph, operator.getitem, apart, number) for number in range(len(bucket.indices))]


_convert = torch.ops.prims.convert_element_type.default
_IN_PLACE = {put_together: put_together_in_place, optimizer_step: optimizer_step_in_place}


def arrive_in_place(graph: Graph) -> None:
    """Let what arrives be put together where the parameters are, and be read there.

    Assumes that what mutates an input stands behind everything else, as AOTAutograd leaves it, and that nothing is
    moved any more. Then

        put_together(gathered, sound, inputs) -> getitem -> ..., copy_(input, getitem)

    becomes

        put_together_(gathered, sound, inputs), input -> ...

    where `put_together` stood; and so an `optimizer_step` whose results are read, as where it is made of what arrives.
    One stays as it is whose input is read elsewhere, or whose result the graph returns, by whatever name: later steps
    would write into that.
    """
    nodes = [node for target in _IN_PLACE for node in graph.find_nodes(op="call_function", target=target)]
    for node in nodes:
        params = _updated_by(node)
        results = results_of(node)
        copies = {place: copies_into(results[place], param) for place, param in enumerate(params) if place in results}
        is_written_here = len(copies) == len(params) and all(copies.values())
        is_read_here = all({*param.users} <= {node, *copies.get(place, ())} for place, param in enumerate(params))
        if not (is_read_here and is_written_here) or any(map(_is_returned, results.values())):
            continue
        with graph.inserting_before(node):
            emit(graph, _IN_PLACE[node.target], *node.args)
        for place, param in enumerate(params):
            for copy in reversed(copies[place]):
                graph.erase_node(copy)
            results[place].replace_all_uses_with(param)
        erase_with_results(graph, node)


def _updated_by(node: Node) -> list[Node]:
    """What the results of a node are made of, one by one."""
    places = (2,) if node.target is put_together else (0, 2, 3)  # parameters; or these, state and counts of steps
    lists: list[list[Node]] = [node.args[place] for place in places]  # type: ignore[misc]
    return [*itertools.chain.from_iterable(lists)]


def _is_returned(value: Node) -> bool:
    """Whether the graph returns a value, or a view of it."""
    views = [user for user in value.users if user.op == "output" or is_view_of(user, value)]
    return any(user.op == "output" or _is_returned(user) for user in views)
