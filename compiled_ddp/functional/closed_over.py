"""What a step depends on besides its arguments: what its functions close over, and the globals that they name."""

import contextlib
import dis
import functools
import operator
import threading
import types
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from compiled_ddp import torch_private

_VALUES = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device)


def closed_over(function: Callable[..., Any]) -> tuple[Hashable, ...]:
    """Equal as long as no number, text, tensor or function that `function` reaches by a name has been replaced.

    It looks through functions and what they are wrapped in, at their defaults, and at whether modules train and which
    hooks they have; not at the attributes of other objects, nor into containers: `Surroundings` sees what of these is
    called. Tensors, modules and other objects count as themselves, numbers by their values.
    """
    found: list[Hashable] = []
    seen: set[int] = set()
    ahead: list[Any] = [function]
    while ahead:
        value = ahead.pop()
        if isinstance(value, _VALUES):
            found.append((type(value), value))
            continue
        found.append(_Same(value))
        if isinstance(value, nn.Module):
            found += _state_of([*value.modules()])
        if id(value) not in seen:
            seen.add(id(value))
            ahead += _reached_from(value)
    return tuple(found)


def _state_of(modules: Collection[nn.Module]) -> tuple[Hashable, Hashable]:
    """Whether each trains, and which hooks are around it."""
    training = tuple(map(_trains, modules))
    return training, tuple((*at, *hooks) for at, hooks in torch_private.modules.hooks_around(modules).items())


_trains = operator.attrgetter("training")


class Surroundings:
    """What a step has met while it was traced, however it came to it: the modules that it has called, and tensors.

    A tensor that is no argument is an input of the graph, whose memory follows what is written there.
    """

    def __init__(self, modules: Collection[nn.Module], tensors: Sequence[torch.Tensor]) -> None:
        self._modules, self._state = modules, _state_of(modules)
        self._tensors = [tensor for tensor in tensors if _has_memory(tensor)]
        self._memory, self._storages = self._memory_now(), {*torch_private.tensors.memory_of_each(self._tensors)}
        known = {id(tensor) for tensor in tensors}
        self._places = [
            (parts, name, part)
            for module in modules
            for parts in (module._parameters, module._buffers)
            for name, part in parts.items()
            if id(part) in known
        ]

    def are_as_they_were(self) -> bool:
        """Whether no module has been switched or got a hook, and no tensor has been replaced or got other memory."""
        return (
            self._memory_now() == self._memory
            and all(parts.get(name) is part for parts, name, part in self._places)
            and _state_of(self._modules) == self._state
        )

    def refuse_as_donated(self, donated: Sequence[torch.Tensor]) -> None:
        """Raise ValueError where one of these is a tensor that the step closes over, and goes on to read."""
        if self._storages and not self._storages.isdisjoint(torch_private.tensors.memory_of_each(donated)):
            raise ValueError(
                "a donated tensor shares memory with one that the step closes over, where its results would appear: "
                "let the step close over a copy, or pass it as an argument of its own."
            )

    def _memory_now(self) -> list[tuple[int, torch.Size]]:
        return [*zip(map(torch.Tensor.data_ptr, self._tensors), map(_shape, self._tensors), strict=True)]


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


def generators_shared(leaves: Sequence[Any], closed: tuple[Hashable, ...]) -> tuple[Hashable, ...]:
    """For each generator among a step's arguments: its first place there, and itself if the step closes over it."""
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Generator)]
    first = [next(other for other in places if leaves[other] is leaves[place]) for place in places]
    same = [_Same(leaves[place]) for place in places]
    return tuple(zip(first, [each if each in closed else None for each in same], strict=True))


def reached(function: Callable[..., Any]) -> Iterator[Any]:
    """What `function` reaches by names, as it is: functions that others are wrapped in too."""
    seen: set[int] = set()
    ahead: list[Any] = [function]
    while ahead:
        value = ahead.pop()
        if id(value) not in seen:
            seen.add(id(value))
            yield value
            ahead += _reached_from(value)


class _Same:
    """Equal to itself alone, and kept, so that its place in memory stays its own."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._value is other._value

    def __hash__(self) -> int:
        return id(self._value)


def _reached_from(value: Any) -> Iterator[Any]:
    if isinstance(value, functools.partial):
        yield from (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, types.MethodType):
        yield from (value.__func__, value.__self__)
    elif isinstance(value, types.FunctionType) and str(value.__module__).partition(".")[0] != "torch":
        for cell in value.__closure__ or ():
            if cell != types.CellType():
                yield cell.cell_contents
        yield from (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
        yield from (value.__globals__[name] for name in _globals_named(value.__code__) if name in value.__globals__)

    if callable(value) and "__wrapped__" in getattr(value, "__dict__", ()):
        yield value.__wrapped__


@functools.lru_cache(maxsize=1024)
def _globals_named(code: types.CodeType) -> tuple[str, ...]:
    """The globals that a function reads, and the functions inside of it."""
    inner = [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    own = {str(step.argval) for step in dis.get_instructions(code) if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    return tuple(sorted(own.union(*map(_globals_named, inner))))
