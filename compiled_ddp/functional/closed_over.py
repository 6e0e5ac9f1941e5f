"""What a step depends on besides its arguments: what its functions close over, and the globals that they name."""

import contextlib
import operator
import threading
import types
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence

import torch
from torch import nn

from compiled_ddp import torch_private
from compiled_ddp.functional.reached import (
    CONTAINERS,
    MOST_ITEMS,
    VALUES,
    OwnChanges,
    Reached,
    Same,
    compared,
    is_array,
    is_opaque,
    is_ours,
    parts_of,
)


def closed_over(by: Reached, own: OwnChanges) -> tuple[Hashable, ...]:
    """Equal as long as nothing that a function has reached by a name has been replaced.

    It looks through functions and what they are wrapped in, at their defaults, into dicts, lists and tuples, at the
    attributes that their code reads by name (`self.rate`, `settings.rate`, `optim.RATE`), at whether modules train and
    which hooks they have, and through what is called with them: the forward of each part of a module, hooks, `__call__`
    of an object. Tensors, modules and other objects count as themselves, numbers by their values. `Surroundings` sees
    the modules that are called, however the step comes to them. The step's `own` do not count.
    """
    found: list[Hashable] = []
    for value in by:
        if isinstance(value, VALUES):
            found.append((type(value), value))
        elif isinstance(value, CONTAINERS) and len(value) <= MOST_ITEMS:
            keys = tuple(map(compared, value)) if isinstance(value, dict) else ()
            found.append((type(value), len(value), keys))
        elif is_array(value):
            found.append((type(value), *by.reads.numbers(value)))
        else:
            found.append(Same(value))
        if isinstance(value, nn.Module):
            modules = parts_of([value])
            found += _state_of(modules)
            if not is_ours(type(value)):  # whole steps look at their model's themselves
                found.append(settings_of([each for each in modules if is_opaque(type(each))], own))
    return tuple(found)


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
    same = [*map(Same, generators)]
    return tuple(zip(first, [each if each in closed else None for each in same], strict=True))
