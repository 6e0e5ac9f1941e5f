"""The gradients that captured graphs have reduced in one backward."""

import functools
import itertools
import operator
from collections.abc import Sequence, Set

import torch

_gradient_of = operator.attrgetter("grad")


class GraphGradients:
    """Knows each by its address and by an alias, to tell it from what else may reach .grad."""

    def __init__(self) -> None:
        # None where several graphs have reduced parts of it.
        self.addresses: dict[int, int | None] = {}
        self._aliases: list[dict[int, torch.Tensor]] = []  # of each graph
        self._left_out: set[int] = set()  # parameters of a graph that no rank's loss reaches through it

    def note(self, indices: Sequence[int], tensors: Sequence[torch.Tensor]) -> None:
        """These are what a graph returns of the parameters `indices`."""
        several = self.addresses.keys() & indices if self.addresses else ()
        self.addresses |= zip(indices, map(torch.Tensor.data_ptr, tensors), strict=True)
        self.addresses |= dict.fromkeys(several)
        # They share the storage, so that autograd adds other contributions out of place, which `has_another` sees.
        self._aliases.append(dict(zip(indices, map(torch.Tensor.detach, tensors), strict=True)))

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
        return sum_in_order([aliases[index] for aliases in self._aliases if index in aliases])

    def found_elsewhere(self, parameters: Sequence[torch.Tensor]) -> list[tuple[int, torch.Tensor]]:
        """Each .grad of these parameters that is not simply where a graph has left it."""
        gradients = [*map(_gradient_of, map(parameters.__getitem__, self.addresses))]
        are_there = all(map(operator.is_not, gradients, itertools.repeat(None)))
        if are_there and [*map(torch.Tensor.data_ptr, gradients)] == [*self.addresses.values()]:
            return []  # in C, as for every parameter in every step
        of_graphs = [(index, address, parameters[index].grad) for index, address in self.addresses.items()]
        return [(i, grad) for i, address, grad in of_graphs if grad is not None and grad.data_ptr() != address]

    def has_another(self, index: int, gradient: torch.Tensor, *, looks_at_values: bool) -> bool:
        """Whether .grad, which is `gradient`, has a contribution besides what graphs have reduced.

        What one graph returned is the very tensor; what several did is their sum, which only a look at it can tell.
        """
        address = self.addresses[index]
        if address is not None:
            return gradient.data_ptr() != address
        return looks_at_values and not _are_equal(gradient, self.sum_of(index))


def sum_in_order(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum that autograd makes of what graphs return in this order, so that every rank rounds alike."""
    return functools.reduce(torch.add, parts)


def _are_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.allclose(one, other, rtol=0.0, atol=0.0, equal_nan=True)
