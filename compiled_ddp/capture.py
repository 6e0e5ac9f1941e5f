"""What a captured forward graph tells before anything is compiled: its parameters and the order of their gradients."""

from collections.abc import Iterable, Sequence

import torch
from torch.fx import Graph, GraphModule, Node

from compiled_ddp.assignment import assign_buckets
from compiled_ddp.options import Options
from compiled_ddp.plan import BucketPlan, GradientSpec


def gradient_order(graph: Graph, parameter_inputs: Sequence[int]) -> list[int]:
    """Graph inputs in the order in which backward completes their gradients.

    Backward runs the forward graph in reverse, and a gradient is complete when the earliest reader of its parameter
    has been run backward; so parameters are ordered by their first reader, last first. Parameters with the same
    first reader keep the reverse order of the graph's inputs.
    """
    position = {node: place for place, node in enumerate(graph.nodes)}
    placeholders = graph.find_nodes(op="placeholder")

    def first_read(index: int) -> tuple[int, int]:
        readers: list[Node] = list(placeholders[index].users)
        return min((position[reader] for reader in readers), default=position[placeholders[index]]), index

    return sorted(parameter_inputs, key=first_read, reverse=True)


def without_gradient(graph: Graph) -> set[int]:
    """Graph inputs from which no differentiable path leads to an output: they get no gradient, as in eager mode.

    What cannot be told counts as a path: a value that is no tensor, a node that mutates or has no reader.
    """
    reaching: set[Node] = set()
    sources: set[Node] = set()  # of what is reaching
    for node in reversed(graph.nodes):
        ends = node.op == "output" or not node.users or _mutates(node)
        if _differentiable(node) and (ends or node in sources):
            reaching.add(node)
            sources.update(_sources(node))
    return {place for place, node in enumerate(graph.find_nodes(op="placeholder")) if node not in reaching}


def _sources(node: Node) -> Iterable[Node]:
    """The operands that a gradient of `node` may reach."""
    if node.target is not torch.ops.higher_order.tag_activation_checkpoint:
        return node.all_input_nodes
    body, *operands = node.args
    assert isinstance(body, Node) and isinstance(body.target, str) and node.graph.owning_module is not None
    inside = node.graph.owning_module.get_submodule(body.target)
    assert isinstance(inside, GraphModule)
    dead = without_gradient(inside.graph)
    return [operand for place, operand in enumerate(operands) if place not in dead and isinstance(operand, Node)]


def _differentiable(node: Node) -> bool:
    value = node.meta.get("example_value")
    return value.requires_grad if isinstance(value, torch.Tensor) else True


def _mutates(node: Node) -> bool:
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return node.op.startswith("call_") and (name.endswith("_") or "out" in node.kwargs)


def plan_segment(gradients: Iterable[GradientSpec], options: Options, world_size: int) -> BucketPlan:
    """The buckets of a captured graph whose backward completes `gradients` in this order.

    A function of the graph and of inputs that are equal on every rank.
    """
    return assign_buckets(
        list(gradients),
        capacities_bytes=options.bucket_capacities_bytes,
        world_size=world_size,
        reduction=options.planned_reduction,
        passengers=len(options.piggyback),
    )
