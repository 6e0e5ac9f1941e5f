"""What a wrapper consists of, for the groups of methods that its class is made of, and what becomes of it:

| from | by | to |
|---|---|---|
| in use | `unwrap()` | unwrapped |
| in use | its module being wrapped once more | replaced |
| | `copy.deepcopy`, of one in use or a copy | a copy |
| a copy | `unwrap()` | unwrapped |
"""

import contextlib
import dataclasses
import enum
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from compiled_ddp import torch_private
from compiled_ddp.model.managed import ManagedState
from compiled_ddp.options import Options
from compiled_ddp.planning.calibration import Calibration
from compiled_ddp.step.runtime import Runtime
from compiled_ddp.users_code import warn_user
from compiled_ddp.wrapping.ddp_arguments import DDPArguments, without_group

# ---- what becomes of it ----------------------------------------------------------------------------------------------


class Lifecycle(enum.Enum):
    """`IN_USE` and `COPY` run forwards; only the first one reduces."""

    IN_USE = "in use"
    UNWRAPPED = "unwrapped"
    REPLACED = "replaced"
    COPY = "copy"

    def why_not_in_use(self, wrapper: str) -> str:
        """What is said where one that is not in use is asked for more than it can do; `wrapper` is its class's name."""
        return _WHY[self].format(wrapper=wrapper)

    def why_no_backward(self, wrapper: str) -> str:
        """What is said in the backward of a forward that was called while it was in use."""
        return (
            f"the {wrapper} of this backward's forward has been {self.value} since, and nothing would reduce the "
            "gradients. Run the forward again, on the wrapper that is in use now."
        )


_WHY = {
    Lifecycle.UNWRAPPED: ("this wrapper has been unwrapped: use the module that unwrap() returned, or wrap it again."),
    Lifecycle.REPLACED: (
        "this {wrapper} was closed when its module was wrapped once more, as by unwrap(): use the wrapper that was "
        "made then."
    ),
    Lifecycle.COPY: (
        "this {wrapper} is a copy, which other ranks know nothing of: it evaluates, is saved, is averaged into, "
        "and runs backwards of forwards under no_sync(), but takes part in nothing that ranks do together, and has no "
        "plan. To train it, wrap its .module on every rank; to evaluate it, use torch.no_grad()."
    ),
}


# ---- what the next forward, and its backward, do together with other ranks -------------------------------------------


class Switches:
    """DDP's two switches of a wrapper, which its users may turn too."""

    def __init__(self, *, buffers_are_stale: bool) -> None:
        self.synchronises = True  # whether the backwards of forwards from here on do; False under no_sync
        # Whether the next forward brings rank 0's buffers, if forwards do. DDP's rule: it follows a synchronised one.
        self.buffers_are_stale = buffers_are_stale
        self._has_told = False

    def tell_too_late(self) -> None:
        """Say once that a forward has been called with the switch on, and that its backward goes by that."""
        if not self._has_told:
            self._has_told = True
            warn_user(
                "require_backward_grad_sync = False comes behind a forward that still waits for its backward, which "
                "stays synchronised: as under torch's DDP the forward decides. Assign it before the forward."
            )

    def synchronise(self, wanted: bool) -> None:
        """Let the backwards of forwards from here on be synchronised, or stay local."""
        self.synchronises = wanted

    @contextlib.contextmanager
    def local(self) -> Iterator[None]:
        """Let them stay local for the time of this context."""
        before = self.synchronises
        self.synchronise(False)
        try:
            yield
        finally:
            self.synchronise(before)

    def refresh_buffers(self, wanted: bool) -> None:
        """Let the next forward bring rank 0's buffers, or leave each rank its own."""
        self.buffers_are_stale = wanted


# ---- what it was asked for -------------------------------------------------------------------------------------------


class Settings:
    """The options of one wrapper and what it was given besides them."""

    def __init__(self, options: Options, ddp_arguments: DDPArguments, *, on_default_group: bool) -> None:
        self.given = options  # what is kept in a file, without a bucket size that was chosen here
        self.options = options
        self.ddp_arguments = ddp_arguments
        self.on_default_group = on_default_group
        self.input_device: torch.device | None = None  # where `device_ids` wants a forward's arguments

    def change(self, **changes: Any) -> None:
        """Take other values for some options, also for what is loaded from a file."""
        self.options = dataclasses.replace(self.options, **changes)
        self.given = dataclasses.replace(self.given, **changes)

    def plan_for(self, calibration: Calibration) -> None:
        """Plan buckets for this link and device, as no size was given."""
        self.options = dataclasses.replace(self.options, calibration=calibration)

    def change_ddp_arguments(self, changes: DDPArguments) -> None:
        self.ddp_arguments = {**self.ddp_arguments, **changes}

    def move_inputs_to(self, device: torch.device | None) -> None:
        """Let each forward find its arguments on `device`; None leaves them where they are."""
        self.input_device = device

    def placed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """A forward's arguments where `device_ids` wants them."""
        if self.input_device is None:
            return args, kwargs
        return torch_private.modules.moved(args, kwargs, self.input_device)

    def of_a_copy(self) -> "Settings":
        """The settings of a copy of the wrapper, which has neither ranks nor these parameters."""
        copied = Settings(self.options, without_group(self.ddp_arguments), on_default_group=True)
        copied.given = self.given
        copied.move_inputs_to(self.input_device)
        return copied


# ---- the wrapper as its methods know it ------------------------------------------------------------------------------


class HasParts(nn.Module):
    """A wrapper, in use or not, as far as all of its methods know it."""

    module: nn.Module
    _lifecycle: Lifecycle
    _settings: Settings
    _switches: Switches
    _managed: ManagedState  # what this wrapper looks after
    _runtime: Runtime

    def _check_in_use(self) -> None:
        """Raise RuntimeError for what only a wrapper in use can do."""
        if self._lifecycle is not Lifecycle.IN_USE:
            raise RuntimeError(self._lifecycle.why_not_in_use(type(self).__name__))

    def _why_not_graph(self) -> str | None:
        """Why hooks reduce everything; None where graphs take part."""
        raise NotImplementedError

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The group that the wrapper was made for; it reduces on a communicator of its own, made from this one."""
        return self._runtime.communicator.ranks.group()

    @property
    def device(self) -> torch.device:
        """Where the trained parameters are."""
        if self._lifecycle is Lifecycle.COPY:  # which may be frozen, as a teacher is
            parameters = self._managed.trained() or self._managed.parameters()
            return next(iter(parameters.values())).device
        return self._runtime.parameters.tensors[0].device
