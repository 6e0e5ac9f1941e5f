"""The .grad tensors that are there when a backward begins."""

import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import torch

from compiled_ddp import torch_private
from compiled_ddp.backward.flat_buffers import SequenceBuffers
from compiled_ddp.planning.trained_parameters import TrainedParameters


class ExistingGradients:
    """What .grad was, to tell what a backward has added, and where its result is to be left."""

    def __init__(self, parameters: TrainedParameters, buffers: SequenceBuffers) -> None:
        self._parameters = parameters
        there = {index: grad for index, grad in enumerate([p.grad for p in parameters.tensors]) if grad is not None}
        self.were_any = bool(there)
        buffers.renew_held(there.values())
        self.apart = dict(self._taken_out_of(buffers, there))  # not views of their own place in a flat buffer
        # Each as it was when the backward began, with its version.
        self.begun_with = {
            index: (weakref.ref(gradient), torch_private.tensors.version_of(gradient))
            for index, gradient in (there | self.apart).items()
            if not gradient.is_inference()
        }
        self._sharing = _with_equal_memory(self.apart)

    def _taken_out_of(
        self, buffers: SequenceBuffers, there: Mapping[int, torch.Tensor]
    ) -> Iterator[tuple[int, torch.Tensor]]:
        for index, gradient in there.items():
            if buffers.holds(index, gradient):
                continue
            if buffers.contain(gradient):  # where another gradient will be put before this one is read
                gradient = self._parameters.tensors[index].grad = gradient.detach().clone()
            yield index, gradient

    def begun_by(self, index: int) -> None:
        """The backward begins with a gradient of this parameter that has been accumulated before."""
        self.begun_with.pop(index, None)

    def has_accumulated(self, index: int) -> bool:
        """Whether .grad is another one than that with which the backward began, or has been added to since."""
        gradient = self._parameters.tensors[index].grad
        if index not in self.begun_with:
            return gradient is not None
        begun_with, version = self.begun_with[index]
        return gradient is not begun_with() or (
            gradient is not None and torch_private.tensors.version_of(gradient) != version
        )

    def check_all(self, indices: Sequence[int], gradients: Sequence[torch.Tensor]) -> None:
        """Raise RuntimeError unless these parameters' gradients can be reduced."""
        tensors, strided = self._parameters.tensors, torch.strided
        unusual = [
            pair
            for pair in zip(indices, gradients, strict=True)
            if pair[1].layout is not strided
            or pair[1].dtype is not tensors[pair[0]].dtype
            or pair[1].device != tensors[pair[0]].device
        ]
        sharing = [] if self._sharing.isdisjoint(indices) else zip(indices, gradients, strict=True)
        for index, gradient in (*unusual, *sharing):
            self.check(index, gradient)

    def check(self, index: int, gradient: torch.Tensor) -> None:
        """Raise RuntimeError unless a parameter's gradient can be reduced."""
        name = self._parameters.names[index]
        parameter = self._parameters.tensors[index]
        if gradient.layout != torch.strided:
            raise RuntimeError(
                f"parameter {name} got a {gradient.layout} gradient; only dense gradients can be reduced. "
                "Pass sparse=False to its nn.Embedding or nn.EmbeddingBag."
            )
        if gradient.dtype != parameter.dtype or gradient.device != parameter.device:
            raise RuntimeError(
                f"the gradient of parameter {name} is {gradient.dtype} on {gradient.device}, the parameter is "
                f"{parameter.dtype} on {parameter.device}. Assign gradients of the parameter's dtype and device."
            )
        if index in self._sharing:
            raise RuntimeError(
                f"the gradients of parameters {self._parameters.named(sorted(self._sharing))} share memory, so that "
                "each would be added to the others. Assign a tensor of its own to each .grad."
            )


def _with_equal_memory(gradients: Mapping[int, torch.Tensor]) -> set[int]:
    """The parameters whose .grad is, or lies where, another one's."""
    if not gradients:
        return set()
    addresses = {i: g.data_ptr() for i, g in gradients.items() if g.layout == torch.strided and g.numel()}
    count = Counter(addresses.values())
    return {index for index, address in addresses.items() if count[address] > 1}
