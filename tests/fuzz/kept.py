"""Gradients that the user keeps over steps: they must stay what they were, bit for bit."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn


def _of_storage(gradient: Tensor) -> Callable[[], Tensor]:
    storage, dtype, place = gradient.untyped_storage(), gradient.dtype, gradient.storage_offset()
    shape, stride = gradient.shape, gradient.stride()
    return lambda: torch.empty(0, dtype=dtype, device="cpu").set_(storage, place, shape, stride)


def _of_array(gradient: Tensor) -> Callable[[], Tensor]:
    if gradient.dtype == torch.bfloat16:
        return _of_storage(gradient)
    array = gradient.detach().numpy()
    return lambda: torch.from_numpy(array)


def _of_tensor(held: Tensor) -> Callable[[], Tensor]:
    return lambda: held


# What is held of a gradient, as a function that reads it.
WAYS: dict[str, Callable[[Tensor], Callable[[], Tensor]]] = {
    "itself": _of_tensor,
    "detached": lambda gradient: _of_tensor(gradient.detach()),
    "data": lambda gradient: _of_tensor(gradient.data),
    "first row": lambda gradient: _of_tensor(gradient[0]),
    "array": _of_array,
    "storage": _of_storage,
}


@dataclass(frozen=True)
class _Held:
    what: str
    address: int
    read: Callable[[], Tensor]
    was: Tensor

    @property
    def is_as_it_was(self) -> bool:
        now = self.read()
        if now.dtype != self.was.dtype or now.shape != self.was.shape:
            return False
        return torch.equal(_bits(now), _bits(self.was))


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)


class Kept:
    """What a user holds of the gradients of one module."""

    def __init__(self) -> None:
        self._held: list[_Held] = []

    def keep(self, module: nn.Module, way: str, when: str) -> None:
        """Hold something of each gradient, if `way` names what."""
        for name, parameter in module.named_parameters():
            if way and parameter.grad is not None:
                read = WAYS[way](parameter.grad)
                what = f"{way} of {name}.grad, kept {when}"
                self._held.append(_Held(what, parameter.grad.data_ptr(), read, read().detach().clone()))

    def let_go(self, module: nn.Module) -> None:
        """Of what is still `.grad`, before something adds to it in place."""
        addresses = {parameter.grad.data_ptr() for parameter in module.parameters() if parameter.grad is not None}
        self._held = [held for held in self._held if held.address not in addresses]

    def differences(self) -> Iterator[str]:
        for held in self._held:
            if not held.is_as_it_was:
                yield f"{held.what}: was {held.was.tolist()}, is {held.read().tolist()}"
