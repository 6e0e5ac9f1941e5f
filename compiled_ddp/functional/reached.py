"""What a function reaches by names, and all that is read to find it, which is asked again in the calls that follow."""

import array
import collections
import contextlib
import dis
import enum
import functools
import itertools
import operator
import sys
import types
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from compiled_ddp import torch_private

VALUES = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, enum.Enum)
CONTAINERS = (dict, list, tuple, set, frozenset, collections.deque)
MOST_ITEMS = 4096  # of a container that is looked into, in each call; a larger one counts as itself
MOST_BYTES = 2**16  # of an array of numbers


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
        containers = [value for value in Reached(function) if isinstance(value, CONTAINERS) and value not in self]
        return {
            id(value): (value, [*map(compared, [*value, *value.values()] if isinstance(value, dict) else value)])
            for value in containers
        }


def parts_of(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """What `modules()` of each yields, each once, in a fifth of its time: it is asked in each call."""
    found, ahead = dict[int, nn.Module](), [*modules][::-1]
    while ahead:
        module = ahead.pop()
        if id(module) not in found:
            found[id(module)] = module
            ahead += [part for part in reversed(module._modules.values()) if part is not None]
    return [*found.values()]


def compared(value: Any) -> Hashable:
    """By its value where that is a number or the like, by itself otherwise."""
    return (type(value), value) if isinstance(value, VALUES) else Same(value)


class Same:
    """Equal to itself alone, and kept, so that its place in memory stays its own."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self._value is other._value

    def __hash__(self) -> int:
        return id(self._value)


# ---- what a function reaches -----------------------------------------------------------------------------------------


class Reads:
    """All that was read of places that others may write to, with what stood there; asked again in each call, in C.

    By identity: a number that was replaced by an equal one counts as another.
    """

    def __init__(self) -> None:
        self._asked: list[Callable[[], Any]] = []
        self._answers: list[Any] = []
        self._containers: list[Collection[Any]] = []
        self._lengths: list[int] = []
        self._contents: list[Collection[Any]] = []  # of those that have any, which follow them
        self._items: list[Any] = []
        self._held: dict[int, tuple[Collection[Any], list[Any]]] = {}  # each of the containers, with what it had
        self._arrays: list[tuple[Any, tuple[Hashable, ...]]] = []  # of numbers, and what they hold

    def are_as_they_were(self) -> bool:
        """Whether each place holds what it held."""
        try:
            return (
                all(map(operator.is_, map(operator.call, self._asked), self._answers))
                and [*map(len, self._containers)] == self._lengths
                and all(map(operator.is_, itertools.chain.from_iterable(self._contents), self._items))
                and all(_numbers_of(values) == before for values, before in self._arrays)
            )
        except (ValueError, RuntimeError):  # an empty cell; or another thread changes what is read
            return False

    def but(self, watched: Iterable[Collection[Any]]) -> "Reads":
        """The same, without these containers, at which somebody else looks in each call."""
        others, left = {*map(id, watched)}, Reads()
        left._asked, left._answers, left._arrays = self._asked, self._answers, self._arrays
        for place, (container, items) in self._held.items():
            if place not in others:
                left._hold(container, items)
        return left

    def of(self, function: Callable[..., Any], *args: Any) -> Any:
        """What it returns for these, the same object as long as nothing changes."""
        asked = functools.partial(function, *args)
        self._asked.append(asked)
        self._answers.append(asked())
        return self._answers[-1]

    def attributes(self, of: Mapping[str, Any], names: Iterable[str]) -> list[Any]:
        """Those of these names that there are."""
        return [each for name in names if (each := self.of(of.get, name, _MISSING)) is not _MISSING]

    def attributes_of(self, value: Any) -> Mapping[str, Any]:
        """The dictionary of an object, or of a class, which has a new view of its own each time."""
        self.of(type, value)
        return vars(value) if isinstance(value, type) else self.of(getattr, value, "__dict__")

    def items(self, container: Any) -> Iterable[Any]:
        """What is in there, and looked at."""
        if self.of(_is_large, container):
            return ()
        self._remember(container)
        return container.values() if isinstance(container, dict) else container

    def numbers(self, values: Any) -> tuple[Hashable, ...]:
        """Those of an array of them, as they are, with their kind and shape."""
        self._arrays.append((values, _numbers_of(values)))
        return self._arrays[-1][1]

    def parts(self, module: nn.Module) -> list[nn.Module]:
        """`parts_of` one, in which nothing is replaced."""
        found = parts_of([module])
        for part in found:
            self.of(type, part)
        for dictionary in [*dictionaries_of(found), *torch_private.modules.hooks_around_all()]:
            self._remember(dictionary)
        return found

    def named_in(self, function: types.FunctionType) -> list[Any]:
        """What it has in cells and as defaults."""
        self.of(getattr, function, "__code__")
        cells = self.of(getattr, function, "__closure__") or ()
        named = [self.of(getattr, cell, "cell_contents") for cell in cells if self.of(operator.ne, cell, _EMPTY)]
        named += self.of(getattr, function, "__defaults__") or ()
        return [*named, *self.items(self.of(getattr, function, "__kwdefaults__") or {})]

    def code_of(self, function: types.FunctionType) -> types.CodeType:
        """That of what it is wrapped around in the end."""
        while wrapped := self.attributes(vars(function), ["__wrapped__"]):
            (function,) = wrapped
        code: types.CodeType = self.of(getattr, function, "__code__")
        return code

    def _remember(self, container: Any) -> None:
        if id(container) not in self._held:  # as a part that is reached by itself too would be
            self._hold(container, [*itertools.chain.from_iterable(_views_of(container))])

    def _hold(self, container: Any, items: list[Any]) -> None:
        self._held[id(container)] = container, items
        views = _views_of(container)
        self._containers.append(container)
        self._lengths.append(len(items) // len(views))
        if items:  # most of a module's hooks are none
            self._contents += views
            self._items += items


_MISSING, _EMPTY = object(), types.CellType()


def _views_of(container: Any) -> list[Collection[Any]]:
    """What it holds, in collections that follow it."""
    return [container.keys(), container.values()] if isinstance(container, dict) else [container]


def is_array(value: Any) -> bool:
    """Whether it is numbers in memory, not too many to be looked at in each call: numpy's array, Python's, or bytes."""
    if isinstance(value, array.array | bytearray):
        return memoryview(value).nbytes <= MOST_BYTES
    kind = type(value)
    return kind.__name__ == "ndarray" and kind.__module__ == "numpy" and value.nbytes <= MOST_BYTES


def _numbers_of(values: Any) -> tuple[Hashable, ...]:
    if isinstance(values, bytearray):
        return (bytes(values),)
    kind = values.typecode if isinstance(values, array.array) else values.dtype
    return kind, getattr(values, "shape", None), values.tobytes()


def _is_large(container: Collection[Any]) -> bool:
    return len(container) > MOST_ITEMS


def dictionaries_of(modules: Collection[nn.Module]) -> list[dict[str, Any]]:
    """Where modules keep what a forward may read: attributes, parameters, buffers, parts and hooks."""
    attributes = [vars(module) for module in modules]
    return [*attributes, *(each for own in attributes for each in own.values() if isinstance(each, dict))]


class Reached:
    """What `function` reaches by names, as it is, `but` for these: functions that others are wrapped in too.

    `reads` has all that was read to find it.
    """

    def __init__(self, function: Callable[..., Any], but: OwnChanges | None = None) -> None:
        self._function, self._but, self.reads = function, OwnChanges() if but is None else but, Reads()

    def __iter__(self) -> Iterator[Any]:
        seen: set[int] = set()
        ahead: list[Any] = [self._function]
        while ahead:
            value = ahead.pop()
            if isinstance(value, VALUES):
                yield value
            elif id(value) not in seen and value not in self._but:
                seen.add(id(value))
                yield value
                ahead += self._reached_from(value)

    def _reached_from(self, value: Any) -> Iterator[Any]:
        if isinstance(value, CONTAINERS):
            yield from self.reads.items(value)
        elif isinstance(value, nn.Module):
            for part in self.reads.parts(value):
                yield from self._read_by_call(part)
        elif isinstance(value, functools.partial):
            yield from (value.func, *value.args, *self.reads.items(value.keywords))
        elif isinstance(value, types.MethodType):
            yield value.__self__
            yield from self._read_by_method(value.__func__, value.__self__)
        elif isinstance(value, types.FunctionType) and ((is_wrapper := is_ours(value)) or _is_users(value.__module__)):
            named = self.reads.named_in(value)
            if is_wrapper:  # what it closes over is the user's
                yield from named
            else:
                named += self.reads.attributes(value.__globals__, _globals_named(value.__code__))
                yield from named
                yield from self._attributes_read(value.__code__, named)
        elif callable(value) and _has_own_attributes(value) and isinstance(type(value).__call__, types.FunctionType):
            yield from self._read_by_method(self.reads.of(getattr, type(value), "__call__"), value)

        if callable(value) and hasattr(value, "__dict__"):
            yield from self.reads.attributes(vars(value), ["__wrapped__"])

    def _read_by_call(self, module: nn.Module) -> Iterator[Any]:
        """What a call of this module runs and reads, besides what its parts and torch's own code do."""
        own = vars(module)
        if "forward" in own:
            yield own["forward"]
        elif not is_opaque(type(module)):
            forwards = (self.reads.attributes(vars(each), ["forward"]) for each in type(module).__mro__)
            yield from self._read_by_method(next(itertools.chain.from_iterable(forwards)), module)
        yield from own["_forward_pre_hooks"].values()
        yield from own["_forward_hooks"].values()

    def _read_by_method(self, method: Any, owner: object) -> Iterator[Any]:
        """What is called as a method of `owner`, as its class has it, and what it reads of that."""
        function = _function_of(method)
        yield method if function is None else function
        if function is not None:
            yield from self._attributes_read(self.reads.code_of(function), [owner])

    def _attributes_read(self, code: types.CodeType, of: Sequence[Any]) -> Iterator[Any]:
        """What `code` reads of these objects, classes and modules of Python, and of what it finds there.

        Methods are followed, as are properties. Any attribute of a name that the code reads somewhere counts as read,
        but for those that are set first.
        """
        ahead = [(value, code) for value in of]
        seen: set[tuple[int, int]] = set()
        while ahead:
            value, code = ahead.pop()
            if (id(value), id(code)) in seen or not _has_own_attributes(value):
                continue
            seen.add((id(value), id(code)))
            own = self.reads.attributes_of(value)
            named = _attributes_named(code)
            found = self.reads.attributes(own, [name for name in named if not self._but.are_set(value, name)])
            ahead += [(each, code) for each in found]
            if isinstance(value, nn.Module):  # `self.encoder.embed(x)`
                ahead += [(part, code) for part in self.reads.attributes(value._modules, named)]
            yield from found
            kind: Any = type(value)
            for owner, name in _of_class(kind, code):
                for attribute in self.reads.attributes(vars(owner), [name]):
                    function = _function_of(attribute)
                    if function is not None:
                        ahead.append((value, self.reads.code_of(function)))
                        yield attribute if isinstance(attribute, CACHING) else function
                    elif isinstance(attribute, (*VALUES, *CONTAINERS, torch.Tensor)) and name not in own:
                        yield attribute
                    elif _has_own_attributes(attribute) and name not in own:
                        ahead.append((attribute, code))
                        yield attribute


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

_OPAQUE = frozenset({"torch", "compiled_ddp"})


def _has_own_attributes(value: Any) -> bool:
    """Whether it is an object, a class or a module of Python that users may set attributes of."""
    if isinstance(value, (*VALUES, torch.Tensor, types.FunctionType, types.MethodType)):
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


def is_ours(function_or_class: Any) -> bool:
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
