"""What a step depends on besides its arguments: what its functions close over, and the globals that they name."""

import dis
import functools
import inspect
import types
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from compiled_ddp import torch_private

_VALUES = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device)


def closed_over(function: Callable[..., Any]) -> tuple[Hashable, ...]:
    """Equal as long as no number, text, tensor or function that `function` reaches by a name has been replaced.

    It looks through functions, and at whether modules train and which hooks they have; not at the attributes of other
    objects, nor into containers. Tensors, modules and other objects count as themselves, numbers by their values.
    """
    found: list[Hashable] = []
    seen: set[int] = set()
    ahead: list[Any] = [function]
    while ahead:
        value = inspect.unwrap(ahead.pop()) if callable(ahead[-1]) else ahead.pop()
        if isinstance(value, _VALUES):
            found.append((type(value), value))
            continue
        found.append(_Same(value))
        if isinstance(value, nn.Module):
            modules = [*value.modules()]
            found.append(tuple(module.training for module in modules))
            found.append(tuple((*at, *hooks) for at, hooks in torch_private.modules.hooks_around(modules).items()))
        if id(value) not in seen:
            seen.add(id(value))
            ahead += _reached_from(value)
    return tuple(found)


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
    elif isinstance(value, types.FunctionType) and value.__module__.partition(".")[0] != "torch":
        for cell in value.__closure__ or ():
            if cell != types.CellType():
                yield cell.cell_contents
        yield from (value.__globals__[name] for name in _globals_named(value.__code__) if name in value.__globals__)


@functools.lru_cache(maxsize=1024)
def _globals_named(code: types.CodeType) -> tuple[str, ...]:
    """The globals that a function reads, and the functions inside of it."""
    inner = [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    own = {str(step.argval) for step in dis.get_instructions(code) if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    return tuple(sorted(own.union(*map(_globals_named, inner))))
