"""What is done to each gradient on its way into a sum over ranks, done where the gradient is produced."""

import bisect

from torch.fx import Graph, Node

from compiled_ddp.passes.graph_edit import is_elementwise, memory_of, written_arguments
from compiled_ddp.passes.ops import sum_over_ranks
from compiled_ddp.passes.schedule_collectives import mutates


def finish_gradients(graph: Graph) -> None:
    """Move what stands between a gradient and its sum right behind what it needs.

    A step as it was traced does it for one gradient after the other, behind all derivatives: a mean, the sum with what
    micro-batches before have left, what a communication hook does. So

        gradient_1 ... gradient_0, (gradient_0 -> mul -> ...), (gradient_1 -> mul -> ...), sum_over_ranks

    becomes

        gradient_1 -> mul -> ... gradient_0 -> mul -> ..., sum_over_ranks

    Else each would count as ready at the end, and buckets be filled in the order of parameters, of which the first ones
    have their gradients last.

    What goes elsewhere, too, stays where it is, and nothing passes what is written into memory that it reads: a step as
    it was traced holds what users' hooks and losses write, and what derivatives write for themselves, as SiLU's do.
    """
    place = {node: number for number, node in enumerate(graph.nodes)}
    writes = [node for node in graph.nodes if mutates(node)]
    written = {write: _written_by(write) for write in writes}
    latest = dict[Node, Node]()  # by what they need the nodes that were moved behind that last
    for reduction in graph.find_nodes(op="call_function", target=sum_over_ranks):
        for gradient in reduction.args[0]:
            found = _between(gradient, reduction)
            memory = {*map(memory_of, _needed(found))}
            before = writes[: bisect.bisect(writes, place[gradient], key=place.__getitem__)]
            earlier = [write for write in before if _may_meet(written[write], memory)][-1:]
            begin = max(map(place.__getitem__, earlier), default=-1)
            found = {node for node in found if place[node] > begin}
            needed = _needed(found)
            behind = max((*needed, *earlier), key=place.__getitem__, default=gradient)
            if behind.op == "placeholder":
                continue
            for node in sorted(found, key=place.__getitem__):
                latest.get(behind, behind).append(node)
                latest[behind] = node


def _needed(found: set[Node]) -> set[Node]:
    """What these read that is none of them."""
    return {each for node in found for each in node.all_input_nodes if each not in found}


def _written_by(write: Node) -> set[Node | None]:
    """What has made the memory that it mutates; None for what is not known."""
    return {memory_of(each) for each in written_arguments(write.target, write.args, write.kwargs) if each is not None}


def _may_meet(written: set[Node | None], memory: set[Node | None]) -> bool:
    """Inputs of the graph may share theirs."""
    if None in written | memory or not written.isdisjoint(memory):
        return True
    return all(any(node is not None and node.op == "placeholder" for node in each) for each in (written, memory))


def _between(gradient: Node, reduction: Node) -> set[Node]:
    """What is done element by element to a gradient, and leads to this reduction alone."""
    found, ahead = set[Node](), [gradient]
    for node in ahead:  # which grows
        if is_elementwise(node) and all(user is reduction or user in found for user in node.users):
            found.add(node)
            ahead += node.all_input_nodes
    return found
