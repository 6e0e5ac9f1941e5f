"""Users' post-accumulate hooks on parameters: deferred until they can see the reduced gradient.

Autograd calls every post-accumulate hook of a parameter, ours and the users', as soon as it has accumulated. A user's
hook is therefore replaced by a stand-in, in the very dictionary it was registered in: its handle still removes it.
"""

from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from compiled_ddp import torch_private
from compiled_ddp.planning.trained_parameters import TrainedParameters

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


def defer(parameter: torch.Tensor, own_id: int, comes: Callable[[], None], waits: Callable[[], bool]) -> None:
    """Defer every hook of `parameter` but our own, whose handle has the id `own_id`."""
    hooks = torch_private.tensors.post_accumulate_hooks(parameter)
    for key, hook in list(hooks.items()):
        if key != own_id and not isinstance(hook, Deferred):
            hooks[key] = Deferred(hook, comes, waits)


def defers_any(parameter: torch.Tensor) -> bool:
    """Whether a hook of the user's on `parameter` is deferred."""
    return any(isinstance(hook, Deferred) for hook in torch_private.tensors.post_accumulate_hooks(parameter).values())


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


def refuse_late(parameters: TrainedParameters, indices: Sequence[int]) -> None:
    """Raise RuntimeError where a hook of the user's was registered too late to be deferred in this backward."""
    for place in torch_private.tensors.with_several_hooks(map(parameters.tensors.__getitem__, indices)):
        hooks = torch_private.tensors.post_accumulate_hooks(parameters.tensors[indices[place]]).values()
        if sum(not isinstance(hook, Deferred) for hook in hooks) > 1:
            raise RuntimeError(
                f"parameter {parameters.names[indices[place]]} got a post-accumulate hook in the middle of a backward, "
                "which would see its gradient before it is reduced. Register it before the backward."
            )
