"""Uneven inputs: a rank whose data has run out shadows the others' steps with zeros, in `join()` or torch's `Join`.

torch's context manager tells a rank that has joined whether any other goes on, an iteration at a time. An iteration
ends with a synchronised backward. What comes in it goes through the wrapper's communicator: before each of its
collectives every rank says what it is about to do, a joined one that it does nothing, and follows the others.

[Note: one iteration, one backward] Ranks that go on are announced by what they launch, not by their forwards: neither
an evaluation, a forward under no_sync, a second forward in one backward nor one whose output is dropped miscounts.

[Note: ranks meet before what may communicate] Where the join throws as soon as one rank has ended, all must learn it
before a module's forward, which may communicate too (SyncBatchNorm). So they meet before every forward with gradients
of a module that trains, and before every backward, and each says which of the two it has come to. Who is at a forward
goes on, who is at a backward meets the others again until all are: no rank counts what another one runs.

What a joined rank had accumulated itself is put aside while it shadows others, and given back when the join is over.
"""

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from compiled_ddp import torch_private
from compiled_ddp.ranks.communicator import Communicator

# What ranks are about to do; the largest of them is what all do.
_NOTHING, _FORWARD, _BUFFERS, _BACKWARD = range(4)


@dataclass(frozen=True)
class _Next:
    kinds: Sequence[int]  # what each rank is about to do
    forward_count: int  # of the ranks that go on

    @property
    def kind(self) -> int:
        return max(self.kinds)

    @property
    def training(self) -> Sequence[int]:
        """The ranks that go on."""
        return [rank for rank, kind in enumerate(self.kinds) if kind != _NOTHING]


class Steps(Protocol):
    """The rank's own steps."""

    def drop_forwards(self) -> None:
        """Take back the forwards of an iteration that has ended with an error on every rank."""

    def end_shadowing(self, *, if_untouched: bool = False) -> None:
        """Give back what was put aside while this rank shadowed others."""


class OwnGradients:
    """The .grad of each parameter, and which of them are still to be sent, as they were before the first shadowed step.

    The tensors themselves are kept, so whoever puts them aside must not write to their memory any more.
    """

    def __init__(
        self, parameters: Sequence[torch.nn.Parameter], unsent: Set[int], piggyback: torch.Tensor | None
    ) -> None:
        """`unsent` have been used since the last synchronised backward; `piggyback` waits for the next one too."""
        self.unsent, self.piggyback = set(unsent), piggyback
        self._before = [(parameter, parameter.grad) for parameter in parameters]
        self._shadowed: dict[int, tuple[torch.Tensor | None, int]] = {}  # what the latest shadowed step left
        self.take_away()

    def take_away(self) -> None:
        """Let the next shadowed step begin without any .grad."""
        for parameter, _ in self._before:
            parameter.grad = None

    def note_shadowed(self) -> None:
        """Note what a shadowed step has left in .grad."""
        self._shadowed = {id(parameter): _now(parameter) for parameter, _ in self._before}

    def give_back(self, *, if_untouched: bool = False) -> None:
        """Put every .grad back; with `if_untouched`, only where nobody has changed what the last step left."""
        for parameter, gradient in self._before:
            if not if_untouched or _is(self._shadowed.get(id(parameter)), _now(parameter)):
                parameter.grad = gradient


def _now(parameter: torch.Tensor) -> tuple[torch.Tensor | None, int]:
    gradient = parameter.grad
    return gradient, 0 if gradient is None else torch_private.tensors.version_of(gradient)


def _is(one: tuple[torch.Tensor | None, int] | None, other: tuple[torch.Tensor | None, int]) -> bool:
    return one is not None and one[0] is other[0] and one[1] == other[1]


class UnevenInputs:
    """A wrapper's part in a join. Does nothing outside of one, or where it is not enabled."""

    def __init__(self, joinable: Joinable, communicator: Communicator, steps: Steps) -> None:
        self.joinable = joinable
        self._communicator, self._steps = communicator, steps
        self._by_initial_world_size = True  # what sums are divided by: the number of all ranks, or of those that go on
        self.factor = 1.0  # what the mean over all ranks is multiplied by in the backward under way
        self._announced = False  # whether torch's context manager knows of this rank's iteration
        self._shadows = False  # whether this rank's own data has run out

    @property
    def is_training(self) -> bool:
        """Whether this rank is in a join and still has data."""
        return torch_private.modules.is_joining(self.joinable) and not self._shadows

    @property
    def _throws(self) -> bool:
        """Whether this join raises as soon as one rank has ended, which this wrapper is to find out."""
        config = self.joinable._join_config
        return bool(config.enable and config.throw_on_early_termination and config.is_first_joinable)

    def divide_by(self, *, initial_world_size: bool) -> None:
        """In the join that begins, divide sums by the number of all ranks, or of those that still have data."""
        self._by_initial_world_size = initial_world_size

    def begin_forward(self) -> None:
        """A forward with gradients begins whose module may communicate.

        Raises RuntimeError if another rank has ended and this join throws on it, before the module waits for that one.
        """
        if self._throws:
            self._go_on(_FORWARD)

    def begin_broadcast(self) -> int:
        """Tell the others that buffers will be broadcast; returns by whom, the first rank that still trains."""
        return self._go_on(_BUFFERS).training[0]

    def begin_backward(self, forward_count: int) -> None:
        """Tell the others that a synchronised backward begins, which ends the iteration."""
        if self.is_training:
            self._go_on(_BACKWARD, forward_count)
            self._announced = False
        elif not self._shadows:
            self.factor = 1.0

    def _go_on(self, kind: int, forward_count: int = 0) -> _Next:
        with self.dropping_forwards():
            if not self._throws:
                self._announce()
                return self._agree(kind, forward_count)
            while True:  # [Note: ranks meet before what may communicate]
                self._notify()
                following = self._agree(kind, forward_count)
                if kind == _FORWARD or _FORWARD not in following.kinds:
                    return following

    def _announce(self) -> None:
        """Let torch's context manager know that this rank goes on, once in an iteration."""
        if not self._announced:
            self._notify()
            self._announced = True

    def _notify(self) -> None:
        work = Join.notify_join_context(self.joinable)
        if work is not None:
            work.wait()

    @contextlib.contextmanager
    def dropping_forwards(self) -> Iterator[None]:
        """For an error of every rank: one has left early, which this join throws on, or their options differ."""
        try:
            yield
        except RuntimeError:
            self._steps.drop_forwards()
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
        Joinable.__init__(self.joinable)
        self.end_shadowing()

    def end_shadowing(self) -> None:
        """Give back what was put aside while this rank shadowed others."""
        self._steps.end_shadowing()

    def _agree(self, kind: int, forward_count: int = 0) -> _Next:
        communicator, initial = self._communicator, self._by_initial_world_size
        kinds = [kind if rank == communicator.rank else _NOTHING for rank in range(communicator.world_size)]
        shared = torch.tensor(
            [forward_count, int(initial), int(not initial), *kinds],
            dtype=torch.int64,
            device=self.joinable.join_device,
        )
        communicator.progress.note_wait("the next step of ranks that still have data (join)")
        communicator.maximum(shared)
        communicator.progress.note_wait("")
        forward_count, some_initial, some_not, *kinds = shared.tolist()
        if some_initial and some_not:
            raise RuntimeError(
                "divide_by_initial_world_size differs between ranks: pass the same value on all of them."
            )
        if _BUFFERS in kinds and _BACKWARD in kinds:
            raise RuntimeError(
                f"rank {communicator.global_rank}: some ranks are at a forward that brings rank 0's buffers, others at "
                "a backward (join): run as many synchronised forwards on every rank, or pass "
                "forward_sync_buffers=False."
            )
        following = _Next(kinds, forward_count)
        self.factor = 1.0 if initial or not following.training else communicator.world_size / len(following.training)
        return following

    def last_of(self, is_last_joiner: bool) -> int:
        """The largest rank among the last ones to join."""
        own = self._communicator.rank if is_last_joiner else -1
        largest = torch.tensor([own], dtype=torch.int64, device=self.joinable.join_device)
        self._communicator.maximum(largest)
        return int(largest.item())


class WrapperJoinHook(JoinHook):
    """What torch's context manager calls on a rank whose data has run out."""

    def __init__(self, uneven: UnevenInputs, follow: Callable[[], None], finish: Callable[[bool], None]) -> None:
        super().__init__()
        self._uneven, self._follow, self._finish = uneven, follow, finish

    @torch_private.dynamo.untraced
    def main_hook(self) -> None:
        try:
            self._follow()
        except BaseException:  # of which torch's context manager tells nobody: it leaves its Joinables in the join
            self._uneven.end_shadowing()
            raise

    @torch_private.dynamo.untraced
    def post_hook(self, is_last_joiner: bool) -> None:
        try:
            self._finish(is_last_joiner)
        finally:
            self._uneven.leave()


class JoinContext(Join):
    """torch's context manager for one wrapper, which also ends an iteration that no backward came in."""

    def __init__(
        self, joinable: Joinable, uneven: UnevenInputs, follow: Callable[[], None], *, enable: bool, **kwargs: Any
    ) -> None:
        super().__init__([joinable], enable, **kwargs)
        self._uneven, self._follow, self._is_enabled = uneven, follow, enable

    @torch_private.dynamo.untraced
    def __exit__(self, kind: Any, value: Any, traceback: Any) -> None:
        with contextlib.ExitStack() as stack:
            stack.callback(self._uneven.leave)
            stack.enter_context(warnings.catch_warnings())  # torch's changes the filters
            if self._is_enabled and kind is None and self._uneven.is_open:
                self._follow()
            with self._uneven.dropping_forwards():
                super().__exit__(kind, value, traceback)
