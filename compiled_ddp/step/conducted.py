"""A wrapper's part in backwards of several wrappers: [Note: waiting in one order]"""

import functools
import itertools
import threading
from collections.abc import Callable, Collection, Iterable

from compiled_ddp import torch_private
from compiled_ddp.step.beginning import Beginning
from compiled_ddp.step.finish import Finish
from compiled_ddp.step.latest_forward import LatestForward
from compiled_ddp.step.phase import Phase
from compiled_ddp.step.reduction import Reduction
from compiled_ddp.step.under_way import UnderWay


class ConductedWrapper:
    """Sends and ends what the conductor tells it to."""

    def __init__(
        self,
        reduction: Reduction,
        forward: LatestForward,
        under_way: UnderWay,
        beginning: Beginning,
        *,
        accumulates: Callable[[int], bool],
        task_ended: Callable[[int], None],
        lock: threading.RLock,
    ) -> None:
        """`task_ended` is called at the end of each task of autograd that may reach the wrapper.

        `accumulates` tells whether one will bring any parameter a gradient.
        """
        self.local = False  # whether backwards that begin now stay local, wherever their forward was called
        self._reduction, self._forward, self._under_way, self._beginning = reduction, forward, under_way, beginning
        self._finish = Finish(reduction, forward.count, under_way)
        self._accumulates, self._task_ended, self._lock = accumulates, task_ended, lock
        self._rest_was_launched = False  # whether something was left to launch when an exception had ended a backward
        self._is_reached_by = functools.lru_cache(maxsize=1)(self._will_be_reached_by)

    def stay_local(self, local: bool) -> None:
        """Whether backwards that begin from here on do."""
        self.local = local

    @property
    def name(self) -> str:
        return self._reduction.communicator.group_name

    @property
    def begin_event(self) -> str:
        """What ranks wait for when a backward begins that brings a sequence about."""
        return f"{self.name} begin {self._reduction.agreed.beginnings}"

    @property
    def communicates(self) -> bool:
        """Whether the model has collectives of its own, as far as has been seen."""
        return self._reduction.models_collectives.seen

    # ---- in a backward -----------------------------------------------------------------------------------------------

    def expect_in_task(self) -> None:
        if self._under_way.phase is Phase.IDLE and self.takes_part():
            self._under_way.tasks.note(self._task_ended)
            self._under_way.expect()

    def takes_part(self) -> bool:
        if self._under_way.has_begun():
            return self._under_way.is_of_this_thread()
        if self.local or not self._forward.awaits_backward:
            return False
        return self._is_reached_by(torch_private.autograd.current_graph_task())

    def _will_be_reached_by(self, task: int) -> bool:
        """Whether this task of autograd, which this thread runs, will reach the wrapper's graphs or parameters."""
        calls = [call for call in self._reduction.live_calls() if call.plan.indices]
        return any(call.will_run() for call in calls) or self._accumulates(task)

    def may_take_part(self) -> bool:
        """As `takes_part`, or nothing tells it: who takes it for a part of the backward loses overlap at worst.

        A backward may reach no more than the outputs: of parameters that are unused, or in a reentrant checkpoint.
        """
        if self.takes_part():
            return True
        forward = self._forward
        waits = forward.awaits_backward and not self.local and not self._under_way.has_begun()
        has_calls = any(call.plan.indices for call in self._reduction.live_calls())
        return waits and forward.is_of_this_thread and not has_calls and forward.count.waits_alive

    def unsent(self) -> Iterable[str]:
        backward, agreed = self._under_way.backward, self._reduction.agreed
        if backward is None and self._beginning.waits:
            yield self.begin_event
        all_by_hooks = backward is not None and backward.circumstances.some_rank_differs  # on every rank
        if not agreed.must_agree and not all_by_hooks:
            for section in agreed.graph_sections.values():
                if backward is None or not backward.launcher.has_launched(section):
                    yield agreed.event_of(section)

    def ends_with(self, task: int) -> bool:
        return self._under_way.has_begun() and self._under_way.tasks.is_last(task)

    # ---- its end -----------------------------------------------------------------------------------------------------

    def waits_to_send(self) -> str | None:
        return self.begin_event if self._under_way.backward is None and self._beginning.waits else None

    def send_rest(self) -> None:
        with self._lock:
            if self._under_way.phase is Phase.POSTPONED:
                self._under_way.begin(self._beginning.after_task(self._under_way.ran_locally))
            assert self._under_way.backward is not None
            self._under_way.backward.send_rest()

    def end(self) -> None:
        with self._lock:
            try:
                self._finish.finish()
            finally:
                self._under_way.leave_skipping()

    def begin_skipping(self) -> None:
        """Take part in the other ranks' synchronised backward with zeros: launch all, and wait for nothing yet."""
        with self._lock:
            carried = self._reduction.carried
            has_any = carried.used or self._reduction.sparse.any_used
            backward = self._beginning.without_task(carried.weight if has_any else 0.0)
            self._under_way.skip(backward)
            self._beginning.leave_all_to_hooks(backward)
            backward.launcher.launch_rest()

    # ---- an exception ------------------------------------------------------------------------------------------------

    def backward_failed(self, failed: torch_private.autograd.FailedBackward) -> None:
        """The others are to be told of one that would have come to a gradient here, if the forward waits for it."""
        under_way, forward = self._under_way, self._forward
        waits = forward.awaits_backward and not forward.was_reached and forward.is_of_this_thread and not self.local
        if not waits or under_way.phase is not Phase.IDLE:
            return
        dense, sparse = self._reduction.parameters.tensors, self._reduction.sparse.tensors
        if not failed.accumulates and not failed.leaves.isdisjoint(map(id, sparse)):
            return  # it was refused, whatever other ranks do
        parameters = itertools.chain(dense, sparse)
        if not failed.leaves.isdisjoint(map(id, parameters)):
            under_way.expect()

    def has_begun(self) -> bool:
        return self._under_way.has_begun()

    def expect_no_more(self) -> None:
        self._under_way.expect_no_more()

    def outlast_threads(self) -> None:
        if self._under_way.phase is not Phase.IDLE and self._forward.is_of_this_thread:
            ranks = self._reduction.communicator.ranks
            self._under_way.outlast_threads(ranks.timeout.total_seconds(), self._reduction.communicator.rank)

    def is_broken_off(self) -> bool:
        return self._forward.is_of_this_thread and self._under_way.is_broken_off()

    def send_rest_of_broken(self) -> None:
        """Launch what is left of a backward that an exception ended; of none, all that this wrapper was to have."""
        with self._lock:
            communicator, under_way = self._reduction.communicator, self._under_way
            under_way.forget_threads()
            communicator.refuse_if_failed()
            has_begun = under_way.backward is not None
            backward = under_way.backward or self._beginning.without_task(weight=0.0)
            under_way.break_off(backward)
            if not has_begun:
                self._beginning.leave_all_to_hooks(backward)
            backward.break_off()
            if not backward.launcher.riders_are_known:
                under_way.end()
                raise communicator.give_up("an exception ended a backward, and what it had reduced is lost")
            self._rest_was_launched = backward.launcher.has_rest()
            backward.launcher.launch_rest()

    def told_ranks(self) -> Collection[int]:
        return self._reduction.communicator.ranks.ranks if self._rest_was_launched else ()

    def end_broken(self, told: Collection[int]) -> None:
        with self._lock:
            self._finish.finish_broken(told=told, rest_was_launched=self._rest_was_launched)
