"""What a captured forward graph tells before anything is compiled: its parameters and the order of their gradients."""

from collections.abc import Mapping, Sequence

import torch
from torch.fx import Graph, Node

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


def only_detached(graph: Graph) -> set[int]:
    """Graph inputs that are read through `detach` alone: they get no gradient, as in eager mode."""

    def is_detach(node: Node) -> bool:
        return node.target in ("detach", torch.Tensor.detach, torch.detach)

    placeholders = enumerate(graph.find_nodes(op="placeholder"))
    return {place for place, node in placeholders if node.users and all(is_detach(user) for user in node.users)}


def plan_segment(graph: Graph, gradients: Mapping[int, GradientSpec], options: Options, world_size: int) -> BucketPlan:
    """The buckets of a captured graph: a function of the graph and of inputs that are equal on every rank."""
    return assign_buckets(
        [gradients[index] for index in gradient_order(graph, list(gradients))],
        first_bucket_bytes=options.first_bucket_bytes,
        bucket_cap_bytes=options.bucket_cap_bytes,
        world_size=world_size,
    )
