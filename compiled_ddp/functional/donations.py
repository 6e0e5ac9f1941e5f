"""Arguments that compiled steps have written results into, for as long as somebody holds them."""

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor


class Donations:
    """[Note: what was donated is found when it comes again]

    A result lies in the memory of a donated argument, and is another object than that. So the argument's own tensors
    can be told from the results, by weak references: in `params = step(params, x)` those of the call before are gone
    when the next one begins, and there is nothing to compare.
    """

    def __init__(self) -> None:
        self._given: list[tuple[str, list[weakref.ref[Tensor]]]] = []  # to which step; the tensors

    def note(self, step: str, tensors: Sequence[Tensor]) -> None:
        """The graph of `step` begins to write results into these."""
        if tensors:
            self._given = [
                (name, alive)
                for name, given in self._given
                if (alive := [each for each in given if each() is not None])
            ]
            self._given.append((step, [*map(weakref.ref, tensors)]))

    def refuse(self, taker: str, leaves: Iterable[Any], named: Callable[[], Iterable[tuple[str, Any]]]) -> None:
        """Raise RuntimeError where `leaves`, with which `taker` is called, has one of them; `named` has the names."""
        for step, given in self._given:
            held = {id(tensor) for reference in given if (tensor := reference()) is not None}
            if held and not held.isdisjoint(map(id, leaves)):
                found = next(name for name, leaf in named() if id(leaf) in held)
                raise RuntimeError(
                    f"{found} of {taker} was given to donate=... of {step} in a call before, which writes its results "
                    f"there: use the tree that {step} returned. Where old values are needed too (an average, a line "
                    "search, another try after an error), keep a copy of them, or leave out donate."
                )


donations = Donations()
