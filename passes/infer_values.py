"""The values of the flat buffers, by which the last pass sees that they are as large as planned."""

import torch
from torch.fx import Graph, Node

from compiled_ddp.passes.graph_edit import fake_mode_of
from compiled_ddp.passes.ops import LAUNCHES


def infer_values(graph: Graph) -> None:
    """Give what each collective launches, and the new nodes that it is made of, their fake values (`meta["val"]`).

    Assumes that all passes that emit nodes have run: most of what they emit is merged into other nodes again, and a
    fake value costs ten times as much as the node itself. Values of results stay unknown for the same reason: a
    compiler infers those of all nodes anew (Inductor of torch 2.11 to 2.14).

    Does nothing on a hand-built graph without values.
    """
    with fake_mode_of(graph) as fake:
        if not fake:
            return
        launched = {source for node in graph.nodes if node.target in LAUNCHES for source in node.all_input_nodes}
        wanted: set[Node] = set()
        for node in reversed(graph.nodes):
            if "val" not in node.meta and (node in launched or not wanted.isdisjoint(node.users)):
                wanted.add(node)
        for node in graph.nodes:
            if node in wanted and _are_known(node):
                assert callable(node.target)
                args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda producer: producer.meta["val"])
                node.meta["val"] = node.target(*args, **kwargs)


def _are_known(node: Node) -> bool:
    """Whether its inputs have values."""
    return all("val" in producer.meta for producer in node.all_input_nodes)
