"""What torch's DDP tells in its logging data, as a plain dict: all that is known without a clock."""

from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from torch import nn

from compiled_ddp.formatting import format_function
from compiled_ddp.model.managed import ManagedState
from compiled_ddp.options import Options
from compiled_ddp.plan import ReductionSequence
from compiled_ddp.step.runtime import Runtime


def training_stats(module: nn.Module, runtime: Runtime, options: Options) -> dict[str, Any]:
    """See `DataParallelWrapper.stats`."""
    communicator, agreed, parameters = runtime.communicator, runtime.reduction.agreed, runtime.parameters
    buckets = agreed.sequence.buckets if agreed.sequence is not None else ()
    sections = agreed.sequence.launched if agreed.sequence is not None else ()
    tensors = (*parameters.tensors, *runtime.reduction.sparse.tensors)
    return {
        "world_size": communicator.world_size,
        "rank": communicator.rank,
        "module_name": type(module).__name__,
        "backend_name": dist.get_backend(communicator.group),
        "device": ", ".join(sorted({str(tensor.device) for tensor in tensors})),
        "dtypes": tuple(sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors})),
        "num_parameter_tensors": len(tensors),
        "total_parameter_size_bytes": _nbytes(tensors),
        "bucket_cap_bytes": options.largest_bucket_bytes,
        "broadcast_buffers": options.synchronise_buffers_in_forward,
        "gradient_as_bucket_view": options.gradient_as_bucket_view,
        "has_sync_bn": any(isinstance(part, nn.SyncBatchNorm) for part in module.modules()),
        "comm_hook": _comm_hook(runtime, options),
        "iteration": runtime.number,
        "has_rebuilt_buckets": agreed.refined,
        "bucket_sizes": tuple(bucket.nbytes for bucket in buckets),
        "per_bucket_param_indices": _positions(module, runtime, agreed.sequence),
        "num_buckets_reduced": len(buckets),
        "num_buckets_in_graphs": sum(len(s.plan.buckets) for s in sections if s.origin == "graph"),
        "unused_parameters": tuple(parameters.names[index] for index in sorted(agreed.unused)),
        "unused_parameter_size": _nbytes(parameters.tensors[index] for index in agreed.unused),
    }


def _comm_hook(runtime: Runtime, options: Options) -> str:
    """The name of the hook, registered or given at construction; empty without one."""
    if runtime.reduction.ddp_hook is not None:
        return runtime.reduction.ddp_hook.name
    return "" if options.comm_hook is None else format_function(options.comm_hook)


def _positions(module: nn.Module, runtime: Runtime, sequence: ReductionSequence | None) -> tuple[tuple[int, ...], ...]:
    """Of the parameters in each bucket, among those trained, in registration order.

    A plan numbers those last that are trained since it was made.
    """
    if sequence is None:
        return ()
    known = {*runtime.parameters.names, *runtime.reduction.sparse.names}
    registered = [name for name in ManagedState(module).parameters() if name in known]
    places = {name: place for place, name in enumerate(dict.fromkeys([*registered, *sequence.parameter_names]))}
    names = sequence.parameter_names
    return tuple(tuple(places[names[index]] for index in bucket.indices) for bucket in sequence.buckets)


def _nbytes(tensors: Iterable[nn.Parameter]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
