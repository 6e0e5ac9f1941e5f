"""Memory that is kept for the buckets of a scattered plan: what is sent of each, and what comes.

On the CPU memory that was freed and comes back costs a page fault for every 4 KiB (docs/benchmarks.md, "Flat buffers
that stay"): a seventh of the step of a GPT on two ranks, of whose buckets each all-to-all took new memory.
"""

import itertools
from collections.abc import Sequence

import torch
from torch.fx import Graph, Node

from compiled_ddp.passes.graph_edit import emit
from compiled_ddp.passes.ops import all_to_all, all_to_all_into, fill_rows, is_launch, is_wait
from compiled_ddp.plan import Bucket, BucketPlan


def lent_buckets(plan: BucketPlan) -> tuple[Bucket, ...]:
    """Those that graphs are lent memory for, twice as much as they have: all, or none."""
    own = plan.of_gradients
    return own if all(bucket.ranks > 1 and bucket.kept for bucket in own) else ()


def lend_rows(graph: Graph, plan: BucketPlan, *, memory: Sequence[Node], group_names: Sequence[str]) -> None:
    """Let what is scattered of a bucket, and then what is gathered, be sent from and come into lent memory.

    That are inputs which nothing reads yet: for `lent_buckets` what is sent, and for all of them again what comes.
    Assumes that nothing is moved any more, and that each bucket is scattered once, in the order of the plan, and
    gathered once, of the same dtype: in the same order, or in that of `buckets_to_gather` where the graph begins with
    these. Then

        rows -> cat -> all_to_all -> wait                  parts -> repeated -> all_to_all

    become

        rows -> fill_rows(sent), all_to_all_into(sent, received), received -> wait

    each launch `after` the one before it, by which a compiler knows their order. Does nothing where a bucket would be
    filled before what the step before has sent of it is there.
    """
    buckets = plan.of_gradients
    launches = [node for node in graph.nodes if node.target is all_to_all and node.args[-1] in group_names]
    assert len(launches) == 2 * len(buckets), f"{len(launches)} all-to-alls of {len(buckets)} buckets"
    arrived = _awaited_inputs(graph)  # what the step before has left under way: its rows may still be in what is sent
    if not _are_awaited_before(arrived, launches[: len(buckets)][::-1]):
        return
    gathered = [*reversed(buckets)] if arrived else buckets
    count = len(buckets)
    memory_of = zip(memory[:count], memory[count:], arrived[::-1] or itertools.repeat(None, count), strict=True)
    of_bucket = dict(zip(buckets, memory_of, strict=True))
    earlier = _launched_before(launches, group_names)
    instead = dict[Node, Node]()  # of a launch that has been replaced
    for number, (bucket, launch) in enumerate(zip((*buckets, *gathered), launches, strict=True)):
        sent, received, before = of_bucket[bucket]
        gathers = number >= count
        (filled,) = launch.all_input_nodes
        parts: Sequence[Node] = filled.args[0]
        with graph.inserting_before(launch):
            emit(graph, fill_rows, [*parts], sent, bucket.ranks, gathers, before)
            after = instead.get(earlier[launch], earlier[launch]) if launch in earlier else None
            emit(graph, all_to_all_into, sent, received, gathers, after, launch.args[-1])
        instead[launch] = received
        if not gathers:
            _read_by_rows(graph, launch, bucket.ranks)
        for node, memory_of_it in ((launch, received), (filled, sent)):  # that by the graph's outputs
            node.replace_all_uses_with(memory_of_it)
            graph.erase_node(node)


def _are_awaited_before(arrived: Sequence[Node], scatters: Sequence[Node]) -> bool:
    place = {node: number for number, node in enumerate(scatters[0].graph.nodes)}
    return all(
        any(is_wait(user) and place[user] < place[scatter.all_input_nodes[0]] for user in one.users)
        for one, scatter in zip(arrived, scatters, strict=bool(arrived))
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
