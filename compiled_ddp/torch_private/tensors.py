"""Tensors and parameters: their memory, their version, and the hooks on them."""

import contextlib
import functools
import operator
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch


def memory_of(tensor: torch.Tensor) -> int:
    """What is equal for tensors that share memory, also for fake ones, which have no address."""
    return int(tensor.untyped_storage()._cdata)


def memory_of_each(tensors: Iterable[torch.Tensor]) -> list[int]:
    """`memory_of` them, in C."""
    return [*map(address_of_storage, map(torch.Tensor.untyped_storage, tensors))]


address_of_storage: Callable[[torch.UntypedStorage], int] = operator.attrgetter("_cdata")


def without_autocast() -> contextlib.AbstractContextManager[None]:
    """In here no operator converts what it is given, on any kind of device."""
    context: contextlib.AbstractContextManager[None] = torch._C._DisableAutocast()
    return context


# What has this address is held by so many tensors, and by one object of Python's, however many hold that.
storage_holders: Callable[[int], int] = torch._C._storage_Use_Count


# A number that grows with each change of a tensor in place. In C, for every parameter in every step.
version_of: Callable[[torch.Tensor], int] = operator.attrgetter("_version")


def version_if_any(tensor: torch.Tensor) -> int:
    """As `version_of`; -1 for a tensor made in inference mode, which has no version."""
    return -1 if tensor.is_inference() else tensor._version


def give_back_cached_memory() -> None:
    """After an error for lack of memory; a no-op where there is no accelerator."""
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()


def has_tensor_hooks(parameter: torch.Tensor) -> bool:
    """Whether Tensor.register_hook was called on `parameter`, by anybody but `register_own_hook`."""
    hooks: Any = parameter._backward_hooks  # asked of every parameter in every step
    return bool(hooks) and any(not hasattr(hook, "of_compiled_ddp") for hook in hooks.values())


# What Tensor.register_hook was called with, by anybody, by ids; None or empty for nothing. In C, as `version_of`.
tensor_hooks_of: Callable[[torch.Tensor], Mapping[int, Any] | None] = operator.attrgetter("_backward_hooks")


def register_own_hook(parameter: torch.Tensor, hook: Callable[[torch.Tensor | None], None]) -> Any:
    """`parameter.register_hook(hook)`, for a hook that takes None for an undefined gradient; returns the handle."""
    marked: Any = functools.partial(hook)
    marked.of_compiled_ddp = True
    return parameter.register_hook(marked)


def post_accumulate_hooks(parameter: torch.Tensor) -> dict[int, Callable[[torch.Tensor], Any]]:
    """What register_post_accumulate_grad_hook was called with, by the ids of the handles; autograd reads it anew."""
    hooks: dict[int, Callable[[torch.Tensor], Any]] | None = parameter._post_accumulate_grad_hooks
    return {} if hooks is None else hooks


def any_is_hooked(parameters: Sequence[torch.Tensor]) -> bool:
    """Whether one of them has a hook of either kind, of anybody's."""
    return any(map(tensor_hooks_of, parameters)) or any(map(_post_accumulate_hooks_of, parameters))


def with_several_hooks(parameters: Iterable[torch.Tensor]) -> list[int]:
    """The places of those with more than one post-accumulate hook."""
    hooks = [*map(_post_accumulate_hooks_of, parameters)]
    if max(map(len, filter(None, hooks)), default=0) < 2:  # asked in every step
        return []
    return [place for place, of_one in enumerate(hooks) if of_one is not None and len(of_one) > 1]


_post_accumulate_hooks_of = operator.attrgetter("_post_accumulate_grad_hooks")


# Copies each tensor of the second list, which is not empty, into the one at its place in the first, of equal shape.
copy_all: Callable[[list[torch.Tensor], list[torch.Tensor]], None] = torch._foreach_copy_


def scale_all(tensors: list[torch.Tensor], factor: float) -> None:
    """Multiply each of `tensors` by `factor`, in one call."""
    torch._foreach_mul_(tensors, factor)


def has_optimizer_in_backward(parameter: torch.Tensor) -> bool:
    """Whether torch.distributed.optim's `_apply_optimizer_in_backward` was called on `parameter`."""
    return hasattr(parameter, OPTIMIZERS_IN_BACKWARD)


# The attribute that it leaves on each, for a look at all of them in C, in every step.
OPTIMIZERS_IN_BACKWARD = "_in_backward_optimizers"


def is_distributed_tensor(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is a DTensor; imports nothing, as there is none before its module has been imported."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def place_of(generator: torch.Generator) -> int:
    """The generator's address, by which it is known where operators see it as another Python object."""
    place: int = generator._cdata  # type: ignore[attr-defined]
    return place


class GeneratorReference:
    """A generator that is not kept; on torch 2.11, which has no weak references to it, it is kept, and counted."""

    def __init__(self, generator: torch.Generator) -> None:
        self._kept: torch.Generator | None = None
        try:
            self._reference: Callable[[], torch.Generator | None] = weakref.ref(generator)
        except TypeError:
            self._kept = generator
            self._reference = self._find_kept

    def _find_kept(self) -> torch.Generator | None:
        return self._kept

    def __call__(self) -> torch.Generator | None:
        """The generator, unless it has gone."""
        return self._reference()

    @property
    def is_held_elsewhere(self) -> bool:
        """Whether anybody else has it."""
        if self._kept is None:
            return self._reference() is not None
        return sys.getrefcount(self._kept) > _COUNTED_HERE


_COUNTED_HERE = 2  # by the object, and as the argument of what counts
