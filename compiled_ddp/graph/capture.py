"""What a captured forward graph tells before anything is compiled: its parameters and the order of their gradients."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node

from compiled_ddp import torch_private


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


def outputs_reached(graph: Graph) -> dict[int, frozenset[int]] | None:
    """For each input of a graph of Dynamo's, the outputs from which autograd reaches it: none for one without gradient.

    Through an input that the graph overwrites it is reached as well: then `OVERWRITTEN` is among them. None where this
    cannot be told: where an operator has code of its own in it, or somebody else has made the graph.

    Read from the autograd graph of the fake tensors that Dynamo has captured with. So whatever `detach`, `no_grad`,
    writing to memory and transforms of gradients do, they do as in eager mode.
    """
    values = [node.meta.get("example_value") for node in graph.find_nodes(op="placeholder")]
    if any(value is None for value in values) or any(_is_opaque(node) for node in _all_nodes(graph)):
        return None
    places = _places_of_leaves(values)
    reached: dict[int, set[int]] = {place: set() for place in range(len(values))}
    for leaf, numbers in _numbers_at_leaves(list(_ends(graph, values))):
        if leaf not in places:
            return None
        for place in places[leaf]:
            reached[place] |= numbers
    return {place: frozenset(numbers) for place, numbers in reached.items()}


OVERWRITTEN = -1


def with_own_outputs(reached: Mapping[int, frozenset[int]], inputs: Iterable[int]) -> dict[int, frozenset[int]]:
    """The inputs that reach some of the graph's outputs and not others, with the outputs that they reach.

    A loss that uses none of them leaves the input without a gradient, as in eager mode.
    """
    every = frozenset[int]().union(*reached.values())
    return {place: reached[place] for place in inputs if OVERWRITTEN not in reached[place] and reached[place] != every}


def _places_of_leaves(values: Sequence[Any]) -> dict[torch.Tensor, set[int]]:
    """Which inputs each leaf stands for; behind one that is no leaf itself, Dynamo has made one."""
    inputs = [value if isinstance(value, torch.Tensor) and value.requires_grad else None for value in values]
    places: dict[torch.Tensor, set[int]] = {}
    for place, value in enumerate(inputs):
        if value is not None and value.is_leaf:
            places.setdefault(value, set()).add(place)
    own = set(places)
    for place, value in enumerate(inputs):
        if value is not None and not value.is_leaf:
            written_into_it = own if value._version > 0 else set()  # else it may be a view of another input
            for leaf in {leaf for leaf, _ in _numbers_at_leaves([(place, value)])} - written_into_it:
                places.setdefault(leaf, set()).add(place)
    return places


def _ends(graph: Graph, values: Sequence[Any]) -> Iterator[tuple[int, torch.Tensor]]:
    """What autograd may begin at, with its number."""
    outputs = graph.output_node().args[0]
    assert isinstance(outputs, Sequence)
    results = [output.meta.get("example_value") if isinstance(output, Node) else None for output in outputs]
    overwritten = [value for value in values if isinstance(value, torch.Tensor) and value._version > 0]
    for number, value in [*enumerate(results), *((OVERWRITTEN, value) for value in overwritten)]:
        if isinstance(value, torch.Tensor) and value.requires_grad and not (number == OVERWRITTEN and value.is_leaf):
            yield number, value


def _numbers_at_leaves(ends: Sequence[tuple[int, torch.Tensor]]) -> Iterator[tuple[torch.Tensor, set[int]]]:
    """The leaves behind these tensors for autograd, each with the numbers of those that it is behind."""
    at: dict[Any, set[int]] = {}
    for number, value in ends:
        if value.grad_fn is None:
            yield value, {number}
        else:
            at.setdefault(value.grad_fn, set()).add(number)
    for node in _in_order_of_backward(list(at)):
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, torch.Tensor) and not node.next_functions:  # an AccumulateGrad, and no user's Function
            yield leaf, at[node]
        for source, _ in node.next_functions:
            if source is not None:
                at.setdefault(source, set()).update(at[node])


def _in_order_of_backward(roots: Sequence[Any]) -> list[Any]:
    """All nodes of autograd behind these, each before those behind it."""
    entered, left, ahead = set(), dict[Any, None](), list(roots)
    while ahead:
        node = ahead[-1]
        if node in entered:
            left[ahead.pop()] = None
        else:
            entered.add(node)
            ahead += [source for source, _ in node.next_functions if source is not None and source not in entered]
    return list(reversed(left))


# Dynamo's fake results of these hang together with their operands as the real ones will.
_LOOKED_THROUGH = ("tag_activation_checkpoint", "autograd_function_apply", "register_hook")


def _is_opaque(node: Node) -> bool:
    return torch_private.dynamo.name_of_higher_order(node.target) not in ("", *_LOOKED_THROUGH)


# Of operators that torch itself brings, and that graphs hold.
_LIBRARIES_OF_TORCH = frozenset({"aten", "prims", "prim", "_c10d_functional", "c10d_functional"})


def calls_torch_alone(graph: Graph, inputs: Iterable[object]) -> bool:
    """Whether every operator in a graph of Dynamo's is torch's own, so that none asks anything of autograd as it runs.

    A custom one may, also in the backward that its library has registered; so may a function that Dynamo was told to
    leave in the graph as it is, and what a tensor subclass among the `inputs` calls in place of an operator.
    """
    plain = (value for value in inputs if isinstance(value, torch.Tensor))
    return all(type(value) in (torch.Tensor, nn.Parameter) for value in plain) and all(
        map(_is_of_torch, _all_nodes(graph))
    )


def _is_of_torch(node: Node) -> bool:
    if node.op != "call_function":
        return node.op != "call_module"
    if torch_private.dynamo.is_operator(node.target):
        return torch_private.dynamo.library_of(node.target) in _LIBRARIES_OF_TORCH
    module: str = getattr(node.target, "__module__", None) or "torch"
    if module.startswith("torch._dynamo"):  # in which it wraps what it leaves in the graph as it is
        return False
    return not _is_opaque(node) and module.partition(".")[0] in ("torch", "_operator", "math", "builtins")


def _all_nodes(graph: Graph) -> Iterator[Node]:
    """The nodes of a graph and of those in it, as in a checkpoint."""
    yield from graph.nodes
    for module in graph.owning_module.modules() if graph.owning_module is not None else ():
        if isinstance(module, GraphModule) and module.graph is not graph:
            yield from module.graph.nodes
