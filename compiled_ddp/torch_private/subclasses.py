"""Tensor subclasses among a graph's inputs: AOTAutograd takes them apart, and so what a compiled backward returns."""

from collections.abc import Sequence
from typing import Any

import torch

from compiled_ddp.torch_private.aot import BackwardImplementation


class PartsOfGradients:
    """Where a compiled backward returns the gradients of a captured graph's inputs.

    A gradient that is a tensor subclass is returned as several entries, its tensors and its symbolic sizes, and those
    of all inputs behind it are moved by as many.
    """

    def __init__(self, places: Sequence[int | slice]) -> None:
        """`places` has one for each input: a slice for a gradient in parts."""
        self._places = places
        last = places[-1]
        self._end = last.stop if isinstance(last, slice) else last + 1

    def is_whole(self, place: int) -> bool:
        """Whether the gradient of this input is one entry, a plain tensor."""
        return isinstance(self._places[place], int)

    def together(self, backward: BackwardImplementation) -> BackwardImplementation:
        """`backward`, returning one entry for each input, a list for a gradient in parts; what follows stays."""

        def run(context: Any, saved_and_tangents: list[Any]) -> Any:
            returned = list(backward(context, saved_and_tangents))
            return [*map(returned.__getitem__, self._places), *returned[self._end :]]

        return run

    def apart(self, backward: BackwardImplementation) -> BackwardImplementation:
        """The inverse of `together`."""

        def run(context: Any, saved_and_tangents: list[Any]) -> Any:
            returned: list[Any] = []
            for gradient in backward(context, saved_and_tangents):
                returned += gradient if isinstance(gradient, list) else [gradient]
            return tuple(returned)

        return run


def parts_of_gradients(compiled_function: type[torch.autograd.Function]) -> PartsOfGradients | None:
    """None where each input has one entry, at its own place: in nearly all graphs."""
    subclasses: Any = compiled_function.maybe_subclass_metadata  # type: ignore[attr-defined]
    if subclasses is None:
        return None
    places = [_entries(gradient) for gradient in subclasses.grad_input_metas]
    return None if places == [*range(len(places))] else PartsOfGradients(places)


def _entries(gradient: Any) -> int | slice:
    from torch._functorch._aot_autograd.schemas import PlainTensorMeta

    if isinstance(gradient, PlainTensorMeta):
        return gradient.unwrapped_idx
    return slice(gradient.flat_tensor_start_idx, gradient.flat_tensor_start_idx + gradient.arg_count)
