"""Computing values of a step again where a derivative reads them, instead of keeping them (Chen et al., 2016)."""

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from compiled_ddp.passes.graph_edit import emit
from compiled_ddp.passes.ops import sum_over_ranks
from compiled_ddp.passes.schedule_collectives import draws_random_numbers

# What a node's meta["custom"] says: the number of its region, and which of the region's results it is a part of.
REGION, RESULT = "compiled_ddp.region", "compiled_ddp.result"

torch.library.define("compiled_ddp::recompute_after", "(Tensor[] inputs, Tensor after) -> Tensor[]")


@torch.library.impl("compiled_ddp::recompute_after", "CompositeExplicitAutograd")
def _recompute_after(inputs: Sequence[torch.Tensor], after: torch.Tensor) -> list[torch.Tensor]:
    """The inputs of a recomputation, which no compiler can tell to be those of the computation before `after`."""
    return [value.clone() for value in inputs]


@torch.library.register_fake("compiled_ddp::recompute_after")
def _recompute_after_fake(inputs: Sequence[torch.Tensor], after: torch.Tensor) -> list[torch.Tensor]:
    return [value.clone() for value in inputs]


recompute_after = torch.ops.compiled_ddp.recompute_after.default


def recompute_regions(graph: Graph) -> None:
    """Let readers outside of a region read copies of its nodes, which stand before the first of those readers.

    Assumes a graph without mutations, but for its tail, in the order in which it was traced, whose nodes have `REGION`
    in their meta. A region's results, what it communicates and what it draws are kept and read as they are. So

        input -> a -> b -> result -> ... -> gradient -> reader of a

    becomes

        input -> a -> b -> result -> ... -> gradient
                                               |
        input -----------------------> recompute_after -> copy of a -> reader

    Inputs of the graph are read as they are, as they stay in any case, unless a region reads nothing else.

    Does nothing with a region whose nodes are read by nobody else, or by nobody behind what its results lead to.
    """
    for number in sorted(
        {number for node in graph.nodes if (number := _label(node, REGION)) is not None}, reverse=True
    ):
        _recompute(graph, [node for node in graph.nodes if _label(node, REGION) == number])


def _recompute(graph: Graph, region: Sequence[Node]) -> None:
    inside = set(region)
    kept = _kept(region)
    readers = {user: None for node in region if node not in kept for user in node.users if user not in inside}
    nodes = list(graph.nodes)
    first = next((node for node in nodes if node in readers), None)
    after = None if first is None else _last_descendant(nodes[: nodes.index(first)], kept, inside)
    if first is None or after is None:
        return
    read = [node for node in region if node not in kept and any(user in readers for user in node.users)]
    again = _with_what_they_need(read, inside - kept)
    copies = _delayed(graph, first, after, _inputs(node for node in region if node in again))
    with graph.inserting_before(first):
        for node in region:
            if node in again:
                copies[node] = graph.node_copy(node, lambda needed: copies.get(needed, needed))
                copies[node].meta["custom"] = {}
    for reader in readers:
        for node in read:
            reader.replace_input_with(node, copies[node])


def _label(node: Node, name: str) -> Any:
    return node.meta.get("custom", {}).get(name)


def _kept(region: Sequence[Node]) -> set[Node]:
    """The last node of each result, and what would not be the same again: collectives, draws of default generators."""
    results = {_label(node, RESULT): node for node in region if _label(node, RESULT) is not None}
    kept = set(results.values())
    for node in region:
        collective = node.target is sum_over_ranks or getattr(node.target, "namespace", "") == "_c10d_functional"
        if (
            collective
            or draws_random_numbers(node.target)
            or (node.target is operator.getitem and node.args[0] in kept)
        ):
            kept.add(node)
    return kept


def _last_descendant(nodes: Sequence[Node], ancestors: set[Node], region: set[Node]) -> Node | None:
    """The last of `nodes`, outside of a region, that hangs on one of `ancestors`: the gradient that has come so far."""
    reached = set(ancestors)
    last = None
    for node in nodes:
        if any(needed in reached for needed in node.all_input_nodes):
            reached.add(node)
            if node not in region and isinstance(node.meta.get("val", node), torch.Tensor | Node):
                last = node
    return last


def _with_what_they_need(nodes: Sequence[Node], among: set[Node]) -> set[Node]:
    found: set[Node] = set()
    ahead = list(nodes)
    while ahead:
        node = ahead.pop()
        if node in among and node not in found:
            found.add(node)
            ahead += node.all_input_nodes
    return found


def _inputs(nodes: Iterable[Node]) -> list[Node]:
    """What `nodes` read of other tensors: those that are not inputs of the graph, if there are any."""
    given = list(nodes)
    read = [needed for node in given for needed in node.all_input_nodes if needed not in set(given)]
    read = [node for node in dict.fromkeys(read) if isinstance(node.meta.get("val", node), torch.Tensor | Node)]
    return [node for node in read if node.op != "placeholder"] or read


def _delayed(graph: Graph, before: Node, after: Node, inputs: Sequence[Node]) -> dict[Node, Node]:
    """What stands for each input in a recomputation that begins when `after` is there."""
    with graph.inserting_before(before):
        delayed = emit(graph, recompute_after, list(inputs), after)
        return {node: emit(graph, operator.getitem, delayed, number) for number, node in enumerate(inputs)}
