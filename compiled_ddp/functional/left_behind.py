"""What a step leaves in its user's objects while it is traced: tensors without values, and numbers of that one call.

A graph returns what it computes, and writes in place into tensors that are there when it is traced. What Python does
besides (`p.grad = gradient`, the state of an optimizer, `losses.append(loss)`, `self.hidden = h`, a draw of `random`)
happens once, while tracing.
"""

import contextlib
import copy
import functools
import inspect
import itertools
import operator
import random
import sys
import threading
import types
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from compiled_ddp import torch_private
from compiled_ddp.functional.reached import CACHING, MOST_ITEMS, is_opaque, parts_of
from compiled_ddp.users_code import warn_user

_INSTEAD = (
    "A compiled step returns what it computes: return the new parameters and state, and pass them to the next call, "
    "as with torch.func; or train the module with compile_ddp and torch.optim."
)


@contextlib.contextmanager
def refusing_optimizers() -> Iterator[None]:
    """In here this thread's torch.optim raises RuntimeError in `step()`, before it makes any state."""
    thread = threading.get_ident()

    def refuse(optimizer: Optimizer, *_: object) -> None:
        if threading.get_ident() != thread:
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if _is_of_the_trace(parameter.grad):
                    parameter.grad = None
        raise RuntimeError(
            f"a compiled step calls step() of torch.optim's {type(optimizer).__name__}, whose state and learning rate "
            f"would be those of this one call for ever. {_INSTEAD}"
        )

    handle = register_optimizer_step_pre_hook(refuse)
    try:
        yield
    finally:
        handle.remove()


def refuse_left_behind(reached: Iterable[Any], modules: Iterable[nn.Module]) -> None:
    """Raise RuntimeError where one of these holds a tensor of the current trace, which is about to end.

    The gradients among them are taken away again, as in zero_grad().
    """
    found = [place for value in reached for place in _places(value)]
    for part in parts_of(modules):
        for name, parameter in part.named_parameters(recurse=False):
            if _is_of_the_trace(parameter.grad):
                found.append(f".grad of the parameter {name!r} of a {type(part).__name__}")
                parameter.grad = None
        of_trace = (name for name, buffer in part.named_buffers(recurse=False) if _is_of_the_trace(buffer))
        found += [f"the buffer {name!r} of a {type(part).__name__}" for name in of_trace]
    if found:
        raise RuntimeError(
            f"a compiled step leaves a tensor in {found[0]}: it is one of the trace, without a value. {_INSTEAD}"
        )


def _places(value: Any) -> Iterator[str]:
    """Where in `value`, itself or its attributes, tensors of the trace are."""
    if _is_of_the_trace(value):
        yield "a global, or a variable of a function around it"
    if isinstance(value, nn.Module | Tensor | type | types.ModuleType) or callable(value):
        return
    kind = type(value).__name__
    if isinstance(value, dict | list | tuple):
        entries = value.items() if isinstance(value, dict) else enumerate(value)
        yield from (f"[{key!r}] of a {kind} that it reaches" for key, each in entries if _is_of_the_trace(each))
        return
    attributes = getattr(value, "__dict__", {}).items()
    yield from (f"{name} of the {kind} that it reaches" for name, each in attributes if _is_of_the_trace(each))


def _is_of_the_trace(value: object) -> bool:
    return isinstance(value, Tensor) and torch_private.tracing.node_of(value) is not None


# ---- attributes of modules -------------------------------------------------------------------------------------------

_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_MISSING = object()
_DEEPEST = 3  # containers within each other that are looked into


class ModuleAttributes:
    """The attributes that modules have before a step is traced, and which of these the trace reads.

    What a forward sets and then reads, as a loss of experts, is a value of the trace like any other. What it reads
    before it has set it is that of the call before, which a graph does not know.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._parts = {id(part): part for part in parts_of(modules)}
        self._before = {place: {**vars(part)} for place, part in self._parts.items()}
        every = [(place, name, value) for place, own in self._before.items() for name, value in own.items()]
        self._contents = {(place, name): _contents(value) for place, name, value in every}
        self._copies = {(place, name): copy.copy(value) for place, name, value in every if type(value) in (dict, list)}
        self._read, self._set = set[tuple[int, str]](), set[tuple[int, str]]()
        self._kept, self._changed = list[tuple[nn.Module, str]](), list[tuple[nn.Module, str]]()

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """Note what the user's code, of this thread, reads and sets in here; not of torch's own modules."""
        thread = threading.get_ident()

        def note(module: nn.Module, name: str, is_set: bool) -> None:
            place = id(module), name
            if place[0] not in self._before or threading.get_ident() != thread:
                return
            if is_set:
                self._set.add(place)
                return
            own, before = object.__getattribute__(module, "__dict__"), self._before[place[0]]
            if place not in self._set and own.get(name, _MISSING) is before.get(name, _MISSING):
                self._read.add(place)

        with contextlib.ExitStack() as stack:
            for kind in {type(part): None for part in self._parts.values()}:
                if not is_opaque(kind):
                    stack.enter_context(_noting_for(kind, note))
            yield

    @property
    def set_first(self) -> list[tuple[nn.Module, str]]:
        """Those that the trace has set before it has read them."""
        return [(self._parts[place], name) for place, name in self._set - self._read]

    def put_back(self) -> None:
        """Let modules have what they had, where that has tensors of the trace now, at its end."""
        for number, part in self._parts.items():
            before, own = self._before[number], vars(part)
            for name in [name for name in {**before, **own} if name not in _OF_EVERY_MODULE]:
                old, new, place = before.get(name, _MISSING), own.get(name, _MISSING), (number, name)
                contents = self._contents.get(place)
                if _contents(new) == contents:
                    continue
                is_read = place in self._read and not _is_computed_once(part, name)
                if not any(map(_is_of_the_trace, _items(new))):
                    self._changed += [(part, name)] if is_read else []
                    continue
                if is_read and contents != []:  # one that was empty is filled anew in each call
                    self._kept.append((part, name))
                _put_back(own, name, old, self._copies.get(place))

    def refuse_kept(self) -> None:
        """Raise RuntimeError where the trace has read what it has replaced: that would be the first call's for ever.

        Warns of numbers.
        """
        for part, name in self._kept:
            raise RuntimeError(
                f"the forward of a {type(part).__name__} keeps a tensor in {name!r} from call to call, and a graph "
                f"would read that of the first one for ever. Make it a buffer, self.register_buffer({name!r}, ...), "
                "which is followed; or pass it in with the batch, and return it. A cache that forward fills is to be "
                "filled, as large as it gets, before the first step."
            )
        for part, name in self._changed:
            warn_user(
                f"the forward of a {type(part).__name__} reads {name!r} and changes it: that is done while a step is "
                "traced, and not in the calls after it. If what it computes depends on it, make it a buffer, a tensor."
            )


def _put_back(own: dict[str, Any], name: str, old: Any, copied: Any) -> None:
    """Let the attribute `name` be what it was, with what was in it, where that is a list or a dict."""
    if isinstance(old, list):
        old[:] = copied
    elif isinstance(old, dict):
        old.clear()
        old.update(copied)
    if old is _MISSING:
        del own[name]
    else:
        own[name] = old


def _is_computed_once(part: nn.Module, name: str) -> bool:
    return isinstance(inspect.getattr_static(type(part), name, None), functools.cached_property)


# ---- noting what is read and set of objects of a class ---------------------------------------------------------------

Note = Callable[[Any, str, bool], None]  # is told of the object, the name, and whether it is set

# Those that are told, of each class, and what it has defined itself before; threads may trace at once.
_noting: dict[type, tuple[list[Note], dict[str, Any]]] = {}
_lock = threading.Lock()
_PATCHED = ("__getattribute__", "__setattr__")


@contextlib.contextmanager
def _noting_for(kind: Any, note: Note) -> Iterator[None]:
    """Tell `note` of each attribute that code of the user's asks for, or sets, of objects of this class."""
    with _lock:
        if kind not in _noting:
            _noting[kind] = [], {name: vars(kind)[name] for name in _PATCHED if name in vars(kind)}
            _note_all_of(kind, _noting[kind][0])
        _noting[kind][0].append(note)
    try:
        yield
    finally:
        with _lock:
            notes, before = _noting[kind]
            notes.remove(note)
            if not notes:
                del _noting[kind]
                for name in _PATCHED:
                    if name in before:
                        setattr(kind, name, before[name])
                    else:
                        delattr(kind, name)


def _note_all_of(kind: Any, notes: list[Note]) -> None:
    get, put = kind.__getattribute__, kind.__setattr__

    def getting(self: Any, name: str) -> Any:
        if not _is_of_torch_or_here(sys._getframe(1)):
            for note in [*notes]:
                note(self, name, False)
        return get(self, name)

    def setting(self: Any, name: str, value: Any) -> None:
        for note in [*notes]:
            note(self, name, True)
        put(self, name, value)

    kind.__getattribute__, kind.__setattr__ = getting, setting


def _is_of_torch_or_here(frame: types.FrameType) -> bool:
    """Whether it is torch's, or what tells of the same access to a class that this one is derived from."""
    return frame.f_globals is globals() or str(frame.f_globals.get("__name__")).startswith("torch.")


# ---- what is in a value ----------------------------------------------------------------------------------------------


def _items(value: object, deepest: int = _DEEPEST) -> list[object]:
    """What is in containers, and in objects of the user's; of anything else itself."""
    if deepest and isinstance(value, dict | list | tuple | set | deque):
        if len(value) > MOST_ITEMS:
            return [value]
        inner = [*value.keys(), *value.values()] if isinstance(value, dict) else [*value]
    elif deepest and _is_plain_object(value):
        inner = [*vars(value).values()]
    else:
        return [value]
    return [each for one in inner for each in _items(one, deepest - 1)]


def _is_plain_object(value: object) -> bool:
    if isinstance(value, nn.Module | Tensor | type | types.ModuleType) or callable(value):
        return False
    return isinstance(getattr(value, "__dict__", None), dict) and not is_opaque(type(value))


def _contents(value: object) -> list[Hashable]:
    """Another list where something else is in a container; the empty one where nothing is in it, or in no attribute."""
    items = [] if value is _MISSING else _items(value)
    return [(type(each), each) if isinstance(each, int | float | str | None) else id(each) for each in items]


# ---- what functions remember, and random numbers ---------------------------------------------------------------------


@contextlib.contextmanager
def emptying_caches(reached: Iterable[Any]) -> Iterator[None]:
    """Empty what functions with `functools.lru_cache` have remembered in here: it may be tensors of the trace."""
    caches = [(value, value.cache_info().misses) for value in reached if isinstance(value, CACHING)]
    try:
        yield
    finally:
        for cache, misses in caches:
            if cache.cache_info().misses != misses:
                cache.cache_clear()


class DrawsOfPython:
    """Whether `random`, or NumPy's global generator, has been drawn from since this was made."""

    def __init__(self) -> None:
        self._numpy = sys.modules.get("numpy")  # what is imported later begins anew
        self._before = self._states()

    def refuse(self, reached: Iterable[Any]) -> None:
        """Raise RuntimeError where they have been, by what a step has `reached`; warn where it has reached neither.

        In that case it may have been another thread.
        """
        if self._states() == self._before:
            return
        message = (
            "a compiled step draws numbers from `random` or `numpy.random`, as mixup and stochastic depth do: those of "
            "its first call would be those of every call. Draw them with torch (torch.rand, torch.distributions), "
            "which is done anew in each, or outside of the step, and pass a tensor."
        )
        if any(map(self._is_drawn_from, reached)):
            raise RuntimeError(message)
        warn_user(f"Unless it was another thread, {message}")

    def _is_drawn_from(self, value: object) -> bool:
        """Whether it is one of the two modules, or a function of theirs."""
        owners: list[object] = [random, random._inst]
        if self._numpy is not None:
            owners += [self._numpy, self._numpy.random, self._numpy.random.mtrand._rand]
        return any(value is each or getattr(value, "__self__", None) is each for each in owners)

    def _states(self) -> Hashable:
        return random.getstate(), None if self._numpy is None else repr(self._numpy.random.get_state(legacy=False))


class Iterators:
    """How far those are that a step reaches, when this was made."""

    def __init__(self, reached: Iterable[Any]) -> None:
        self._before = [(each, _position(each)) for each in reached if isinstance(each, Iterator)]

    def refuse_advanced(self) -> None:
        """Raise RuntimeError where one is further now; warn where that cannot be told."""
        for each, before in self._before:
            message = (
                f"a compiled step calls next() of a {type(each).__name__}: what comes in its first call would come in "
                "every call. Call it outside of the step, and pass what comes."
            )
            if _position(each) != before:
                raise RuntimeError(message)
            if before is None or (isinstance(each, types.GeneratorType) and each.gi_suspended):  # at the same `yield`
                warn_user(f"If it does so at all, {message}")


def _position(iterator: Iterator[Any]) -> Hashable:
    """Another one where it has been advanced; None where none can be told."""
    if isinstance(iterator, types.GeneratorType):
        return inspect.getgeneratorstate(iterator), iterator.gi_frame and iterator.gi_frame.f_lasti
    left = operator.length_hint(iterator, -1)
    return left if left >= 0 else repr(iterator) if isinstance(iterator, itertools.count) else None
