"""What the wrappers of this package share: apex's arguments, and a switch that is read when a backward runs."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from compiled_ddp.compat.arguments import ApexArguments
from compiled_ddp.errors import NotPicklableError
from compiled_ddp.options import CheckSteps, Verify
from compiled_ddp.ranks.agreement import Description
from compiled_ddp.step.runtime import Runtime
from compiled_ddp.wrapper import DataParallelWrapper
from compiled_ddp.wrapping.ddp_attributes import Fixed
from compiled_ddp.wrapping.parts import Lifecycle


class _SwitchedRuntime(Runtime):
    """A run time whose backwards may be local wherever their forward was called.

    Ranks compare how many forwards each has begun that a synchronised backward was to follow. Which one does, the
    switch decides when the backward begins, so while it is off a forward is counted no earlier than then: a rank may
    leave out the backward of a batch that it would only have accumulated.
    """

    def begin_forward(self, *, synchronise: bool, counted: bool) -> None:
        super().begin_forward(synchronise=synchronise, counted=counted and not self.local)


class ApexAdapter(DataParallelWrapper):
    """`EagerDDP` with apex's arguments.

    Every method and attribute of `EagerDDP` is there too: no_sync, skip_step, plan, explain, unwrap and the others.
    """

    _runtime_kind = _SwitchedRuntime

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

    # ---- apex's attributes: what it reads anew in each backward, and here the constructor has decided ----------------

    @Fixed
    def message_size(self) -> float:
        """How many elements a bucket has at least."""
        return self._arguments.message_size

    @Fixed
    def delay_allreduce(self) -> bool:
        """Whether everything is reduced when backward has ended."""
        return self._arguments.delay_allreduce

    @Fixed
    def retain_allreduce_buffers(self) -> bool:
        """Whether `allreduce_buffers` has each backward's reduced flat buckets."""
        return self._arguments.retain_allreduce_buffers

    @Fixed
    def allreduce_always_fp32(self) -> bool:
        """Whether float16 and bfloat16 gradients are scaled and summed in float32."""
        return self._arguments.allreduce_always_fp32

    @Fixed
    def gradient_average(self) -> bool:
        """Whether sums are divided by the number of ranks."""
        return self._arguments.gradient_average

    @Fixed
    def gradient_predivide_factor(self) -> float:
        """What gradients are divided by before the sum."""
        return self._arguments.gradient_predivide_factor

    def _why_not_graph(self) -> str:
        return "as in apex"

    def _run_module(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = super().__deepcopy__(memo)
        copied._arguments = self._arguments
        return copied

    def __reduce_ex__(self, protocol: object) -> Any:
        if self._lifecycle is Lifecycle.COPY:
            return super().__reduce_ex__(protocol)
        raise NotPicklableError(
            f"apex's {type(self).__name__} cannot be pickled: save its .module (or its state_dict()), and wrap that on "
            "every rank."
        )
