"""What torch.optim's own `step()` does besides computing."""

import functools
import inspect
from collections.abc import Callable

import torch
from torch import Tensor
from torch.optim import optimizer as _optimizer


def note_step(optimizer: torch.optim.Optimizer) -> None:
    """Let schedulers know of a step: they warn where none has been taken."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


def note_found_infinity(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, found: Tensor) -> None:
    """Let a scaler's `update()` know whether this step's gradients had infinities: 1.0 or 0.0, in float32."""
    of_optimizer = scaler._per_optimizer_states[id(optimizer)]
    of_optimizer["found_inf_per_device"] = {found.device: found}


class _OwnHook(functools.partial[None]):
    """A hook of compiled_ddp's."""


def register_own_step_pre_hook(optimizer: torch.optim.Optimizer, hook: Callable[..., None]) -> None:
    """Let `hook(optimizer, args, kwargs)` run before each of the optimizer's own steps, which `has_hooks` ignores."""
    optimizer.register_step_pre_hook(_OwnHook(hook))


def has_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its `step()` runs more than its class's: hooks, of its own or of all optimizers, or a patch."""
    before = [each for each in optimizer._optimizer_step_pre_hooks.values() if not isinstance(each, _OwnHook)]
    own = before or optimizer._optimizer_step_post_hooks
    of_all = _optimizer._global_optimizer_pre_hooks or _optimizer._global_optimizer_post_hooks
    patched = vars(optimizer).get("step")
    return bool(own or of_all) or (patched is not None and not hasattr(patched, "_wrapped_by_lr_sched"))


def needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its `step()` cannot be called without one, as that of LBFGS."""
    closure = inspect.signature(inspect.unwrap(type(optimizer).step)).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty
