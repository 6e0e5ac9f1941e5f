"""The gradients that captured graphs have reduced in one backward."""

import functools
import itertools
import operator
from collections.abc import Sequence, Set

import torch

from compiled_ddp import torch_private
from compiled_ddp.backward.existing_gradients import gradient_of


class GraphGradients:
    """Knows each by its address and its version, to tell it from what else may reach .grad."""

    def __init__(self, *, copies: bool = False) -> None:
        """With `copies` what was reduced is known also where somebody has written into it since."""
        # None where several graphs have reduced parts of it.
        self.addresses: dict[int, int | None] = {}
        self._of_each: list[dict[int, torch.Tensor]] = []  # what each graph has returned
        self._copies = copies
        self._left_out: set[int] = set()  # parameters of a graph that no rank's loss reaches through it

    def hand_out(self, indices: Sequence[int], tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Note what a graph returns of the parameters `indices`; returns what autograd is to get in its place.

        Aliases that nobody else holds, which autograd makes .grad instead of a copy, each with a version of its own.
        They share the storage with what is kept, so that autograd adds what comes before that out of place, and what
        comes behind it in place: `changed` tells of both.
        """
        several = self.addresses.keys() & indices if self.addresses else ()
        self.addresses |= zip(indices, map(torch.Tensor.data_ptr, tensors), strict=True)
        self.addresses |= dict.fromkeys(several)
        kept = map(torch.Tensor.clone, tensors) if self._copies else tensors
        self._of_each.append(dict(zip(indices, kept, strict=True)))
        return [*map(_alias_of, tensors)]

    def note_left_out(self, indices: Set[int]) -> None:
        """A graph returns nothing of these parameters: [Note: undefined gradients]"""
        self._left_out |= indices

    @property
    def left_out(self) -> Set[int]:
        """The parameters of which a graph was to reduce a gradient, and none has."""
        return self._left_out and self._left_out - self.addresses.keys()

    @property
    def indices(self) -> Set[int]:
        return self.addresses.keys()

    def sum_of(self, index: int) -> torch.Tensor:
        """What graphs have reduced of a gradient."""
        return sum_in_order([of_one[index] for of_one in self._of_each if index in of_one])

    def changed(self, parameters: Sequence[torch.Tensor]) -> list[int]:
        """Those of these parameters whose .grad is not simply what a graph has left in it."""
        gradients = [*map(gradient_of, map(parameters.__getitem__, self.addresses))]
        are_there = all(map(operator.is_not, gradients, itertools.repeat(None)))
        if (
            are_there
            and [*map(torch.Tensor.data_ptr, gradients)] == [*self.addresses.values()]
            and not any(map(torch_private.tensors.version_of, gradients))
        ):
            return []  # in C, as for every parameter in every step
        found = zip(self.addresses.items(), gradients, strict=True)
        return [
            index
            for (index, address), gradient in found
            if gradient is not None
            and (gradient.data_ptr() != address or torch_private.tensors.version_of(gradient) != 0)
        ]

    def has_another(self, index: int, gradient: torch.Tensor, *, looks_at_values: bool) -> bool:
        """Whether .grad, which is `gradient` and `changed`, has a contribution besides what graphs have reduced.

        Autograd makes a copy of what one graph has returned where somebody else holds it, or under create_graph. What
        several have returned is a sum, of which only a look at it can tell: on a GPU, which would have to be waited
        for in every step, without `looks_at_values` only where the version is not that of a sum of so many. (Autograd
        adds the second one out of place, and those behind it in place.)
        """
        address = self.addresses[index]
        if address is None and not looks_at_values:
            parts = sum(index in of_one for of_one in self._of_each)
            if torch_private.tensors.version_of(gradient) == max(parts - 2, 0):
                return False
        return gradient.data_ptr() == address or not _are_equal(gradient, self.sum_of(index))


_alias_of = operator.attrgetter("data")


def sum_in_order(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum that autograd makes of what graphs return in this order, so that every rank rounds alike."""
    return functools.reduce(torch.add, parts)


def _are_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    alike = (one.layout, one.dtype, one.device, one.shape) == (other.layout, other.dtype, other.device, other.shape)
    return alike and torch.allclose(one, other, rtol=0.0, atol=0.0, equal_nan=True)
