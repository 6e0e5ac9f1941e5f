"""Users' post-accumulate hooks on parameters that hooks reduce: deferred until they can see the reduced gradient.

Autograd calls every post-accumulate hook of a parameter, ours and the users', as soon as it has accumulated. A user's
hook is therefore replaced by a stand-in, in the very dictionary it was registered in: its handle still removes it.
"""

from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch

from compiled_ddp import torch_private

Hook = Callable[[torch.Tensor], Any]


@dataclass(frozen=True)
class Deferred:
    """A user's hook; does nothing while `waits()`, when `run_deferred` calls it later.

    `comes` is told before.
    """

    hook: Hook
    comes: Callable[[], None]
    waits: Callable[[], bool]

    @torch_private.dynamo.untraced
    def __call__(self, parameter: torch.Tensor) -> None:
        self.comes()
        if not self.waits():
            self.hook(parameter)


def has_several(parameter: torch.Tensor) -> bool:
    """Whether `parameter` has a post-accumulate hook besides our own."""
    return len(torch_private.tensors.post_accumulate_hooks(parameter)) > 1


def defer(parameter: torch.Tensor, own_id: int, comes: Callable[[], None], waits: Callable[[], bool]) -> None:
    """Defer every hook of `parameter` but our own, whose handle has the id `own_id`."""
    hooks = torch_private.tensors.post_accumulate_hooks(parameter)
    for key, hook in list(hooks.items()):
        if key != own_id and not isinstance(hook, Deferred):
            hooks[key] = Deferred(hook, comes, waits)


def run_deferred(parameter: torch.Tensor) -> None:
    """Call the users' hooks of `parameter`, in the order of their registration: its .grad is reduced now."""
    for hook in list(torch_private.tensors.post_accumulate_hooks(parameter).values()):
        if isinstance(hook, Deferred):
            hook.hook(parameter)


def restore(parameter: torch.Tensor) -> None:
    """Put the users' hooks back in their places."""
    hooks: MutableMapping[int, Hook] = torch_private.tensors.post_accumulate_hooks(parameter)
    for key, hook in list(hooks.items()):
        if isinstance(hook, Deferred):
            hooks[key] = hook.hook


def sees_unreduced(parameter: torch.Tensor) -> bool:
    """Whether a hook of the user's was registered too late to be deferred in this backward."""
    hooks = torch_private.tensors.post_accumulate_hooks(parameter).values()
    return has_several(parameter) and sum(not isinstance(hook, Deferred) for hook in hooks) > 1
