"""What a captured forward graph tells before anything is compiled: its parameters and the order of their gradients."""

import operator
from collections.abc import Iterable, Sequence

import torch
from torch.fx import Graph, GraphModule, Node

from compiled_ddp import torch_private
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


def outputs_reached(graph: Graph, inputs: Iterable[int]) -> dict[int, frozenset[int]]:
    """Of these inputs, those that reach some of the graph's outputs and not others, with the outputs that they reach.

    A loss that uses none of them leaves the input without a gradient, as in eager mode. Empty where this cannot be
    told: where something that requires a gradient is overwritten, or an operator has code of its own in it.
    """
    if any(_overwrites_differentiable(node) or _is_opaque(node) for node in graph.nodes):
        return {}
    reached: dict[Node, set[int]] = {}
    for node in reversed(graph.nodes):
        if node.op == "output":
            outputs = node.args[0]
            assert isinstance(outputs, Sequence)
            for number, output in enumerate(outputs):
                if isinstance(output, Node) and _differentiable(output):
                    reached.setdefault(output, set()).add(number)
            every = {number for numbers in reached.values() for number in numbers}
        elif node in reached and _differentiable(node):
            for source in _sources(node):
                reached.setdefault(source, set()).update(reached[node])
    placeholders = graph.find_nodes(op="placeholder")
    found = {place: frozenset(reached.get(placeholders[place], ())) for place in inputs}
    return {place: numbers for place, numbers in found.items() if numbers and numbers != every}


_IN_PLACE_OPERATORS = frozenset(
    getattr(operator, name)
    for name in ("setitem", "iadd", "isub", "imul", "imatmul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior")
)


def _overwrites_differentiable(node: Node) -> bool:
    """Whether a node writes to a tensor, through whatever alias, and gradients take part in that."""
    in_place = node.op == "call_function" and node.target in _IN_PLACE_OPERATORS
    if not (in_place or torch_private.overwrites_an_argument(node.target) or _mutates(node)):
        return False
    values = (operand.meta.get("example_value") for operand in (node, *node.all_input_nodes))
    return any(isinstance(value, torch.Tensor) and value.requires_grad for value in values)


# A gradient goes through them to their operands: to all, but for what `_sources` tells.
_LOOKED_THROUGH = ("tag_activation_checkpoint", "autograd_function_apply", "register_hook")


def _is_opaque(node: Node) -> bool:
    return torch_private.name_of_higher_order(node.target) not in ("", *_LOOKED_THROUGH)


def _sources(node: Node) -> Iterable[Node]:
    """The operands that a gradient of `node` may reach."""
    name = torch_private.name_of_higher_order(node.target)
    if name == "register_hook":
        return node.all_input_nodes[:1]  # the others are what the hook reads
    if name != "tag_activation_checkpoint":
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
