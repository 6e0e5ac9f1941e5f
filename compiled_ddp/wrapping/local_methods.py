"""Methods of the model that are not forward, called through the wrapper: `ddp.loss(x).backward()` stays local.

A wrapper watches forwards of its own alone, so nothing reduces what such a method's backward accumulates. That is said
once for each method, when a backward has reached what it returned.
"""

import functools
import types
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn

from compiled_ddp import torch_private
from compiled_ddp.model.nested_tensors import tensors_in
from compiled_ddp.step.runtime import Runtime
from compiled_ddp.users_code import warn_user

_MOST_PARTS = 1000  # of what a method returns, which may be anything, that are looked at


class Synchronises(Protocol):
    """A wrapper."""

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether backwards of forwards from here on are synchronised."""


class LocalMethods:
    """The methods of a model as its wrapper hands them out."""

    def __init__(self, wrapper: Synchronises, runtime: Runtime) -> None:
        """Neither of the two is kept alive."""
        self._name = type(wrapper).__name__
        self._wrapper, self._runtime = weakref.ref(wrapper), weakref.ref(runtime)
        self._watched: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {}  # by name, with what it stands for
        self._told: set[str] = set()

    def watched(self, method: types.MethodType) -> types.MethodType:
        """`method`, with a warning where its backward stays local. Not where it is called under `no_sync()`."""
        name, function = method.__name__, method.__func__
        if name not in self._watched or self._watched[name][0] is not function:

            @functools.wraps(function)
            def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
                outputs = function(module, *args, **kwargs)
                if name not in self._told and self._synchronises():
                    self._watch(name, outputs)
                return outputs

            self._watched[name] = function, call
        return types.MethodType(self._watched[name][1], method.__self__)

    def _synchronises(self) -> bool:
        wrapper = self._wrapper()
        return wrapper is not None and wrapper.require_backward_grad_sync

    def _watch(self, name: str, outputs: object) -> None:
        if torch.is_grad_enabled() and not torch_private.autograd.transforms_are_active():
            tensors = tensors_in(outputs, most_parts=_MOST_PARTS)
            for node in {tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None}:
                torch_private.autograd.register_own_prehook(node, functools.partial(_reached, weakref.ref(self), name))

    def reached(self, name: str) -> None:
        """A backward has come to what the method `name` returned."""
        runtime = self._runtime()
        if name not in self._told and runtime is not None and runtime.leaves_local():
            self._told.add(name)
            warn_user(
                f"{self._name}.{name}() runs the model's own method, which the wrapper does not watch: the "
                "gradients of this backward stay on this rank. Call the wrapper itself, with a forward that does what "
                f"{name}() does, or call {name}() under no_sync() if that is meant."
            )


@torch_private.dynamo.untraced
def _reached(methods: "weakref.ref[LocalMethods]", name: str, _: object) -> None:
    alive = methods()
    if alive is not None:
        alive.reached(name)
