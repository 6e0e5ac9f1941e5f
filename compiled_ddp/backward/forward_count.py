"""Counting forwards begun to be synchronised: what tells ranks that average different steps from ranks that do not.

[Note: forwards that are no step] A rank whose forward raised may try again, with two halves of its batch say: then what
it sends belongs to the step in which the others are, and only forwards that returned count. Or all ranks have dropped
that step, as they had agreed, and each has given up one forward. So ranks average one step if equally many of their
forwards have returned, or if they have begun equally many. (A rank that goes on with its next batch after one that
raised cannot be told from one that tries again: as under DDP its next step is averaged with the others' step.)
"""

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ForwardNumbers:
    """A rank's numbers of forwards when a synchronised backward begins. [Note: forwards that are no step]"""

    begun: int  # but for those whose output was thrown away
    returned: int  # these without those that raised, as far as other ranks have not forgiven them


class _Graph:
    """Lives as long as one of the autograd nodes it is kept with."""


class ForwardCount:
    """How many forwards this rank has begun that a synchronised backward was to follow.

    A forward whose graph is dead before the next one begins, without a backward having reached it, is taken back:
    nobody can run its backward any more, so throwing an output away harms nothing. One that raised stays counted until
    the ranks turn out to average one step without it; `take_back` is for what has ended on every rank.
    """

    def __init__(self) -> None:
        self.value = 0
        self._waiting = 0  # of these, since the latest backward began
        self._raised = 0  # of these
        self._unsettled: list[int] = []  # that raised before each backward whose outcome is not known yet
        self._latest: weakref.ref[_Graph] | None = None  # of the latest forward, if it has returned and still waits

    def begin(self, *, after_exception: Callable[[], object] = bool) -> None:
        """Count a forward that begins; after an exception in a backward, the one before it was not thrown away."""
        if self._latest is not None and not self.waits_alive and not after_exception():
            self.value -= 1
            self._waiting -= 1
        self._latest = None
        self.value += 1
        self._waiting += 1

    def begin_late(self) -> None:
        """Count one that has begun uncounted, and whose backward begins now; a no-op if a counted one waits for it."""
        if not self._waiting:
            self.value += 1
            self._waiting += 1

    def returned(self, nodes: Iterable[Any]) -> None:
        """Note the autograd nodes of the outputs that the counted forward has returned."""
        graph = _Graph()
        for node in nodes:
            node.metadata["compiled_ddp.forward"] = graph
        self._latest = weakref.ref(graph)

    def raised(self) -> None:
        """Note that the counted forward has raised."""
        self._raised += 1

    @property
    def waits_alive(self) -> bool:
        """Whether the latest forward waits for a backward that somebody may still run."""
        return self._latest is not None and self._latest() is not None

    def follow(self, value: int) -> None:
        """Take the number that other ranks have, on one that shadows them."""
        self.value, self._latest = value, None
        self._raised = 0
        self._unsettled.clear()

    def backward_began(self) -> ForwardNumbers:
        """Keep the latest forward counted whatever becomes of its graph; returns what to tell the other ranks."""
        self._unsettled.append(self._raised)
        self._begin_anew()
        return ForwardNumbers(self.value, self.value - sum(self._unsettled))

    def settle(self, *, backwards: int, forgiven: bool) -> None:
        """The outcome of so many backwards, the earliest ones, is known: whether ranks averaged one step after all."""
        if forgiven:
            self.value -= sum(self._unsettled[:backwards])
        del self._unsettled[:backwards]

    def take_back(self) -> None:
        """Take back the forwards that wait for a backward: none comes that other ranks take part in."""
        self.value -= self._waiting
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._latest, self._waiting, self._raised = None, 0, 0
