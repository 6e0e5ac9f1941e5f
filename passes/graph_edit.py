"""What every pass needs to edit a graph: nodes whose metadata is right, and the graph's outputs by position."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node


@contextlib.contextmanager
def fake_mode_of(graph: Graph) -> Iterator[bool]:
    """Enter the mode that the graph's values were traced in; yields False on a hand-built graph without values."""
    for node in graph.nodes:
        mode = getattr(node.meta.get("val"), "fake_mode", None)
        if mode is not None:
            with mode:
                yield True
            return
    yield False


def emit(graph: Graph, op: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
    """Insert a call of `op` at the graph's insertion point, with the fake value that later stages read.

    The value (`meta["val"]`) is computed from the arguments' values; on a hand-built graph without values it is left
    out.
    """
    node = graph.call_function(op, args, kwargs)
    inputs = node.all_input_nodes
    # An op that takes no tensor needs the graph's own fake mode.
    with contextlib.nullcontext(True) if inputs else fake_mode_of(graph) as fake:
        if fake and all("val" in producer.meta for producer in inputs):
            args, kwargs = torch.fx.node.map_arg((args, kwargs), lambda producer: producer.meta["val"])
            node.meta["val"] = op(*args, **kwargs)
    return node


def add_placeholder(graph: Graph, name: str, value: torch.Tensor | None) -> Node:
    """Append an input to the graph, after all others."""
    first_other = next(node for node in graph.nodes if node.op != "placeholder")
    with graph.inserting_before(first_other):
        node = graph.placeholder(name)
    if value is not None:
        node.meta["val"] = value
    return node


def output_values(graph: Graph) -> list[Node | None]:
    """The graph's outputs, by position."""
    (values,) = graph.output_node().args
    assert isinstance(values, Sequence)
    return list(values)  # type: ignore[arg-type]


def set_output_values(graph: Graph, values: Sequence[Node | None]) -> None:
    """Replace the graph's outputs; metadata of the positions there were before stays."""
    graph.output_node().args = (tuple(values),)
