"""When collectives are launched and waited for: as early, and as late, as the data allows."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType

import torch
from torch.fx import Graph, Node

from compiled_ddp.passes.ops import is_launch, pack_into, wait_tensor


def schedule_collectives(graph: Graph, *, group_name: str) -> None:
    """Reorder the graph so that each launch follows the last gradient of its bucket, and waits come last.

    Assumes that launches on the group `group_name` stand in the graph in plan order; other collectives are left to
    where the data puts them. Nodes are emitted on demand: for each launch in that
    order what its gradients still need, then the launch itself; then everything else in its old order; then the
    waits and what reads them. A weight gradient therefore runs before the data gradients that only later buckets
    need. Random numbers are drawn in their old order: what each operator draws depends on what was drawn before.

    Leaves the order of nodes as it is, except for the waits, in a graph that mutates something: nothing may move across
    a mutation.
    """
    nodes = list(graph.nodes)
    launches = [node for node in nodes if is_launch(node, group_name)]
    if not launches:
        return
    waits = [node for node in nodes if node.target is wait_tensor and node.args[0] in launches]
    after_wait = descendants(nodes, waits)
    something_mutates = any(mutates(node) for node in nodes)
    order: dict[Node, None] = {node: None for node in nodes if node.op == "placeholder"}
    behind = behind_each_other([node for node in draws(nodes) if node not in after_wait])
    if not something_mutates:
        for launch in launches:
            emit_with_inputs(launch, order, behind)
    for node in nodes:
        if node not in after_wait and node.op != "output":
            emit_with_inputs(node, order, behind)
    order.update(dict.fromkeys(node for node in nodes if node not in order))
    apply_order(graph, list(order))


def emit_with_inputs(node: Node, order: dict[Node, None], behind: Mapping[Node, Node] = MappingProxyType({})) -> None:
    """Append `node` and what it needs, inputs first, to `order` (a stack, as backward graphs are deep).

    A node that is in `behind` needs the other one before it too.
    """
    stack = [node]
    while stack:
        current = stack[-1]
        needed = [*current.all_input_nodes, *([behind[current]] if current in behind else [])]
        missing = [producer for producer in needed if producer not in order]
        if missing:
            stack += reversed(missing)
        else:
            stack.pop()
            order.setdefault(current)


def descendants(nodes: list[Node], roots: list[Node]) -> set[Node]:
    reached = set(roots)
    for node in nodes:
        if any(producer in reached for producer in node.all_input_nodes):
            reached.add(node)
    return reached


def draws(nodes: Sequence[Node]) -> list[Node]:
    """Those that draw random numbers from a default generator, in their order. Each target is asked once."""
    drawing = set(filter(draws_random_numbers, {node.target for node in nodes}))
    return [node for node in nodes if node.target in drawing]


def draws_random_numbers(target: object) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())


def behind_each_other(nodes: Iterable[Node]) -> dict[Node, Node]:
    """Each but the first one with the one before it."""
    return {later: earlier for earlier, later in pairwise(nodes)}


def mutates(node: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    is_lent = node.target is pack_into  # nothing but its result reads that memory: verify_collectives
    return schema is not None and schema.is_mutable and not is_lent


def apply_order(graph: Graph, order: list[Node]) -> None:
    for earlier, later in pairwise(order):
        if earlier.next is not later:
            earlier.append(later)
