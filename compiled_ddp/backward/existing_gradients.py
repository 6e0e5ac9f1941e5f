"""The .grad tensors that are there when a backward begins."""

import itertools
import operator
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch

from compiled_ddp import torch_private
from compiled_ddp.backward.flat_buffers import SequenceBuffers
from compiled_ddp.planning.trained_parameters import TrainedParameters


def any_has_gradient(parameters: Iterable[torch.Tensor]) -> bool:
    """Whether one of them has a .grad. In C, for every parameter in every backward."""
    return any(map(operator.is_not, map(gradient_of, parameters), itertools.repeat(None)))


gradient_of = operator.attrgetter("grad")


class ExistingGradients:
    """What .grad was, to tell what a backward has added, and where its result is to be left."""

    def __init__(self, parameters: TrainedParameters, buffers: SequenceBuffers) -> None:
        self._parameters = parameters
        self.were_any = any_has_gradient(parameters.tensors)
        self.apart: dict[int, torch.Tensor] = {}  # not views of their own place in a flat buffer
        # Each as it was when the backward began, with its version.
        self.begun_with: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
        self._sharing: set[int] = set()
        if self.were_any:
            self._look_at(buffers)
        else:
            buffers.renew_all_held()

    def _look_at(self, buffers: SequenceBuffers) -> None:
        gradients = [parameter.grad for parameter in self._parameters.tensors]
        there = {index: gradient for index, gradient in enumerate(gradients) if gradient is not None}
        buffers.renew_held(there.values())
        self.apart |= self._taken_out_of(buffers, there)
        self.begun_with |= {
            index: (weakref.ref(gradient), torch_private.tensors.version_if_any(gradient))
            for index, gradient in {**there, **self.apart}.items()
        }
        self._sharing |= _with_equal_memory(self.apart)

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
            gradient is not None and torch_private.tensors.version_if_any(gradient) != version
        )

    def check_all(self, indices: Sequence[int], gradients: Sequence[torch.Tensor]) -> None:
        """Raise RuntimeError unless these parameters' gradients, which go into one bucket, can be reduced."""
        planned = self._parameters.gradients[indices[0]]
        usual = torch_private.tensors.are_strided(gradients, planned.dtype, planned.device)
        if not usual or not self._sharing.isdisjoint(indices):
            for index, gradient in zip(indices, gradients, strict=True):
                self.check(index, gradient)

    def check(self, index: int, gradient: torch.Tensor) -> None:
        """Raise RuntimeError unless a parameter's gradient can be reduced."""
        name = self._parameters.names[index]
        if gradient.layout != torch.strided:
            raise RuntimeError(
                f"parameter {name} got a {gradient.layout} gradient; only dense gradients can be reduced. "
                "Pass sparse=False to its nn.Embedding or nn.EmbeddingBag."
            )
        self._check_kind(index, gradient)
        if index in self._sharing:
            raise RuntimeError(
                f"the gradients of parameters {self._parameters.named(sorted(self._sharing))} share memory, so that "
                "each would be added to the others. Assign a tensor of its own to each .grad."
            )

    def _check_kind(self, index: int, gradient: torch.Tensor) -> None:
        """Raise RuntimeError unless a gradient is of the dtype and on the device of its bucket."""
        planned = self._parameters.gradients[index]
        if gradient.dtype == planned.dtype and gradient.device == planned.device:
            return
        name, parameter = self._parameters.names[index], self._parameters.tensors[index]
        advice = "Assign gradients of the parameter's dtype, or its grad_dtype, and device."
        if parameter.grad_dtype is None:
            advice = (
                "Its grad_dtype is None, which admits any dtype, and ranks add up gradients of one: set its grad_dtype "
                f"to {gradient.dtype} between two steps, on every rank."
            )
        elif parameter.grad_dtype != planned.dtype:
            advice = (
                "Its grad_dtype was set after the forward of this backward had begun. Drop this step on every rank "
                "(zero_grad): the next forward takes it as it is."
            )
        raise RuntimeError(
            f"the gradient of parameter {name} is {gradient.dtype} on {gradient.device}, where {planned.dtype} on "
            f"{planned.device} is reduced. {advice}"
        )


def _with_equal_memory(gradients: Mapping[int, torch.Tensor]) -> set[int]:
    """The parameters whose .grad is, or lies where, another one's."""
    if not gradients:
        return set()
    addresses = {i: g.data_ptr() for i, g in gradients.items() if g.layout == torch.strided and g.numel()}
    count = Counter(addresses.values())
    return {index for index, address in addresses.items() if count[address] > 1}
