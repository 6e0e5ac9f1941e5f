"""Memory that is kept for the buckets of a scattered plan: what is sent of each, what comes, and a rank's share.

On the CPU memory that was freed and comes back costs a page fault for every 4 KiB (docs/benchmarks.md, "Flat buffers
that stay"): a seventh of the step of a GPT on two ranks, of whose buckets each exchange took new memory.
"""

import itertools
from collections.abc import Sequence

import torch
from torch.fx import Graph, Node

from compiled_ddp.passes.graph_edit import emit
from compiled_ddp.passes.ops import exchange, exchange_into, fill_rows, is_launch, is_wait, pack, pack_into
from compiled_ddp.plan import Bucket, BucketPlan

_CAT = torch.ops.aten.cat.default  # compilers leave out one of a single part


def lent_memory(plan: BucketPlan) -> tuple[tuple[Bucket, int], ...]:
    """For each tensor that graphs are lent the bucket that it is for, and its number of elements: of all, or none.

    First what is sent of each bucket, then what comes, and then this rank's share.
    """
    own = plan.of_gradients
    if not all(bucket.ranks > 1 and bucket.kept for bucket in own):
        return ()
    flat = [(bucket, bucket.numel) for bucket in own]
    return *flat, *flat, *((bucket, bucket.numel // bucket.ranks) for bucket in own)


def lend_rows(graph: Graph, plan: BucketPlan, *, memory: Sequence[Node], group_names: Sequence[str]) -> None:
    """Let what is scattered of a bucket, and then what is gathered, be sent from and come into lent memory.

    That are inputs which nothing reads yet, those of `lent_memory`. Assumes that nothing is moved any more, and that
    each bucket is scattered once, in the order of the plan, and gathered once, of the same dtype: in the same order, or
    in that of `buckets_to_gather` where the graph begins with these. Then

        rows -> cat -> exchange -> wait                    parts -> cat -> exchange

    become

        rows -> fill_rows(sent), exchange_into(sent, received), received -> wait
        parts -> pack_into(share), exchange_into(share, received)

    (of a bucket that is whole: gradients -> pack_into(sent)), each launch `after` the one before it. That which
    scatters is also behind the wait for what the step before has left of this bucket, as others may still be sent the
    share in this memory. Does nothing where something would be overwritten before that.
    """
    buckets = plan.of_gradients
    launches = [node for node in graph.nodes if node.target is exchange and node.args[-1] in group_names]
    assert len(launches) == 2 * len(buckets), f"{len(launches)} exchanges of {len(buckets)} buckets"
    arrived = _awaited_inputs(graph)  # what the step before has left under way
    count = len(buckets)
    if not _are_awaited_before(arrived, launches[:count][::-1]):
        return
    awaited = [[node] for node in arrived[::-1]] or [list[Node]()] * count
    of_bucket = {bucket: (memory[n::count], awaited[n]) for n, bucket in enumerate(buckets)}
    earlier = _launched_before(launches, group_names)
    instead = dict[Node, Node]()  # of a launch that has been replaced
    for launch, bucket in zip(launches, (*buckets, *(reversed(buckets) if arrived else buckets)), strict=True):
        (sent, received, share), before = of_bucket[bucket]
        (filled,) = launch.all_input_nodes
        _, _, gathers, number, group_name = launch.args
        parts: Sequence[Node] = filled.args[0] if filled.target in (_CAT, pack) else [filled]
        after = [instead.get(earlier[launch], earlier[launch])] if launch in earlier else []
        after += [] if gathers else before
        with graph.inserting_before(launch):
            if gathers or bucket.whole:
                packed = emit(graph, pack_into, [*parts], share if gathers else sent)
            else:
                emit(graph, fill_rows, [*parts], sent, bucket.ranks)
                packed = sent
            emit(graph, exchange_into, packed, received, gathers, number, after, group_name)
        instead[launch] = received
        launch.replace_all_uses_with(received)
        graph.erase_node(launch)
        graph.output_node().replace_input_with(filled, share)
        if not filled.users:
            graph.erase_node(filled)


def _are_awaited_before(arrived: Sequence[Node], scatters: Sequence[Node]) -> bool:
    place = {node: number for number, node in enumerate(scatters[0].graph.nodes)}
    return all(
        any(is_wait(user) and place[user] < place[scatter] for user in one.users)
        for one, scatter in zip(arrived, scatters, strict=bool(arrived))
    )


def _launched_before(launches: Sequence[Node], group_names: Sequence[str]) -> dict[Node, Node]:
    """For each of these launches the one before it: another of them, or that of the riders or of other numbers."""
    every = [node for node in launches[0].graph.nodes if any(is_launch(node, name) for name in group_names)]
    return {later: earlier for earlier, later in itertools.pairwise(every)}


def _awaited_inputs(graph: Graph) -> list[Node]:
    return [node for node in graph.find_nodes(op="placeholder") if any(map(is_wait, node.users))]
