"""No second copy of parameters and of an optimizer's state: they are updated where they are."""

import itertools

from torch.fx import Graph, Node

from compiled_ddp.passes.graph_edit import copies_into, emit, results_of
from compiled_ddp.passes.ops import optimizer_step, optimizer_step_in_place


def update_in_place(graph: Graph) -> None:
    """Let the updates of a step write into the graph's inputs, where all that is done with their results is that.

    Assumes that what mutates an input stands behind everything else, as AOTAutograd leaves it. Then

        optimizer_step(inputs) -> getitem -> copy_(input, getitem)        becomes        optimizer_step_(inputs)

    where the first of these copies stood. An update with a result that goes elsewhere stays as it is.
    """
    place = {node: number for number, node in enumerate(graph.nodes)}
    for node in graph.find_nodes(op="call_function", target=optimizer_step):
        params, _, state, steps, *_ = node.args
        updated: list[Node] = [*params, *state, *steps]
        results = results_of(node)
        chains = [_written(results[number], into) for number, into in enumerate(updated) if number in results]
        if len(chains) < len(updated) or not all(chains):
            continue
        with graph.inserting_before(min((chain[-1] for chain in chains), key=place.__getitem__)):
            emit(graph, optimizer_step_in_place, *node.args)
        for written in itertools.chain.from_iterable(reversed(chain) for chain in chains):
            graph.erase_node(written)
        graph.erase_node(node)


def _written(result: Node, into: Node) -> list[Node]:
    """The nodes from `result` to where it is written `into` an input, and goes nowhere else; empty if not so."""
    copies = copies_into(result, into)
    is_all = all(len(each.users) == 1 for each in (result, *copies[:-1]))
    return [result, *copies] if copies and is_all else []
