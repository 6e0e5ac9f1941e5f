"""When the collectives of a whole step are launched and waited for: as early, and as late, as the data allows."""

import heapq
from collections.abc import Mapping, Sequence

from torch.fx import Graph, Node

from compiled_ddp.passes.ops import is_launch, is_wait, meets_other_ranks, optimizer_step, put_together, wait_tensor
from compiled_ddp.passes.schedule_collectives import (
    apply_order,
    behind_each_other,
    descendants,
    draws,
    emit_with_inputs,
    mutates,
)


def schedule_step(graph: Graph, *, group_names: Sequence[str], following: Sequence[Node] = ()) -> None:
    """Reorder a step so that launches follow the last gradient of their buckets, and waits stand where they are read.

    Assumes that what mutates an input stands behind everything else, as AOTAutograd leaves it. Launches come first, in
    the order of `group_names` and on each of them in that of the graph, each behind what it needs, which keeps its
    order. Then comes what hangs on no wait; then each wait, in the order of the launches, with all that can be computed
    once it is over: the updates of a bucket's parameters run while later buckets are on their way. Launches `following`
    them, of what comes of these waits, are made in this order as soon as that is there, and awaited last, if the graph
    awaits them. Waits for what is an input come right before what reads them. Other collectives, a loss's, keep their
    order, and so do draws of random numbers, before the waits and behind them.

    Leaves the graph as it is where something else is mutated, where nothing is launched, and where these orders exclude
    each other: draws that other collectives bring behind a draw that follows a wait.
    """
    nodes = list(graph.nodes)
    late = set(following)
    launches = [node for name in group_names for node in nodes if is_launch(node, name) and node not in late]
    tail = _mutating_tail(nodes)
    if not launches or tail is None:
        return
    order: dict[Node, None] = {node: None for node in nodes if node.op == "placeholder"}
    ours = dict.fromkeys((*launches, *following))
    waits = {launch: user for launch in ours for user in launch.users if user.target is wait_tensor}
    others = [node for node in nodes if meets_other_ranks(node) and not is_wait(node) and node not in ours]
    after_wait = descendants(nodes, [waits[launch] for launch in launches])
    drawn = sorted(draws(nodes), key=after_wait.__contains__)
    behind = behind_each_other(others) | behind_each_other(following) | behind_each_other(drawn)
    if _goes_round(nodes, behind):
        return
    place, arrivals = {node: number for number, node in enumerate(nodes)}, _arrivals(nodes)
    for launch in launches:
        for node in sorted(_missing(launch, order) - arrivals, key=place.__getitem__):
            emit_with_inputs(node, order, behind)
    rest = _Rest(place, order, behind, held_back={*tail, *waits.values()})
    rest.emit_ready()
    for wait in waits.values():
        rest.emit(wait)
        rest.emit_ready()
    order.update(dict.fromkeys(node for node in nodes if node not in order and node not in tail))
    order.update(dict.fromkeys(tail))
    apply_order(graph, list(order))


def _arrivals(nodes: Sequence[Node]) -> set[Node]:
    """Waits for inputs of the graph, and what is made of these alone."""
    found = set[Node]()
    for node in nodes:
        inputs = node.all_input_nodes
        if node.target is put_together:
            inputs = inputs[:1]
        elif node.target is optimizer_step:
            inputs = [*node.args[1]]  # type: ignore[misc]
        is_first = is_wait(node) and inputs[0].op == "placeholder"
        if is_first or (inputs and found.issuperset(inputs)):
            found.add(node)
    return found


def _missing(launch: Node, order: Mapping[Node, None]) -> set[Node]:
    """The launch, and what it needs that is not in `order`."""
    found, stack = {launch}, [launch]
    while stack:
        needed = [each for each in stack.pop().all_input_nodes if each not in order and each not in found]
        found.update(needed)
        stack += needed
    return found


def _mutating_tail(nodes: Sequence[Node]) -> dict[Node, None] | None:
    """What mutates, and the output: the end of the graph. None where that is not all."""
    first = next((number for number, node in enumerate(nodes) if mutates(node)), len(nodes) - 1)
    tail = nodes[first:]
    return dict.fromkeys(tail) if all(mutates(node) or node.op == "output" for node in tail) else None


def _goes_round(nodes: Sequence[Node], behind: Mapping[Node, Node]) -> bool:
    """Whether a node must stand behind itself, by what it reads and what it is `behind`."""
    follower = {earlier: later for later, earlier in behind.items()}
    missing = {node: len(node.all_input_nodes) + (node in behind) for node in nodes}
    ready = [node for node in nodes if not missing[node]]
    for node in ready:  # which grows
        for later in (*node.users, *([follower[node]] if node in follower else ())):
            missing[later] -= 1
            if not missing[later]:
                ready.append(later)
    return len(ready) < len(nodes)


class _Rest:
    """What is not in `order` yet: each node with the number of those missing there that it must stand behind."""

    def __init__(
        self, place: Mapping[Node, int], order: dict[Node, None], behind: Mapping[Node, Node], *, held_back: set[Node]
    ) -> None:
        """All nodes of the graph, in their old order, each with its `place` in that."""
        nodes = [*place]
        self._nodes, self._place, self._order, self._held_back = nodes, place, order, held_back
        self._follower = {earlier: later for later, earlier in behind.items()}
        self._missing = {node: 0 for node in nodes if node not in order}
        for node in nodes:
            if node not in order:
                for later in self._those_behind(node):
                    self._missing[later] += 1
        # A heap of the places of the nodes whose inputs are all there.
        self._ready = [self._place[node] for node in self._missing if self._is_ready(node)]

    def _those_behind(self, node: Node) -> set[Node]:
        follower = self._follower.get(node)
        return {*node.users} if follower is None else {*node.users, follower}

    def _is_ready(self, node: Node) -> bool:
        return self._missing[node] == 0 and node not in self._held_back

    def emit_ready(self) -> None:
        """Append, in their old order, all nodes whose inputs are there."""
        while self._ready:
            self.emit(self._nodes[heapq.heappop(self._ready)])

    def emit(self, node: Node) -> None:
        """Append a node, unless it is there."""
        if node in self._order:
            return
        self._order[node] = None
        for later in self._those_behind(node):
            self._missing[later] -= 1
            if self._is_ready(later):
                heapq.heappush(self._ready, self._place[later])
