"""Proves that a backward graph's outputs scale with its tangents, so that the mean may be taken at its head.

    tangents -> mul(1 / world) -> ... the backward ... -> gradients        is the mean only if this pass says so

[Note: proof by propagation]
Each value that a gradient is made of is *zero*, *independent* of the tangents, or *linear* in all of them together
(additive and homogeneous of degree 1). The degree of a node follows from the degrees of its arguments by the rule of
its op in `linear_ops`; an op without a rule keeps independent values independent and stops the proof at a linear one.
Linear plus independent is affine, which does not scale, so only zero may be added to a linear value. What the pass
cannot tell refuses: the caller then applies the mean to each gradient instead, which is always right.
"""

import operator
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from torch._ops import HigherOrderOperator, OpOverload
from torch.fx.node import Argument, Node, Target

from compiled_ddp.passes.graph_edit import memory_of, returns_views, written_arguments
from compiled_ddp.passes.linear_ops import LINEAR_OPS, LinearityRule
from compiled_ddp.passes.ops import meets_other_ranks


@dataclass(frozen=True)
class LinearityProof:
    """Whether scaling every tangent by a factor scales every gradient by the same factor, to the dtype's rounding.

    `reason` is "" where `proven`; otherwise a sentence that begins with the node that stops the proof and names its op.
    """

    proven: bool
    reason: str


def prove_linearity(
    graph: torch.fx.Graph,
    tangents: Sequence[Node],
    gradients: Sequence[Node],
    *,
    own_launches: Collection[Node] = (),
) -> LinearityProof:
    """Decide whether every one of `gradients` is linear in `tangents` taken together.

    Assumes an ATen-level backward graph of AOTAutograd, decomposed or not, in topological order, where each node that
    depends on a tangent has its (fake) tensor in `meta["val"]`. `tangents` are all placeholders that would be scaled;
    `gradients` are all outputs that the caller takes as scaled, so also those it divides the scale out of again.
    `own_launches` are the collectives that the caller itself has put behind them.

    Rewrites nothing.

    Proves nothing where a gradient is constant and not zero (an auxiliary loss), where a value that depends on a
    tangent meets an op, an argument or a mutation the allow-list does not cover, or where it is held in float16 (it
    may underflow once scaled), float8 or integers; and where such a value meets a collective, of which the other ranks'
    parts may not be scaled. A graph with no gradient is proven.
    """
    ancestors = _ancestors_of(gradients)
    scaled = set(tangents)
    dependents = _dependents_of(graph, scaled) - _dependents_of(graph, own_launches)
    degrees: dict[Node, _Degree] = {}
    out_of_place = _out_of_place(graph)
    try:
        for node in graph.nodes:
            if node not in out_of_place:
                _refuse_hidden_effect(node, dependents, degrees)
            if node not in ancestors:
                continue
            target = out_of_place.get(node, node.target)
            degrees[node] = _Degree.LINEAR if node in scaled else _degree_of(node, target, degrees)
            if degrees[node] is _Degree.LINEAR:
                _refuse_dtype(node)
        for gradient in gradients:
            if degrees[gradient] is _Degree.INDEPENDENT:
                raise _NotProvenError(gradient, "is a gradient that depends on no tangent and is not known to be zero")
    except _NotProvenError as refusal:
        return LinearityProof(proven=False, reason=str(refusal))
    return LinearityProof(proven=True, reason="")


class _Degree(Enum):
    """How a value depends on the tangents. See [Note: proof by propagation]."""

    ZERO = "zero, whatever the tangents are"
    INDEPENDENT = "the same, whatever the tangents are"
    LINEAR = "linear in the tangents"


class _NotProvenError(Exception):
    """The proof stops at `node`; never leaves this module."""

    def __init__(self, node: Node, what: str) -> None:
        super().__init__(f"{node.name}: {_name_of(node)} {what}")


# What scaling by 1/world leaves whole: the exponent range of float32 (bfloat16 has it too) or wider.
_SCALABLE_DTYPES = frozenset({torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128})


def _degree_of(node: Node, target: Target, degrees: dict[Node, _Degree]) -> _Degree:
    """The degree of a node that is not a tangent, from the degrees of its inputs: as if it called `target`."""
    if node.op in ("placeholder", "get_attr"):
        return _Degree.INDEPENDENT
    if node.op == "call_function":
        if target is operator.getitem and _degree_of_argument(node.args[1], degrees) is not _Degree.LINEAR:
            return _degree_of_argument(node.args[0], degrees)
        rule = _rule_of(target)
        if rule is not None:
            return _apply(rule, node, degrees)
    for place, argument in _arguments_in_order(node):
        if _degree_of_argument(argument, degrees) is _Degree.LINEAR:
            raise _NotProvenError(node, f"is not known to be linear in {place}")
    return _Degree.INDEPENDENT


def _apply(rule: LinearityRule, node: Node, degrees: dict[Node, _Degree]) -> _Degree:
    """The degree of `node` by its op's rule: products first, then their sum."""
    arguments = _arguments_by_name(node)
    for name, allowed in rule.only_when:
        if arguments[name] not in allowed:
            raise _NotProvenError(node, f"is linear only with {name} in {allowed}, not with {arguments[name]!r}")
    factors = {name for term in rule.terms for name in term}
    for position, (name, argument) in enumerate(arguments.items()):
        covered = name in factors or name in rule.shape_only
        if not covered and _degree_of_argument(argument, degrees) is _Degree.LINEAR:
            raise _NotProvenError(node, f"is not known to be linear in argument {position} ({name})")

    terms: list[tuple[Argument, _Degree]] = []
    for term in rule.terms:
        values = [arguments[name] for name in term]
        if None in values:
            continue
        if len(values) == 1:
            elements = values[0] if isinstance(values[0], list | tuple) else values
            terms += [(element, _degree_of_argument(element, degrees)) for element in elements]
        else:
            terms.append((tuple(values), _product(node, values, degrees)))
    if rule.constant:
        return _Degree.INDEPENDENT
    return _sum(node, terms)


def _product(node: Node, factors: Sequence[Argument], degrees: dict[Node, _Degree]) -> _Degree:
    found = [_degree_of_argument(factor, degrees) for factor in factors]
    if found.count(_Degree.LINEAR) > 1:
        linear = [str(factor) for factor, degree in zip(factors, found, strict=True) if degree is _Degree.LINEAR]
        raise _NotProvenError(node, f"multiplies values that both depend on the tangents ({' and '.join(linear)})")
    for degree in (_Degree.LINEAR, _Degree.ZERO):
        if degree in found:
            return degree
    return _Degree.INDEPENDENT


def _sum(node: Node, terms: Sequence[tuple[Argument, _Degree]]) -> _Degree:
    found = [degree for _, degree in terms]
    if _Degree.LINEAR in found and _Degree.INDEPENDENT in found:
        constant = terms[found.index(_Degree.INDEPENDENT)][0]
        raise _NotProvenError(
            node, f"combines a value that depends on the tangents with one that does not ({constant})"
        )
    for degree in (_Degree.LINEAR, _Degree.INDEPENDENT):
        if degree in found:
            return degree
    return _Degree.ZERO


def _degree_of_argument(argument: Argument, degrees: dict[Node, _Degree]) -> _Degree:
    """The degree of a node, a number, or of a list as a whole: linear where any element is."""
    if isinstance(argument, Node):
        return degrees[argument]
    if isinstance(argument, list | tuple):
        found = {_degree_of_argument(element, degrees) for element in argument}
        return _Degree.LINEAR if _Degree.LINEAR in found else _Degree.INDEPENDENT
    if isinstance(argument, dict):
        return _degree_of_argument(list(argument.values()), degrees)
    if isinstance(argument, slice):
        return _degree_of_argument([argument.start, argument.stop, argument.step], degrees)
    if isinstance(argument, bool | int | float | complex) and argument == 0:
        return _Degree.ZERO
    return _Degree.INDEPENDENT


def _refuse_dtype(node: Node) -> None:
    """Refuse a value that depends on a tangent and whose dtype cannot be scaled safely, or is not known."""
    leaves = list(_leaves(node.meta.get("val")))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    if not tensors or len(tensors) < len(leaves):
        raise _NotProvenError(node, 'depends on a tangent and has no tensor in meta["val"], so its dtype is not known')
    for tensor in tensors:
        if tensor.dtype is torch.float16:
            raise _NotProvenError(node, "depends on a tangent in torch.float16, which may underflow when it is scaled")
        if tensor.dtype not in _SCALABLE_DTYPES:
            raise _NotProvenError(node, f"depends on a tangent in {tensor.dtype}, which does not scale")


def _refuse_hidden_effect(node: Node, dependents: set[Node], degrees: Mapping[Node, _Degree]) -> None:
    """Refuse what changes a value behind the propagation's back, whether or not its own result is used.

    Writing an independent value into a graph input stays allowed (`copy_` of a buffer at the end of a graph), and into
    memory that was made for independent values (as SiLU's derivative does, where nothing has functionalised it): they
    are independent before it and after it. Not so what is zero, nor what shares its memory.
    """
    if node.op in ("call_method", "call_module"):
        raise _NotProvenError(node, "is not an ATen op, so its effects are not known")
    if node in dependents and meets_other_ranks(node):
        raise _NotProvenError(node, "meets other ranks, whose values may not be scaled")
    if isinstance(node.target, HigherOrderOperator) and not node.users:
        raise _NotProvenError(node, "is called for an effect that is not known")
    if not isinstance(node.target, OpOverload) or not node.target._schema.is_mutable:
        return
    arguments = _arguments_by_name(node)
    written = [a.name for a in node.target._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    for target in (arguments[name] for name in written if arguments[name] is not None):
        if not isinstance(target, Node):
            raise _NotProvenError(node, f"writes into {target}, which is not an input of the graph")
        if target.op != "placeholder" and not _is_independent(memory_of(target), dependents, degrees):
            raise _NotProvenError(node, f"writes into {target}, which is not an input of the graph")
    if node in dependents:
        raise _NotProvenError(node, "writes into memory while it depends on the tangents")


def _out_of_place(graph: torch.fx.Graph) -> dict[Node, OpOverload]:
    """For nodes that write into what nothing else reads, which is no effect, the ops that do the same out of place.

    What they write into is the result of one other node, which is no view, or one of these. Not among them are ops of
    which too little is known, as `set_`.
    """
    found: dict[Node, OpOverload] = {}
    for node in graph.nodes:
        written = written_arguments(node.target, node.args, node.kwargs)
        other = _other_op(node.target) if len(written) == 1 and written == [*node.args[:1]] else None
        if other is not None and isinstance(written[0], Node) and len(written[0].users) == 1:
            (memory,) = written
            is_made = isinstance(memory.target, OpOverload) and not returns_views(memory)
            if is_made or memory in found:
                found[node] = other
    return found


def _other_op(target: Target) -> OpOverload | None:
    """The op that returns what `target` writes into its first argument."""
    assert isinstance(target, OpOverload)
    name = target._schema.name.removeprefix("aten::")
    if not name.endswith("_"):
        return None
    other = getattr(getattr(torch.ops.aten, name[:-1], None), target._overloadname, None)
    is_known = other is not None and (torch.Tag.pointwise in other.tags or _rule_of(other) is not None)
    return other if is_known else None


def _is_independent(memory: Node | None, dependents: set[Node], degrees: Mapping[Node, _Degree]) -> bool:
    """Whether what has made some memory has made it in this graph, and has put neither zeros nor tangents there."""
    if memory is None or memory.op != "call_function" or memory in dependents:
        return False
    return degrees.get(memory) in (None, _Degree.INDEPENDENT)  # None where no gradient is made of it


def _rule_of(target: Target) -> LinearityRule | None:
    """The rule of an op as the installed torch has it."""
    if not isinstance(target, OpOverload):
        return None
    arguments = {argument.name for argument in target._schema.arguments}
    fitting = (rule for rule in LINEAR_OPS.get(str(target), ()) if arguments.issuperset(rule.argument_names()))
    return next(fitting, None)


def _arguments_by_name(node: Node) -> dict[str, Argument]:
    """Every argument of an op under its schema's name, defaults filled in, in the schema's order."""
    assert isinstance(node.target, OpOverload)
    arguments: dict[str, Argument] = {}
    for position, declared in enumerate(node.target._schema.arguments):
        if position < len(node.args):
            arguments[declared.name] = node.args[position]
        else:
            arguments[declared.name] = node.kwargs.get(declared.name, declared.default_value)
    return arguments


def _arguments_in_order(node: Node) -> Iterator[tuple[str, Argument]]:
    """Every argument of a call with what a message calls it."""
    if isinstance(node.target, OpOverload):
        for position, (name, argument) in enumerate(_arguments_by_name(node).items()):
            yield f"argument {position} ({name})", argument
        return
    for position, argument in enumerate(node.args):
        yield f"argument {position}", argument
    for name, argument in node.kwargs.items():
        yield f"argument {name}", argument


def _leaves(value: object) -> Iterator[object]:
    """What a node's (nested) result holds, without the outputs that are masked out."""
    if isinstance(value, list | tuple):
        for element in value:
            yield from _leaves(element)
    elif value is not None:
        yield value


def _ancestors_of(nodes: Sequence[Node]) -> set[Node]:
    """`nodes` and everything they are computed from."""
    ancestors: set[Node] = set()
    pending = list(nodes)
    while pending:
        node = pending.pop()
        if node not in ancestors:
            ancestors.add(node)
            pending += node.all_input_nodes
    return ancestors


def _dependents_of(graph: torch.fx.Graph, nodes: Collection[Node]) -> set[Node]:
    """`nodes` and everything that is computed from them."""
    dependents = set(nodes)
    for node in graph.nodes:
        if not dependents.isdisjoint(node.all_input_nodes):
            dependents.add(node)
    return dependents


def _name_of(node: Node) -> str:
    if node.op != "call_function":
        return f"{node.op} {node.target}"
    return str(node.target) if isinstance(node.target, OpOverload) else getattr(node.target, "__name__", "a function")
