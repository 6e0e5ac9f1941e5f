"""The backward that a wrapper has under way, if any: in which phase it is, and in which tasks of autograd it runs.

    IDLE <--> EXPECTED, until the backward arrives
    IDLE ---> REDUCING ---> IDLE, maybe POSTPONED in between
    IDLE ---> SKIPPING ---> IDLE
    any of them ---> BROKEN ---> IDLE

Whether a forward waits for its backward is no phase: a forward may begin in one thread while another runs the backward
of an earlier one, and a torch.autograd.grad leaves it waiting.
"""

import abc
import enum
import functools
import threading
import time
import weakref
from collections.abc import Callable, Sequence

import torch

from compiled_ddp import torch_private
from compiled_ddp.step.graph_call import GraphCall
from compiled_ddp.step.synchronised import SynchronisedBackward

# ---- in which phase a wrapper is -------------------------------------------------------------------------------------


class Phase(enum.StrEnum):
    """What a wrapper is doing for the other ranks."""

    IDLE = "no backward is under way"
    EXPECTED = "a backward that has reached another wrapper, or has failed before it did, would reach this one"
    POSTPONED = "a backward has reached it, which begins for the other ranks when it has ended here"
    REDUCING = "a backward is under way"
    SKIPPING = "zeros are sent in place of a backward"
    BROKEN = "an exception has ended a backward, and the rest of it is sent as zeros"


class Event(enum.StrEnum):
    """What changes the phase."""

    OTHER_REACHED = "a backward has reached another wrapper first, or none before an exception ended it"
    EXPECTATION_OVER = "that backward, or another, has reached this one, too, or has ended"
    POSTPONE = "a backward has reached it that must not wait for other ranks now"
    BEGIN = "a synchronised backward begins"
    SKIP = "zeros are to be sent in place of a backward"
    BREAK = "what is left of a backward is to be sent, as an exception has ended it"
    END = "its results have been read, or nobody can read them"


TRANSITIONS = {
    (Phase.IDLE, Event.OTHER_REACHED): Phase.EXPECTED,
    (Phase.IDLE, Event.POSTPONE): Phase.POSTPONED,
    (Phase.IDLE, Event.BEGIN): Phase.REDUCING,
    (Phase.IDLE, Event.SKIP): Phase.SKIPPING,
    (Phase.IDLE, Event.BREAK): Phase.BROKEN,  # the exception came before the backward had reached the wrapper
    (Phase.EXPECTED, Event.EXPECTATION_OVER): Phase.IDLE,
    (Phase.EXPECTED, Event.SKIP): Phase.SKIPPING,  # in another thread than the one that expected it
    (Phase.EXPECTED, Event.BREAK): Phase.BROKEN,
    (Phase.POSTPONED, Event.BEGIN): Phase.REDUCING,
    (Phase.POSTPONED, Event.BREAK): Phase.BROKEN,
    (Phase.REDUCING, Event.BREAK): Phase.BROKEN,
    (Phase.REDUCING, Event.END): Phase.IDLE,
    (Phase.SKIPPING, Event.BREAK): Phase.BROKEN,
    (Phase.SKIPPING, Event.END): Phase.IDLE,
    (Phase.BROKEN, Event.BREAK): Phase.BROKEN,  # sending the rest had failed, and is tried once more
    (Phase.BROKEN, Event.END): Phase.IDLE,
}

_NOT_BEGUN = Phase.IDLE, Phase.EXPECTED  # as far as this wrapper goes

# What happens in other phases as well, and changes nothing there.
WITHOUT_EFFECT = {
    *((phase, Event.OTHER_REACHED) for phase in Phase if phase is not Phase.IDLE),
    *((phase, Event.EXPECTATION_OVER) for phase in Phase if phase is not Phase.EXPECTED),
}


def after(phase: Phase, event: Event) -> Phase:
    """The phase that follows; what the table does not have is a mistake of this package."""
    if (phase, event) in WITHOUT_EFFECT:
        return phase
    following = TRANSITIONS.get((phase, event))
    assert following is not None, f"a wrapper that is {phase.name} cannot {event.name}"
    return following


# ---- the tasks of autograd: more than one where checkpoints are reentrant --------------------------------------------


class OpenTasks:
    """Tells a backward that autograd still runs, in whatever thread, from one that an exception has ended.

    For each task autograd holds what is to be called at its end, and drops it with the task. So that nothing else
    does, as a traceback would, it is made in a call that returns before anything can be raised.
    """

    def __init__(self) -> None:
        # By task; which have been noted is asked for every gradient, so it is read as it stands, by others too.
        self.noted: dict[int, weakref.ref[Callable[[], None]]] = {}
        self._threads: dict[int, int] = {}  # in which each was noted

    def are_of_this_thread(self) -> bool:
        """Whether one that runs has been noted by this thread."""
        here = threading.get_ident()
        return any(self._threads[task] == here for task, end in list(self.noted.items()) if end() is not None)

    def note(self, at_end: Callable[[int], None]) -> None:
        """Note the task that this thread runs; `at_end` is called with it when it has ended without an exception."""
        if self.noted:
            for ended in [task for task, end in self.noted.items() if end() is None]:
                self.close(ended)  # an exception has ended it
        task = torch_private.autograd.current_graph_task()
        end = functools.partial(at_end, task)
        self.noted[task], self._threads[task] = weakref.ref(end), threading.get_ident()
        torch_private.autograd.call_at_end_of_backward(end)

    def are_running(self, *, but: int | None = None) -> bool:
        """Whether autograd still runs one of them, other than `but`."""
        others = {**self.noted}  # other threads note some meanwhile
        if but is not None:
            others.pop(but, None)
        return bool(others) and any(end() is not None for end in others.values())

    def are_of_other_threads(self) -> bool:
        """Whether some run, and all of these have been noted by other threads."""
        if not self.noted:
            return False
        threads = {self._threads[task] for task, end in self.noted.items() if end() is not None}
        return bool(threads) and threading.get_ident() not in threads

    def close(self, task: int) -> None:
        self.noted.pop(task, None)
        self._threads.pop(task, None)

    def forget(self) -> None:
        """Drop all: an exception has ended them."""
        self.noted.clear()
        self._threads.clear()


# ---- the backward under way ------------------------------------------------------------------------------------------


class Steady(abc.ABC):
    """A backward in place of the `SynchronisedBackward` that it may become: [Note: steady step]"""

    @property
    @abc.abstractmethod
    def is_usual(self) -> bool:
        """Whether nothing that the beginning has found calls for more."""

    @property
    @abc.abstractmethod
    def has_rest(self) -> bool:
        """Whether a bucket has not been launched."""

    @abc.abstractmethod
    def wait(self) -> None:
        """Wait for every bucket, all of which have been launched."""

    @abc.abstractmethod
    def riders(self) -> list[torch.Tensor]:
        """Their sums over ranks, of every section."""

    @abc.abstractmethod
    def is_as_left(self) -> bool:
        """Whether each .grad is what was left in it, and nobody has written to it: [Note: what a backward leaves]"""

    @abc.abstractmethod
    def end(self) -> None:
        """The mean is in .grad."""

    @abc.abstractmethod
    def as_general(self) -> SynchronisedBackward:
        """The backward that has come as far as this one, which ends here."""


class UnderWay:
    """Its phase, and what belongs to that."""

    def __init__(self) -> None:
        self.phase = Phase.IDLE
        self._backward: SynchronisedBackward | None = None  # in the phases REDUCING, SKIPPING and BROKEN
        self.steady: Steady | None = None  # in its place: [Note: steady step]
        self.ran_locally: list[GraphCall] = []  # calls whose backward has run since it was POSTPONED
        self.tasks = OpenTasks()  # of autograd, that it runs in
        self._skipping: int | None = None  # the thread that sends zeros

    @property
    def backward(self) -> SynchronisedBackward | None:
        """The one under way, which is a steady one no longer."""
        if self.steady is not None:
            self.leave_steady()
        return self._backward

    def leave_steady(self) -> None:
        """Let the backward under way go on in the general way: [Note: steady step]"""
        assert self.steady is not None
        steady, self.steady = self.steady, None
        self._backward = steady.as_general()

    # ---- calls that run locally --------------------------------------------------------------------------------------

    def pass_on(self, call: GraphCall, gradients: Sequence[torch.Tensor | None]) -> Sequence[torch.Tensor | None]:
        """What autograd gets of the gradients, by graph input, of a call that has run locally: [Note: equal calls]"""
        backward = self.backward
        if backward is None or call.fingerprint not in backward.folded.withheld.repeated:
            return gradients
        return backward.folded.withheld.pass_on(call, gradients, call.index_of)

    # ---- what happens ------------------------------------------------------------------------------------------------

    def expect(self) -> None:
        """A backward has reached another wrapper, and will reach this one."""
        self.phase = after(self.phase, Event.OTHER_REACHED)

    def expect_no_more(self) -> None:
        """It has reached this one, or has ended."""
        self.phase = after(self.phase, Event.EXPECTATION_OVER)

    def postpone(self) -> None:
        """It begins when autograd has ended it: [Note: waiting in one order]. Meanwhile its gradients accumulate."""
        self.phase = after(self.phase, Event.POSTPONE)

    def run_locally(self, call: GraphCall) -> None:
        """A graph of it runs without collectives."""
        self.ran_locally.append(call)

    def begin(self, backward: SynchronisedBackward) -> None:
        self.phase = after(self.phase, Event.BEGIN)
        self._backward, self.ran_locally = backward, []

    def begin_steady(self, steady: Steady) -> None:
        """A steady one has begun, of which a backward is made should anybody ask for that."""
        self.phase = after(self.phase, Event.BEGIN)
        self.steady, self.ran_locally = steady, []
        if not steady.is_usual:
            self.leave_steady()

    def skip(self, backward: SynchronisedBackward) -> None:
        """This thread sends zeros."""
        self.phase = after(self.phase, Event.SKIP)
        self._backward, self._skipping = backward, threading.get_ident()

    def leave_skipping(self) -> None:
        """This thread is done with that, though the results could not be read."""
        self._skipping = None

    def break_off(self, backward: SynchronisedBackward) -> None:
        """An exception has ended `backward`, the one under way or one that would have begun."""
        self.phase = after(self.phase, Event.BREAK)
        self._backward, self.ran_locally = backward, []

    def end(self) -> None:
        self.phase = after(self.phase, Event.END)
        self._backward = self.steady = self._skipping = None

    def forget_threads(self) -> None:
        """An exception has ended all that runs it."""
        self.tasks.forget()
        self._skipping = None

    def outlast_threads(self, timeout_s: float, rank: int) -> None:
        """Wait for what other devices' threads still run of a backward that an exception has ended in one of them.

        For the thread that has called the latest forward. Raises RuntimeError after the timeout.
        """
        deadline = time.monotonic() + timeout_s
        while self.phase is not Phase.IDLE and self._skipping is None and self.tasks.are_running():
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"rank {rank}: the backward before this forward has not ended in every thread: a hook of yours "
                    "waits for something."
                )
            time.sleep(0.001)

    # ---- questions ---------------------------------------------------------------------------------------------------

    def has_begun(self) -> bool:
        """Whether a backward has reached this wrapper that has not ended."""
        return self.phase not in _NOT_BEGUN

    def ends_with(self, task: int) -> bool:
        """Whether it ends when autograd has ended this task, the only one of its that runs."""
        noted = self.tasks.noted
        is_last = task in noted and (len(noted) == 1 or not self.tasks.are_running(but=task))
        return is_last and self.phase not in _NOT_BEGUN

    def is_broken_off(self) -> bool:
        """Outside of backwards: whether an exception has ended one. One that another thread still runs has not."""
        return self.phase is not Phase.IDLE and self._is_here() and not self.tasks.are_running()

    def is_of_this_thread(self) -> bool:
        """Whether this thread runs it."""
        return self.tasks.are_of_this_thread() or self._skipping == threading.get_ident()

    def _is_here(self) -> bool:
        return self._skipping is None or self._skipping == threading.get_ident()
