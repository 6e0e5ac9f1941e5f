"""Which parameters this rank has a gradient of to reduce, in one backward."""

import math
from collections.abc import Iterable, Mapping, Set


class Usage:
    """What earlier local backwards have accumulated, and what this one brings."""

    def __init__(
        self,
        used_before: Set[int],
        *,
        sends_zeros: bool = False,
        delayed: bool = False,
        expected_gradients: Mapping[int, int] | None = None,
    ) -> None:
        """`used_before` have been used since the last synchronised backward. The others are `Circumstances`.

        With `sends_zeros`, in a torch.autograd.grad, nothing counts as used: hooks send zeros.
        """
        self.arrived: dict[int, int] = {}  # how many gradients each parameter has got
        self.before = used_before
        self._sends_zeros, self._delayed, self._expected = sends_zeros, delayed, expected_gradients

    def is_used(self, index: int) -> bool:
        """Whether this rank has a gradient to reduce, produced since the last synchronised backward."""
        return not self._sends_zeros and (index in self.arrived or index in self.before)

    def unused(self, indices: Iterable[int]) -> set[int]:
        """Of these parameters, those without one."""
        return set(indices) if self._sends_zeros else set(indices).difference(self.arrived, self.before)

    def note_gradient(self, index: int) -> None:
        """A parameter has got a gradient."""
        self.arrived[index] = self.arrived.get(index, 0) + 1

    def note_gradients(self, indices: Iterable[int]) -> None:
        """Each of these has got one."""
        if self.arrived:
            self.arrived |= {index: self.arrived.get(index, 0) + 1 for index in indices}
        else:
            self.arrived = dict.fromkeys(indices, 1)

    def note_any(self, indices: Iterable[int]) -> None:
        """Each of these has got one, if not more."""
        for index in indices:
            self.arrived.setdefault(index, 1)

    def awaits_more(self, index: int) -> bool:
        """Whether more may be added to .grad before it goes into its bucket, at the end of the backward at the latest.

        `index` has got a gradient.
        """
        return self._delayed or (
            self._expected is not None and self.arrived[index] < self._expected.get(index, math.inf)
        )
