"""The post-accumulate hooks through which a runtime learns that autograd has accumulated a gradient."""

import functools
import weakref
from collections.abc import Iterable, Sequence, Set
from typing import Protocol

import torch

from compiled_ddp import torch_private
from compiled_ddp.backward import deferred_hooks


class Listener(Protocol):
    """Who is told, from whichever of autograd's threads has accumulated the gradient."""

    def gradient_accumulated(self, index: int) -> None:
        """Autograd has accumulated a gradient of parameter `index` into its .grad."""

    def users_hook_comes(self, index: int) -> None:
        """Before a hook of the user's on parameter `index`, which may come before our own, of a new gradient."""

    def is_reduced_by_hooks(self, index: int) -> bool:
        """Whether what has just been accumulated is still to be reduced, so that users' hooks may not see it yet."""


class GradientHooks:
    """Our hooks on the parameters, and the users' ones that are held back behind them."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter], listener: Listener) -> None:
        self._parameters = parameters
        # A parameter must not keep the listener alive: the collector does not see through autograd's hooks.
        self._listener = weakref.ref(listener)
        self._ids: dict[int, int] = {}  # of our hooks, by parameter: what their handles would remove them by
        self._deferred: set[int] = set()  # the parameters on which users' hooks were found
        # What is left of a wrapper that was dropped must hold nothing back. Not when the interpreter ends.
        by_weak = [weakref.ref(parameter) for parameter in parameters]
        weakref.finalize(self, _remove_all, self._ids, by_weak).atexit = False

    def on(self, parameters: Sequence[torch.nn.Parameter]) -> "GradientHooks":
        """Hooks on other parameters, for the same listener."""
        listener = self._listener()
        assert listener is not None
        return GradientHooks(parameters, listener)

    @property
    def everywhere(self) -> bool:
        """Whether every parameter is watched."""
        return len(self._ids) == len(self._parameters)

    def install(self) -> None:
        """Watch every parameter, and hold back the users' hooks on them; a no-op where every one is watched."""
        if self.everywhere:
            return
        for index, parameter in enumerate(self._parameters):
            if index in self._ids:
                continue
            hook = functools.partial(_gradient_accumulated, self._listener, index)
            if parameter.requires_grad:
                self._ids[index] = parameter.register_post_accumulate_grad_hook(hook).id
            else:
                parameter.requires_grad_(True)  # one that was frozen refuses hooks, and may be trained again
                self._ids[index] = parameter.register_post_accumulate_grad_hook(hook).id
                parameter.requires_grad_(False)
        self.defer_users()

    def remove(self, keep: Set[int] = frozenset()) -> None:
        """Watch only the parameters in `keep`."""
        for index in self._ids.keys() - keep:
            _remove(self._ids.pop(index), self._parameters[index])

    def defer_users(self) -> None:
        """Let the users' hooks on watched parameters wait for `run_users` where the gradient is still to be reduced."""
        if not self._ids:
            return  # in most steps of a captured model
        watched = list(self._ids)
        for place in torch_private.tensors.with_several_hooks(map(self._parameters.__getitem__, watched)):
            index = watched[place]
            comes = functools.partial(_users_hook_comes, self._listener, index)
            waits = functools.partial(_is_reduced_by_hooks, self._listener, index)
            deferred_hooks.defer(self._parameters[index], self._ids[index], comes, waits)
            self._deferred.add(index)

    def run_users(self, indices: Iterable[int]) -> None:
        """Call the users' hooks that were held back on these parameters, whose .grad is reduced now."""
        for index in sorted(self._deferred.intersection(indices)):
            deferred_hooks.run_deferred(self._parameters[index])


def _remove_all(ids: dict[int, int], parameters: Sequence[weakref.ref[torch.nn.Parameter]]) -> None:
    for index, own_id in ids.items():
        parameter = parameters[index]()
        if parameter is not None:
            _remove(own_id, parameter)


def _remove(own_id: int, parameter: torch.nn.Parameter) -> None:
    torch_private.tensors.post_accumulate_hooks(parameter).pop(own_id, None)
    deferred_hooks.restore(parameter)


def _gradient_accumulated(listener: weakref.ref[Listener], index: int, _: torch.Tensor) -> None:
    alive = listener()
    if alive is None:
        return
    if torch_private.dynamo.of_this_thread() is None:
        alive.gradient_accumulated(index)  # `_untraced` takes a call more, which would be one for each gradient
    else:
        _untraced(alive, index)


@torch_private.dynamo.untraced
def _untraced(listener: Listener, index: int) -> None:
    listener.gradient_accumulated(index)


def _users_hook_comes(listener: weakref.ref[Listener], index: int) -> None:
    alive = listener()
    if alive is not None:
        alive.users_hook_comes(index)


def _is_reduced_by_hooks(listener: weakref.ref[Listener], index: int) -> bool:
    alive = listener()
    return alive is not None and alive.is_reduced_by_hooks(index)
