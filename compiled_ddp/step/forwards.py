"""The forwards of a wrapper: which one waits for its backward, and how many have begun, by which ranks tell
whether they average one step.

[Note: forwards that are no step] A rank whose forward raised may try again, with two halves of its batch say: then what
it sends belongs to the step in which the others are, and only forwards that returned count. Or all ranks have dropped
that step, as they had agreed, and each has given up one forward. So ranks average one step if equally many of their
forwards have returned, or if they have begun equally many. (A rank that goes on with its next batch after one that
raised cannot be told from one that tries again: as under DDP its next step is averaged with the others' step.)
"""

import sys
import threading
import weakref
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

# ---- how many have begun that a synchronised backward was to follow --------------------------------------------------


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


# ---- the latest one --------------------------------------------------------------------------------------------------


class LatestForward:
    """Whether the latest forward was synchronised, who called it, and whether it still waits for its backward."""

    def __init__(self) -> None:
        self.synchronises = True  # whether its backward does: False under no_sync
        # Whether it was synchronised, or one before it in whose output nothing is seen of a graph, and no backward has
        # begun since.
        self.awaits_backward = False
        self._is_hidden = False  # whether the one that waits has returned no autograd node that was found
        self.count = ForwardCount()
        self._is_counted = False  # whether it is one of `count`
        self._may_count_late = False  # whether one was synchronised and not counted since the latest backward
        self.was_reached = False  # whether a backward, or a torch.autograd.grad, has begun since
        self._thread = 0

    def begin(self, *, synchronise: bool, counted: bool) -> None:
        """`counted` tells whether every rank is to begin as many such forwards as this one; it is counted then.

        Otherwise it is once its backward begins, if no counted one waits for that: one rank may train in eval mode.
        A local one takes the place of one that waits, unless that has hidden its graph (in a closure, in the module):
        nothing but the first gradient tells that its backward has come, and as under DDP this is taken for it.
        """
        self.synchronises = synchronise
        self.awaits_backward = synchronise or (self.awaits_backward and self._is_hidden)
        self._is_hidden = self._is_hidden and not synchronise
        self._thread = threading.get_ident()
        self._is_counted, self.was_reached = synchronise and counted, False
        self._may_count_late = self._may_count_late or (synchronise and not counted)

    def begin_inside_backward(self, *, synchronise: bool, under_way: bool) -> None:
        """A reentrant checkpoint runs one of its own; `under_way` tells whether in a synchronised backward."""
        self.synchronises = synchronise
        self._is_counted = False
        self.awaits_backward = synchronise and not under_way

    def raised(self) -> None:
        """It has ended with an exception. [Note: forwards that are no step]"""
        if self._is_counted:
            self.count.raised()

    def returned(self, nodes: Collection[Any]) -> None:
        """It has returned outputs of these autograd nodes; one that runs again inside a backward has done so before."""
        self._is_hidden = self.awaits_backward and not nodes
        if self._is_counted and self.awaits_backward:
            self.count.returned(nodes)

    def backward_began(self, *, accumulates: bool) -> None:
        """It waits no more, unless a torch.autograd.grad, which does not accumulate, has come before its backward."""
        self.was_reached = True
        if self._may_count_late:
            self._may_count_late = False
            if self.awaits_backward:
                self.count.begin_late()
        self.awaits_backward = self.awaits_backward and not accumulates

    def drop(self) -> None:
        """No backward follows the forwards that wait for one, on any rank."""
        self.awaits_backward = self._may_count_late = False
        self.count.take_back()

    @property
    def is_of_this_thread(self) -> bool:
        return self._thread == threading.get_ident()

    def is_awaited(self) -> bool:
        """Whether it still waits for its backward, and its output has not just been thrown away.

        An exception that is being handled may be what has thrown it away.
        """
        return self.awaits_backward and (self.count.waits_alive or sys.exc_info()[0] is not None)
