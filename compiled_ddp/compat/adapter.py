"""What the wrappers of this package share: apex's arguments, and a switch that is read when a backward runs."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from compiled_ddp.compat.arguments import ApexArguments
from compiled_ddp.errors import NotPicklableError
from compiled_ddp.options import CheckSteps, Verify
from compiled_ddp.ranks.agreement import Description
from compiled_ddp.wrapper import DataParallelWrapper
from compiled_ddp.wrapping.parts import Lifecycle


class ApexAdapter(DataParallelWrapper):
    """`EagerDDP` with apex's arguments.

    Every method and attribute of `EagerDDP` is there too: no_sync, skip_step, plan, explain, unwrap and the others.
    """

    def __init__(
        self,
        module: nn.Module,
        arguments: ApexArguments,
        *,
        process_group: dist.ProcessGroup | None,
        check_steps: CheckSteps,
        verify: Verify,
    ) -> None:
        self._arguments = arguments
        ready = dist.is_initialized() and isinstance(process_group, dist.ProcessGroup | None)
        world_size = dist.get_world_size(process_group) if ready else 1  # what is not ready is refused below
        options = arguments.options(module, world_size, check_steps=check_steps, verify=verify)
        super().__init__(module, process_group, options, {})
        self.allreduce_buffers: list[torch.Tensor] = []
        if arguments.retain_allreduce_buffers:
            self._runtime.reduction.hand_out_to(self._retain)

    def _check_and_describe(self, module: nn.Module) -> Description:
        if isinstance(module, nn.Module):  # anything else is refused below
            self._arguments.check(module)
        retain: Description = {"option retain_allreduce_buffers": [repr(self._arguments.retain_allreduce_buffers)]}
        return {**super()._check_and_describe(module), **retain}

    def _retain(self, flat_buckets: list[torch.Tensor]) -> None:
        self.allreduce_buffers = flat_buckets

    def _reduce_in_backward(self, *, wanted: bool) -> None:
        """Whether backwards that begin from now on reduce, also those of forwards that have been called already."""
        self._check_in_use()
        self._runtime.stay_local(not wanted)

    @property
    def _reduces_in_backward(self) -> bool:
        return not self._runtime.local

    def _why_not_graph(self) -> str:
        return "as in apex"

    def _run_module(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def __reduce_ex__(self, protocol: object) -> Any:
        if self._lifecycle is Lifecycle.COPY:
            return super().__reduce_ex__(protocol)
        raise NotPicklableError(
            f"apex's {type(self).__name__} cannot be pickled: save its .module (or its state_dict()), and wrap that on "
            "every rank."
        )
