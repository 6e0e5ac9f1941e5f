"""What a step depends on besides its arguments: what its functions close over, and the globals that they name."""

import contextlib
import dis
import enum
import functools
import inspect
import operator
import sys
import threading
import types
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from compiled_ddp import torch_private

_VALUES = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, enum.Enum)
_CONTAINERS = (dict, list, tuple, set, frozenset)
MOST_ITEMS = 256  # of a container that is looked into, in each call; a larger one counts as itself


class OwnChanges:
    """Lists and dicts that a step itself changes while it is traced, as a list that counts how often that happens.

    And attributes that it sets before it reads them. No later call changes them, or reads what they were: they say
    nothing of what a graph would compute.
    """

    def __init__(self) -> None:
        self._changed: dict[int, object] = {}  # kept, so that their places in memory stay theirs
        self._set: dict[tuple[int, str], nn.Module] = {}

    def add_set(self, attributes: Iterable[tuple[nn.Module, str]]) -> None:
        """These attributes of modules are set before they are read."""
        self._set.update(((id(module), name), module) for module, name in attributes)

    def are_set(self, value: object, name: str) -> bool:
        """Whether a step sets this attribute before it reads it."""
        return bool(self._set) and (id(value), name) in self._set

    def __contains__(self, value: object) -> bool:
        return id(value) in self._changed

    @contextlib.contextmanager
    def changing(self, function: Callable[..., Any]) -> Iterator[None]:
        """Note what is changed in here of what `function` reaches."""
        before = self._contents(function)
        yield
        after = self._contents(function)
        for place, (value, contents) in before.items():
            if place in after and after[place][1] != contents:
                self._changed[place] = value

    def _contents(self, function: Callable[..., Any]) -> dict[int, tuple[object, list[Hashable]]]:
        containers = [value for value in reached(function) if isinstance(value, _CONTAINERS) and value not in self]
        return {
            id(value): (value, [*map(_compared, [*value, *value.values()] if isinstance(value, dict) else value)])
            for value in containers
        }


def closed_over(function: Callable[..., Any], own: OwnChanges) -> tuple[Hashable, ...]:
    """Equal as long as nothing that `function` reaches by a name has been replaced.

    It looks through functions and what they are wrapped in, at their defaults, into dicts, lists and tuples, at the
    attributes that their code reads by name (`self.rate`, `settings.rate`, `optim.RATE`), at whether modules train and
    which hooks they have, and through what is called with them: the forward of each part of a module, hooks, `__call__`
    of an object. Tensors, modules and other objects count as themselves, numbers by their values. `Surroundings` sees
    the modules that are called, however the step comes to them. The step's `own` do not count.
    """
    found: list[Hashable] = []
    for value in reached(function, own):
        if isinstance(value, _VALUES):
            found.append((type(value), value))
        elif isinstance(value, _CONTAINERS) and len(value) <= MOST_ITEMS:
            keys = tuple(map(_compared, value)) if isinstance(value, dict) else ()
            found.append((type(value), len(value), keys))
        else:
            found.append(_Same(value))
        if isinstance(value, nn.Module):
            modules = parts_of([value])
            found += _state_of(modules)
            if not _is_ours(type(value)):  # whole steps look at their model's themselves
                found.append(settings_of([each for each in modules if is_opaque(type(each))], own))
    return tuple(found)


def _compared(value: Any) -> Hashable:
    return (type(value), value) if isinstance(value, _VALUES) else _Same(value)


def _state_of(modules: Collection[nn.Module]) -> tuple[Hashable, Hashable]:
    """Whether each trains, and which hooks are around it."""
    training = tuple(map(_trains, modules))
    return training, tuple((*at, *hooks) for at, hooks in torch_private.modules.hooks_around(modules).items())


_trains = operator.attrgetter("training")

_NUMBERS = frozenset({int, float, bool, str, type(None)})
_SETTINGS = _NUMBERS | {torch.dtype, types.FunctionType, types.BuiltinFunctionType}


def settings_of(modules: Iterable[nn.Module], but: OwnChanges) -> tuple[Hashable, ...]:
    """The attributes of modules that are numbers, texts, tuples of these, or functions: with names and types."""
    return tuple(
        (name, type(value), value)
        for module in modules
        for name, value in vars(module).items()
        if (type(value) in _SETTINGS or _is_row(value)) and not but.are_set(module, name)
    )


def _is_row(value: object) -> bool:
    return type(value) is tuple and all(type(each) in _NUMBERS for each in value)


def parts_of(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """What `modules()` of each yields, each once, in a fifth of its time: it is asked in each call."""
    found, ahead = dict[int, nn.Module](), [*modules][::-1]
    while ahead:
        module = ahead.pop()
        if id(module) not in found:
            found[id(module)] = module
            ahead += [part for part in reversed(module._modules.values()) if part is not None]
    return [*found.values()]


class Surroundings:
    """What a step has met while it was traced, however it came to it: the modules that it has called, and tensors.

    A tensor that is no argument is an input of the graph, whose memory follows what is written there.
    """

    def __init__(
        self, modules: Collection[nn.Module], others: Collection[nn.Module], tensors: Sequence[torch.Tensor]
    ) -> None:
        """`modules` are those that were called, `others` those that the step has had besides, called or not."""
        self._modules, self._state = modules, _state_of(modules)
        self._tensors = [tensor for tensor in tensors if _has_memory(tensor)]
        self._memory, self._storages = self._memory_now(), {*torch_private.tensors.memory_of_each(self._tensors)}
        # A ParameterList is never called, nor is a module whose parameters the step reads as attributes.
        known = {*map(id, tensors), *map(id, modules)}
        self._places = [
            (parts, name, part)
            for module in parts_of([*modules, *others])
            for parts in (module._parameters, module._buffers, module._modules)
            for name, part in parts.items()
            if id(part) in known
        ]

    def are_as_they_were(self) -> bool:
        """Whether no module was switched, replaced or got a hook, and no tensor was replaced or got other memory."""
        return (
            self._memory_now() == self._memory
            and all(parts.get(name) is part for parts, name, part in self._places)
            and _state_of(self._modules) == self._state
        )

    def refuse_as_donated(self, donated: Iterable[torch.Tensor]) -> None:
        """Raise ValueError where one of these is a tensor that the step closes over, and goes on to read."""
        if self._storages and not self._storages.isdisjoint(torch_private.tensors.memory_of_each(donated)):
            raise ValueError(
                "a donated tensor shares memory with one that the step closes over, where its results would appear: "
                "let the step close over a copy, or pass it as an argument of its own."
            )

    def _memory_now(self) -> list[tuple[int, torch.Size, tuple[int, ...]]]:
        addresses, strides = map(torch.Tensor.data_ptr, self._tensors), map(torch.Tensor.stride, self._tensors)
        return [*zip(addresses, map(_shape, self._tensors), strides, strict=True)]


_shape = operator.attrgetter("shape")


def _has_memory(tensor: torch.Tensor) -> bool:
    """Whether it has a place in memory that can be asked for: a sparse one and a subclass have none, or several."""
    return type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout == torch.strided


@contextlib.contextmanager
def modules_called() -> Iterator[Collection[nn.Module]]:
    """Those that are called in here, by this thread, each once."""
    thread, called = threading.get_ident(), dict[int, nn.Module]()

    def note(module: nn.Module, _: object) -> None:
        if threading.get_ident() == thread:
            called[id(module)] = module

    handle = nn.modules.module.register_module_forward_pre_hook(note)
    try:
        yield called.values()
    finally:
        handle.remove()


def generators_shared(generators: Sequence[torch.Generator], closed: tuple[Hashable, ...]) -> tuple[Hashable, ...]:
    """For each of a step's arguments that are generators: its first place, and itself if the step closes over it."""
    first = [next(place for place, other in enumerate(generators) if other is each) for each in generators]
    same = [*map(_Same, generators)]
    return tuple(zip(first, [each if each in closed else None for each in same], strict=True))


def reached(function: Callable[..., Any], but: OwnChanges | None = None) -> Iterator[Any]:
    """What `function` reaches by names, as it is, `but` for these: functions that others are wrapped in too."""
    but = OwnChanges() if but is None else but
    seen: set[int] = set()
    ahead: list[Any] = [function]
    while ahead:
        value = ahead.pop()
        if isinstance(value, _VALUES):
            yield value
        elif id(value) not in seen and value not in but:
            seen.add(id(value))
            yield value
            ahead += _reached_from(value, but)


class _Same:
    """Equal to itself alone, and kept, so that its place in memory stays its own."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._value is other._value

    def __hash__(self) -> int:
        return id(self._value)


def _reached_from(value: Any, but: OwnChanges) -> Iterator[Any]:
    if isinstance(value, _CONTAINERS):
        if len(value) <= MOST_ITEMS:
            yield from value.values() if isinstance(value, dict) else value
    elif isinstance(value, nn.Module):
        for part in parts_of([value]):
            yield from _read_by_call(part, but)
    elif isinstance(value, functools.partial):
        yield from (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, types.MethodType):
        yield value.__self__
        yield from _read_by_method(value.__func__, value.__self__, but)
    elif isinstance(value, types.FunctionType) and ((is_ours := _is_ours(value)) or _is_users(value.__module__)):
        named = [cell.cell_contents for cell in value.__closure__ or () if cell != types.CellType()]
        named += [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        if is_ours:  # a wrapper: what it closes over is the user's
            yield from named
        else:
            named += [value.__globals__[name] for name in _globals_named(value.__code__) if name in value.__globals__]
            yield from named
            yield from _attributes_read(value.__code__, named, but)
    elif callable(value) and _has_own_attributes(value) and isinstance(type(value).__call__, types.FunctionType):
        yield from _read_by_method(type(value).__call__, value, but)

    if callable(value) and "__wrapped__" in getattr(value, "__dict__", ()):
        yield value.__wrapped__


def _read_by_call(module: nn.Module, but: OwnChanges) -> Iterator[Any]:
    """What a call of this module runs and reads, besides what its parts and torch's own code do."""
    own = vars(module)
    if "forward" in own:
        yield own["forward"]
    elif not is_opaque(type(module)):
        forward = next(vars(each)["forward"] for each in type(module).__mro__ if "forward" in vars(each))
        yield from _read_by_method(forward, module, but)
    yield from own["_forward_pre_hooks"].values()
    yield from own["_forward_hooks"].values()


def _read_by_method(method: Any, owner: object, but: OwnChanges) -> Iterator[Any]:
    """What is called as a method of `owner`, as its class has it, and what it reads of that."""
    function = _function_of(method)
    yield method if function is None else function
    if function is not None:
        yield from _attributes_read(inspect.unwrap(function).__code__, [owner], but)


def _function_of(attribute: Any) -> types.FunctionType | None:
    """The function behind what a class has by a name: a method of any kind, or a property."""
    if isinstance(attribute, property):
        attribute = attribute.fget
    elif isinstance(attribute, staticmethod | classmethod):
        attribute = attribute.__func__
    elif isinstance(attribute, functools.cached_property | functools.partialmethod):
        attribute = attribute.func
    elif isinstance(attribute, CACHING):
        attribute = attribute.__wrapped__
    return attribute if isinstance(attribute, types.FunctionType) else None


CACHING = type(functools.lru_cache(lambda: None))  # of a function that remembers what it has returned


# ---- what functions read by name -------------------------------------------------------------------------------------


def _attributes_read(code: types.CodeType, of: Sequence[Any], but: OwnChanges) -> Iterator[Any]:
    """What `code` reads of these objects, classes and modules of Python, and of what it finds there.

    Methods are followed, as are properties. Any attribute of a name that the code reads somewhere counts as read, `but`
    for those that are set first.
    """
    ahead = [(value, code) for value in of]
    seen: set[tuple[int, int]] = set()
    while ahead:
        value, code = ahead.pop()
        if (id(value), id(code)) in seen or not _has_own_attributes(value):
            continue
        seen.add((id(value), id(code)))
        own = vars(value)
        named = _attributes_named(code)
        found = [own[name] for name in named if name in own and not but.are_set(value, name)]
        ahead += [(each, code) for each in found]
        if isinstance(value, nn.Module):  # `self.encoder.embed(x)`
            ahead += [(value._modules[name], code) for name in named if name in value._modules]
        yield from found
        kind: Any = type(value)
        for owner, name in _of_class(kind, code):
            attribute = vars(owner).get(name)
            function = _function_of(attribute)
            if function is not None:
                ahead.append((value, inspect.unwrap(function).__code__))
                yield attribute if isinstance(attribute, CACHING) else function
            elif isinstance(attribute, (*_VALUES, *_CONTAINERS, torch.Tensor)) and name not in own:
                yield attribute
            elif _has_own_attributes(attribute) and name not in own:
                ahead.append((attribute, code))
                yield attribute


_OPAQUE = frozenset({"torch", "compiled_ddp"})


def _has_own_attributes(value: Any) -> bool:
    """Whether it is an object, a class or a module of Python that users may set attributes of."""
    if isinstance(value, (*_VALUES, torch.Tensor, types.FunctionType, types.MethodType)):
        return False
    if isinstance(value, types.ModuleType):
        return _is_users(value.__name__)
    kind = value if isinstance(value, type) else type(value)
    return hasattr(value, "__dict__") and _package(kind.__module__) not in _OPAQUE


@functools.lru_cache(maxsize=2**16)
def _package(module: str | None) -> str:
    return str(module).partition(".")[0]


def _is_users(module: str | None) -> bool:
    """Whether code of a module is looked through: that of torch, of ours and of Python itself is not."""
    package = _package(module)
    return package not in _OPAQUE and package not in sys.stdlib_module_names


def _is_ours(function_or_class: Any) -> bool:
    return _package(function_or_class.__module__) == "compiled_ddp"


def _has_no_users_class(kind: type) -> bool:
    return all(_package(each.__module__) in _OPAQUE for each in kind.__mro__[:-1])


# Whether a class is torch's, or ours, whose code is not looked through, and not one that torch has derived of a user's.
is_opaque: Callable[[type], bool] = functools.lru_cache(maxsize=2**16)(_has_no_users_class)


@functools.lru_cache(maxsize=2**16)
def _globals_named(code: types.CodeType) -> tuple[str, ...]:
    """The globals that a function reads, and the functions inside of it."""
    inner = [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    own = {str(step.argval) for step in dis.get_instructions(code) if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    return tuple(sorted(own.union(*map(_globals_named, inner))))


@functools.lru_cache(maxsize=2**16)
def _attributes_named(code: types.CodeType) -> tuple[str, ...]:
    """The attributes that a function reads, and the functions inside of it; not those that it sets as it is traced."""
    inner = [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    steps = [*dis.get_instructions(code)]
    read = {str(step.argval) for step in steps if step.opname in ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR")}
    set_here = {str(step.argval) for step in steps if step.opname == "STORE_ATTR"}
    return tuple(sorted(read.union(*map(_attributes_named, inner)) - set_here))


@functools.lru_cache(maxsize=2**16)
def _of_class(kind: type, code: types.CodeType) -> tuple[tuple[type, str], ...]:
    """Where the attributes that a function reads are defined, for objects of this class: (class, name).

    Each class that has one, as methods call what they override.
    """
    owners = [each for each in kind.__mro__ if _is_users(each.__module__)]
    return tuple((each, name) for name in _attributes_named(code) for each in owners if name in vars(each))
