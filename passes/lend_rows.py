"""Memory that is kept for the buckets of a scattered plan: what is sent of each, what comes, and a rank's share.

On the CPU memory that was freed and comes back costs a page fault for every 4 KiB (docs/benchmarks.md, "Flat buffers
that stay"): a seventh of the step of a GPT on two ranks, of whose buckets each exchange took new memory.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch.fx import Graph, Node

from compiled_ddp.passes.graph_edit import emit
from compiled_ddp.passes.ops import (
    exchange_of_all,
    exchange_of_all_into,
    exchange_of_sums,
    exchange_of_sums_into,
    fill_rows,
    is_launch,
    is_wait,
    number_of_exchange,
    pack,
    pack_into,
)
from compiled_ddp.plan import Bucket, BucketPlan

_aten = torch.ops.aten


class Lent(NamedTuple):
    """An input of a graph that is memory for a bucket.

    For one that is not scattered that is its flat buffer. For one that is, what is sent, what comes, this rank's own
    row of what comes, which is a part of that, and its share of the sums where these do not lie in the own row.
    """

    bucket: Bucket
    what: Literal["flat", "sent", "received", "own row", "sums"]

    @property
    def numel(self) -> int:
        is_row = self.what in ("own row", "sums")
        return self.bucket.numel // self.bucket.ranks if is_row else self.bucket.numel


def lent_memory(plan: BucketPlan) -> tuple[Lent, ...]:
    """What a graph is lent for a scattered plan; sums of a bucket that is whole lie in its own row."""
    own = plan.of_gradients
    if not all(bucket.ranks > 1 and bucket.kept for bucket in own):
        return ()
    kinds = [[Lent(bucket, "sent"), Lent(bucket, "received"), Lent(bucket, "own row")] for bucket in own]
    return *itertools.chain(*kinds), *(Lent(bucket, "sums") for bucket in own if not bucket.whole)


def lend_rows(graph: Graph, plan: BucketPlan, *, lent: Mapping[Lent, Node], group_names: Sequence[str]) -> None:
    """Let what is scattered of a bucket, and then what is gathered, be sent from and come into lent memory.

    That are inputs which nothing reads yet, those of `lent_memory`. Assumes that nothing is moved any more, and that
    each bucket is scattered once and gathered once, of the same dtype. Then

        rows -> cat -> exchange_of_sums -> wait            parts -> cat -> exchange_of_all

    become

        rows -> fill_rows(sent), exchange_of_sums_into(sent, received, summed), summed -> wait
        parts -> pack_into(own row), exchange_of_all_into(own row, received)

    (of a bucket that is whole: gradients -> pack_into(sent), and sums that are gathered as they are lie in the own
    row), each launch `after` the one before it.
    """
    of_number = {
        number_of_exchange(b.indices, gathers=gathers): b for b in plan.of_gradients for gathers in (False, True)
    }
    exchanges = (exchange_of_sums, exchange_of_all)
    launches = [node for node in graph.nodes if node.target in exchanges and node.args[-1] in group_names]
    assert sorted(node.args[-2] for node in launches) == sorted(of_number), f"{launches} for {of_number}"
    earlier = _launched_before(launches, group_names)
    instead = dict[Node, Node]()  # of a launch that has been replaced
    for launch in launches:
        (source,), (*_, number, name) = launch.all_input_nodes, launch.args
        bucket = of_number[number]
        received, own_row = lent[Lent(bucket, "received")], lent[Lent(bucket, "own row")]
        after = [instead.get(earlier[launch], earlier[launch])] if launch in earlier else []
        with graph.inserting_before(launch):
            if launch.target is exchange_of_sums:
                sent = _filled(graph, source, bucket, lent[Lent(bucket, "sent")])
                instead[launch] = own_row if bucket.whole else lent[Lent(bucket, "sums")]
                emit(graph, exchange_of_sums_into, sent, received, instead[launch], after, name)
            else:
                share = _share(graph, source, bucket, own_row)
                instead[launch] = received
                emit(graph, exchange_of_all_into, share, received, after, name)
                graph.output_node().replace_input_with(source, own_row)
        launch.replace_all_uses_with(instead[launch])
        graph.erase_node(launch)
        if not source.users:
            graph.erase_node(source)


def _parts(sent: Node) -> list[Node]:
    """One behind the other; compilers leave out what puts a single part so."""
    return [*sent.args[0]] if sent.target in (_aten.cat.default, pack) else [sent]  # type: ignore[misc]


def _filled(graph: Graph, source: Node, bucket: Bucket, into: Node) -> Node:
    if bucket.whole:
        return emit(graph, pack_into, _parts(source), into)
    emit(graph, fill_rows, _parts(source), into, bucket.ranks)
    return into


def _share(graph: Graph, source: Node, bucket: Bucket, own_row: Node) -> Node:
    """What this rank has for the others, in its own row: sums that have been awaited may be there already."""
    parts = _parts(source)
    flat: Any = parts[0].args[0] if parts[0].target is _aten.slice.Tensor else parts[0]
    if is_wait(flat) and flat.args[0] is own_row and _are_all_of(flat, bucket.numel // bucket.ranks, parts):
        return flat  # type: ignore[no-any-return]
    return emit(graph, pack_into, parts, own_row)


def _are_all_of(flat: Node, numel: int, parts: Sequence[Node]) -> bool:
    """Whether these are all parts of it, in their order."""
    if [*parts] == [flat]:
        return True
    if any(part.target is not _aten.slice.Tensor or part.args[:2] != (flat, 0) for part in parts):
        return False
    begins, ends = zip(*(part.args[2:4] for part in parts), strict=True)
    return begins[0] == 0 and (*begins[1:], numel) == ends


def _launched_before(launches: Sequence[Node], group_names: Sequence[str]) -> dict[Node, Node]:
    """For each of these launches the one before it: another of them, or that of the riders or of other numbers."""
    every = [node for node in launches[0].graph.nodes if any(is_launch(node, name) for name in group_names)]
    return {later: earlier for earlier, later in itertools.pairwise(every)}
