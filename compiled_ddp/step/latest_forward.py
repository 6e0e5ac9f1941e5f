"""The forwards of a wrapper, as far as the next backward needs to know of them."""

import sys
import threading
from collections.abc import Collection
from typing import Any

from compiled_ddp.backward.forward_count import ForwardCount


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
