"""A step as a graph of tensors: what of its arguments and results are tensors, and what is written where."""

import dataclasses
import enum
import inspect
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.fx import Graph, GraphModule
from torch.overrides import TorchFunctionMode

from compiled_ddp import torch_private
from compiled_ddp.functional.closed_over import Surroundings, modules_called
from compiled_ddp.functional.left_behind import (
    DrawsOfPython,
    Iterators,
    ModuleAttributes,
    emptying_caches,
    refuse_left_behind,
    refusing_optimizers,
)
from compiled_ddp.functional.overlaps import overlapping
from compiled_ddp.functional.random_state import DrawnGenerator
from compiled_ddp.functional.reached import Reached
from compiled_ddp.functional.session import Session
from compiled_ddp.passes.gather_later import gather_later
from compiled_ddp.passes.ops import gather_shares, gathered_before
from compiled_ddp.plan import Bucket, BucketPlan
from compiled_ddp.users_code import line_that_raised

# ---- the graph -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Leaf:
    """A leaf of a step's arguments, as far as its graph depends on it."""

    properties: Hashable

    @staticmethod
    def of(leaf: Any) -> "Leaf | None":
        """None for a leaf that can change without being told from what it was."""
        if isinstance(leaf, Tensor):
            return Leaf((leaf.shape, leaf.stride(), leaf.dtype, leaf.device))
        if isinstance(leaf, torch.Generator):
            return Leaf((torch.Generator, leaf.device))
        if isinstance(leaf, float) and leaf != leaf:  # which would be another graph in each call
            return Leaf((type(leaf), "nan"))
        return Leaf((type(leaf), leaf)) if _is_value(leaf) else None


def in_plain_memory(leaf: Any) -> Any:
    """A leaf as graphs read it: of a lazy negative or conjugate the memory has something else."""
    is_lazy = isinstance(leaf, Tensor) and (leaf.is_neg() or leaf.is_conj())
    return leaf.resolve_neg().resolve_conj() if is_lazy else leaf


def _is_value(leaf: Any) -> bool:
    """Whether it is compared by its value; or a module, whose state `Surroundings` sees, a function, or torch's own."""
    kind: Any = type(leaf)
    if kind in _PLAIN or isinstance(leaf, nn.Module | enum.Enum):
        return True
    if any(isinstance(each, Tensor) for each in getattr(leaf, "__dict__", {}).values()):
        return False
    is_own = kind.__module__.partition(".")[0] in ("torch", "compiled_ddp")
    if kind.__eq__ is object.__eq__ and not callable(leaf) and not is_own:
        return False
    try:
        hash(leaf)
    except TypeError:
        return False
    return True


_PLAIN = frozenset({int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device})


def unfit_leaf(name: str, leaf: Any, step: str) -> TypeError:
    """The error for a leaf of a step's arguments of which there is no `Leaf`."""
    kind = type(leaf)
    remedy = (
        "pass torch.as_tensor(...) of it"
        if kind.__module__.partition(".")[0] == "numpy"
        else "pass what it holds as a dict, a list or a NamedTuple, or register its class as a pytree "
        "(torch.export.register_dataclass)"
    )
    return TypeError(
        f"{name} of the compiled step {step} is a {kind.__module__}.{kind.__qualname__}: neither a tensor, generator, "
        "module, function nor a value that can be hashed and compared, so the graph would keep what it holds in this "
        f"call; {remedy}."
    )


@dataclass(frozen=True)
class TracedStep:
    """`inputs` are the tensors it was traced with, `constants` those that it closes over, which follow them.

    It is one for as long as its `surroundings` are as they were.
    """

    graph_module: GraphModule
    inputs: Sequence[Tensor]
    constants: Sequence[Tensor]
    others: Sequence[tuple[int, Any]]  # results that are no tensors, with their places
    structure: Any  # of the results
    generators: Sequence[DrawnGenerator]
    written: Sequence[int]  # the leaves of its arguments in whose memory it leaves results
    requires_grad: Sequence[bool] | None  # of each tensor among the arguments; None where the step has not asked
    surroundings: Surroundings
    set_first: Sequence[tuple[nn.Module, str]]  # attributes that it sets before it reads them

    def fits(self, leaves: Sequence[Any]) -> bool:
        """Whether what it has met while it was traced is as it was, for arguments of these leaves."""
        is_grad_as_it_was = self.requires_grad is None or self.requires_grad == _requires_grad(leaves)
        return is_grad_as_it_was and self.surroundings.are_as_they_were()

    def values_by_node(self) -> dict[str, Tensor]:
        """The value of each input, by the name of its node."""
        nodes = self.graph_module.graph.find_nodes(op="placeholder")
        return {node.name: value for node, value in zip(nodes, self.inputs, strict=True)}

    def add_inputs(self, values: Sequence[Tensor], name: str) -> "TracedStep":
        """With inputs of this `name` behind all others, which nothing reads yet."""
        graph = self.graph_module.graph
        *_, last = graph.find_nodes(op="placeholder")
        for number in reversed(range(len(values))):
            with graph.inserting_after(last):
                graph.placeholder(f"{name}_{number}")
        self.graph_module.recompile()
        return dataclasses.replace(self, inputs=[*self.inputs, *values])

    def gathering_later(self, plan: BucketPlan, buckets: Sequence[Bucket], group_name: str, by: str) -> "TracedStep":
        """With shares, its last outputs but one, gathered behind it in `buckets`: `gather_later`. Changes its graph."""
        values = [torch.empty(each.numel, dtype=each.dtype, device=each.device) for each in buckets]
        values.append(torch.empty((), dtype=torch.bool, device=values[0].device))
        added, graph = self.add_inputs(values, "gathered"), self.graph_module.graph
        arrived = graph.find_nodes(op="placeholder")[-len(values) :]
        gather_later(graph, plan, buckets, arrived=arrived, group_name=group_name, by=by)
        self.graph_module.recompile()
        return added

    def rebuild(self, tensors: Sequence[Tensor], arguments: Sequence[Any]) -> Any:
        """The step's results, of those of its graph, called with arguments of these leaves."""
        leaves = list(tensors)
        for place, value in self.others:
            leaves.insert(place, arguments[value.place] if isinstance(value, _Argument) else value)
        return torch_private.trees.unflatten(leaves, self.structure)


@dataclass(frozen=True)
class _Argument:
    """A generator that a step returns as it was given."""

    place: int  # among the leaves of its arguments

    @staticmethod
    def of(result: Any, leaves: Sequence[Any]) -> Any:
        """`result`, unless it is a generator. Raises TypeError for one that is none of the arguments."""
        if not isinstance(result, torch.Generator):
            return result
        for place, leaf in enumerate(leaves):
            if leaf is result:
                return _Argument(place)
        raise TypeError(
            "a compiled step returns a generator that is none of its arguments: make it outside of the step."
        )


def trace(
    step: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    donated: Sequence[str | int],
    session: Session,
    *,
    writes_if_sound: bool = False,
) -> TracedStep:
    """Trace `step` with these arguments.

    Its last results are the sums of its reductions' leading riders, the states of its generators, and what departs.
    With `writes_if_sound` only the last of what the step returns is a result. Those before it are written into what is
    donated, which is kept as it was if a rank has failed.
    """
    given, structure = torch_private.trees.flatten((args, kwargs))
    to_reuse = _donated_leaves(step, args, kwargs, donated, trains=writes_if_sound)
    places = [place for place, leaf in enumerate(given) if isinstance(leaf, Tensor)]
    found: dict[str, Any] = {}

    def flat(*tensors: Tensor) -> list[Tensor]:
        leaves = list(given)
        for place, tensor in zip(places, tensors, strict=True):
            leaves[place] = tensor.requires_grad_(given[place].requires_grad)
        called_args, called_kwargs = torch_private.trees.unflatten(leaves, structure)
        with session.generators.drawing(), _AskedForGrad(tensors) as asked:
            returned = step(*called_args, **called_kwargs)
        found["requires_grad"] = _requires_grad(given) if asked.was_asked else None
        memory = {place: leaves[place] for place in places if id(given[place]) in to_reuse}
        if writes_if_sound:
            *becomes, returned = returned
            _write_if_sound(memory.values(), torch_private.trees.flatten(becomes)[0], session)
            found["written"], memory = [*memory], {}
        results, found["structure"] = torch_private.trees.flatten(returned)
        found["others"] = [
            (n, _Argument.of(result, given)) for n, result in enumerate(results) if not isinstance(result, Tensor)
        ]
        kept = [result for result in results if isinstance(result, Tensor)]
        targets = _targets(memory, kept)
        found.setdefault("written", [place for place in targets if place is not None])
        of_session = [*session.sums, *session.generators.states(), *session.departing]
        return [*_copied(memory, targets, kept), *of_session]

    inputs = [in_plain_memory(given[place]).detach() for place in places]
    graph_module, constants, surroundings, set_first = _graph_of(step, flat, inputs, given, session)
    surroundings.refuse_as_donated([leaf for leaf in given if id(leaf) in to_reuse])
    generators = session.generators.drawn(given)
    tensors = [*inputs, *constants]
    found |= {"generators": generators, "surroundings": surroundings, "set_first": set_first}
    return TracedStep(graph_module, tensors, constants, **found)


def _requires_grad(leaves: Sequence[Any]) -> list[bool]:
    return [leaf.requires_grad for leaf in leaves if isinstance(leaf, Tensor)]


class _AskedForGrad(TorchFunctionMode):
    """Notes whether Python asks in here if one of these tensors requires a gradient.

    Few steps ask, and in `params = step(params)` the first parameters often do where the later ones do not.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self._tensors = {id(tensor) for tensor in tensors}
        self.was_asked = False

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func == _REQUIRES_GRAD and id(args[0]) in self._tensors:
            self.was_asked = True
        return func(*args, **(kwargs or {}))


_REQUIRES_GRAD: Callable[..., bool] = inspect.getattr_static(Tensor, "requires_grad").__get__


def _graph_of(
    step: Callable[..., Any],
    flat: Callable[..., list[Tensor]],
    inputs: Sequence[Tensor],
    given: Sequence[Any],
    session: Session,
) -> tuple[GraphModule, list[Tensor], Surroundings, list[tuple[nn.Module, str]]]:
    """The graph of `flat`, which calls `step` with the leaves `given`; the tensors that it closes over; what it met.

    And which attributes it sets first.
    """
    others: list[nn.Module] = []
    draws = DrawsOfPython()
    before = [*Reached(step)]
    iterators = Iterators(before)
    attributes = ModuleAttributes(value for value in [*before, *given] if isinstance(value, nn.Module))

    def whole(*tensors: Tensor) -> list[Tensor]:
        try:
            with attributes.noting():
                results = flat(*tensors)
        finally:
            attributes.put_back()
        attributes.refuse_kept()
        iterators.refuse_advanced()
        values = [*Reached(step), *given]
        others.extend(value for value in values if isinstance(value, nn.Module))
        refuse_left_behind(values, [*called, *others])
        return results

    try:
        checkpointing = torch_private.tracing.checkpointing_by(session.regions.call)
        with modules_called() as called, refusing_optimizers(), emptying_caches(before), checkpointing:
            graph_module, constants = torch_private.tracing.trace_without_mutations(whole, inputs)
    except Exception as error:
        if torch_private.tracing.depends_on_values(error):
            raise _asks_for_a_value(error) from None
        remedy = next((remedy for text, remedy in _REMEDIES.items() if text in str(error)), None)
        if remedy is None:
            raise
        raise RuntimeError(f"a compiled step cannot run {line_that_raised(error)}: {remedy} ({error})") from error
    _refuse_others_collectives(graph_module.graph)  # before draws: torch's placeholders for them use `random`
    draws.refuse(Reached(step))
    surroundings = Surroundings(called, others, constants)
    return graph_module, [constant.detach() for constant in constants], surroundings, attributes.set_first


_NO_AUTOGRAD = (
    "gradients within a loss are taken by torch.func.grad there, not by autograd.grad; or train with "
    "compile_ddp(model)."
)
# What to do, by a part of the message of torch.func and of make_fx.
_REMEDIES = {
    "backward() called inside": "the step takes the gradients itself; return the loss without calling backward().",
    "support saved tensor hooks": "hooks on saved tensors, as save_on_cpu's, are none of a graph's; leave them out, or "
    "train with compile_ddp(model). (Checkpoints of torch.utils.checkpoint are recomputed in the graph.)",
    "must override the setup_context": "an autograd.Function needs a setup_context for graphs; so does what "
    "register_full_backward_hook puts around a module, and what torch makes of a custom operator's register_autograd. "
    "Define it, remove the hook, let an autograd.Function call the operator, or train with compile_ddp(model).",
    "Tensor.requires_grad_()": _NO_AUTOGRAD,
    "differentiated Tensors does not require grad": _NO_AUTOGRAD,
    "mutate a captured Tensor": "a loss writes into what is no parameter or buffer of the model's (a teacher's "
    "BatchNorm that trains, a metric): let it be a part of the model, put a teacher into eval(), or write between "
    "two steps.",
    "mutating directly with `.data`": "write with torch.no_grad() and copy_(), or between two steps.",
    "symbolically trace a dynamo-optimized": "a part of it is compiled by itself; pass what is not compiled yet, as "
    "the step is one graph.",
}


def _asks_for_a_value(error: Exception) -> RuntimeError:
    return RuntimeError(
        f"a compiled step asks at {line_that_raised(error)} for a value that is known only when the graph runs "
        f"({error}). Choose with torch.where(...) in place of `if`, keep numbers as tensors in place of .item(), "
        "float() and print(), multiply by a mask in place of x[mask]; or return the value and decide outside of "
        "the step."
    )


def _refuse_others_collectives(graph: Graph) -> None:
    """Raise RuntimeError for what torch.distributed launches: a graph can hold neither its group nor waits."""
    for node in graph.nodes:
        if isinstance(node.target, OpOverload) and node.target.namespace == "c10d":
            raise RuntimeError(
                f"a compiled step calls torch.distributed ({node.target}), which no graph can hold: call all_reduce, "
                "all_gather or broadcast of compiled_ddp.functional, which have derivatives too."
            )


def _donated_leaves(
    step: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    donated: Sequence[str | int],
    *,
    trains: bool,
) -> set[int]:
    """The ids of the tensors that are given up.

    Raises TypeError for a name that is none, ValueError as `_refuse_overlaps`.
    """
    if not donated:
        return set()
    bound = inspect.signature(step).bind(*args, **kwargs)
    names = list(bound.arguments)
    tensors = []
    for which in donated:
        if which not in (names if isinstance(which, str) else range(len(args))):
            raise TypeError(f"donate names {which!r}, and the step is called with {', '.join(names)}.")
        tree = bound.arguments[which] if isinstance(which, str) else args[which]
        tensors += [leaf for leaf in torch_private.trees.flatten(tree)[0] if isinstance(leaf, Tensor)]
    own = {id(tensor) for tensor in tensors}
    _refuse_overlaps(bound.arguments, own, trains=trains)
    return own


def _refuse_overlaps(arguments: Mapping[str, Any], own: Set[int], *, trains: bool) -> None:
    """Raise ValueError where one of these tensors, which a step writes into, overlaps with another argument.

    And, for a step that `trains`, where one does of which gradients are taken: those of the other would be lost.
    """
    named = [
        (name + path, leaf)
        for name, tree in arguments.items()
        for path, leaf in torch_private.trees.named_leaves(tree)
        if isinstance(leaf, Tensor) and leaf.layout == torch.strided
    ]
    tensors = [leaf for _, leaf in named]
    for first, second, *_ in overlapping(tensors):
        both = tensors[first], tensors[second]
        if any(id(leaf) in own or (trains and isinstance(leaf, nn.Parameter)) for leaf in both):
            remedy = (
                "; what a loss reads of the model is read as model.name, and no part of the batch" if trains else ""
            )
            raise ValueError(
                f"{named[first][0]} shares memory with {named[second][0]}, and a step writes into one, or takes "
                f"its gradient: give each memory of its own{remedy}."
            )


def refuse_rows_of_shares(graph: Graph) -> None:
    """Raise RuntimeError for what writes, where ranks update their shares of parameters, rows of whole ones."""
    every = {node.target for node in graph.nodes}
    if torch.ops.aten.embedding_renorm_.default in every and not every.isdisjoint((gather_shares, gathered_before)):
        raise RuntimeError(
            "an embedding with max_norm rescales the rows that the batch of this rank uses, and with shard_optimizer a "
            "row is put together of several ranks' shares: leave out max_norm, or shard_optimizer."
        )


def _targets(memory: Mapping[int, Tensor], results: Sequence[Tensor]) -> list[int | None]:
    """For each result the donated leaf in whose memory it is to lie: the first that fits, and that no result is."""
    if not memory:
        return [None] * len(results)
    returned = {torch_private.tensors.memory_of(result) for result in results}
    left = {
        place: tensor for place, tensor in memory.items() if torch_private.tensors.memory_of(tensor) not in returned
    }
    donated = {torch_private.tensors.memory_of(tensor) for tensor in memory.values()}
    targets: list[int | None] = []
    for result in results:
        is_there = torch_private.tensors.memory_of(result) in donated
        fitting = (place for place, tensor in left.items() if _kind(tensor) == _kind(result))
        target = None if is_there else next(fitting, None)
        targets.append(target)
        if target is not None:
            del left[target]
    return targets


def _copied(memory: Mapping[int, Tensor], targets: Sequence[int | None], results: Sequence[Tensor]) -> list[Tensor]:
    """The results, each in the memory of its target where it has one."""
    with torch.no_grad():
        return [
            result if place is None else memory[place].copy_(result)
            for result, place in zip(results, targets, strict=True)
        ]


def _write_if_sound(into: Iterable[Tensor], values: Iterable[Tensor], session: Session) -> None:
    is_sound, settled = session.are_sound(), {id(each) for each in session.settled}
    with torch.no_grad():
        for tensor, value in zip(into, values, strict=True):
            if is_sound is not None and id(value) not in settled:
                value = torch.where(is_sound.to(tensor.device), value, tensor)
            tensor.copy_(value)


def _kind(tensor: Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


# ---- why a compiled step is compiled once more, in a message ---------------------------------------------------------

_MOST_OF_A_VALUE = 60  # characters


def why_another(known: Collection[Sequence[Any]], kind: Sequence[Any]) -> str:
    """How a kind of arguments (`CompiledStep.__call__` makes them) differs from the latest of those known."""
    if not known:
        return "in its first call"
    *_, latest = known
    differs = [one != other for one, other in zip(latest, kind, strict=True)]
    structure, leaves, generators, closed_over, *others = differs
    if structure:
        return "again: the structure of its arguments is another one"
    if leaves:
        before, now = ([leaf for tree in each[1] for leaf in tree.value] for each in (latest, kind))
        return f"again: {_other_leaf(before, now)}"
    if generators:
        return "again: its generators are shared in another way"
    if closed_over:
        return f"again: {_other_value(latest[3], kind[3])}"
    if any(others):
        return "again: autocast, a default, the ranks, or what shares memory is another one"
    return (
        "again: a module that it calls was switched or changed, a tensor that it closes over has other memory, or "
        "other arguments require gradients"
    )


def _other_leaf(before: Sequence[Leaf], now: Sequence[Leaf]) -> str:
    """The first leaf that differs; both are as many, as their structure is the same."""
    number, old, new = next((n, a, b) for n, (a, b) in enumerate(zip(before, now, strict=True)) if a != b)
    return f"leaf {number} of its arguments is {_described(new.properties)}, and was {_described(old.properties)}"


def _other_value(before: Sequence[Any], now: Sequence[Any]) -> str:
    """What differs first of what a step closes over: with its values, where it is a number or the like."""
    if len(before) == len(now):
        old, new = next((a, b) for a, b in zip(before, now, strict=True) if a != b)
        if _is_plain(old) and _is_plain(new):
            return f"a value that it closes over is {_described(new)}, and was {_described(old)}"
    return "something that it closes over has been replaced"


def _is_plain(found: Any) -> bool:
    """Whether `closed_over` has found a number or the like, and has it as its type and its value."""
    return isinstance(found, tuple) and len(found) == 2 and found[0] is type(found[1])


def _described(properties: Hashable) -> str:
    if isinstance(properties, tuple) and properties and isinstance(properties[0], torch.Size):
        shape, stride, dtype, device = properties
        return f"a {dtype} of shape {tuple(shape)}, strides {stride} on {device}"
    value = repr(properties[1] if isinstance(properties, tuple) else properties)
    return value if len(value) <= _MOST_OF_A_VALUE else f"{value[:_MOST_OF_A_VALUE]}..."
