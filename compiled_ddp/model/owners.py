"""Which wrapper a module, or a parameter in it, belongs to: from its construction until it is closed, or its end."""

import gc
import weakref
from typing import Protocol

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from compiled_ddp import torch_private
from compiled_ddp.model.managed import ManagedState


class Owner(Protocol):
    """A wrapper."""

    def make_way(self) -> None:
        """Take part in what other ranks may still wait for, before the module is wrapped once more."""

    def warn_of(self, successor: str) -> None:
        """Warn that a `successor` is about to take this one's place."""

    def be_replaced(self) -> None:
        """Close, for another wrapper that all ranks are about to make of the same module."""


# The wrappers that are in use, by what each looks after: they have been neither closed nor collected as garbage.
_in_use: "weakref.WeakKeyDictionary[ManagedState, weakref.ref[Owner]]" = weakref.WeakKeyDictionary()

# By a wrapped module, or a parameter in it, a weak reference to one of these. Not a mark on the module itself, which a
# copy of the module, or a module loaded from a file, would carry too.
_owner_of: WeakIdKeyDictionary = WeakIdKeyDictionary()


def mark_wrapped(state: ManagedState, owner: Owner) -> None:
    """Note that `owner` looks after `state`, for as long as it lives and until `unmark_wrapped`."""
    _in_use[state] = weakref.ref(owner)
    mark_parts(state)


def mark_parts(state: ManagedState) -> None:
    """Note what belongs to the wrapper that looks after `state`, as the model is now."""
    for part in _parts_of(state):
        if _state_of(part) is None:  # a parameter that is frozen here may be trained by an earlier wrapper
            _owner_of[part] = weakref.ref(state)


def _parts_of(state: ManagedState) -> list[nn.Module | nn.Parameter]:
    return [torch_private.modules.without_compile_wrapper(state.module), *state.parameters().values()]


def unmark_wrapped(state: ManagedState) -> None:
    """Note that nobody looks after `state` any more: nothing is left that keeps `torch.utils.swap_tensors` away."""
    _in_use.pop(state, None)
    for part in _parts_of(state):
        if (reference := _owner_of.get(part)) is not None and reference() is state:
            del _owner_of[part]


def _state_of(part: object) -> ManagedState | None:
    """What the wrapper looks after that `part` belongs to, if it is in use."""
    reference = _owner_of.get(part)
    state: ManagedState | None = None if reference is None else reference()
    return None if state is None or owner_of_state(state) is None else state


def is_owned(part: object) -> bool:
    """Whether `part` belongs to a wrapper that is in use."""
    return _state_of(part) is not None


def other_state_of(part: object, own: ManagedState) -> ManagedState | None:
    """The state of the wrapper that `part` belongs to; None for `own`, and an earlier wrapper of the same module."""
    if not _is_others(_state_of(part), own):
        return None
    gc.collect()  # a wrapper is part of a cycle: one that was dropped may still be there, on some ranks alone
    state = _state_of(part)
    return state if _is_others(state, own) else None


def _is_others(state: ManagedState | None, own: ManagedState) -> bool:
    if state is None or state is own:
        return False
    bare = torch_private.modules.without_compile_wrapper
    return bare(state.module) is not bare(own.module)


def owner_of(module: object) -> Owner | None:
    """The wrapper of `module` itself, or of what torch.compile has made of it, that is in use."""
    if not isinstance(module, nn.Module):
        return None
    bare = torch_private.modules.without_compile_wrapper(module)
    if _owner_of_very(bare) is None:
        return None
    gc.collect()  # as above
    return _owner_of_very(bare)


def _owner_of_very(bare: nn.Module) -> Owner | None:
    state = _state_of(bare)
    return None if state is None else owner_of_state(state)


def owner_of_state(state: ManagedState) -> Owner | None:
    """The wrapper that looks after `state`."""
    reference = _in_use.get(state)
    return None if reference is None else reference()
