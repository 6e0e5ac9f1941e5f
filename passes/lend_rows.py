"""Memory that is kept for the buckets of a scattered plan: what is sent of each, and what comes.

On the CPU memory that was freed and comes back costs a page fault for every 4 KiB (docs/benchmarks.md, "Flat buffers
that stay"): a seventh of the step of a GPT on two ranks, of whose buckets each all-to-all took new memory.
"""

import itertools
from collections.abc import Mapping, Sequence

import torch
from torch.fx import Graph, Node

from compiled_ddp.passes.graph_edit import emit, is_view_of, results_of
from compiled_ddp.passes.ops import (
    all_to_all,
    all_to_all_into,
    fill_rows,
    is_launch,
    is_wait,
    optimizer_step_in_place,
    pack_into,
    put_together_in_place,
)
from compiled_ddp.plan import Bucket, BucketPlan


def lent_memory(plan: BucketPlan) -> tuple[Bucket, ...]:
    """For each tensor that graphs are lent the bucket that it is for, and as large as: of all, or none.

    What is sent of each bucket, then what comes; and of buckets that are whole, in which gradients may be produced at
    any time, then what is gathered.
    """
    own = plan.of_gradients
    return own * (3 if own[0].whole else 2) if all(bucket.ranks > 1 and bucket.kept for bucket in own) else ()


def lend_rows(graph: Graph, plan: BucketPlan, *, memory: Sequence[Node], group_names: Sequence[str]) -> None:
    """Let what is scattered of a bucket, and then what is gathered, be sent from and come into lent memory.

    That are inputs which nothing reads yet, those of `lent_memory`. Assumes that nothing is moved any more, and that
    each bucket is scattered once, in the order of the plan, and gathered once, of the same dtype: in the same order, or
    in that of `buckets_to_gather` where the graph begins with these. Then

        rows -> cat -> all_to_all -> wait                  parts -> repeated -> all_to_all

    become

        rows -> fill_rows(sent), all_to_all_into(sent, received), received -> wait

    and of a bucket that is whole

        gradients -> pack -> all_to_all -> wait            parts -> repeated -> all_to_all

    become

        gradients -> pack_into(sent), all_to_all_into(sent, received), received -> wait
        parts -> fill_rows(received), all_to_all_into(received, gathered)

    each launch `after` the one before it, and behind what reads of this bucket what the step before has left in this
    memory, by which a compiler knows their order. Does nothing where something would be overwritten before it is read.
    """
    buckets = plan.of_gradients
    launches = [node for node in graph.nodes if node.target is all_to_all and node.args[-1] in group_names]
    assert len(launches) == 2 * len(buckets), f"{len(launches)} all-to-alls of {len(buckets)} buckets"
    count = len(buckets)
    arrived = _awaited_inputs(graph)  # what the step before has left under way, in this memory
    reads = [_read_of(one) for one in arrived[::-1]] or [dict[Node, Node]()] * count
    if not _are_before(reads, launches[:count]):
        return
    gathered = [*reversed(buckets)] if arrived else buckets
    of_bucket = {bucket: (memory[n::count], read) for n, (bucket, read) in enumerate(zip(buckets, reads, strict=True))}
    earlier = _launched_before(launches, group_names)
    instead = dict[Node, Node]()  # of a launch that has been replaced
    for number, (bucket, launch) in enumerate(zip((*buckets, *gathered), launches, strict=True)):
        (lent, read), gathers = of_bucket[bucket], number >= count
        sent, received = lent[-2:] if gathers else lent[:2]
        before = [] if gathers else [*read.values()]
        (filled,) = launch.all_input_nodes
        with graph.inserting_before(launch):
            packed = _fill(graph, filled, sent, bucket, before, repeats=gathers)
            if launch in earlier:
                before.append(instead.get(earlier[launch], earlier[launch]))
            emit(graph, all_to_all_into, packed, received, gathers, before, launch.args[-1])
        instead[launch] = received
        if not gathers:
            _read_by_rows(graph, launch, bucket.ranks)
        for node, memory_of_it in ((launch, received), (filled, sent)):  # that by the graph's outputs
            node.replace_all_uses_with(memory_of_it)
            graph.erase_node(node)


def _fill(graph: Graph, filled: Node, into: Node, bucket: Bucket, after: Sequence[Node], *, repeats: bool) -> Node:
    """Let `into` be what is `filled` now; returns what is to be sent."""
    if bucket.whole and not repeats:
        (pack,) = filled.all_input_nodes
        pack.target, pack.args = pack_into, (pack.args[0], into)
        return pack
    emit(graph, fill_rows, [*filled.args[0]], into, bucket.ranks, repeats, after)
    return into


def _read_of(arrived: Node) -> dict[Node, Node]:
    """What reads a bucket that has arrived, or awaits it alone, each with something that is there when it has."""
    (wait,) = (user for user in arrived.users if is_wait(user))
    found, ahead = dict[Node, Node](), [wait]
    for node in ahead:  # which grows
        for user in node.users:
            if user.target in _PARAMETERS_OF:
                found[user] = user.args[_PARAMETERS_OF[user.target]][0]
            elif is_view_of(user, node):
                ahead.append(user)
            else:
                found[user] = next(iter(results_of(user).values()), user)
    return found or {wait: wait}


_PARAMETERS_OF = {put_together_in_place: 2, optimizer_step_in_place: 0}  # their places among the arguments


def _are_before(reads: Sequence[Mapping[Node, Node]], launches: Sequence[Node]) -> bool:
    """Whether that stands before anything of the same bucket is sent."""
    place = {node: number for number, node in enumerate(launches[0].graph.nodes)}
    return all(
        place[node] < place[launch.all_input_nodes[0]]
        for read, launch in zip(reads, launches, strict=True)
        for node in (*read, *read.values())
    )


def _launched_before(launches: Sequence[Node], group_names: Sequence[str]) -> dict[Node, Node]:
    """For each of these launches the one before it: another of them, or that of the riders or of other numbers."""
    every = [node for node in launches[0].graph.nodes if any(is_launch(node, name) for name in group_names)]
    return {later: earlier for earlier, later in itertools.pairwise(every)}


def _read_by_rows(graph: Graph, launch: Node, ranks: int) -> None:
    (wait,) = launch.users
    with graph.inserting_after(wait):
        matrix = emit(graph, torch.ops.aten.view.default, wait, [ranks, -1])
    wait.replace_all_uses_with(matrix, delete_user_cb=lambda user: user is not matrix)


def _awaited_inputs(graph: Graph) -> list[Node]:
    return [node for node in graph.find_nodes(op="placeholder") if any(map(is_wait, node.users))]
