"""A communication hook, traced: its program, what it keeps from step to step, and one backward's use of it.

[Note: what was sent and what is owed] A compression sends a part of the gradients and owes the rest. For every
parameter, what backwards have left in .grad plus the mean over ranks of what is still owed is the sum of the true
means. That holds because

- a state belongs to a place in the agreed sequence, not to a set of parameters: the buckets of a layer that is called
  twice have states of their own, the same ones on every rank, whether a graph launches them or hooks do;
- it is replaced when a backward has ended well, and not by one that breaks off (`TracedHook.settle`);
- a parameter that a backward brings nothing to has of it what it had before;
- when the sequence changes, what a parameter has of it moves to where its gradients go from then on (`adopt`).
"""

import collections
import contextlib
import functools
import hashlib
import inspect
import re
import reprlib
import types
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Graph, Node

from compiled_ddp import torch_private
from compiled_ddp.comm_hooks import CommHook, Ranks, StatefulHook
from compiled_ddp.passes.graph_edit import output_values, set_output_values
from compiled_ddp.passes.inline_hook import rounds
from compiled_ddp.passes.ops import LAUNCHES, all_gather, all_reduce, wait_tensor
from compiled_ddp.passes.schedule_collectives import descendants
from compiled_ddp.plan import Bucket, Gradient, GradientSpec, Section, gradient_dtype
from compiled_ddp.planning.assignment import place_buckets
from compiled_ddp.ranks.communicator import Communicator
from compiled_ddp.reducers.reducer import Reducer, Work
from compiled_ddp.users_code import warn_user

# ---- the program that graphs take in and that hooks of gradients run -------------------------------------------------

_aten = torch.ops.aten
_clone = _aten.clone.default

# What stands for the collectives where a program runs on one rank alone, as if all ranks had the same tensors.
_ALONE: Mapping[object, Callable[..., torch.Tensor]] = {
    all_reduce: lambda tensor, *_: tensor.clone(),
    all_gather: lambda tensor, size, _: torch.cat([tensor] * size),
    wait_tensor: lambda tensor: tensor,
}
_CHECKED_ELEMENTS = 64  # of the bucket that a hook is tried with


def check_hook(hook: CommHook, parameters: Mapping[str, torch.Tensor]) -> None:
    """Raise TypeError or ValueError unless `hook` reduces gradients like those of every parameter; on whatever ranks.

    It is traced for each dtype and device, and run once there, so that an operator that is not made for one of them is
    found here and not in the first backward.
    """
    if _takes_a_bucket(hook):
        raise TypeError(
            f"{hook!r} is a communication hook of torch's kind, called with a state and a GradBucket: pass it to "
            "register_comm_hook(state, hook), or use one of compiled_ddp.comm_hooks."
        )
    first_of: dict[tuple[torch.dtype, torch.device], str] = {}
    for name, parameter in parameters.items():
        first_of.setdefault((gradient_dtype(parameter), parameter.device), name)
    for (dtype, device), name in first_of.items():
        flat = example(_CHECKED_ELEMENTS, dtype, device)
        try:
            state = initial_state(hook, flat)
            HookProgram(hook, Ranks(2, "check"), flat, state).run_alone(torch.ones_like(flat), state)
            kept = _kept_in_python(hook)  # after the first call, which may have set it up
            HookProgram(hook, Ranks(2, "check"), flat, state)
            elementwise = elementwise_state(hook, dtype, device)
        except Exception as error:
            kind = ValueError if isinstance(error, ValueError) else TypeError
            raise kind(
                f"the communication hook {hook!r} cannot reduce gradients like those of parameter {name}, {dtype} on "
                f"{device}: {error} Let the hook convert what it is given, or use another one."
            ) from error
        changed = _changed(kept, _kept_in_python(hook))
        if changed:
            raise ValueError(
                f"the communication hook {hook!r} changes its {', '.join(changed)} in each call, and is traced once "
                "for each bucket, so it would stay as it is then: what a hook keeps from step to step must be tensors, "
                "as state of a compiled_ddp.comm_hooks.StatefulHook."
            )
        if isinstance(hook, StatefulHook) and not elementwise.issuperset(hook.owed):
            raise ValueError(
                f"the communication hook {hook!r} has owed={hook.owed!r}, and of its {len(state)} tensors of state "
                f"those at {sorted(elementwise)} are floating point and as long as the bucket: name some of these."
            )


_BY_VALUE = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, frozenset)
_CONTAINERS = (dict, list, tuple, collections.deque)
# Levels of attributes and containers that are looked into, and values: a hook may hold a whole trainer.
_DEEPEST, _MOST_VALUES = 4, 5000


def _kept_in_python(hook: CommHook) -> dict[str, object]:
    """What a hook may change from call to call outside of tensors, by where it is found: `state.step`, `calls[0]`.

    That is all within its attributes, the variables around a function, its defaults, the arguments of a
    functools.partial and the object of a method; and the plain values among the globals that a function names. Near
    ones first, where there is too much.
    """
    kept: dict[str, object] = {}
    seen = {id(hook)}
    rest = collections.deque((path, value, 1) for path, value in _kept_by(hook))
    while rest and len(kept) < _MOST_VALUES:
        path, value, depth = rest.popleft()
        value = frozenset(value) if isinstance(value, set) else value
        kept[path] = type(value) if isinstance(value, _CONTAINERS) else value
        if depth < _DEEPEST and id(value) not in seen and not isinstance(value, _BY_VALUE):
            rest.extend((path + inner, part, depth + 1) for inner, part in _kept_by(value, "."))
            if not isinstance(value, tuple):  # equal ones may be one object, or not
                seen.add(id(value))
    return kept


def _kept_by(value: object, dot: str = "") -> list[tuple[str, object]]:
    """What `value` holds, each with what follows the name of `value` then; `dot` stands before an attribute's."""
    if isinstance(value, dict):
        return [(f"[{reprlib.repr(key)}]", part) for key, part in [*value.items()]]
    if isinstance(value, _CONTAINERS):
        return [(f"[{place}]", part) for place, part in enumerate([*value])]
    if isinstance(value, functools.partial):
        given = [(f"{dot}args[{place}]", part) for place, part in enumerate(value.args)]
        given += [(dot + name, part) for name, part in value.keywords.items()]
        return given + _kept_by(value.func, dot)
    if isinstance(value, types.MethodType):
        return [(f"{dot}__self__", value.__self__), *_kept_by(value.__func__, dot)]
    if isinstance(value, types.FunctionType):
        return [(dot + name, part) for name, part in _around(value)]
    # Operators and loggers have caches of their own, which are filled when something is called.
    if isinstance(value, torch.Tensor | types.ModuleType | type) or _package_of(value) in ("torch", "logging"):
        return []
    attributes = {**getattr(value, "__dict__", {}), **_in_slots(value)}
    call = getattr(type(value), "__call__", None)  # noqa: B004
    around = _around(call) if isinstance(call, types.FunctionType) else ()
    return [(dot + name, part) for name, part in (*attributes.items(), *around)]


def _in_slots(value: object) -> dict[str, object]:
    """The attributes that `__slots__` of its classes name."""
    slots = [vars(cls).get("__slots__", ()) for cls in type(value).__mro__]
    names = [name for found in slots for name in ((found,) if isinstance(found, str) else found)]
    return {name: getattr(value, name) for name in names if not name.startswith("__") and hasattr(value, name)}


def _package_of(value: object) -> str:
    return type(value).__module__.partition(".")[0]


def _around(function: types.FunctionType) -> Iterator[tuple[str, object]]:
    """What a function has besides its arguments, by name."""
    code = function.__code__
    for name in code.co_names:
        found = function.__globals__.get(name)
        if isinstance(found, (*_BY_VALUE, *_CONTAINERS, set)) and found is not None:
            yield name, found
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # a variable that has no value yet
            yield name, cell.cell_contents
    defaults = function.__defaults__ or ()
    yield from zip(code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount], defaults, strict=True)
    yield from (function.__kwdefaults__ or {}).items()
    yield from vars(function).items()


def _changed(before: dict[str, object], now: dict[str, object]) -> list[str]:
    """Where values are others, or there are none any more, in what `_kept_in_python` has returned."""
    missing = object()
    changed = []
    for path in before | now:
        old, new = before.get(path, missing), now.get(path, missing)
        equal = isinstance(new, _BY_VALUE) and type(new) is type(old) and new == old
        if old is not new and not equal:
            changed.append(path)
    return changed[:3]


def _takes_a_bucket(hook: CommHook) -> bool:
    """Whether its second parameter is a `GradBucket` of torch's, by its annotation or its name."""
    try:
        _, second, *_ = inspect.signature(hook).parameters.values()
    except (ValueError, TypeError):  # no function of Python's, or one of fewer parameters
        return False
    return second.name == "bucket" or "GradBucket" in str(second.annotation)


def as_real(flat: torch.Tensor) -> torch.Tensor:
    """A flat buffer as hooks are given it: complex numbers are pairs of real ones. Shares the memory."""
    return torch.view_as_real(flat).view(-1) if flat.is_complex() else flat


def example(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A bucket of `numel` gradients as a hook is given it, all zero."""
    return as_real(torch.zeros(numel, dtype=dtype, device=device))


@torch.no_grad()
def initial_state(hook: CommHook, flat: torch.Tensor) -> list[torch.Tensor]:
    """What `hook` keeps for a bucket like `flat` at first, in memory that nothing else has; empty without state."""
    if not isinstance(hook, StatefulHook):
        return []
    state: object = hook.initial_state(flat)
    if not isinstance(state, tuple | list) or not all(isinstance(tensor, torch.Tensor) for tensor in state):
        raise TypeError(f"{hook!r}.initial_state must return a tuple of tensors, found {_format_value(state)}.")
    return [tensor.detach().clone(memory_format=torch.contiguous_format) for tensor in state]


def elementwise_state(hook: CommHook, dtype: torch.dtype, device: torch.device) -> frozenset[int]:
    """Which tensors of a hook's state have, whatever the bucket, one floating-point number for each of its elements.

    What they have of a parameter moves along with its gradients where these go into another bucket.
    """
    tried = []
    for numel in (_CHECKED_ELEMENTS, _CHECKED_ELEMENTS + 1):  # one alone may be as long as the bucket by chance
        flat = example(numel, dtype, device)
        state = initial_state(hook, flat)
        tried.append({n for n, t in enumerate(state) if t.shape == flat.shape and t.is_floating_point()})
    return frozenset(set.intersection(*tried))


class HookProgram:
    """What a hook does to buckets of one size, dtype and device.

    [Note: what a hook hands out is its own] Whatever the hook does with its arguments, the program writes into none of
    them, its new state shares no memory with anything, and its result none with its arguments. The state is contiguous,
    of the types that it had before. It is kept as it was where the result is not finite, which all ranks see alike,
    and where it would become so: one step that overflows is lost, and nothing after it.
    """

    def __init__(self, hook: CommHook, ranks: Ranks, flat: torch.Tensor, state: Sequence[torch.Tensor]) -> None:
        """Trace `hook` for buckets like `flat`. Raises TypeError or ValueError where it is not what a hook must be."""

        def run(gradients: torch.Tensor, *old: torch.Tensor) -> tuple[torch.Tensor, ...]:
            before = [tensor.clone() for tensor in old]  # the hook may write into what it is given
            results = hook(gradients, ranks, *old)
            reduced, *new = _checked(hook, results, [gradients, *before])
            return reduced, *_unless_not_finite(reduced, new, before)

        traced = torch_private.tracing.trace_functional(run, [flat, *state])
        self.graph: Graph = traced.graph
        if self.graph.find_nodes(op="get_attr"):
            raise ValueError(
                f"the communication hook {hook!r} reads a tensor that is none of its arguments: keep it as state of a "
                "compiled_ddp.comm_hooks.StatefulHook."
            )
        _leave_inputs_alone(self.graph)
        _set_result_apart(self.graph)
        nodes = list(self.graph.nodes)
        self.state = self.graph.find_nodes(op="placeholder")[1:]  # its inputs that are that
        self.launches = [node for node in nodes if node.target in LAUNCHES]  # the same on every rank, in this order
        self.rounds = rounds(self.launches)
        waited = descendants(nodes, [node for node in nodes if node.target is wait_tensor])
        # Where a collective needs another one's result, the others would have to be launched in between.
        several_rounds = bool(self.rounds[1])
        self.first = nodes if several_rounds else [node for node in nodes if node not in waited]
        self.then = [] if several_rounds else [node for node in nodes if node in waited]
        text = [str(self.graph), *(_format_value(node.meta["val"]) for node in self.graph.find_nodes(op="placeholder"))]
        self.identity = hashlib.sha256("\n".join(text).encode()).hexdigest()

    def inputs(self, flat: torch.Tensor, state: Sequence[torch.Tensor]) -> dict[Node, Any]:
        return dict(zip(self.graph.find_nodes(op="placeholder"), [as_real(flat), *state], strict=True))

    @torch.no_grad()
    def run(
        self,
        nodes: Sequence[Node],
        values: dict[Node, Any],
        instead: Mapping[object, Callable[..., Any]] | None = None,
    ) -> None:
        """Run some of the nodes, from and into `values`; `instead` has functions to call in place of operators."""
        with torch_private.tensors.without_autocast():  # the dtypes are those that the hook was traced with
            for node in nodes:
                if node.op == "call_function":
                    assert callable(node.target)
                    args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
                    values[node] = (instead or {}).get(node.target, node.target)(*args, **kwargs)

    def wait(self, values: Mapping[Node, Any]) -> None:
        """Wait for the collectives among `values`, whatever has become of their results; a no-op the second time."""
        for node in self.launches:
            if node in values:
                wait_tensor(values[node])

    @torch.no_grad()
    def launch_zeros(self, launched: int) -> list[torch.Tensor]:
        """Launch, with zeros, what a run that broke off after `launched` collectives has left; returns their results.

        None waits for another one's result, so that this rank need not compute anything.
        """
        return [*map(launch_of_zeros, self.launches[launched:])]

    def results(self, values: Mapping[Node, Any]) -> list[torch.Tensor]:
        """The mean, and the new state."""
        return [values[node] for node in output_values(self.graph) if node is not None]

    def run_alone(self, flat: torch.Tensor, state: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The results where every rank has what this one has. No collective is started."""
        values = self.inputs(flat, state)
        self.run([*self.first, *self.then], values, _ALONE)
        return self.results(values)


@torch.no_grad()
def launch_of_zeros(launch: Node, group_name: str = "") -> torch.Tensor:
    """Launch a collective of a hook's program with zeros, on the group that it names or on another one."""
    assert callable(launch.target)
    sent, *others = launch.args
    assert isinstance(sent, Node)
    like = sent.meta["val"]
    others[-1] = group_name or others[-1]
    result: torch.Tensor = launch.target(torch.zeros(like.shape, dtype=like.dtype, device=like.device), *others)
    return result


def _checked(hook: CommHook, results: object, expected: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """What a hook has returned, if it is like `expected`: gradients and state."""
    found = tuple(results) if isinstance(results, tuple | list) else (results,)
    if len(found) != len(expected) or not all(map(_alike, found, expected)):
        state = f", and {len(expected) - 1} tensors of state as they were given" if expected[1:] else ""
        raise TypeError(
            f"the communication hook {hook!r} must return the reduced gradients, {_format_value(expected[0])}{state}; "
            f"found {', '.join(map(_format_value, found))}."
        )
    return found


def _unless_not_finite(
    reduced: torch.Tensor, new: Sequence[torch.Tensor], old: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """The new state where the result is finite; what was finite of it stays so."""
    kept = []
    good = _is_finite(reduced) if new else None
    for after, before in zip(new, old, strict=True):
        assert good is not None
        stays_so = _is_finite(after) | _is_finite(before).logical_not()
        kept.append(torch.where(good.to(after.device) & stays_so, after, before).contiguous())
    return kept


def _is_finite(tensor: torch.Tensor) -> torch.Tensor:
    """Whether all of it is, shape (). In two kernels, where `isfinite` takes five."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if not tensor.is_floating_point() or not tensor.numel():
        return torch.ones((), dtype=torch.bool, device=tensor.device)
    return tensor.abs().amax() < torch.inf  # not a number if any is not


def _leave_inputs_alone(graph: Graph) -> None:
    """Drop what is written into the program's inputs, which nothing reads any more, and so the copies of them."""
    inputs = set(graph.find_nodes(op="placeholder"))
    for node in graph.find_nodes(op="call_function", target=_aten.copy_.default):
        if node.args[0] in inputs:
            graph.erase_node(node)
    for node in graph.find_nodes(op="call_function", target=_clone):
        if node.args[0] in inputs and not node.kwargs:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    graph.eliminate_dead_code()


def _set_result_apart(graph: Graph) -> None:
    """Copy the result where it lies in memory of an input, or not from the beginning of its own without gaps."""
    result, *state = output_values(graph)
    assert result is not None
    value = result.meta["val"]
    taken = {torch_private.tensors.memory_of(node.meta["val"]) for node in graph.find_nodes(op="placeholder")}
    if torch_private.tensors.memory_of(value) in taken or not value.is_contiguous() or value.storage_offset():
        with graph.inserting_before(graph.output_node()):
            copied = graph.call_function(_clone, (result,), {"memory_format": torch.contiguous_format})
        copied.meta["val"] = value.clone(memory_format=torch.contiguous_format)
        set_output_values(graph, [copied, *state])


def _alike(found: object, expected: torch.Tensor) -> bool:
    return isinstance(found, torch.Tensor) and _type(found) == _type(expected)


def _type(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.dtype, tensor.device


def _format_value(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}, {value.dtype}"
    return repr(value)


# ---- what it keeps for each place in the sequence: [Note: what was sent and what is owed] ----------------------------


@dataclass
class Place:
    """A bucket's place in the sequence, with what the hook keeps for it: None before it is first asked for."""

    bucket: Bucket
    state: list[torch.Tensor] | None = None

    def keep(self, state: list[torch.Tensor] | None) -> None:
        self.state = state

    @functools.cached_property
    def _gradients(self) -> dict[int, Gradient]:
        return {gradient.index: gradient for gradient in self.bucket.gradients}

    def part(self, slot: int, index: int, state: Sequence[torch.Tensor] | None = None) -> torch.Tensor:
        """What `state[slot]`, as long as the bucket, has of a parameter: a view of the parameter's shape."""
        tensors = self.state if state is None else state
        assert tensors is not None
        return part_of(tensors[slot], self.bucket, self._gradients[index])


@dataclass
class _Former:
    """A state whose place is no more, or not there yet."""

    place: Place
    remaining: set[int]  # the parameters whose part is still here
    waits: bool = False  # whether what belongs to the bucket as a whole is kept until there is such a bucket


def part_of(flat: torch.Tensor, bucket: Bucket, gradient: Gradient) -> torch.Tensor:
    """What a tensor as long as the bucket has of a gradient, in its shape; complex where the gradients are."""
    return gradient.view(torch.view_as_complex(flat.view(-1, 2)) if bucket.dtype.is_complex else flat)


class BucketHook:
    """A wrapper's communication hook: its programs by kind of bucket, and its state by place in the sequence."""

    def __init__(self, hook: CommHook, ranks: Ranks) -> None:
        self.owed: Set[int] = frozenset(hook.owed) if isinstance(hook, StatefulHook) else frozenset()
        self._hook, self._ranks = hook, ranks
        self._programs: dict[tuple[int, torch.dtype, torch.device], HookProgram] = {}
        self._elementwise: frozenset[int] | None = None
        self._sections: Sequence[Section] = ()
        self._names: Sequence[str] = ()
        self._is_lasting = False
        self._places: dict[int, list[Place]] = {}  # by id of a section of the sequence
        self._former: list[_Former] = []

    def begin_anew(self) -> None:
        """Drop all state, and what is owed. On all ranks before the same backward."""
        for place in self._all():
            place.keep(None)
        self._former = []

    def program(self, bucket: Bucket) -> HookProgram | None:
        """None for a bucket of riders alone, or of nothing, which is reduced as it is."""
        if not bucket.gradients or not bucket.numel:
            return None
        kind = bucket.numel, bucket.dtype, bucket.device
        if kind not in self._programs:
            flat = example(*kind)
            self._programs[kind] = HookProgram(self._hook, self._ranks, flat, initial_state(self._hook, flat))
        return self._programs[kind]

    def elementwise(self, bucket: Bucket) -> Set[int]:
        """Which of the state's tensors are as long as a bucket like this one, so that each parameter has a part."""
        if self._elementwise is None:
            self._elementwise = elementwise_state(self._hook, bucket.dtype, bucket.device)
        return self._elementwise

    def state(self, place: Place) -> list[torch.Tensor]:
        """What the hook keeps there, from the last backward that ended."""
        if place.state is None:
            flat = example(place.bucket.numel, place.bucket.dtype, place.bucket.device)
            place.keep([] if self.program(place.bucket) is None else initial_state(self._hook, flat))
        assert place.state is not None
        return place.state

    def places(self, sections: Sequence[Section]) -> list[Place]:
        """The places of these sections of the sequence, in launch order. Equal sections have places of their own."""
        return [place for section in sections for place in self._places[id(section)]]

    # ---- when the sequence changes -----------------------------------------------------------------------------------

    def adopt(self, sections: Sequence[Section], names: Sequence[str], *, lasting: bool) -> None:
        """Take another sequence. A bucket that stays keeps its state; of others what their parameters have moves on.

        `names` are those of the parameters. Unless it is `lasting`, another one follows at the end of the next
        backward.
        """
        kept: dict[Bucket, list[Place]] = defaultdict(list)
        for place in self._with_state():
            kept[place.bucket].append(place)
        self._sections, self._names, self._is_lasting = sections, names, lasting  # held, so that their ids stay theirs
        self._places = {id(s): [Place(bucket) for bucket in s.plan.buckets] for s in sections}
        assert len(self._places) == len(sections), "a section stands twice in the sequence"
        for place in self._all():
            if kept[place.bucket]:
                place.keep(kept[place.bucket].pop(0).state)
        self._former += [_Former(place, set(place.bucket.indices)) for places in kept.values() for place in places]
        self._move_on()

    def _all(self) -> Iterator[Place]:
        """Every place, those that backwards launch first."""
        for places in self._places.values():
            yield from places

    def _with_state(self) -> list[Place]:
        return [place for place in self._all() if place.state]

    @torch.no_grad()
    def _move_on(self) -> None:
        """Bring what former places hold to where it belongs now.

        To a new bucket of the same parameters if there is one, else part by part to the first place of each parameter.
        """
        first_of: dict[int, Place] = {}
        for place in self._all():
            for index in place.bucket.indices:
                first_of.setdefault(index, place)
        begun: set[tuple[int, int]] = set()  # places and parameters with what `initial_state` says
        for former in self._former:
            indices = former.place.bucket.indices
            new = next((p for p in self._all() if p.state is None and p.bucket.indices == indices), None)
            if new is not None:
                self._begin(new, begun)
                self._take_over(new, former)
                self._move_parts(former, dict.fromkeys(indices, new), begun)
        for former in self._former:
            self._move_parts(former, first_of, begun)
        self._former = [f for f in self._former if f.remaining or (f.waits and not self._is_lasting)]

    def _begin(self, place: Place, begun: set[tuple[int, int]]) -> None:
        if place.state is None:
            self.state(place)
            begun.update((id(place), index) for index in place.bucket.indices)

    def _take_over(self, place: Place, former: _Former) -> None:
        """Convert what belongs to the bucket as a whole."""
        assert place.state is not None and former.place.state is not None
        for slot, (new, old) in enumerate(zip(place.state, former.place.state, strict=True)):
            if slot not in self.elementwise(place.bucket) and new.shape == old.shape:
                place.state[slot] = old.to(new)
        former.waits = False

    def _move_parts(self, former: _Former, place_of: Mapping[int, Place], begun: set[tuple[int, int]]) -> None:
        """Move the parameters' parts, each to its place, on top of what it has already."""
        for index in sorted(former.remaining & place_of.keys()):
            place = place_of[index]
            self._begin(place, begun)
            for slot in self.elementwise(place.bucket) if place.state else ():
                part, into = former.place.part(slot, index), place.part(slot, index)
                if part.shape == into.shape:
                    moved = (part.real if part.is_complex() and not into.is_complex() else part).to(into)
                    into.copy_(moved if (id(place), index) in begun else into + moved)
                else:
                    self._warn_of_another_shape(index, part, into)
                part.zero_()
            begun.discard((id(place), index))
            former.remaining.discard(index)

    def _warn_of_another_shape(self, index: int, found: torch.Tensor, now: torch.Tensor) -> None:
        warn_user(
            f"parameter {self._names[index]} had the shape {tuple(found.shape)} and has "
            f"{tuple(now.shape)} now: what the communication hook {self._hook!r} kept of its gradients is dropped."
        )

    # ---- as a state dict ---------------------------------------------------------------------------------------------

    def state_dict(self, names: Sequence[str]) -> dict[str, list[torch.Tensor]]:
        """Copies of the state of this rank, by the `names` of each bucket's parameters.

        What has a part for each parameter has them in the order of the names, each in the order of its elements
        whatever its memory format is. Where several buckets have the same parameters, `#2` and so on follow the names.
        """
        saved: dict[str, list[torch.Tensor]] = {}
        times: Counter[str] = Counter()
        for place in [*self._with_state(), *(former.place for former in self._former)]:
            key = ",".join(_escaped(names[index]) for index in place.bucket.indices)
            times[key] += 1
            elementwise = self.elementwise(place.bucket)
            saved[key if times[key] == 1 else f"{key}#{times[key]}"] = [
                _in_order_of_elements(tensor, place.bucket) if slot in elementwise else tensor.clone()
                for slot, tensor in enumerate(place.state or ())
            ]
        return saved

    def load_state_dict(
        self, state: Mapping[str, Sequence[object]], names: Sequence[str], parameters: Sequence[torch.Tensor]
    ) -> None:
        """Take up what `state_dict` has returned, in place of all that there is; whatever the buckets are now.

        Raises KeyError for a parameter that is not there, ValueError for tensors that are not such a bucket's state.
        """
        index_of = {name: index for index, name in enumerate(names)}
        loaded = []
        for key, tensors in state.items():
            indices = [index_of[name] for name in _names_in(key)]
            place = Place(_bucket_of(indices, parameters))
            place.keep(self._checked(key, tensors, place.bucket))
            loaded.append(_Former(place, set(indices), waits=True))
        for place in self._all():
            place.keep(None)
        self._former = loaded
        self._move_on()

    def _checked(self, key: str, found: Sequence[object], bucket: Bucket) -> list[torch.Tensor]:
        """Copies of what was found, of the types that the hook's state for such a bucket has."""
        expected = self.state(Place(bucket))
        shapes = [tuple(tensor.shape) for tensor in expected]
        tensors = [tensor for tensor in found if isinstance(tensor, torch.Tensor)]
        if len(tensors) != len(found) or [tuple(tensor.shape) for tensor in tensors] != shapes:
            words = [tuple(other.shape) if isinstance(other, torch.Tensor) else other for other in found]
            raise ValueError(
                f"the communication hook {self._hook!r} keeps tensors of the shapes {shapes} for the parameters {key}; "
                f"found {words}. Load what comm_hook_state_dict() returned with this hook and this model."
            )
        for slot in self.owed:
            if not tensors[slot].isfinite().all():
                raise ValueError(
                    f"what the communication hook {self._hook!r} owes the parameters {key} is not finite, and would "
                    "make every gradient so: load an earlier state, or none."
                )
        return [t.detach().to(like).clone() for t, like in zip(tensors, expected, strict=True)]


def _bucket_of(indices: Sequence[int], parameters: Sequence[torch.Tensor]) -> Bucket:
    """A bucket of these parameters in which each lies in the order of its elements."""
    specs = [GradientSpec.of(index, parameters[index]) for index in indices]
    specs = [replace(spec, stride=torch.empty(spec.size, dtype=spec.dtype, device="meta").stride()) for spec in specs]
    return place_buckets([specs], world_size=1, reduction="hook").buckets[0]


def _in_order_of_elements(flat: torch.Tensor, bucket: Bucket) -> torch.Tensor:
    """A copy in which each gradient's part is row-major."""
    return torch.cat(
        [torch.view_as_real(p).reshape(-1) if p.is_complex() else p.reshape(-1) for p in _parts(flat, bucket)]
    )


def _parts(flat: torch.Tensor, bucket: Bucket) -> Iterator[torch.Tensor]:
    return (part_of(flat, bucket, gradient) for gradient in bucket.gradients)


def _escaped(name: str) -> str:
    return re.sub(r"([\\,#])", r"\\\1", name)


def _names_in(key: str) -> list[str]:
    """The names that a key of a state dict is made of."""
    of_one_name = r"(?:[^\\,#]|\\.)+"
    if not re.fullmatch(rf"{of_one_name}(,{of_one_name})*(#\d+)?", key):
        raise KeyError(key)
    return [re.sub(r"\\(.)", r"\1", name) for name in re.findall(rf"(?:^|,)({of_one_name})", key)]


# ---- one backward's use: what hooks launch, and what becomes of the state at its end ---------------------------------


class HookedWork:
    """What stands for the Work of an all-reduce where a hook has launched it: one run of its program by hand.

    In two parts: up to its collectives in `launch`, and what comes after them in `wait`.
    """

    def __init__(
        self,
        program: HookProgram,
        flat: torch.Tensor,
        state: Sequence[torch.Tensor],
        keep: Callable[[Sequence[torch.Tensor]], None],
    ) -> None:
        """`keep` is given the new state."""
        self._program, self._flat, self._keep = program, flat, keep
        self._values = program.inputs(flat, state)

    def launch(self) -> None:
        self._program.run(self._program.first, self._values)

    def wait(self) -> None:
        """Leave the mean in the flat buffer; a no-op the second time.

        The hook's own code may raise in here. Then this can be called again.
        """
        if not self._values:
            return
        self._program.run(self._program.then, self._values)
        reduced, *state = self._program.results(self._values)
        with torch.no_grad():
            as_real(self._flat).copy_(reduced)
        self._keep(state)
        self._values.clear()

    def wait_for_collectives(self) -> None:
        """Compute nothing of what comes after them, which `wait` may still do."""
        self._program.wait(self._values)


class LaunchedInPart:
    """What stands for the Work of a bucket of which an exception had left some collectives unlaunched."""

    def __init__(self, rest: Sequence[torch.Tensor], begun: HookedWork | None) -> None:
        """`rest` are the results of these, `begun` is what had launched the others, None for a graph."""
        self._rest, self._begun = rest, begun

    def wait(self) -> None:
        self.wait_for_collectives()

    def wait_for_collectives(self) -> None:
        if self._begun is not None:
            self._begun.wait_for_collectives()
        for result in self._rest:
            wait_tensor(result)  # nobody reads it


@dataclass
class _Change:
    """What a backward makes of the state at one place."""

    new: list[torch.Tensor]
    left_out: Set[int] | None  # parameters whose gradients nobody has asked for; None where hooks launched
    held_back: Set[int] = frozenset()  # parameters whose debt took no part


class TracedHook(Reducer):
    """One backward's use of a communication hook. No state changes before `settle`."""

    def __init__(self, communicator: Communicator, hook: BucketHook, sections: Sequence[Section]) -> None:
        """`sections`, of the sequence that the hook has adopted, are what this backward launches."""
        super().__init__(communicator)
        self._hook, self._places = hook, hook.places(sections)
        self._changes: dict[int, _Change] = {}
        self._begun: dict[int, HookedWork] = {}  # what an exception may have ended before all of it was launched

    def _program(self, position: int) -> HookProgram | None:
        """None for riders, which an all-reduce sums."""
        return self._hook.program(self._places[position].bucket)

    def runs_users_code(self, position: int) -> bool:
        return self._program(position) is not None

    def collectives(self, buckets: int) -> list[int]:
        programs = map(self._program, range(buckets))
        return [1 if program is None else len(program.launches) for program in programs]

    def has_state(self, position: int) -> bool:
        return bool(self._hook.state(self._places[position]))

    def state(self, positions: Iterable[int]) -> list[torch.Tensor]:
        return [tensor for position in positions for tensor in self._hook.state(self._places[position])]

    def keep(self, positions: Iterable[int], new: Sequence[torch.Tensor], left_out: Set[int]) -> None:
        rest = iter(new)
        for position in positions:
            state = [next(rest) for _ in self._hook.state(self._places[position])]
            self._note(position, _Change(state, left_out))
        assert next(rest, None) is None

    def start(self, position: int, flat_buffer: torch.Tensor, unused: Callable[[], Set[int]]) -> Work:
        """Reduce a bucket by hand; `wait` leaves the mean in `flat_buffer`.

        What is owed to the parameters that this rank leaves `unused` is held back. Else it would be sent, and could be
        thrown away: other ranks may not use them either, which nobody knows before the bucket has come back.
        """
        program = self._program(position)
        if program is None:
            return super().start(position, flat_buffer, unused)
        place = self._places[position]
        state = self._hook.state(place)
        held_back: Set[int] = unused() if self._hook.owed else frozenset()
        if held_back:
            state = [tensor.clone() if slot in self._hook.owed else tensor for slot, tensor in enumerate(state)]
            for slot, index in _pairs(self._hook.owed, held_back):
                place.part(slot, index, state).zero_()

        def keep(new: Sequence[torch.Tensor]) -> None:
            self._note(position, _Change(list(new), None, held_back))

        work = self._begun[position] = HookedWork(program, flat_buffer, state, keep)
        work.launch()
        del self._begun[position]
        return work

    def start_rest(self, position: int, launched: int) -> Work:
        program = self._program(position)
        assert program is not None
        return LaunchedInPart(program.launch_zeros(launched), self._begun.pop(position, None))

    def _note(self, position: int, change: _Change) -> None:
        for new, old in zip(change.new, self._hook.state(self._places[position]), strict=True):
            assert (new.shape, new.dtype, new.device) == (old.shape, old.dtype, old.device), f"{new} for {old}"
        change.new = [tensor.contiguous() for tensor in change.new]
        self._changes[position] = change

    @torch.no_grad()
    def settle(self, unused: Callable[[], Set[int]]) -> None:
        used_by_none = unused()
        for position, change in self._changes.items():
            place = self._places[position]
            indices = set(place.bucket.indices)
            as_before = indices & (change.left_out if change.left_out is not None else used_by_none)
            if as_before == indices:
                continue  # also what belongs to the bucket as a whole
            for slot, index in _pairs(self._hook.elementwise(place.bucket), as_before):
                place.part(slot, index, change.new).copy_(place.part(slot, index))
            for slot, index in _pairs(self._hook.owed, change.held_back - as_before):
                place.part(slot, index, change.new).add_(place.part(slot, index))
            place.keep(change.new)
        self._changes.clear()


def _pairs(slots: Set[int], indices: Set[int]) -> Iterator[tuple[int, int]]:
    return ((slot, index) for slot in slots for index in indices)
