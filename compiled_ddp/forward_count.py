"""Counting forwards begun to be synchronised: what tells ranks that average different steps from ranks that do not."""

import weakref
from collections.abc import Iterable
from typing import Any


class _Graph:
    """Lives as long as one of the autograd nodes it is kept with."""


class ForwardCount:
    """How many forwards this rank has begun that a synchronised backward was to follow.

    A forward whose graph is dead before the next one begins, without a backward having reached it, is taken back:
    nobody can run its backward any more, so throwing an output away harms nothing. One that raised stays counted, as
    other ranks may be in its backward.
    """

    def __init__(self) -> None:
        self.value = 0
        self._waiting = 0  # of these, since the latest backward began
        self._thrown_away_if_dead: weakref.ref[_Graph] | None = None

    def begin(self) -> None:
        """Count a forward that begins."""
        if self._thrown_away_if_dead is not None and self._thrown_away_if_dead() is None:
            self.value -= 1
            self._waiting -= 1
        self._thrown_away_if_dead = None
        self.value += 1
        self._waiting += 1

    def returned(self, nodes: Iterable[Any]) -> None:
        """Note the autograd nodes of the outputs that the counted forward has returned."""
        graph = _Graph()
        for node in nodes:
            node.metadata["compiled_ddp.forward"] = graph
        self._thrown_away_if_dead = weakref.ref(graph)

    def backward_began(self) -> None:
        """Keep the latest forward counted whatever becomes of its graph."""
        self._thrown_away_if_dead = None
        self._waiting = 0

    def backward_stays_local(self) -> None:
        """Take back the forwards that wait for a backward: it began, and is none that other ranks take part in."""
        self.value -= self._waiting
        self.backward_began()
