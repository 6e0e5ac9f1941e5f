"""Uneven inputs: a rank whose data has run out shadows the others' steps with zeros, in `join()` or torch's `Join`.

torch's context manager tells a rank that has joined whether any other goes on, an iteration at a time. An iteration
ends with a synchronised backward. What comes in it goes through the wrapper's communicator: before each of its
collectives every rank says what it is about to do, a joined one that it does nothing, and follows the others.

[Note: one iteration, one backward] Ranks that go on are announced by what they launch, not by their forwards: neither
an evaluation, a forward under no_sync, a second forward in one backward nor one whose output is dropped miscounts.
"""

import contextlib
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from compiled_ddp import torch_private
from compiled_ddp.communicator import Communicator

# What ranks are about to do; the largest of them is what all do.
_NOTHING, _BUFFERS, _BACKWARD = range(3)


@dataclass(frozen=True)
class _Next:
    kind: int
    forward_count: int  # of the ranks that go on
    training: Sequence[int]  # ranks that go on


class UnevenInputs:
    """A wrapper's part in a join. Does nothing outside of one, or where it is not enabled."""

    def __init__(self, joinable: Joinable, communicator: Communicator, drop_forwards: Callable[[], None]) -> None:
        """`drop_forwards` takes back those of an iteration that has ended with an error on every rank."""
        self._joinable, self._communicator, self._drop_forwards = joinable, communicator, drop_forwards
        self.divide_by_initial_world_size = True
        self.factor = 1.0  # what the mean over all ranks is multiplied by in the backward under way
        self._announced = False  # whether torch's context manager knows of this rank's iteration
        self._shadows = False  # whether this rank's own data has run out

    @property
    def is_training(self) -> bool:
        """Whether this rank is in a join and still has data."""
        return torch_private.is_joining(self._joinable) and not self._shadows

    def begin_broadcast(self) -> int:
        """Tell joined ranks that buffers will be broadcast; returns by whom, the first rank that still trains."""
        return self._go_on(_BUFFERS, 0).training[0]

    def begin_backward(self, forward_count: int) -> None:
        """Tell joined ranks that a synchronised backward begins, which ends the iteration."""
        if self.is_training:
            self._go_on(_BACKWARD, forward_count)
            self._announced = False
        elif not self._shadows:
            self.factor = 1.0

    def _go_on(self, kind: int, forward_count: int) -> _Next:
        try:
            if not self._announced:
                work = Join.notify_join_context(self._joinable)
                if work is not None:
                    work.wait()
                self._announced = True
            return self._agree(kind, forward_count)
        except RuntimeError:  # a rank has left early, which this join throws on; or the ranks' options differ
            self._drop_forwards()
            raise

    def shadow(self, broadcast: Callable[[int], None], backward: Callable[[int], None]) -> None:
        """Follow the others to the end of their iteration.

        `broadcast` gets the rank whose buffers are taken, `backward` the others' number of forwards.
        """
        self._shadows = True
        try:
            following = self._agree(_NOTHING)
            while following.kind == _BUFFERS:
                broadcast(following.training[0])
                following = self._agree(_NOTHING)
            if following.kind == _BACKWARD:
                backward(following.forward_count)
        finally:
            self._shadows = self._announced = False

    @property
    def is_open(self) -> bool:
        """Whether this rank has begun an iteration that no backward has ended."""
        return self._announced

    def leave(self) -> None:
        """The join is over on this rank."""
        self._announced, self.factor = False, 1.0
        Joinable.__init__(self._joinable)

    def _agree(self, kind: int, forward_count: int = 0) -> _Next:
        communicator, initial = self._communicator, self.divide_by_initial_world_size
        trains = [int(kind != _NOTHING and rank == communicator.rank) for rank in range(communicator.world_size)]
        shared = torch.tensor(
            [kind, forward_count, int(initial), int(not initial), *trains],
            dtype=torch.int64,
            device=self._joinable.join_device,
        )
        communicator.standing.note_wait("the next step of ranks that still have data (join)")
        communicator.maximum(shared)
        communicator.standing.note_wait("")
        kind, forward_count, some_initial, some_not, *trains = shared.tolist()
        if some_initial and some_not:
            raise RuntimeError(
                "divide_by_initial_world_size differs between ranks: pass the same value on all of them."
            )
        training = [rank for rank, is_training in enumerate(trains) if is_training]
        self.factor = 1.0 if initial or not training else communicator.world_size / len(training)
        return _Next(kind, forward_count, training)

    def last_of(self, is_last_joiner: bool) -> int:
        """The largest rank among the last ones to join."""
        own = self._communicator.rank if is_last_joiner else -1
        largest = torch.tensor([own], dtype=torch.int64, device=self._joinable.join_device)
        self._communicator.maximum(largest)
        return int(largest.item())


class WrapperJoinHook(JoinHook):
    """What torch's context manager calls on a rank whose data has run out."""

    def __init__(self, follow: Callable[[], None], finish: Callable[[bool], None]) -> None:
        super().__init__()
        self._follow, self._finish = follow, finish

    def main_hook(self) -> None:
        self._follow()

    def post_hook(self, is_last_joiner: bool) -> None:
        self._finish(is_last_joiner)


class JoinContext(Join):
    """torch's context manager for one wrapper, which also ends an iteration that no backward came in."""

    def __init__(
        self, joinable: Joinable, uneven: UnevenInputs, follow: Callable[[], None], *, enable: bool, **kwargs: Any
    ) -> None:
        super().__init__([joinable], enable, **kwargs)
        self._uneven, self._follow, self._is_enabled = uneven, follow, enable

    def __exit__(self, kind: Any, value: Any, traceback: Any) -> None:
        with contextlib.ExitStack() as stack:
            stack.callback(self._uneven.leave)
            stack.enter_context(warnings.catch_warnings())  # torch's changes the filters
            if self._is_enabled and kind is None and self._uneven.is_open:
                self._follow()
            super().__exit__(kind, value, traceback)
