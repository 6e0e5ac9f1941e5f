"""What a model must be to be wrapped, and what must be equal on every rank."""

import torch
from torch import nn

from compiled_ddp.agreement import Description
from compiled_ddp.options import Options

WRAPPED_BY = "_compiled_ddp_wrapper"  # the name of the mark that a wrapper leaves on the module it wraps


def check_model(module: nn.Module, wrapper: str) -> None:
    """Raise TypeError or ValueError, with what to do, if `module` cannot be wrapped by `wrapper`."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"{wrapper} wraps a torch.nn.Module, found {type(module).__name__}.")
    if isinstance(module, nn.parallel.DistributedDataParallel):
        raise ValueError(f"the model is already wrapped by torch's DistributedDataParallel: pass its .module to {wrapper}.")
    if getattr(module, "is_compiled_ddp_wrapper", False):
        raise ValueError("the model is a compiled_ddp wrapper already: use it as it is, or wrap its .unwrap().")
    if WRAPPED_BY in vars(module):
        owner = vars(module)[WRAPPED_BY]
        raise ValueError(f"the model is already wrapped by {owner}: call that wrapper's unwrap() first.")
    parameters = trainable_parameters(module)
    if not parameters:
        raise ValueError(
            f"the model ({type(module).__name__}) has no parameter that requires a gradient: there is nothing to "
            "reduce. Use it unwrapped, or unfreeze parameters before wrapping it."
        )
    _check_parameters(parameters)


def _check_parameters(parameters: dict[str, nn.Parameter]) -> None:
    for name, parameter in parameters.items():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise ValueError(f"parameter {name} is uninitialised (lazy): run one forward before wrapping the model.")
        if parameter.is_meta:
            raise ValueError(f"parameter {name} is on the meta device: materialise the model before wrapping it.")
        if parameter.layout != torch.strided:
            raise ValueError(f"parameter {name} has layout {parameter.layout}: only strided parameters are supported.")
    devices = {parameter.device: name for name, parameter in parameters.items()}
    if len(devices) > 1:
        places = ", ".join(f"{name} on {device}" for device, name in devices.items())
        raise ValueError(f"parameters are on several devices ({places}): move the model to one device first.")


def trainable_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that require a gradient, by name, each once, in registration order."""
    return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}


def describe_model(module: nn.Module, options: Options, mode: str) -> Description:
    """Everything that must be equal on every rank."""
    description: Description = {}
    for name, parameter in module.named_parameters():
        kind = "trained" if parameter.requires_grad else "frozen"
        description[f"parameter {name}"] = [*_properties(parameter), kind]
    for name, buffer in module.named_buffers():
        description[f"buffer {name}"] = _properties(buffer)
    for option, value in options.shared().items():
        description[f"option {option}"] = [value]
    description["COMPILED_DDP_MODE"] = [mode]
    description["torch version"] = [torch.__version__]
    return description


def _properties(tensor: torch.Tensor) -> list[object]:
    return [
        f"shape {tuple(tensor.shape)}",
        f"stride {tensor.stride() if tensor.layout == torch.strided else None}",
        f"dtype {tensor.dtype}",
    ]
