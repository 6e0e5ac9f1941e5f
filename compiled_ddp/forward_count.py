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
    other ranks may be in its backward; `take_back` is for what has ended on every rank.
    """

    def __init__(self) -> None:
        self.value = 0
        self._waiting = 0  # of these, since the latest backward began
        self._thrown_away_if_dead: weakref.ref[_Graph] | None = None

    def begin(self, *, after_exception: bool = False) -> None:
        """Count a forward that begins; after an exception in a backward, the one before it was not thrown away."""
        dead = self._thrown_away_if_dead is not None and self._thrown_away_if_dead() is None
        if dead and not after_exception:
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

    def follow(self, value: int) -> None:
        """Take the number that other ranks have, on one that shadows them."""
        self.value, self._thrown_away_if_dead = value, None

    def backward_began(self) -> None:
        """Keep the latest forward counted whatever becomes of its graph."""
        self._thrown_away_if_dead = None
        self._waiting = 0

    def take_back(self) -> None:
        """Take back the forwards that wait for a backward: none comes that other ranks take part in."""
        self.value -= self._waiting
        self.backward_began()
