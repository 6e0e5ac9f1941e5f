"""The values that a compiler reads, for the nodes that the passes have left in a graph."""

import torch
from torch.fx import Graph, Node

from compiled_ddp.passes.graph_edit import fake_mode_of


def infer_values(graph: Graph) -> None:
    """Give each new node its fake value (`meta["val"]`).

    Assumes that all passes that emit nodes have run: most of what they emit is merged into other nodes again, and a
    fake value costs ten times as much as the node itself.

    Does nothing on a hand-built graph without values.
    """
    with fake_mode_of(graph) as fake:
        if not fake:
            return
        for node in graph.nodes:
            if node.op == "call_function" and "val" not in node.meta and _are_known(node):
                assert callable(node.target)
                args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda producer: producer.meta["val"])
                node.meta["val"] = node.target(*args, **kwargs)


def _are_known(node: Node) -> bool:
    """Whether its inputs have values."""
    return all("val" in producer.meta for producer in node.all_input_nodes)
