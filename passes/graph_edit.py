"""What every pass needs to edit a graph: new nodes and inputs, and the graph's outputs by position."""

import contextlib
import functools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import Graph, Node

_aten = torch.ops.aten
_COPIES = (_aten.copy.default, _aten.copy_.default)
_ELEMENTWISE = (  # besides what torch says of its operators
    _aten._to_copy.default,
    _aten.clone.default,
    _aten.view_as_real.default,
    torch.ops.prims.convert_element_type.default,
)


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
    """Insert a call of `op` at the graph's insertion point. Its value is not inferred."""
    return graph.call_function(op, args, kwargs)


def add_placeholders(graph: Graph, values: Mapping[str, Callable[[], torch.Tensor]]) -> list[Node]:
    """Append inputs to the graph, after all others, by their names.

    Where the graph has values, what is made here is theirs, in its fake mode.
    """
    nodes = []
    first_other = next(node for node in graph.nodes if node.op != "placeholder")
    with graph.inserting_before(first_other), fake_mode_of(graph) as fake:
        for name, make in values.items():
            nodes.append(graph.placeholder(name))
            if fake:
                nodes[-1].meta["val"] = make()
    return nodes


def output_values(graph: Graph) -> list[Node | None]:
    """The graph's outputs, by position."""
    (values,) = graph.output_node().args
    assert isinstance(values, Sequence)
    return list(values)  # type: ignore[arg-type]


def set_output_values(graph: Graph, values: Sequence[Node | None]) -> None:
    """Replace the graph's outputs; metadata of the positions there were before stays."""
    graph.output_node().args = (tuple(values),)


def results_of(node: Node) -> dict[int, Node]:
    """The results that are read of a node which has several, by their places."""
    return {int(user.args[1]): user for user in node.users if user.target is operator.getitem}  # type: ignore[arg-type]


def erase_with_results(graph: Graph, node: Node) -> None:
    """Remove a node with several results, which nothing reads any more."""
    for result in [*node.users]:
        graph.erase_node(result)
    graph.erase_node(node)


def replace_nodes(graph: Graph, replacements: Mapping[Node, Node]) -> None:
    """Let everything that reads a key read its value instead.

    The graph's outputs are replaced at once: all that is changed among a node's arguments reads all of them.
    """
    output = graph.output_node()
    for node, replacement in replacements.items():
        node.replace_all_uses_with(replacement, delete_user_cb=functools.partial(operator.is_not, output))
    set_output_values(graph, [node and replacements.get(node, node) for node in output_values(graph)])


def copies_into(result: Node, into: Node) -> list[Node]:
    """The nodes by which a result is written into an input of the graph, at last in place; empty where it is not."""
    found, value = list[Node](), result
    while not found or value.target is not _aten.copy_.default:
        copies = [user for user in value.users if user.target in _COPIES and user.args[:2] == (into, value)]
        if len(copies) != 1:
            return []
        value = copies[0]
        found.append(value)
    return found if into.op == "placeholder" and not value.users else []


def written_arguments(target: object, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Those of a call's arguments that the operator `target` writes to, of lists every element."""
    if not isinstance(target, OpOverload) or not target._schema.is_mutable:
        return []
    found = list[Any]()
    for place, argument in enumerate(target._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            found += value if isinstance(value, list | tuple) else [value]
    return found


def is_elementwise(node: Node) -> bool:
    """Whether each element that a node returns is made of those at its place, and by no chance."""
    target = node.target
    if not isinstance(target, OpOverload) or target._schema.is_mutable:
        return False
    is_drawn = torch.Tag.nondeterministic_seeded in target.tags
    return not is_drawn and (torch.Tag.pointwise in target.tags or target in _ELEMENTWISE)


def is_view_of(node: Node, value: Node) -> bool:
    """Whether a node's result may lie in the memory of `value`, its first argument, or be one of several that do."""
    if not node.args or node.args[0] is not value:
        return False
    return returns_views(value if node.target is operator.getitem else node)


def returns_views(node: Node) -> bool:
    """Whether what a node returns may lie in the memory of its first argument."""
    schema = getattr(node.target, "_schema", None)
    is_told = schema is not None and any(each.alias_info is not None for each in schema.returns)
    return is_told or node.target is _aten._unsafe_view.default


def memory_of(value: Node) -> Node | None:
    """What has made the memory in which a value lies; None where that is not known."""
    while value.op == "call_function":
        source = value.args[0] if value.target is operator.getitem else value
        assert isinstance(source, Node)
        if not returns_views(source):
            break
        owner, *others = written_arguments(source.target, source.args, source.kwargs) or source.args[:1]
        if others or not isinstance(owner, Node):
            return None
        value = owner
    return value
