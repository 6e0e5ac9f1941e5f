"""No second copy of parameters and of an optimizer's state: they are updated where they are."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch._ops import OpOverload
from torch.fx import Graph, Node

from compiled_ddp.passes.graph_edit import copies_into, emit, is_view_of, results_of, returns_views
from compiled_ddp.passes.ops import optimizer_step, optimizer_step_in_place

_VIEW = torch.ops.aten.view.default


def update_in_place(graph: Graph) -> None:
    """Let the updates of a step write into what they are given, where nothing reads that behind them.

    Assumes that nothing is moved any more. With inputs of the graph, and memory that it has made itself,

        optimizer_step(input, made) -> getitem -> copy_(input, getitem)
                                    -> getitem -> ...

    becomes

        optimizer_step_(input, made), made -> ...

    where the first of these results was read. Views in between do not matter. An update stays as it is that returns
    what becomes of an input to anything else than this copy.
    """
    for node in graph.find_nodes(op="call_function", target=optimizer_step):
        params, _, state, steps, *_ = node.args
        results = results_of(node)
        updates = [_update(into, results.get(number)) for number, into in enumerate((*params, *state, *steps))]
        written = [each for each in updates if each is not None]
        place = {other: number for number, other in enumerate(graph.nodes)}
        first = min((reader for each in written for reader in each.readers), key=place.__getitem__, default=node.next)
        others = (place[other] for each in written for other in each.others(node))
        if len(written) < len(updates) or any(other >= place[first] for other in others):
            continue
        with graph.inserting_before(first):
            emit(graph, optimizer_step_in_place, *node.args)
        for each in written:
            each.leave_in_place(graph)
        graph.erase_node(node)


@dataclass(frozen=True)
class _Update:
    """`result` is what becomes of `into`, a view of `memory`, and `written` by these nodes where that is an input."""

    into: Node
    memory: Node
    result: Node | None
    written: list[Node]

    @property
    def readers(self) -> list[Node]:
        """What reads the result."""
        if self.written:
            return self.written[-1:]
        return [] if self.result is None else [*self.result.users]

    def others(self, update: Node) -> Iterator[Node]:
        """What reads the memory besides the update, by whatever view."""
        ahead = [self.memory]
        for node in ahead:  # which grows
            for user in node.users:
                if user is not update and user not in self.written:
                    yield user
                    if is_view_of(user, node):
                        ahead.append(user)

    def leave_in_place(self, graph: Graph) -> None:
        for node in reversed(self.written):
            graph.erase_node(node)
        if self.result is not None and not self.written:
            self.result.replace_all_uses_with(self.into)
            graph.erase_node(self.result)


def _update(into: Node, result: Node | None) -> _Update | None:
    """None where it cannot be in place."""
    memory = into
    while memory.target is _VIEW:
        (memory,) = memory.all_input_nodes
    if memory.op != "placeholder":
        is_made_here = isinstance(memory.target, OpOverload) and not returns_views(memory)
        return _Update(into, memory, result, []) if is_made_here else None
    written = [] if result is None else _written(result, memory)
    return _Update(into, memory, result, written) if written else None


def _written(result: Node, into: Node) -> list[Node]:
    """The nodes from `result` to where it is written `into` an input, and goes nowhere else; empty if not so."""
    nodes = [result]
    while len(nodes[-1].users) == 1 and next(iter(nodes[-1].users)).target is _VIEW:
        nodes += nodes[-1].users
    copies = copies_into(nodes[-1], into)
    return [*nodes, *copies] if copies and all(len(each.users) == 1 for each in (*nodes, *copies[:-1])) else []
