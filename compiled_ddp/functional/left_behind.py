"""What a step leaves in its user's objects while it is traced: tensors without values, and numbers of that one call.

A graph returns what it computes, and writes in place into tensors that are there when it is traced. What Python does
besides (`p.grad = gradient`, the state of an optimizer, `losses.append(loss)`, `self.hidden = h`, a draw of `random`)
happens once, while tracing.
"""

import contextlib
import functools
import random
import sys
import threading
import types
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from compiled_ddp import torch_private
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
    parts = {id(part): part for module in modules for part in module.modules()}
    for part in parts.values():
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
_MOST_ITEMS = 256  # of a container that is looked into


class ModuleAttributes:
    """The attributes that modules have before a step is traced, and which of these the trace reads.

    What a forward sets and then reads, as a loss of its own, is a value of the trace like any other. What it reads
    before it has set it is that of the call before, which a graph does not know.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        parts = {id(part): part for module in modules for part in module.modules()}
        self._parts = [*parts.values()]
        self._before = {place: {**vars(part)} for place, part in parts.items()}
        self._contents = {
            (place, name): _contents(value) for place, own in self._before.items() for name, value in own.items()
        }
        self._read = set[tuple[int, str]]()
        self._kept = list[tuple[nn.Module, str]]()

    @contextlib.contextmanager
    def noting_reads(self) -> Iterator[None]:
        """Note what code of this thread reads in here while it is what it was; not torch's own modules."""
        thread = threading.get_ident()

        def note(module: nn.Module, name: str) -> None:
            before = self._before.get(id(module), {})
            is_as_it_was = name in before and object.__getattribute__(module, "__dict__").get(name) is before[name]
            if is_as_it_was and threading.get_ident() == thread:
                self._read.add((id(module), name))

        with contextlib.ExitStack() as stack:
            for kind in {type(part): None for part in self._parts}:
                if kind.__module__.partition(".")[0] != "torch":
                    stack.enter_context(_noting_reads_of(kind, note))
            yield

    def put_back(self) -> None:
        """Put back, at the end of the trace, what has tensors of it, and warn of numbers that it has changed."""
        for part in self._parts:
            before, own = self._before[id(part)], vars(part)
            for name in [name for name in {**before, **own} if name not in _OF_EVERY_MODULE]:
                old, new = before.get(name, _MISSING), own.get(name, _MISSING)
                is_read = (id(part), name) in self._read
                if new is old and _contents(new) == self._contents.get((id(part), name)):
                    continue
                if any(map(_is_of_the_trace, _items(new))):
                    if is_read:
                        self._kept.append((part, name))
                    if new is old:  # what is in a container stays there, and is refused where the step reaches it
                        continue
                    if old is _MISSING:
                        del own[name]
                    else:
                        own[name] = old
                elif is_read:
                    _warn_of_change(part, name)

    def refuse_kept(self) -> None:
        """Raise RuntimeError where the trace has read what it has replaced: that would be the first call's for ever."""
        for part, name in self._kept:
            raise RuntimeError(
                f"the forward of a {type(part).__name__} keeps a tensor in {name!r} from call to call, and a graph "
                f"would read that of the first one for ever. Make it a buffer, self.register_buffer({name!r}, ...), "
                "which is followed; or pass it in with the batch, and return it. A cache that forward fills is to be "
                "filled before the first step."
            )


def _warn_of_change(module: nn.Module, name: str) -> None:
    warn_user(
        f"the forward of a {type(module).__name__} reads {name!r} and changes it: that is done while a step is traced, "
        "and not in the calls after it. If what it computes depends on it, make it a buffer, a tensor."
    )


@contextlib.contextmanager
def _noting_reads_of(kind: Any, note: Callable[[Any, str], None]) -> Iterator[None]:
    """Tell `note` of each attribute that is asked for of objects of this class."""
    own, inherited = vars(kind).get("__getattribute__"), kind.__getattribute__

    def noting(self: Any, name: str) -> Any:
        note(self, name)
        return inherited(self, name)

    kind.__getattribute__ = noting
    try:
        yield
    finally:
        if own is None:
            del kind.__getattribute__
        else:
            kind.__getattribute__ = own


def _items(value: object) -> list[object]:
    """What is in a container; of anything else itself."""
    if isinstance(value, dict | list | tuple) and len(value) <= _MOST_ITEMS:
        return [*(value.values() if isinstance(value, dict) else value)]
    return [value]


def _contents(value: object) -> list[Hashable]:
    """Another list where something else is in a container."""
    return [each if isinstance(each, int | float | str | None) else id(each) for each in _items(value)]


@contextlib.contextmanager
def emptying_caches(reached: Iterable[Any]) -> Iterator[None]:
    """Empty what functions with `functools.lru_cache` have remembered in here: it may be tensors of the trace."""
    caches = [(value, value.cache_info().misses) for value in reached if isinstance(value, _CACHING)]
    try:
        yield
    finally:
        for cache, misses in caches:
            if cache.cache_info().misses != misses:
                cache.cache_clear()


_CACHING = type(functools.lru_cache(lambda: None))


# ---- random numbers --------------------------------------------------------------------------------------------------


class DrawsOfPython:
    """Whether `random`, or NumPy's global generator, has been drawn from since this was made."""

    def __init__(self) -> None:
        self._numpy = sys.modules.get("numpy")  # what is imported later begins anew
        self._before = self._states()

    def refuse(self) -> None:
        """Raise RuntimeError where they have been."""
        if self._states() != self._before:
            raise RuntimeError(
                "a compiled step draws numbers from `random` or `numpy.random`, as mixup and stochastic depth do: "
                "those of its first call would be those of every call. Draw them with torch (torch.rand, "
                "torch.distributions), which is done anew in each, or outside of the step, and pass a tensor."
            )

    def _states(self) -> Hashable:
        if self._numpy is None:
            return random.getstate()
        name, keys, *others = self._numpy.random.get_state()
        return random.getstate(), name, keys.tobytes(), *others
