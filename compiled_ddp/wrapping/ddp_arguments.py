"""The arguments of torch's DistributedDataParallel that are nothing of ours: what each of them means here.

Those of torch 2.15 (torch/nn/parallel/distributed.py). What the wrappers take themselves stands in their signatures.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, TypedDict

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from compiled_ddp.errors import ModelError, WrongKindError
from compiled_ddp.keywords import suggestion
from compiled_ddp.model.managed import every_parameter
from compiled_ddp.options import CompilerKeywords, Options
from compiled_ddp.ranks.rank_group import check_kind

Device = int | str | torch.device


class DDPKeywords(TypedDict, total=False):
    """Keyword arguments that are taken so that a script written for DDP keeps its meaning."""

    device_mesh: DeviceMesh | None  # in place of process_group
    check_reduction: bool  # without effect, as there
    batched_grad_copy: bool  # without effect: graphs write gradients into their bucket
    lazy_bucket_allocation: bool  # keep_buffers=False, by another name
    skip_all_reduce_unused_params: bool  # without effect: what no rank uses is not reduced in any case
    # Which gradients to launch last, and by whose hook: both only order launches, which the graph does.
    delay_all_reduce_named_params: Sequence[tuple[str, nn.Parameter]] | None
    param_to_hook_all_reduce: nn.Parameter | None
    mixed_precision: object | None  # refused


class DDPArguments(DDPKeywords, total=False):
    """DDP's arguments, with those that may be given by position."""

    device_ids: Sequence[Device] | None  # the GPU of the model, where inputs are moved
    output_device: Device | None  # the same
    dim: int  # without effect: inputs are not split
    find_unused_parameters: bool  # without effect: they need no flag


def check_ddp_arguments(arguments: DDPArguments, module: nn.Module, wrapper: str) -> None:
    """Raise TypeError or ValueError, with what to do, for what `wrapper` cannot take or has no name for."""
    refuse_unknown(arguments, wrapper)
    if arguments.get("mixed_precision") is not None:
        raise ValueError(
            "mixed_precision is not supported: run the forward under torch.autocast, or convert the model to a lower "
            "precision before wrapping it."
        )
    _check_delayed(arguments, module)


def options_as_under_ddp(options: Options, arguments: DDPArguments) -> Options:
    """What is asked for by an argument of DDP's that has another name here is asked for."""
    return replace(options, keep_buffers=False) if arguments.get("lazy_bucket_allocation") else options


def refuse_unknown(arguments: Iterable[str], function: str) -> None:
    """Raise TypeError for a keyword that is no argument of DDP, with the one that may have been meant."""
    known = DDPArguments.__annotations__.keys() | CompilerKeywords.__annotations__.keys() | {"process_group"}
    for name in sorted({*arguments} - DDPArguments.__annotations__.keys()):
        if name in known:
            hint = " It is compile_ddp's: hooks compile nothing."
        else:
            hint = suggestion(name, known)
        raise TypeError(f"{function} got an unexpected keyword argument {name!r}.{hint}")


def _check_delayed(arguments: DDPArguments, module: nn.Module) -> None:
    delayed, trigger = arguments.get("delay_all_reduce_named_params"), arguments.get("param_to_hook_all_reduce")
    if (delayed is None) != (trigger is None):
        raise ValueError(
            "delay_all_reduce_named_params and param_to_hook_all_reduce belong together: pass both or neither."
        )
    given: object = delayed or ()
    named: list[Any] = list(given) if isinstance(given, Iterable) else [given]
    if not all(isinstance(pair, tuple | list) and len(pair) == 2 for pair in named):
        raise WrongKindError(
            f"delay_all_reduce_named_params must be pairs of a name and a parameter, as model.named_parameters() has, "
            f"found {delayed!r}."
        )
    own = {id(parameter) for parameter in every_parameter(module)}
    for name, parameter in [*named, *([] if trigger is None else [("param_to_hook_all_reduce", trigger)])]:
        if id(parameter) not in own:
            raise ValueError(f"{name} is not a parameter of the model: pass those that model.named_parameters() has.")


def input_device(arguments: DDPArguments, devices: Sequence[torch.device]) -> torch.device | None:
    """The GPU that `device_ids` names, where inputs are moved in each forward; None to leave them where they are.

    `devices` are those of the parameters that are reduced.

    Raises ValueError where it is not the model's.
    """
    ids, output = arguments.get("device_ids"), arguments.get("output_device")
    if ids is not None and (isinstance(ids, str) or not isinstance(ids, Sequence)):
        raise WrongKindError(f"device_ids must be a list with one device, found {ids!r}: pass [{ids!r}].")
    if ids and len(ids) > 1:
        raise ValueError(f"device_ids may name one device, found {ids}: start one process for each GPU.")
    if not ids and output is None:
        return None
    if len(devices) > 1:
        raise ValueError(
            f"device_ids and output_device name the one device of a model, and this one is on {len(devices)}: leave "
            "them out."
        )
    (model_device,) = devices
    named = [_device("device_ids", name, model_device.type) for name in ids or ()]
    named += [_device("output_device", output, model_device.type)] if output is not None else []
    if model_device.type == "cpu" or any(device != model_device for device in named):
        raise ValueError(
            f"device_ids and output_device must name the model's GPU, found device_ids={ids}, output_device={output} "
            f"for a model on {model_device}. Move the model to its device first; for a model on the CPU leave them out."
        )
    return model_device if ids else None


def _device(argument: str, name: object, kind: str) -> torch.device:
    if isinstance(name, bool) or not isinstance(name, int | str | torch.device):
        raise WrongKindError(
            f"{argument} must name a device by its number, a string or a torch.device, found {name!r}."
        )
    try:
        return torch.device(kind, name) if isinstance(name, int) else torch.device(name)
    except RuntimeError as error:
        raise ModelError(f"{argument} names no device, found {name!r}: {str(error).splitlines()[0]}.") from error


def without_group(arguments: DDPArguments) -> DDPArguments:
    """The arguments for a copy of a wrapper, which has neither ranks nor these parameters."""
    kept: DDPArguments = {**arguments}
    for name in ("device_mesh", "delay_all_reduce_named_params", "param_to_hook_all_reduce"):
        kept.pop(name, None)  # type: ignore[misc]
    return kept


def group_of(process_group: dist.ProcessGroup | None, arguments: DDPArguments) -> dist.ProcessGroup | None:
    """The ranks to average over.

    Raises TypeError for what names none; RuntimeError, as DDP does, for two of them or a mesh of several dimensions.
    """
    check_kind(process_group)
    mesh: object = arguments.get("device_mesh")
    if mesh is None:
        return process_group
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(
            "device_mesh must be a DeviceMesh, as torch.distributed.init_device_mesh() returns, or None, "
            f"found {mesh!r}."
        )
    if process_group is not None:
        raise RuntimeError("process_group and device_mesh both name the ranks to average over: pass one of them.")
    if mesh.ndim != 1:
        raise RuntimeError(f"device_mesh must have one dimension, found {mesh}: pass the slice of data parallelism.")
    return mesh.get_group(mesh_dim=0)
