"""Arguments that compiled steps have written results into, for as long as somebody holds them."""

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor

# A tensor, and what changes when somebody writes into it, and when it gets other memory.
_Given = tuple["weakref.ref[Tensor]", int, int]


class Donations:
    """[Note: what was donated is found when it comes again]

    A result lies in the memory of a donated argument, and is another object than that. So the argument's own tensors
    can be told from the results, by weak references: in `params = step(params, x)` those of the call before are gone
    when the next one begins, and there is nothing to compare. Who has written into one of them since then, or given it
    other memory (`copy_`, `load_state_dict`, `.data`), means what it holds now.
    """

    def __init__(self) -> None:
        self._given: list[tuple[str, list[_Given]]] = []  # to which step, and what

    def note(self, step: str, tensors: Sequence[Tensor]) -> None:
        """The graph of `step` has written results into these, or some of them."""
        if tensors:
            addresses = [tensor.data_ptr() for tensor in tensors]
            # What was given before lies in the same memory, in a loop, and somebody may still hold it.
            self._given = [(name, _unchanged(given, addresses)) for name, given in self._given]
            self._given = [(name, given) for name, given in self._given if given]
            versions = [0 if tensor.is_inference() else tensor._version for tensor in tensors]
            self._given.append((step, [*zip(map(weakref.ref, tensors), versions, addresses, strict=True)]))

    def refuse(self, taker: str, leaves: Iterable[Any], named: Callable[[], Iterable[tuple[str, Any]]]) -> None:
        """Raise RuntimeError where `leaves`, with which `taker` is called, has one of them; `named` has the names."""
        if not self._given:
            return
        self._given = [(step, left) for step, given in self._given if (left := _unchanged(given))]
        for step, given in self._given:
            held = {id(reference()) for reference, *_ in given}
            if not held.isdisjoint(map(id, leaves)):
                found = next(name for name, leaf in named() if id(leaf) in held)
                raise RuntimeError(
                    f"{found} of {taker} was given to donate=... of {step} in a call before, which writes its results "
                    f"there: use the tree that {step} returned. Where old values are needed too (an average, a line "
                    "search, another try after an error), keep a copy of them, or leave out donate."
                )


def _unchanged(given: Sequence[_Given], written: Iterable[int] = ()) -> list[_Given]:
    """The tensors still alive that nobody has written into, except a step (at the addresses `written`)."""
    alive = [(each, tensor, version, address) for each, version, address in given if (tensor := each()) is not None]
    return [
        (each, now, address)
        for each, tensor, version, address in alive
        if address == tensor.data_ptr() and ((now := _version(tensor)) == version or address in written)
    ]


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


donations = Donations()
