"""Counting forwards begun to be synchronised: what tells ranks that average different steps from ranks that do not.

[Note: forwards that are no step] A rank whose forward raised may have left the others in that step's backward: so the
forward counts, and the ranks differ from then on. Or every rank has dropped the step, as they had agreed: then the
others have given up a forward too, whose output they threw away. Ranks thus average one step if they have begun equally
many forwards; or, leaving out those that raised, equally many, and have given up equally many since the last backward.
"""

import operator
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Forwards:
    """A rank's numbers of forwards when a synchronised backward begins. [Note: forwards that are no step]"""

    begun: int  # but for those whose output was thrown away
    returned: int  # these without those that raised, as far as other ranks have not forgiven them
    given_up: int = 0  # that raised or were thrown away, since the last backward of which all ranks know the outcome


class _Graph:
    """Lives as long as one of the autograd nodes it is kept with."""


@dataclass
class _GivenUp:
    raised: int = 0
    thrown_away: int = 0


_raised, _thrown_away = operator.attrgetter("raised"), operator.attrgetter("thrown_away")


class ForwardCount:
    """How many forwards this rank has begun that a synchronised backward was to follow.

    A forward whose graph is dead before the next one begins, without a backward having reached it, is taken back:
    nobody can run its backward any more, so throwing an output away harms nothing. One that raised stays counted until
    all ranks turn out to have dropped its step; `take_back` is for what has ended on every rank.
    """

    def __init__(self) -> None:
        self.value = 0
        self._waiting = 0  # of these, since the latest backward began
        self._given_up = _GivenUp()  # since the latest backward began
        self._unsettled: list[_GivenUp] = []  # before each backward whose outcome is not known yet
        self._latest: weakref.ref[_Graph] | None = None  # of the latest forward, if it has returned and still waits

    def begin(self, *, after_exception: Callable[[], object] = bool) -> None:
        """Count a forward that begins; after an exception in a backward, the one before it was not thrown away."""
        if self._latest is not None and not self.waits_alive and not after_exception():
            self.value -= 1
            self._waiting -= 1
            self._given_up.thrown_away += 1
        self._latest = None
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
        self._given_up.raised += 1

    @property
    def waits_alive(self) -> bool:
        """Whether the latest forward waits for a backward that somebody may still run."""
        return self._latest is not None and self._latest() is not None

    def follow(self, value: int) -> None:
        """Take the number that other ranks have, on one that shadows them."""
        self.value, self._latest = value, None
        self._given_up = _GivenUp()
        self._unsettled.clear()

    def backward_began(self) -> Forwards:
        """Keep the latest forward counted whatever becomes of its graph; returns what to tell the other ranks."""
        self._unsettled.append(self._given_up)
        raised = sum(map(_raised, self._unsettled))
        thrown_away = sum(map(_thrown_away, self._unsettled))
        self._begin_anew()
        return Forwards(self.value, self.value - raised, raised + thrown_away)

    def settle(self, *, backwards: int, forgiven: bool) -> None:
        """The outcome of so many backwards, the earliest ones, is known: whether ranks averaged one step after all."""
        for given_up in self._unsettled[:backwards]:
            if forgiven:
                self.value -= given_up.raised
        del self._unsettled[:backwards]

    def take_back(self) -> None:
        """Take back the forwards that wait for a backward: none comes that other ranks take part in."""
        self.value -= self._waiting
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._latest, self._waiting, self._given_up = None, 0, _GivenUp()
