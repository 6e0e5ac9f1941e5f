"""When the collectives of a whole step are launched and waited for: as early, and as late, as the data allows."""

from collections.abc import Sequence

from torch.fx import Graph, Node

from compiled_ddp.passes.ops import is_launch, wait_tensor
from compiled_ddp.passes.schedule_collectives import apply_order, emit_with_inputs, mutates


def schedule_step(graph: Graph, *, group_names: Sequence[str]) -> None:
    """Reorder a step so that launches follow the last gradient of their buckets, and waits stand where they are read.

    Assumes that what mutates an input stands behind everything else, as AOTAutograd leaves it. Launches come first, in
    the order of `group_names` and on each of them in that of the graph, with what they need. Then comes what hangs on
    no wait; then each wait, in the order of the launches, with all that can be computed once it is over: the updates of
    a bucket's parameters run while later buckets are on their way.

    Leaves the graph as it is where something else is mutated, and where nothing is launched.
    """
    nodes = list(graph.nodes)
    launches = [node for name in group_names for node in nodes if is_launch(node, name)]
    tail = _mutating_tail(nodes)
    if not launches or tail is None:
        return
    order: dict[Node, None] = {node: None for node in nodes if node.op == "placeholder"}
    for launch in launches:
        emit_with_inputs(launch, order)
    waits = {node.args[0]: node for node in nodes if node.target is wait_tensor}
    _emit_ready(nodes, order, held_back={*tail, *waits.values()})
    for launch in launches:
        order.setdefault(waits[launch])
        _emit_ready(nodes, order, held_back={*tail, *waits.values()})
    order.update(dict.fromkeys(node for node in nodes if node not in order and node not in tail))
    order.update(dict.fromkeys(tail))
    apply_order(graph, list(order))


def _mutating_tail(nodes: Sequence[Node]) -> dict[Node, None] | None:
    """What mutates, and the output: the end of the graph. None where that is not all."""
    first = next((number for number, node in enumerate(nodes) if mutates(node)), len(nodes) - 1)
    tail = nodes[first:]
    return dict.fromkeys(tail) if all(mutates(node) or node.op == "output" for node in tail) else None


def _emit_ready(nodes: Sequence[Node], order: dict[Node, None], *, held_back: set[Node]) -> None:
    """Append, in their old order, all nodes whose inputs are there."""
    for node in nodes:
        if node not in order and node not in held_back and all(needed in order for needed in node.all_input_nodes):
            order[node] = None
