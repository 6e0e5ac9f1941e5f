"""torch.autograd.grad: which gradients it returns, and whether each is the mean over ranks that a graph has made."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from compiled_ddp import torch_private


class ReturnedGradients:
    """Watches the gradients that a torch.autograd.grad is about to return.

    Nothing can be put in their place, so each must be the very tensor that a graph has reduced.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter], requested: Sequence[int]) -> None:
        self._parameters = {index: parameters[index] for index in requested}
        self._addresses: dict[int, int] = {}
        self._handles: list[Any] = []

    def begin(self) -> None:
        for index, parameter in self._parameters.items():
            watch = functools.partial(self._returned, index)
            self._handles.append(torch_private.tensors.register_own_hook(parameter, watch))

    def end(self) -> None:
        for handle in self._handles:
            handle.remove()

    @torch_private.dynamo.untraced
    def _returned(self, index: int, gradient: torch.Tensor | None) -> None:
        if gradient is not None:  # as it is where this backward brings the parameter none
            self._addresses[index] = gradient.data_ptr()

    def not_reduced(self, graph_gradients: Mapping[int, int | None]) -> list[int]:
        """The parameters with a gradient that was not made by graphs alone.

        `graph_gradients` has the address of each reduced gradient, None where several graphs have reduced parts of it.
        """
        return [
            index
            for index, address in sorted(self._addresses.items())
            if index not in graph_gradients or graph_gradients[index] not in (address, None)
        ]


def watch_returned(parameters: Sequence[torch.nn.Parameter]) -> ReturnedGradients | None:
    """For the running torch.autograd.grad of some of `parameters`; None in a backward that accumulates."""
    requested = []
    for index, parameter in enumerate(parameters):
        fate = torch_private.autograd.fate_of_gradient(parameter)
        if fate == "accumulated":
            return None
        if fate == "returned":
            requested.append(index)
    return ReturnedGradients(parameters, requested) if requested else None


def returns_inputs_alone(parameters: Sequence[torch.nn.Parameter]) -> bool:
    """Whether the running backward is a torch.autograd.grad of tensors that are none of `parameters`."""
    if any(torch_private.autograd.fate_of_gradient(parameter) != "none" for parameter in parameters):
        return False
    return torch_private.autograd.backward_accumulates_nothing()
