"""The backward that a wrapper has under way, if any."""

import threading
import time
from collections.abc import Sequence

import torch

from compiled_ddp.backward.synchronised import SynchronisedBackward
from compiled_ddp.step.graph_call import GraphCall
from compiled_ddp.step.graph_tasks import OpenTasks
from compiled_ddp.step.phase import Event, Phase, after


class UnderWay:
    """Its phase, and what belongs to that."""

    def __init__(self) -> None:
        self.phase = Phase.IDLE
        self.backward: SynchronisedBackward | None = None  # in the phases REDUCING, SKIPPING and BROKEN
        self.ran_locally: list[GraphCall] = []  # calls whose backward has run since it was POSTPONED
        self.tasks = OpenTasks()  # of autograd, that it runs in
        self._skipping: int | None = None  # the thread that sends zeros

    # ---- calls that run locally --------------------------------------------------------------------------------------

    def pass_on(self, call: GraphCall, gradients: Sequence[torch.Tensor | None]) -> Sequence[torch.Tensor | None]:
        """What autograd gets of the gradients, by graph input, of a call that has run locally: [Note: equal calls]"""
        if self.backward is None or call.fingerprint not in self.backward.folded.withheld.repeated:
            return gradients
        return self.backward.folded.withheld.pass_on(call, gradients, call.index_of)

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
        self.backward, self.ran_locally = backward, []

    def skip(self, backward: SynchronisedBackward) -> None:
        """This thread sends zeros."""
        self.phase = after(self.phase, Event.SKIP)
        self.backward, self._skipping = backward, threading.get_ident()

    def leave_skipping(self) -> None:
        """This thread is done with that, whether the results could be read or not."""
        self._skipping = None

    def break_off(self, backward: SynchronisedBackward) -> None:
        """An exception has ended `backward`, the one under way or one that would have begun."""
        self.phase = after(self.phase, Event.BREAK)
        self.backward, self.ran_locally = backward, []

    def end(self) -> None:
        self.phase = after(self.phase, Event.END)
        self.backward = None

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
        return self.phase is not Phase.IDLE and self.phase is not Phase.EXPECTED

    def is_broken_off(self) -> bool:
        """Outside of backwards: whether an exception has ended one. One that another thread still runs has not."""
        return self.phase is not Phase.IDLE and self._is_here() and not self.tasks.are_running()

    def is_of_this_thread(self) -> bool:
        """Whether this thread runs it."""
        return self.tasks.are_of_this_thread() or self._skipping == threading.get_ident()

    def _is_here(self) -> bool:
        return self._skipping is None or self._skipping == threading.get_ident()
