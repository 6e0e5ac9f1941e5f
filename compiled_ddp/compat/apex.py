"""apex.parallel: DistributedDataParallel and Reducer (apex/parallel/distributed.py, removed from apex in 2025)."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn

from compiled_ddp.compat.adapter import ApexAdapter
from compiled_ddp.compat.arguments import ApexArguments, listed
from compiled_ddp.compat.reducer import Reducer
from compiled_ddp.keywords import suggests_keywords
from compiled_ddp.options import CheckSteps, Verify
from compiled_ddp.wrapping.ddp_attributes import Fixed

__all__ = ["DistributedDataParallel", "Reducer"]


class DistributedDataParallel(ApexAdapter):
    """apex's wrapper: parameters are rank 0's at construction, gradients are averaged during backward.

    What each argument was in apex, is here, and is tested by: docs/apex.md. The last three are not apex's.

    Args:
        module: the model.
        message_size: how many elements a bucket has at least; each dtype has buckets of its own.
        delay_allreduce: reduce everything when backward has ended, in one bucket for each dtype.
        shared_param: refused, as in apex.
        allreduce_trigger_params: parameters; the gradient of each closes the bucket of its own dtype, and
            `message_size` is ignored.
        retain_allreduce_buffers: leave each backward's reduced flat buckets, in launch order, in `allreduce_buffers`,
            until the next backward.
        allreduce_always_fp32: scale and sum float16 and bfloat16 gradients in float32.
        num_allreduce_streams: refused for a model on the CPU unless it is the default; elsewhere without effect: all
            buckets go through one communicator in one order, on a stream of its own.
        allreduce_communicators: the same.
        gradient_average: whether to divide by the number of ranks; False leaves the sum.
        gradient_predivide_factor: divide by it before the sum, and by world size / factor after it; the latter only
            with `gradient_average`.
        gradient_average_split_factor: refused: an old name of the one before.
        prof: without effect: folds, launches and waits always have names in torch.profiler.
        process_group: the ranks to average over; None is all of them.
        check_steps: see `EagerDDP`.
        verify: see `EagerDDP`.

    The arguments `message_size`, `delay_allreduce`, `retain_allreduce_buffers`, `allreduce_always_fp32`,
    `num_allreduce_streams`, `allreduce_communicators`, `gradient_average` and `gradient_predivide_factor` are
    attributes, too: to assign one is an AttributeError.

    Attributes:
        allreduce_buffers: with `retain_allreduce_buffers`, flat tensors; empty before the first backward that reduces.

    Raises:
        TypeError, ValueError: an argument is refused; on every rank.
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
        num_allreduce_streams: int = 1,
        allreduce_communicators: object = None,
        gradient_average: bool = True,
        gradient_predivide_factor: float = 1.0,
        gradient_average_split_factor: object = None,
        prof: bool = False,
        *,
        process_group: dist.ProcessGroup | None = None,
        check_steps: CheckSteps = "error",
        verify: Verify = "first",
    ) -> None:
        self.prof = prof
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
            num_allreduce_streams=num_allreduce_streams,
            allreduce_communicators=allreduce_communicators,
        )
        super().__init__(module, arguments, process_group=process_group, check_steps=check_steps, verify=verify)

    def enable_allreduce(self) -> None:
        """Let backwards that start from now on reduce, including what was accumulated before."""
        self._reduce_in_backward(wanted=True)

    def disable_allreduce(self) -> None:
        """Let backwards that start from now on stay local: gradients accumulate into .grad."""
        self._reduce_in_backward(wanted=False)

    @property
    def _disable_allreduce(self) -> bool:
        """The switch of the two, which scripts assign too."""
        return not self._reduces_in_backward

    @_disable_allreduce.setter
    def _disable_allreduce(self, value: bool) -> None:
        self._reduce_in_backward(wanted=not value)

    @Fixed
    def num_allreduce_streams(self) -> int:
        """What was passed; without effect."""
        return self._arguments.num_allreduce_streams

    @Fixed
    def allreduce_communicators(self) -> object:
        """What was passed; without effect."""
        return self._arguments.allreduce_communicators
