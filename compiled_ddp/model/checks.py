"""What a model must be to be wrapped, and what must be equal on every rank."""

from collections.abc import Iterable, Mapping

import torch
from torch import nn

from compiled_ddp import torch_private
from compiled_ddp.errors import ModelError
from compiled_ddp.formatting import format_names
from compiled_ddp.model.managed import Contents, ManagedState
from compiled_ddp.model.owners import other_state_of, owner_of_state
from compiled_ddp.options import Options
from compiled_ddp.plan import gradient_dtype
from compiled_ddp.ranks.agreement import Description


def check_model(module: nn.Module, wrapper: str) -> tuple[ManagedState, Contents]:
    """What a `wrapper` of `module` looks after. Raises TypeError or ValueError, with what to do, if it cannot."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"{wrapper} wraps a torch.nn.Module, found {type(module).__name__}.")
    bare = torch_private.modules.without_compile_wrapper(module)
    if getattr(type(bare), "is_compiled_ddp_wrapper", False):  # others may hand on the attributes of one inside
        raise ModelError(f"the model is a {type(bare).__name__} already: use it as it is, or wrap its .unwrap().")
    if isinstance(bare, nn.parallel.DistributedDataParallel):
        raise ModelError(
            f"the model is already wrapped by torch's DistributedDataParallel: pass its .module to {wrapper}."
        )
    state = ManagedState(module)
    contents = state.contents()
    check_parts(state, contents)
    if contents.trained and len(contents.trained) == len(contents.sparse):
        raise ModelError(
            "every trained parameter has a sparse gradient: at least one with a dense gradient must carry what ranks "
            "share. Pass sparse=False to one of the embeddings."
        )
    if not contents.trained:
        others = " besides those to ignore and those of wrappers inside" if state.left_alone() else ""
        raise ModelError(
            f"the model ({type(module).__name__}) has no parameter that requires a gradient{others}: there is nothing "
            "to reduce. Use it unwrapped, or unfreeze parameters before wrapping it."
        )
    return state, contents


def check_parts(state: ManagedState, contents: Contents) -> None:
    """Raise ValueError, with what to do, if this wrapper cannot reduce or synchronise a parameter or buffer."""
    _check_materialised(contents)
    _check_parameters(contents.trained)
    _check_not_owned(state, contents)
    for name in contents.sparse:
        device = contents.trained[name].device
        if device.type != "cpu":
            raise ModelError(f"parameter {name} has sparse=True on {device}: sparse gradients are averaged on the CPU.")


def check_writable(contents: Contents) -> None:
    """Raise ValueError, with what to do, if a parameter or buffer cannot take rank 0's values."""
    for name, tensor in (*contents.parameters.items(), *contents.buffers.items()):
        lengths_and_steps = zip(tensor.shape, tensor.stride(), strict=True) if tensor.layout == torch.strided else ()
        if any(length > 1 and not step for length, step in lengths_and_steps):
            raise ModelError(
                f"{name} is expanded, with several elements in one place of memory, so that rank 0's values cannot be "
                "written to it: clone() it, or, for a wrapper, pass init_sync=False if all ranks have the same model."
            )


def broadcast_tensors(contents: Contents, options: Options) -> dict[str, torch.Tensor]:
    """The parameters and buffers that rank 0's values are broadcast to, at construction or in forwards, by name."""
    received: dict[str, torch.Tensor] = {}
    if options.init_sync:
        received |= {f"parameter {name}": parameter for name, parameter in contents.parameters.items()}
    if _sends_buffers(options):
        received |= {f"buffer {name}": buffer for name, buffer in contents.buffers.items()}
    return received


def _sends_buffers(options: Options, *, at_init: bool = True) -> bool:
    """Whether rank 0's buffers are broadcast in forwards or, where it counts, `at_init`."""
    sent_at_init = at_init and options.init_sync and options.synchronise_buffers_at_init
    return options.synchronise_buffers_in_forward or sent_at_init


def check_layouts(contents: Contents, options: Options) -> None:
    """Raise ValueError, with what to do, if a tensor that rank 0's values are broadcast to cannot be sent."""
    for name, tensor in broadcast_tensors(contents, options).items():
        if tensor.layout != torch.strided:
            raise ModelError(
                f"{name} has layout {tensor.layout}: only strided tensors are broadcast. If it is the same on all "
                "ranks, name it in model._ddp_params_and_buffers_to_ignore; otherwise keep a dense one."
            )
        if tensor.is_quantized:
            raise ModelError(
                f"{name} is quantised ({tensor.dtype}), which cannot be broadcast. If it is the same on all ranks, "
                "name it in model._ddp_params_and_buffers_to_ignore."
            )


def _check_not_owned(state: ManagedState, contents: Contents) -> None:
    for name, parameter in contents.trained.items():
        other = other_state_of(parameter, state)
        if other is not None:
            module = torch_private.modules.without_compile_wrapper(other.module)
            raise ModelError(
                f"parameter {name} belongs to a {type(module).__name__} that {type(owner_of_state(other)).__name__} "
                "wraps: two wrappers would both scale its gradient. Wrap one module that contains both, unwrap() the "
                "other, or freeze the parameter."
            )


def _check_materialised(contents: Contents) -> None:
    tensors: list[tuple[str, torch.Tensor]] = [
        (f"parameter {name}", parameter) for name, parameter in contents.parameters.items()
    ]
    tensors += [(f"buffer {name}", buffer) for name, buffer in contents.buffers.items()]
    for name, tensor in tensors:
        if torch_private.tensors.is_distributed_tensor(tensor):
            raise ModelError(
                f"{name} is a DTensor, whose parts are not this wrapper's to average: wrap a model of plain tensors, "
                "or have the DTensors ignored by their names in model._ddp_params_and_buffers_to_ignore and average "
                "their gradients where they were distributed."
            )
        if nn.parameter.is_lazy(tensor):
            raise ModelError(f"{name} is uninitialised (lazy): run one forward before wrapping the model.")
        if tensor.is_meta:
            raise ModelError(f"{name} is on the meta device: materialise the model before wrapping it.")


def _check_parameters(parameters: dict[str, nn.Parameter]) -> None:
    for name, parameter in parameters.items():
        if parameter.layout != torch.strided:
            raise ModelError(f"parameter {name} has layout {parameter.layout}: only strided parameters are supported.")
        if parameter.is_inference():
            raise ModelError(
                f"parameter {name} was made in torch.inference_mode(), where nothing can be trained: make the model "
                "outside of it, or put nn.Parameter(parameter.clone()) in its place there."
            )
        if parameter.dtype.itemsize == 1:
            raise ModelError(
                f"parameter {name} is of {parameter.dtype}, in which no gradient can be summed up: train it in a wider "
                "dtype and convert it in forward, or freeze it with requires_grad_(False)."
            )
    check_stepped_after_backward(parameters)


def check_stepped_after_backward(parameters: Mapping[str, nn.Parameter]) -> None:
    for name, parameter in parameters.items():
        if torch_private.tensors.has_optimizer_in_backward(parameter):
            raise ModelError(
                f"parameter {name} has an optimizer of torch.distributed.optim's _apply_optimizer_in_backward, which "
                "steps as soon as this rank's own gradient is there. Make an optimizer for each parameter and let it "
                "step in parameter.register_post_accumulate_grad_hook(...), which is given the reduced gradient, on a "
                "model without the other."
            )


def describe_model(contents: Contents, options: Options, mode: str, *, at_init: bool) -> Description:
    """Everything that must be equal on every rank: of buffers those that are broadcast, in forwards or `at_init`."""
    description: Description = {}
    places = _places(contents.parameters.values())
    for name, parameter in contents.parameters.items():
        kind = "sparse gradient" if name in contents.sparse else "trained" if parameter.requires_grad else "frozen"
        description[f"parameter {name}"] = [*properties_of(parameter), places[parameter.device], kind]
        if name in contents.embeddings and parameter.is_cpu and options.may_send_rows:
            description[f"parameter {name}"].append("of an embedding")
        if parameter.requires_grad and gradient_dtype(parameter) != parameter.dtype:
            description[f"parameter {name}"].append(f"grad_dtype {parameter.grad_dtype}")
    if _sends_buffers(options, at_init=at_init):
        description |= {f"buffer {name}": properties_of(buffer) for name, buffer in contents.buffers.items()}
    for option, value in options.shared().items():
        description[f"option {option}"] = [value]
    description["COMPILED_DDP_MODE"] = [mode]
    description["torch version"] = [torch.__version__]
    return description


def _places(parameters: Iterable[torch.Tensor]) -> dict[torch.device, str]:
    """What must be equal on every rank of the devices that a model is on: their kinds, and which is which."""
    places: dict[torch.device, str] = {}
    for parameter in parameters:
        device = parameter.device
        if device not in places:
            others = sum(other.type == device.type for other in places)
            places[device] = f"{device.type} device number {others + 1} of the model"
    return places


def properties_of(tensor: torch.Tensor) -> list[object]:
    """What must be equal on every rank of a parameter or buffer, whatever device it is on."""
    return [
        f"shape {tuple(tensor.shape)}",
        f"stride {tensor.stride() if tensor.layout == torch.strided else None}",
        f"dtype {tensor.dtype}",
    ]


def check_not_inside_ddp(ddp: nn.parallel.DistributedDataParallel, state: ManagedState, wrapper: str) -> None:
    """Raise RuntimeError if torch's `ddp`, whose forward runs this one, averages what `wrapper` averages too."""
    averaged = {id(p) for name, p in ddp.module.named_parameters() if name not in ddp.parameters_to_ignore}
    both = [name for name, parameter in state.trained().items() if id(parameter) in averaged]
    if both:
        raise RuntimeError(
            f"torch's DistributedDataParallel around {wrapper}: both average the gradients of "
            f"{format_names(both)}. Leave one of them out: a trainer that wraps its model itself is given the bare "
            f"one, and {wrapper} is trained as it is. Or let DistributedDataParallel ignore what is wrapped inside, "
            "by its names in the _ddp_params_and_buffers_to_ignore of the module that it wraps."
        )
