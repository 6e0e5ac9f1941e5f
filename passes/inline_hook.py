"""A communication hook's traced program, put into a backward graph in place of a bucket's all-reduce."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch.fx import Graph, Node

from compiled_ddp.passes.graph_edit import emit, output_values
from compiled_ddp.passes.ops import wait_tensor
from compiled_ddp.passes.schedule_collectives import descendants

_aten = torch.ops.aten
_cat = _aten.cat.default
HOOKS_GROUP = "the ranks of a hook"  # what a program may call its group, until it is in a graph
_MARK = "compiled_ddp_flat_buffer"

# With a scalar, these may be taken of each part before they are laid back to back.
_ELEMENTWISE = (_aten.mul.Tensor, _aten.div.Tensor, torch.ops.prims.convert_element_type.default)


class TracedHook(Protocol):
    """A hook's program for buckets of one size: its graph, and a text that changes whenever that does."""

    graph: Graph
    identity: str


def inline_hook(graph: Graph, hook: Graph, parts: Sequence[Node], state: Sequence[Node]) -> tuple[Node, list[Node]]:
    """Emit `hook` at the graph's insertion point; returns the reduced flat tensor and the nodes of the new state.

    `hook`'s inputs are the flat gradients and the state, its outputs the flat mean and the new state. `parts` are the
    flattened gradients. What the hook does first to every element alike is done to each part, so that it is fused with
    what produces the part:

        part -- cat -- div -- to bfloat16 -- ...     becomes     part -- div -- to bfloat16 -- cat -- ...
    """
    flat, *old = hook.find_nodes(op="placeholder")
    leading = _leading_elementwise(flat)
    for node in leading:
        assert callable(node.target)
        parts = [emit(graph, node.target, part, *node.args[1:]) for part in parts]
    emitted: dict[Node, Node] = dict(zip(old, state, strict=True))
    emitted[leading[-1] if leading else flat] = emit_flat(graph, parts)
    for node in hook.nodes:
        if node.op == "call_function" and node not in leading:
            assert callable(node.target)
            args = torch.fx.node.map_arg(node.args, emitted.__getitem__)
            kwargs = torch.fx.node.map_arg(node.kwargs, emitted.__getitem__)
            emitted[node] = emit(graph, node.target, *args, **kwargs)
    reduced, *new = (emitted[output] for output in output_values(hook) if output is not None)
    return reduced, new


def rounds(launches: Sequence[Node]) -> tuple[list[Node], list[Node]]:
    """The collectives among these that can be launched at once, and those that need a result of one."""
    if not launches:
        return [], []
    nodes = list(launches[0].graph.nodes)
    waits = [node for node in nodes if node.target is wait_tensor and node.args[0] in launches]
    later = descendants(nodes, waits)
    return [each for each in launches if each not in later], [each for each in launches if each in later]


def emit_flat(graph: Graph, parts: Sequence[Node]) -> Node:
    """Emit the concatenation that fills a bucket, by which `flat_buffers` finds it."""
    flat = emit(graph, _cat, list(parts))
    flat.meta[_MARK] = True
    return flat


def flat_buffers(graph: Graph) -> list[Node]:
    """The concatenations that fill the buckets, in launch order."""
    return [node for node in graph.nodes if _MARK in node.meta]


def _leading_elementwise(flat: Node) -> list[Node]:
    chain: list[Node] = []
    node = flat
    while len(node.users) == 1:
        (user,) = node.users
        if user.target not in _ELEMENTWISE or user.args[0] is not node or isinstance(user.args[1], Node):
            break
        chain.append(user)
        node = user
    return chain
