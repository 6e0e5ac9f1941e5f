"""The DistributedDataParallel of the BERT pre-training fork of apex (pretrain/PyTorch/distributed_apex.py).

The user says when to reduce. Its `Reducer` is apex's.
"""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn

from compiled_ddp.compat.adapter import ApexAdapter
from compiled_ddp.compat.arguments import ApexArguments, listed
from compiled_ddp.compat.reducer import Reducer
from compiled_ddp.keywords import suggests_keywords
from compiled_ddp.options import CheckSteps, Verify

__all__ = ["DistributedDataParallel", "Reducer"]


class DistributedDataParallel(ApexAdapter):
    """apex's wrapper, in which nothing is reduced before `enable_need_reduction()`.

        ddp = DistributedDataParallel(model)
        for number, batch in enumerate(batches, start=1):
            loss = ddp(batch)
            if number % accumulation_steps == 0:
                ddp.enable_need_reduction()
            else:
                ddp.disable_need_reduction()
            loss.backward()

    A backward without reduction leaves this rank's own gradients in .grad, added to what was there; the next one with
    reduction leaves the mean over ranks of their sum. The switch is read when a backward starts. The
    arguments are those of `compiled_ddp.compat.apex`, in the fork's order, which has fewer of them; the last three
    are not the fork's.

    Attributes:
        need_reduction: whether backwards that start now reduce; may be assigned.
        allreduce_buffers, and what was passed: as in `compiled_ddp.compat.apex`.
    """

    @suggests_keywords
    def __init__(
        self,
        module: nn.Module,
        message_size: float = 10_000_000,
        delay_allreduce: bool = False,
        shared_param: object = None,
        allreduce_trigger_params: Iterable[torch.Tensor] | None = None,
        retain_allreduce_buffers: bool = False,
        allreduce_always_fp32: bool = False,
        gradient_average: bool = True,
        gradient_predivide_factor: float = 1.0,
        gradient_average_split_factor: object = None,
        *,
        process_group: dist.ProcessGroup | None = None,
        check_steps: CheckSteps = "error",
        verify: Verify = "first",
    ) -> None:
        arguments = ApexArguments(
            message_size=message_size,
            delay_allreduce=delay_allreduce,
            shared_param=shared_param,
            allreduce_trigger_params=listed(allreduce_trigger_params),
            retain_allreduce_buffers=retain_allreduce_buffers,
            allreduce_always_fp32=allreduce_always_fp32,
            gradient_average=gradient_average,
            gradient_predivide_factor=gradient_predivide_factor,
            gradient_average_split_factor=gradient_average_split_factor,
        )
        super().__init__(module, arguments, process_group=process_group, check_steps=check_steps, verify=verify)
        self.need_reduction = False

    def enable_need_reduction(self) -> None:
        """Let backwards that start from now on reduce, including what was accumulated before."""
        self.need_reduction = True

    def disable_need_reduction(self) -> None:
        """Let backwards that start from now on stay local."""
        self.need_reduction = False

    @property
    def need_reduction(self) -> bool:
        return self._reduces_in_backward

    @need_reduction.setter
    def need_reduction(self, wanted: bool) -> None:
        self._reduce_in_backward(wanted=wanted)
