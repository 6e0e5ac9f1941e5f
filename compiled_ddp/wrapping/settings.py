"""What a wrapper was asked for: its arguments as they were given, and as they are now."""

import dataclasses
from typing import Any

import torch

from compiled_ddp import torch_private
from compiled_ddp.options import Options
from compiled_ddp.wrapping.ddp_arguments import DDPArguments, without_group


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

    def choose_bucket_cap(self, bucket_cap_mb: float) -> None:
        """Take the size that fits the link, as none was given."""
        self.options = dataclasses.replace(self.options, bucket_cap_mb=bucket_cap_mb)

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
        """Those of a copy of the wrapper, which has neither ranks nor these parameters."""
        copied = Settings(self.options, without_group(self.ddp_arguments), on_default_group=True)
        copied.given = self.given
        copied.move_inputs_to(self.input_device)
        return copied
