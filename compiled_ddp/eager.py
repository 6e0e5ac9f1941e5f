"""EagerDDP: averaging gradients by hooks, overlapped with backward, where there is no graph."""

from collections.abc import Sequence
from typing import Any, Unpack

import torch.distributed as dist
from torch import nn

from compiled_ddp.options import OptionKeywords, part_options, takes_options
from compiled_ddp.wrapper import DataParallelWrapper
from compiled_ddp.wrapping.ddp_arguments import DDPKeywords, Device


class EagerKeywords(OptionKeywords, DDPKeywords, total=False):
    """Keyword arguments of `EagerDDP`: its options, and arguments of DDP."""


class EagerDDP(DataParallelWrapper):
    """Data-parallel training of an eager model: hooks, flat buckets and asynchronous all-reduces.

    Gradients are copied into their bucket as autograd accumulates them, small ones together. A bucket is launched when
    it is full and all buckets before it have been launched. At the end of the outermost backward missing gradients are
    sent as zeros, all launches are awaited, and .grad is a view of its bucket. The first backward fills buckets in
    reverse registration order; later ones use the order in which gradients arrived on rank 0.

    In the spirit of apex's `DistributedDataParallel` (apex/parallel/distributed.py) and c10d's Reducer
    (torch/csrc/distributed/c10d/reducer.cpp).

    Args:
        module: the model; its parameters and buffers are overwritten with those of the group's rank 0.
        device_ids: the model's GPU, to which each forward moves its inputs; None leaves them where they are.
        output_device: the same GPU, if given.
        dim: accepted for compatibility; inputs are not split.
        process_group: the ranks to average over; None is all of them.
        bucket_cap_mb: size of a bucket in MiB, at which it closes as under DDP. None plans the buckets with which a
            backward ends earliest, for the link and the device as they are measured here (docs/planner.md).
        first_bucket_mb: size of the first bucket, which decides how soon communication starts. None is 1 MiB where a
            `bucket_cap_mb` is given, and is planned where none is.
        bucket_cap_mb_list: the size of each bucket in MiB, in launch order; the last one applies to all further
            buckets. Replaces the two sizes above.
        calibration: what buckets are planned for, from `calibrate()` or `Calibration.load(path)`; None measures the
            link and the device here, where no size is given. The same on every rank.
        plan: the buckets of an earlier run, from `SavedPlan.load(path)`, in place of planning and of the sizes above;
            `ddp.plan.save(path)` writes them. Refused where it is not of this model. The same on every rank.
        embedding_rows: whether the gradient of an embedding is sent as those of its rows that are not zero, where that
            is fewer bytes, on CPUs with gloo; the sum is the same. None lets the measured link decide, where buckets
            are planned for it.
        broadcast_buffers: overwrite buffers with rank 0's at construction and at the start of a forward, by DDP's rule;
            None means True.
        forward_sync_buffers: DDP's newer name for the same, for forwards only: at construction buffers always become
            rank 0's. None leaves it to `broadcast_buffers`.
        init_sync: overwrite parameters and buffers with rank 0's at construction.
        find_unused_parameters: accepted for compatibility; unused parameters need no flag.
        static_graph: every step runs the same graph. A parameter may then get several gradients in one backward, by
            reentrant checkpoints that share it: the first backward counts them, and launches at its end.
        gradient_as_bucket_view: leave .grad as views of the buckets; False keeps plain tensors, at a copy each.
        keep_buffers: keep the buckets' flat buffers from step to step. False gives them back when a forward begins, so
            that activations may use their memory once no .grad lies in it; each backward allocates them anew.
        reduction: what a synchronised backward makes of the ranks' gradients: their "mean", their "sum", or the mean
            "weighted" by what each rank gives to `set_weight`, for example its number of tokens.
        piggyback: names of numbers that `piggyback` sends along with the gradients, to be summed over ranks.
        comm_hook: reduces the buckets in place of an all-reduce (`compiled_ddp.comm_hooks`).
        check_steps: what to do when ranks have begun different numbers of forwards, and so average different steps:
            "error" raises on every rank, "warn" warns once, "off" does not check.
        verify: when to prove that gradients were reduced, by checksums before and after, compared between ranks:
            "first" in the first backward, and while something is pending (`explain()` lists it);
            "always" in every backward; "off" never. A gradient that was not reduced raises on every rank.
        **ddp_arguments: DDP's other arguments (docs/migration.md, "Arguments of the constructor").

    Raises:
        RuntimeError: torch.distributed is not initialised, the models differ between ranks, or torch is unsupported.
        TypeError, ValueError: the model or an option cannot be used; the message says what to do.
    """

    @takes_options(OptionKeywords)
    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[Device] | None = None,
        output_device: Device | None = None,
        dim: int = 0,
        *,
        process_group: dist.ProcessGroup | None = None,
        find_unused_parameters: bool = False,
        **ddp_arguments: Unpack[EagerKeywords],
    ) -> None:
        options, others = part_options(ddp_arguments, OptionKeywords)
        others |= {"device_ids": device_ids, "output_device": output_device, "dim": dim}
        others |= {"find_unused_parameters": find_unused_parameters}
        super().__init__(module, process_group, options, others)

    def _why_not_graph(self) -> str:
        return "the model runs eagerly"

    def _run_module(self, *args: Any, **kwargs: Any) -> Any:
        return self._managed.module(*args, **kwargs)  # which stands under `module`: without a search for that name
