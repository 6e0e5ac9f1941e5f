"""A wrapper's run time: what it tells of its forwards, and what autograd tells of its backwards.

The backward that it has under way, if any, is in one of these phases, and runs in one task of autograd or in several:

    IDLE <--> EXPECTED, until the backward arrives
    IDLE ---> REDUCING ---> IDLE, maybe POSTPONED in between
    IDLE ---> SKIPPING ---> IDLE
    any of them ---> BROKEN ---> IDLE

Whether a forward waits for its backward is no phase: a forward may begin in one thread while another runs the backward
of an earlier one, and a torch.autograd.grad leaves it waiting.
"""

import enum
import functools
import itertools
import operator
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Generic, TypeVar

import torch

from compiled_ddp import torch_private
from compiled_ddp.planning.trained_parameters import TrainedParameters
from compiled_ddp.ranks.recorder import Recorder
from compiled_ddp.step.beginning import Beginning
from compiled_ddp.step.channel import ForwardNumbers, LatestForward
from compiled_ddp.step.conductor import conductor
from compiled_ddp.step.ending import Finish
from compiled_ddp.step.gradients import requires_grad
from compiled_ddp.step.graph_call import GraphCall, fingerprint_of, may_leave_out
from compiled_ddp.step.graphs import GraphReservations, ReservedSection
from compiled_ddp.step.join import OwnGradients
from compiled_ddp.step.reduction import Reduction, Wrapped
from compiled_ddp.step.steady import SteadyGraph, SteadyHooks, SteadyStep
from compiled_ddp.step.synchronised import SynchronisedBackward, returns_inputs_alone, watch_returned
from compiled_ddp.torch_private.autograd import current_graph_task, evaluating_node, fate_of_gradient
from compiled_ddp.torch_private.modules import hooks_registered, is_joining, own_hooks_registered
from compiled_ddp.users_code import warn_user

_DISTRIBUTED_AUTOGRAD = (
    "the backward is torch.distributed.autograd's, which leaves .grad alone: there is nothing that could be averaged. "
    "Call loss.backward() outside of its context, or the forward under no_sync() and average the context's gradients "
    "by hand."
)


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


class UnderWay:
    """Its phase, and what belongs to that."""

    def __init__(self) -> None:
        self.phase = Phase.IDLE
        self._backward: SynchronisedBackward | None = None  # in the phases REDUCING, SKIPPING and BROKEN
        self.steady: SteadyStep | None = None  # in its place: [Note: steady step]
        self.ran_locally: list[GraphCall] = []  # calls whose backward has run since it was POSTPONED
        self.tasks = OpenTasks()  # of autograd, that it runs in
        self._skipping: int | None = None  # the thread that sends zeros
        self._goes_on_outside = False  # whether a reentrant backward has ended inside one that may not be noted

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

    def begin_steady(self, steady: SteadyStep) -> None:
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
        self._goes_on_outside = False

    def drop(self) -> None:
        """Whatever was under way, nobody can send the rest of it, or read its results."""
        if self.phase is not Phase.IDLE:
            if self.steady is not None:
                self.steady.end()
            self.phase = after(self.phase, Event.BREAK)
            self.end()
            self.ran_locally = []
        self.tasks.forget()

    def go_on_outside(self) -> None:
        """A reentrant backward has ended, and the one around it, which may not have been noted, goes on."""
        self._goes_on_outside = True

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

    def is_broken_off_unawares(self) -> bool:
        """Whether an exception has ended it, and a backward that comes now is another one."""
        return not self._goes_on_outside and self.is_broken_off()

    def is_of_this_thread(self) -> bool:
        """Whether this thread runs it."""
        return self.tasks.are_of_this_thread() or self._skipping == threading.get_ident()

    def _is_here(self) -> bool:
        return self._skipping is None or self._skipping == threading.get_ident()


# ---- what an output of a forward keeps until its backward ------------------------------------------------------------

Kept = TypeVar("Kept")


class UntilBackward(Generic[Kept]):
    """Keeps what runs a wrapper's backwards, and so the wrapper, alive for a graph until a backward has freed that.

    All ranks must run the backward alike, also where the wrapper was dropped before it. Afterwards the outputs, which
    users hold on to, keep nothing.
    """

    def __init__(self, kept: Kept) -> None:
        self._held: Kept | None = kept
        self.is_over = False  # whether a backward has come here that has freed the graph
        self._kept: Callable[[], Kept | None] = weakref.ref(kept)

    def take(self) -> Kept | None:
        """What is kept, for the backward that this thread runs; None once it is gone."""
        if not torch_private.autograd.keeps_graph():
            self._held, self.is_over = None, True
        return self._kept()

    @torch_private.dynamo.untraced
    def tell(self, reached: Callable[[Kept], None], _: object = None) -> None:
        """As a hook of autograd: let what is kept know that a backward has come here."""
        kept = self.take()
        if kept is not None:
            reached(kept)


# ---- one wrapper -----------------------------------------------------------------------------------------------------


class Runtime:
    """One wrapper's part of the run time, as long as the wrapper lives.

    Its forwards are told by the wrapper. A backward begins and ends where hooks, graphs and outputs tell that autograd
    has come, in any of its threads. The conductor asks for its part in backwards of several wrappers.
    """

    def __init__(self, wrapped: Wrapped) -> None:
        self.communicator = wrapped.communicator
        self.forward, self.under_way = LatestForward(), UnderWay()
        # Held from the reservation for a graph to what it launches, so that no other thread launches anything between.
        self.lock = threading.RLock()
        self.reduction = Reduction(wrapped, self)
        self._reservations = GraphReservations(self.reduction)
        self._beginning = Beginning(self.reduction, self._reservations)
        self.number = 0  # of synchronised backwards begun, the same on ranks that are level
        self._steady_hooks = SteadyHooks(self.reduction, self.under_way)
        self._steady_graph = SteadyGraph(self.reduction, self.under_way)
        self._finish = Finish(self.reduction, self.forward.count, self.under_way)
        self.local = False  # whether backwards that begin now stay local, wherever their forward was called
        self.recorded: Recorder | None = None  # what was last asked for
        self._closed_because = ""
        self._rest_was_launched = False  # whether something was left to launch when an exception had ended a backward
        self.own_gradients: OwnGradients | None = None  # what this rank had accumulated itself, while it shadows others
        # Of the latest task of autograd that was asked about.
        self._accumulates = functools.lru_cache(maxsize=1)(functools.partial(_accumulates, self.reduction))
        is_reached = functools.partial(_is_reached, self.reduction, self._accumulates)
        self._is_reached_by = functools.lru_cache(maxsize=1)(is_reached)
        conductor.add(self)

    def close(self, why: str, *, abandon: bool = False) -> None:
        """Remove every hook and give the communicator back, or `abandon` it to the next one that is made.

        `why` is the error of backwards that would still be synchronised.
        """
        self._closed_because = why
        for call in self.reduction.live_calls():
            if call.synchronise:
                call.when_reached(Runtime.output_reached)
        self.reduction.hooks.remove()
        self.reduction.sparse.close()
        self.under_way.drop()
        conductor.leave(self)
        if abandon:
            self.communicator.abandon()
        else:
            self.communicator.close()

    @property
    def parameters(self) -> TrainedParameters:
        return self.reduction.parameters

    @property
    def step(self) -> int:
        """The number of the step that is under way: of synchronised forwards begun, or, in a local one, to be begun."""
        begun = self.forward.count.value
        return begun if self.forward.synchronises and begun else begun + 1

    def record(self, backwards: int) -> Recorder:
        """Record so many synchronised backwards, in place of what was recorded before."""
        self.recorded = self.communicator.record(backwards)
        return self.recorded

    # ---- forward -----------------------------------------------------------------------------------------------------

    def begin_forward(self, *, synchronise: bool, counted: bool) -> None:
        """Note a forward with gradients enabled, which is not a recomputation inside a backward.

        `counted` tells whether every rank is to begin as many such forwards as this one. One of a model that is frozen
        as a whole, as a discriminator's where the generator learns, is local, and counted all the same: where one rank
        alone has frozen it, all are told that they are in different steps.
        """
        if synchronise and self.reduction.ddp_hook is not None:
            self.reduction.ddp_hook.refuse_if_broken()
        dense, sparse = self.reduction.parameters.tensors, self.reduction.sparse.tensors
        trains = any(map(requires_grad, dense)) or any(map(requires_grad, sparse))
        self.forward.begin(synchronise=synchronise and trains, counted=synchronise and counted)
        hooks, by_rows = self.reduction.hooks, self.reduction.sparse
        if hooks.registered != hooks_registered() - own_hooks_registered():
            hooks.defer_users()
        if by_rows.names:
            by_rows.defer_users()
        if not self.reduction.options.keep_buffers:
            self.reduction.agreed.buffers.let_go()
        if synchronise and counted:
            self.forward.count.begin(after_exception=conductor.broken_off)
        self.communicator.progress.forward_began(self.forward.count.value)

    def begin_reentrant_forward(self, *, synchronise: bool) -> None:
        """Note a forward that a reentrant checkpoint runs inside a backward: of its own, which was without gradients.

        As under DDP, it is synchronised if this one is called outside of no_sync.
        """
        self.forward.begin_inside_backward(synchronise=synchronise, under_way=self.under_way.has_begun())

    def forward_raised(self) -> None:
        """The forward that began has ended with an exception."""
        self.forward.raised()

    def drop_forwards(self) -> None:
        """Take back the forwards that wait for a backward: the step has ended without one, on every rank."""
        self.forward.drop()

    def end_forward(self, calls: Sequence[GraphCall]) -> None:
        """Watch the parameters by hooks unless the segments that this forward called cover every graph section.

        Even then its loss may reach none of these: [Note: tripwire]. Where a step was another one, and graphs have
        reduced everything since, the hooks rest again.
        """
        agreed, hooks = self.reduction.agreed, self.reduction.hooks
        everywhere = hooks.everywhere
        if agreed.sequence is None or (everywhere and not agreed.all_graphs_ran):
            return
        called = {*map(fingerprint_of, calls)}  # in C, as below: in every forward
        if not agreed.graph_sections.keys() <= called:
            agreed.note_graphs(frozenset())
            hooks.install()
            return
        if everywhere and not self.under_way.has_begun() and {*self.reduction.live_calls()} <= {*calls}:
            self.reduction.remove_needless_hooks()
            everywhere = hooks.everywhere
        if not everywhere and (self.forward.awaits_backward or any(map(may_leave_out, calls))):
            hooks.arm()  # also of a local one, whose backward may use outside of a graph what this leaves out

    def watch(self, outputs: Iterable[torch.Tensor]) -> None:
        """Begin a synchronised backward when one reaches these outputs, before it has accumulated any gradient.

        The first gradient after a synchronised forward begins one too: the loss may not be among the outputs. A later
        backward that does not come through them, of `wrapper.module` called by itself, stays local, as under DDP.
        """
        if self.forward.synchronises:
            nodes = {*filter(None, map(_grad_fn_of, outputs))}
            self.forward.returned(nodes)
            for node in nodes:
                if not hasattr(node, torch_private.autograd.CALL):  # a captured segment's node begins it by itself
                    torch_private.autograd.register_own_prehook(
                        node, functools.partial(UntilBackward(self).tell, Runtime.output_reached)
                    )
        elif self.communicator.recorder is not None:
            self.communicator.recorder.watch_local(outputs)

    @property
    def awaits_backward(self) -> bool:
        """Whether the latest forward was synchronised and no backward has begun since."""
        return self.forward.awaits_backward

    def is_awaited(self) -> bool:
        """Whether a forward still waits for its backward, and its output has not just been thrown away."""
        return self.forward.is_awaited()

    # ---- where a backward begins -------------------------------------------------------------------------------------

    def enter(self) -> None:
        """Begin the synchronised backward that this thread is in, if need be, or postpone it."""
        if self._closed_because:
            raise RuntimeError(self._closed_because)
        with self.lock:
            under_way = self.under_way
            if current_graph_task() not in under_way.tasks.noted:
                self._enter_task()
            if under_way.phase is Phase.EXPECTED:
                under_way.expect_no_more()
            if under_way.phase is Phase.IDLE:
                self._begin()

    def _begin(self) -> None:
        waits = self._waits
        if waits and not conductor.may_wait(self, [self.begin_event]):
            self.under_way.postpone()
            self.reduction.hooks.install()
            self.reduction.hooks.defer_users()
            return
        if self.communicator.recorder is not None:
            self.communicator.recorder.backward_began(self.number + 1)
        accumulates = self._accumulates(current_graph_task())
        steady = self._steady_graph if self.reduction.agreed.expects_graphs else self._steady_hooks
        number = self.number
        try:
            if accumulates and not waits and not self.communicator.has_failed and steady.fits():
                steady.begin(self._take_number(accumulates=True))
                self.under_way.begin_steady(steady)
                return
            returned = None if accumulates else watch_returned(self.reduction.parameters.tensors)
            backward = self._beginning.in_task(self._count(accumulates=returned is None), returned)
            self.under_way.begin(backward)
        except BaseException:
            self._could_not_begin(number)
            raise
        self._beginning.leave_to_hooks(backward)
        agreed, hooks = self.reduction.agreed, self.reduction.hooks
        if not agreed.expects_graphs and not hooks.deferred and backward.is_usual:
            backward.collect(hooks.collect(agreed.buffers))
        if returned is not None:
            returned.begin()  # with tensor hooks of its own: after what looks for users' ones

    def _could_not_begin(self, number: int) -> None:
        """An exception has come as a backward began, before which there were `number`: other ranks may wait in it.

        They are told in the next forward, as where one ends a backward before it reaches the wrapper.
        """
        if self.under_way.phase is Phase.IDLE and self.number > number:
            self.number = number
            self.forward.count.take_back_backward()
            self.under_way.expect()

    @property
    def _waits(self) -> bool:
        """Whether a backward that begins now waits for other ranks."""
        agreed, uneven = self.reduction.agreed, self.reduction.uneven
        if agreed.must_agree or (agreed.among_collectives and agreed.graph_sections):
            return True
        return uneven is not None and is_joining(uneven.joinable) and uneven.is_training

    def _count(self, *, accumulates: bool) -> ForwardNumbers:
        """Count a backward that begins; returns the numbers of forwards before it. Raises RuntimeError if none can."""
        self.reduction.refuse_if_broken()
        self.reduction.hooks.defer_users()
        return self._take_number(accumulates=accumulates)

    def _take_number(self, *, accumulates: bool) -> ForwardNumbers:
        reduction, count, uneven = self.reduction, self.forward.count, self.reduction.uneven
        self.forward.backward_began(accumulates=accumulates)
        if uneven is not None and (uneven.factor != 1.0 or is_joining(uneven.joinable)):
            uneven.begin_backward(count.value)
        self.number += 1
        if accumulates:
            reduction.hooks.disarm()
        if reduction.receive is not None:
            reduction.receive([])  # those of the backward before are about to be filled again
        return count.backward_began()

    def _may_wait_for_first(self) -> bool:
        """Whether this rank may wait for others in the graph of the first section, as far as other wrappers go."""
        return conductor.may_wait(self, [self.reduction.agreed.event_of(0)])

    def _enter_task(self) -> None:
        if torch_private.dynamo.in_compiled_autograd():
            raise RuntimeError(torch_private.dynamo.COMPILED_AUTOGRAD)
        if evaluating_node() is None and torch_private.autograd.in_distributed_backward():
            warn_user(_DISTRIBUTED_AUTOGRAD)  # a hook's error becomes "python_error" there
            raise RuntimeError(_DISTRIBUTED_AUTOGRAD)
        tasks = self.under_way.tasks
        if tasks.noted and self.reduction.parameters.on_cpu and tasks.are_of_other_threads():
            raise RuntimeError(
                "two threads run backwards of one wrapper at the same time, whose gradients would be mixed up: let "
                "one wait for the other, or give each thread a wrapper of its own."
            )
        tasks.note(self._task_ended)
        if len(conductor.references) > 1:
            conductor.backward_reached(self)

    def _is_local(self) -> bool:
        """Whether the running backward, which has not begun here, is one of which other ranks need not know."""
        if self.local:
            return True
        accumulates = self._accumulates(current_graph_task())
        return not accumulates and returns_inputs_alone(self.reduction.parameters.tensors)

    def _refuse_behind_broken(self) -> None:
        """Raise RuntimeError if an exception has ended the backward under way, and this is another one."""
        if self.under_way.is_broken_off_unawares():
            raise RuntimeError(
                f"rank {self.communicator.global_rank}: an exception has ended the backward before this one, the rest "
                "of which other ranks wait for, and no forward has followed it. Call abandon_backward() where the "
                "exception is handled, and then the forward and this backward again, on every rank."
            )

    def _refuse_returned_sparse(self) -> None:
        if not self.local:
            self.reduction.sparse.refuse_returned()

    def output_reached(self) -> None:
        """A backward has come to an output of a synchronised forward."""
        if self.under_way.phase in _NOT_BEGUN:
            if self.reduction.sparse.names:
                self._refuse_returned_sparse()
            if self._is_local():
                return
        elif current_graph_task() not in self.under_way.tasks.noted:
            self._refuse_behind_broken()
        self.enter()

    # ---- told by graphs ----------------------------------------------------------------------------------------------

    def reserve(self, call: GraphCall) -> ReservedSection | SteadyGraph | None:
        """The section that `call` may launch in its graph now; None if it must run locally."""
        with self.lock:
            if self.under_way.phase in _NOT_BEGUN:
                synchronises = call.synchronise or self._will_reach_synchronised()
                if synchronises and self.reduction.sparse.names:
                    self._refuse_returned_sparse()
                if not synchronises or self._is_local():
                    self._note_local_run(call)
                    return None
            elif current_graph_task() not in self.under_way.tasks.noted:
                self._refuse_behind_broken()
            self.enter()
            if self.under_way.steady is self._steady_graph:
                alone = len(conductor.references) == 1
                reserved = self._steady_graph.reserve(call, None if alone else self._may_wait_for_first)
                if reserved is not None:
                    return reserved
            backward = self.under_way.backward
            if backward is None:
                self.under_way.run_locally(call)
                self._note_local_run(call)
                return None
            return self._reservations.reserve(backward, call, self)

    def _will_reach_synchronised(self) -> bool:
        """Whether the running backward, come to a graph of a local forward, is to reach one of a synchronised one too.

        Then it is synchronised as a whole, and this is where it begins: what the local graph gives would be added to
        what the other one has reduced.
        """
        return any(call.synchronise and call.is_still_to_run() for call in self.reduction.live_calls())

    def _note_local_run(self, call: GraphCall) -> None:
        call.note_local_run()
        if self.local:
            self.forward.count.take_back()
        carried = self.reduction.carried
        carried.note_local_use(filter(self.reduction.will_accumulate, set(call.plan.indices) - carried.used))

    # ---- told by hooks -----------------------------------------------------------------------------------------------

    def gradient_accumulated(self, index: int) -> None:
        """Autograd has accumulated a gradient of parameter `index` into its .grad."""
        with self.lock:
            under_way = self.under_way
            if under_way.steady is self._steady_hooks and current_graph_task() in under_way.tasks.noted:
                self._steady_hooks.gradient_arrived(index)
                return
            # The one under way, where this task is known to be one of it: asked for every gradient, so without a call.
            backward = under_way.backward if current_graph_task() in under_way.tasks.noted else None
            if backward is None and self.synchronises():
                backward = self._enter_with(index)
            elif backward is None and self.local:
                self.forward.count.take_back()
            if backward is not None:
                backward.gradient_arrived(index)
            elif self.reduction.parameters.tensors[index].grad is not None:  # hooks run for an undefined gradient too
                self.reduction.carried.note_local_use([index])

    def users_hook_comes(self, index: int) -> None:
        """A gradient was accumulated, as a user's hook tells that may come before ours."""
        with self.lock:
            if self.synchronises():
                self._enter_with(index)

    def gradient_comes(self) -> None:
        """A gradient comes, of a parameter that is not in the buckets."""
        with self.lock:
            if self.synchronises():
                self.enter()

    def _enter_with(self, index: int) -> SynchronisedBackward | None:
        """As `enter`, in a hook of a parameter, which has its gradient already if that begins the backward."""
        begins_here = not self.under_way.has_begun()
        self.enter()
        backward = self.under_way.backward
        if begins_here and backward is not None:
            backward.existing.begun_by(index)
        return backward

    def synchronises(self) -> bool:
        """Whether what autograd has just accumulated belongs to a synchronised backward."""
        return self.under_way.has_begun() or (self.forward.awaits_backward and not self.local)

    def leaves_local(self) -> bool:
        """Whether the running backward brings parameters a gradient that nothing reduces, which nobody asked for."""
        if self.local or self.synchronises():
            return False
        return any(fate_of_gradient(parameter) != "none" for parameter in self.parameters.tensors)

    # ---- the end of a task -------------------------------------------------------------------------------------------

    @torch_private.dynamo.untraced
    def _task_ended(self, task: int) -> None:
        with self.lock:
            outer = evaluating_node()
            tasks = self.under_way.tasks
            try:
                # With several devices, another task's thread may end the one that is inside of it.
                if outer is None and ([*tasks.noted] == [task] or not tasks.are_running(but=task)):
                    if len(conductor.references) > 1:
                        conductor.end(task)
                    elif self.under_way.ends_with(task):
                        self.end()
            finally:  # only now: other threads must not take the backward for one that has broken off
                tasks.close(task)
                if self.under_way.phase is Phase.EXPECTED:
                    self.under_way.expect_no_more()
            if outer is None:
                return
            self.under_way.go_on_outside()
            # A reentrant backward has ended inside `outer`. What follows `outer` runs in the outer backward, whose
            # end is the one to finish at.
            for following, _ in outer.next_functions:
                if following is not None:
                    self._enter_before(following)

    def _enter_before(self, node: Any) -> None:
        @torch_private.dynamo.untraced
        def enter(*_: object) -> None:
            handle.remove()
            self.enter()

        handle = torch_private.autograd.register_own_prehook(node, enter)

    # ---- for the conductor: [Note: waiting in one order] -------------------------------------------------------------

    @property
    def name(self) -> str:
        return self.communicator.group_name

    @property
    def begin_event(self) -> str:
        """What ranks wait for when a backward begins in which they agree on a sequence."""
        return f"{self.name} begin {self.reduction.agreed.beginnings}"

    @property
    def communicates(self) -> bool:
        """Whether the model has collectives of its own, as far as has been seen."""
        return self.reduction.models_collectives.seen

    def stay_local(self, local: bool) -> None:
        """Whether backwards that begin from here on do."""
        self.local = local

    def has_begun(self) -> bool:
        return self.under_way.has_begun()

    def expect_in_task(self) -> None:
        """If the backward that this thread runs will reach the wrapper: note that it has begun elsewhere."""
        if self.under_way.phase is Phase.IDLE and self.takes_part():
            self.under_way.tasks.note(self._task_ended)
            self.under_way.expect()

    def expect_no_more(self) -> None:
        self.under_way.expect_no_more()

    def takes_part(self) -> bool:
        """Whether the backward that this thread runs has reached the wrapper, or will."""
        if self.under_way.has_begun():
            return self.under_way.is_of_this_thread()
        if self.local or not self.forward.awaits_backward:
            return False
        return self._is_reached_by(current_graph_task())

    def may_take_part(self) -> bool:
        """As `takes_part`, or nothing tells it: who takes it for a part of the backward loses overlap at worst.

        A backward may reach no more than the outputs: of parameters that are unused, or in a reentrant checkpoint.
        """
        if self.takes_part():
            return True
        forward = self.forward
        waits = forward.awaits_backward and not self.local and not self.under_way.has_begun()
        has_calls = any(call.plan.indices for call in self.reduction.live_calls())
        return waits and forward.is_of_this_thread and not has_calls and forward.count.waits_alive

    def unsent(self) -> Iterable[str]:
        """What ranks wait for in the middle of a backward and this rank has not sent yet."""
        agreed = self.reduction.agreed
        if self.under_way.steady is not None:
            if self._steady_graph.awaited is not None:
                yield from map(agreed.event_of, agreed.graph_sections.values())
            return
        backward = self.under_way.backward
        if backward is None and self._waits:
            yield self.begin_event
        all_by_hooks = backward is not None and backward.circumstances.some_rank_differs  # on every rank
        if not agreed.must_agree and not all_by_hooks:
            for section in agreed.graph_sections.values():
                if backward is None or not backward.has_launched(section):
                    yield agreed.event_of(section)

    def waits_to_send(self) -> str | None:
        """What `send_rest` waits for, if for anything."""
        if self.under_way.steady is not None:  # which has waited for nobody
            return None
        return self.begin_event if self.under_way.backward is None and self._waits else None

    def send_rest(self) -> None:
        """Send what is left of a backward that has ended."""
        with self.lock:
            if self.under_way.phase is Phase.POSTPONED:
                self.under_way.begin(
                    self._beginning.after_task(self._count(accumulates=True), self.under_way.ran_locally)
                )
            steady = self.under_way.steady
            if steady is not None and not steady.has_rest:
                return
            assert self.under_way.backward is not None
            self.under_way.backward.send_rest()

    def ends_with(self, task: int) -> bool:
        return self.under_way.ends_with(task)

    def end(self) -> None:
        """Send what is left, if anything is, wait for the results, and leave them in .grad."""
        with self.lock:
            if self.under_way.phase is Phase.POSTPONED:
                self.send_rest()
            try:
                if self.under_way.steady is not None:
                    self._end_steady(self.under_way.steady)
                if self.under_way.phase is not Phase.IDLE:
                    self._finish.finish()
            except BaseException:
                self.under_way.leave_skipping()
                raise
            if self.communicator.recorder is not None:
                self._note_recorded(self.communicator.recorder)

    def _note_recorded(self, recorder: Recorder) -> None:
        recorder.backward_ended(self.number, self.reduction.agreed.sequence)
        if not recorder.remaining:
            self.communicator.stop_recording()

    def _end_steady(self, steady: SteadyStep) -> None:
        """[Note: steady step] Changes nothing where more is to be done than usually."""
        reduction = self.reduction
        findings = None if steady.has_rest else steady.conclude()
        if findings is None:
            return
        self.forward.count.settle(backwards=findings.backwards, forgiven=False)
        steady.end()
        reduction.models_collectives.end()
        self.communicator.progress.backward_ended(launched_all=True)
        self.under_way.end()
        if reduction.carried.used:
            reduction.carried.note_reduced()
        if not reduction.agreed.graphs_fit:
            reduction.agreed.note_mismatches(0)

    def begin_skipping(self) -> None:
        """Take part in the other ranks' synchronised backward with zeros: launch all, and wait for nothing yet."""
        with self.lock:
            carried = self.reduction.carried
            has_any = carried.used or self.reduction.sparse.any_used
            backward = self._beginning.without_task(self._count(accumulates=True), carried.weight if has_any else 0.0)
            self.under_way.skip(backward)
            self._beginning.leave_all_to_hooks(backward)
            backward.launch_rest()

    # ---- an exception ------------------------------------------------------------------------------------------------

    def finish_broken_backward(self) -> None:
        """Take part, with zeros, in what is left of a backward that an exception ended; other ranks may wait in it.

        A no-op where there is none. A backward that another thread runs is none.
        """
        if self.under_way.phase is Phase.IDLE:  # as before nearly every forward, which asks
            return
        self.outlast_threads()
        if self.under_way.is_broken_off():
            conductor.finish_broken(also=[self])

    def backward_failed(self, failed: torch_private.autograd.FailedBackward) -> None:
        """The others are to be told of one that would have come to a gradient here, if the forward waits for it."""
        under_way, forward = self.under_way, self.forward
        waits = forward.awaits_backward and not forward.was_reached and forward.is_of_this_thread and not self.local
        if not waits or under_way.phase is not Phase.IDLE:
            return
        dense, sparse = self.reduction.parameters.tensors, self.reduction.sparse.tensors
        if not failed.accumulates and not failed.leaves.isdisjoint(map(id, sparse)):
            return  # it was refused, whatever other ranks do
        parameters = itertools.chain(dense, sparse)
        if not failed.leaves.isdisjoint(map(id, parameters)):
            under_way.expect()

    def outlast_threads(self) -> None:
        if self.under_way.phase is not Phase.IDLE and self.forward.is_of_this_thread:
            self.under_way.outlast_threads(
                self.communicator.ranks.timeout.total_seconds(), self.communicator.global_rank
            )

    def is_broken_off(self) -> bool:
        return self.forward.is_of_this_thread and self.under_way.is_broken_off()

    def send_rest_of_broken(self) -> None:
        """Launch what is left of a backward that an exception ended; of none, all that this wrapper was to have."""
        with self.lock:
            communicator, under_way = self.communicator, self.under_way
            under_way.forget_threads()
            if communicator.has_failed:
                under_way.drop()  # else each wrapper that asks for what is broken would meet this one's error
            communicator.refuse_if_failed()
            has_begun = under_way.backward is not None
            backward = under_way.backward or self._beginning.without_task(self._count(accumulates=True), weight=0.0)
            under_way.break_off(backward)
            if not has_begun:
                self._beginning.leave_all_to_hooks(backward)
            backward.break_off()
            if not backward.riders_are_known:
                under_way.end()
                raise communicator.give_up("an exception ended a backward, and what it had reduced is lost")
            self._rest_was_launched = backward.has_rest()
            backward.launch_rest()

    def told_ranks(self) -> Collection[int]:
        """The global ranks that `send_rest_of_broken` has told of the exception."""
        return self.communicator.ranks.ranks if self._rest_was_launched else ()

    def end_broken(self, told: Collection[int]) -> None:
        """Wait for the results of that, and drop them. `told` are the ranks that know of it through any wrapper."""
        with self.lock:
            self._finish.finish_broken(told=told, rest_was_launched=self._rest_was_launched)

    # ---- other ranks' steps, when this one's data has run out (`join`) -----------------------------------------------

    @torch.no_grad()
    def shadow_backward(self, forward_count: int) -> None:
        """Take part in the other ranks' backward with nothing but zeros, until `end_shadowing`.

        .grad becomes what it is on the others, who have begun `forward_count` forwards.
        """
        with self.lock:
            carried = self.reduction.carried
            if self.own_gradients is None:
                self.reduction.agreed.buffers.let_go()  # which hold what is put aside
                self.own_gradients = OwnGradients(self.parameters.tensors, carried.used, carried.piggyback)
            self.own_gradients.take_away()
            carried.put_aside()
            self.forward.count.follow(forward_count)
            self.begin_skipping()
            self.end()
            self.own_gradients.note_shadowed()

    def end_shadowing(self, *, if_untouched: bool = False) -> None:
        """Let all that this rank had accumulated itself be as it was before the first `shadow_backward`.

        A no-op without one. With `if_untouched`, a .grad that somebody has changed since stays as it is.
        """
        if self.own_gradients is None:
            return
        with self.lock:
            own, self.own_gradients = self.own_gradients, None
            own.give_back(if_untouched=if_untouched)
            self.reduction.carried.take_up_again(own.unsent, own.piggyback)


_grad_fn_of = operator.attrgetter("grad_fn")


def _accumulates(reduction: Reduction, _: int) -> bool:
    """Whether this task of autograd, which this thread runs, will bring any parameter a gradient."""
    return "accumulated" in map(fate_of_gradient, reduction.parameters.tensors)


def _is_reached(reduction: Reduction, accumulates: Callable[[int], bool], task: int) -> bool:
    """Whether it will reach the wrapper's graphs or parameters."""
    calls = [call for call in reduction.live_calls() if call.plan.indices]
    return any(call.will_run() for call in calls) or accumulates(task)
