"""Memory that is kept for the buckets of a scattered plan: what is sent of each, and what comes.

On the CPU memory that was freed and comes back costs a page fault for every 4 KiB (docs/benchmarks.md, "Flat buffers
that stay"): a fifth of the step of a GPT on two ranks, of whose buckets each all-to-all took new memory.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from compiled_ddp.passes.graph_edit import emit
from compiled_ddp.passes.ops import all_to_all, all_to_all_into, fill_rows, is_wait
from compiled_ddp.plan import Bucket, BucketPlan


def lent_buckets(plan: BucketPlan) -> tuple[Bucket, ...]:
    """Those that graphs are lent memory for, twice as much as they have."""
    return tuple(bucket for bucket in plan.of_gradients if bucket.ranks > 1 and bucket.kept)


@dataclass(frozen=True)
class Lent:
    """The memory of one bucket: inputs of the graph, which nothing reads yet."""

    sent: Node
    received: Node
    arrived: Node | None = None  # what the step before has left under way, whose rows may be in `sent`


def lend_rows(graph: Graph, plan: BucketPlan, *, memory: Sequence[Node], group_names: Sequence[str]) -> None:
    """Let what is scattered of a bucket, and then what is gathered, be sent from and come into lent memory.

    That are inputs which nothing reads yet: for `lent_buckets` what is sent, and for all of them again what comes.
    Assumes that nothing is moved any more, and that each bucket is scattered once, in the order of the plan, and
    gathered once: in the same order, or in that of `buckets_to_gather` where the graph begins with these. Then

        rows -> cat -> all_to_all -> wait                  parts -> repeated -> all_to_all

    become

        rows -> fill_rows(sent), all_to_all_into(sent, received), received -> wait

    A bucket keeps its own memory where it would be filled before what the step before has sent of it is there.
    """
    buckets, lent = plan.of_gradients, lent_buckets(plan)
    launches = [node for node in graph.nodes if node.target is all_to_all and node.args[-1] in group_names]
    assert len(launches) == 2 * len(buckets), f"{len(launches)} all-to-alls of {len(buckets)} buckets"
    scatters, gathers = launches[: len(buckets)], launches[len(buckets) :]
    arrived = _awaited_inputs(graph)
    if arrived:
        arrived, gathers = arrived[::-1], gathers[::-1]
    place = {node: number for number, node in enumerate(graph.nodes)}
    memory_of = {
        bucket: Lent(sent, received, arrived[buckets.index(bucket)] if arrived else None)
        for bucket, sent, received in zip(lent, memory[: len(lent)], memory[len(lent) :], strict=True)
    }
    for bucket, scatter, gather in zip(buckets, scatters, gathers, strict=True):
        own = memory_of.get(bucket)
        if own is None or not _is_awaited_before(own.arrived, scatter, place):
            continue
        for launch, repeats in ((scatter, False), (gather, True)):
            _launch_into(graph, launch, own, bucket.ranks, repeats=repeats)


def _is_awaited_before(arrived: Node | None, scatter: Node, place: Mapping[Node, int]) -> bool:
    if arrived is None:
        return True
    filled = scatter.all_input_nodes[0]
    return any(is_wait(user) and place[user] < place[filled] for user in arrived.users)


def _launch_into(graph: Graph, launch: Node, memory: Lent, ranks: int, *, repeats: bool) -> None:
    (sent,) = launch.all_input_nodes
    parts: Sequence[Node] = sent.args[0]  # type: ignore[assignment]
    with graph.inserting_before(launch):
        emit(graph, fill_rows, [*parts], memory.sent, ranks, repeats, memory.arrived)
        emit(graph, all_to_all_into, memory.sent, memory.received, repeats, launch.args[-1])
    if not repeats:  # which is read by rows
        (wait,) = launch.users
        with graph.inserting_after(wait):
            matrix = emit(graph, torch.ops.aten.view.default, wait, [ranks, -1])
        wait.replace_all_uses_with(matrix, delete_user_cb=lambda user: user is not matrix)
    launch.replace_all_uses_with(memory.received)
    graph.erase_node(launch)
    sent.replace_all_uses_with(memory.sent)  # by the graph's outputs
    graph.erase_node(sent)


def _awaited_inputs(graph: Graph) -> list[Node]:
    """What the step before has left under way."""
    return [node for node in graph.find_nodes(op="placeholder") if any(map(is_wait, node.users))]
