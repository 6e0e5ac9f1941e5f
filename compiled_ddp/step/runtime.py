"""A wrapper's run time: what it tells of its forwards, and what autograd tells of its backwards."""

import functools
import itertools
import threading
from collections.abc import Callable, Collection, Iterable, Sequence, Set
from typing import Any

import torch

from compiled_ddp import torch_private
from compiled_ddp.planning.trained_parameters import TrainedParameters
from compiled_ddp.step.beginning import Beginning
from compiled_ddp.step.conductor import conductor
from compiled_ddp.step.ending import Finish
from compiled_ddp.step.forwards import ForwardCount, LatestForward
from compiled_ddp.step.graph_call import GraphCall, UntilBackward, may_leave_out
from compiled_ddp.step.graphs import GraphReservations, ReservedSection
from compiled_ddp.step.reduction import Reduction, Wrapped
from compiled_ddp.step.synchronised import SynchronisedBackward, returns_inputs_alone, watch_returned
from compiled_ddp.step.under_way import Phase, UnderWay
from compiled_ddp.torch_private.autograd import current_graph_task, evaluating_node
from compiled_ddp.users_code import warn_user

# ---- a wrapper's part in backwards of several wrappers: [Note: waiting in one order] ---------------------------------


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


# ---- its backwards, which begin and end where hooks, graphs and outputs tell that autograd has come ------------------

_DISTRIBUTED_AUTOGRAD = (
    "the backward is torch.distributed.autograd's, which leaves .grad alone: there is nothing that could be averaged. "
    "Call loss.backward() outside of its context, or the forward under no_sync() and average the context's gradients "
    "by hand."
)


class Backwards:
    """What autograd reaches of a wrapper. Every method may be called in any of autograd's threads."""

    def __init__(self, wrapped: Wrapped) -> None:
        self.forward = LatestForward()
        self.under_way = UnderWay()
        # Held from the reservation for a graph to what it launches, so that no other thread launches anything between.
        self.lock = threading.RLock()
        self.reduction = Reduction(wrapped, self)
        self._reservations = GraphReservations(self.reduction)
        self.beginning = Beginning(self.reduction, self._reservations, self.forward)
        accumulates = functools.lru_cache(maxsize=1)(functools.partial(_accumulates, self.reduction))
        self.conducted = ConductedWrapper(
            self.reduction,
            self.forward,
            self.under_way,
            self.beginning,
            accumulates=accumulates,
            task_ended=self._task_ended,
            lock=self.lock,
        )
        self._closed_because, self._accumulates = "", accumulates
        conductor.add(self.conducted)

    def close(self, why: str) -> None:
        """Remove every hook; `why` is the error of backwards that would still be synchronised."""
        self._closed_because = why
        for call in self.reduction.live_calls():
            if call.synchronise:
                call.when_reached(Backwards.output_reached)
        self.reduction.hooks.remove()
        self.reduction.sparse.close()

    # ---- the beginning -----------------------------------------------------------------------------------------------

    def enter(self) -> SynchronisedBackward | None:
        """The synchronised backward that this thread is in, begun if need be; None where it is postponed."""
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
            return under_way.backward

    def _begin(self) -> None:
        if self.beginning.waits and not conductor.may_wait(self.conducted, [self.conducted.begin_event]):
            self.under_way.postpone()
            self.reduction.hooks.install()
            self.reduction.hooks.defer_users()
            return
        accumulates = self._accumulates(current_graph_task())
        returned = None if accumulates else watch_returned(self.reduction.parameters.tensors)
        backward = self.beginning.in_task(returned)
        self.under_way.begin(backward)
        self.beginning.leave_to_hooks(backward)
        if returned is not None:
            returned.begin()  # with tensor hooks of its own: after what looks for users' ones

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
            conductor.backward_reached(self.conducted)

    def _is_local(self) -> bool:
        """Whether the running backward, which has not begun here, is one of which other ranks need not know."""
        if self.conducted.local:
            return True
        accumulates = self._accumulates(current_graph_task())
        return not accumulates and returns_inputs_alone(self.reduction.parameters.tensors)

    def _refuse_returned_sparse(self) -> None:
        if not self.conducted.local:
            self.reduction.sparse.refuse_returned()

    def output_reached(self) -> None:
        """A backward has come to an output of a synchronised forward."""
        if not self.under_way.has_begun():
            if self.reduction.sparse.names:
                self._refuse_returned_sparse()
            if self._is_local():
                return
        self.enter()

    # ---- told by graphs ----------------------------------------------------------------------------------------------

    def reserve(self, call: GraphCall) -> ReservedSection | None:
        """The section that `call` may launch in its graph now; None if it must run locally."""
        with self.lock:
            if not self.under_way.has_begun():
                synchronises = call.synchronise or self._will_reach_synchronised()
                if synchronises and self.reduction.sparse.names:
                    self._refuse_returned_sparse()
                if not synchronises or self._is_local():
                    self._note_local_run(call)
                    return None
            backward = self.enter()
            if backward is None:
                self.under_way.run_locally(call)
                self._note_local_run(call)
                return None
            return self._reservations.reserve(backward, call, self.conducted)

    def _will_reach_synchronised(self) -> bool:
        """Whether the running backward, come to a graph of a local forward, is to reach one of a synchronised one too.

        Then it is synchronised as a whole, and this is where it begins: what the local graph gives would be added to
        what the other one has reduced.
        """
        return any(call.synchronise and call.is_still_to_run() for call in self.reduction.live_calls())

    def _note_local_run(self, call: GraphCall) -> None:
        call.note_local_run()
        if self.conducted.local:
            self.forward.count.take_back()
        carried = self.reduction.carried
        carried.note_local_use(filter(self.reduction.will_accumulate, set(call.plan.indices) - carried.used))

    # ---- told by hooks -----------------------------------------------------------------------------------------------

    def gradient_accumulated(self, index: int) -> None:
        """Autograd has accumulated a gradient of parameter `index` into its .grad."""
        with self.lock:
            under_way = self.under_way
            # The one under way, where this task is known to be one of it: asked for every gradient, so without a call.
            backward = under_way.backward if current_graph_task() in under_way.tasks.noted else None
            if backward is None and self.synchronises():
                backward = self._enter_with(index)
            elif backward is None and self.conducted.local:
                self.forward.count.take_back()
            if backward is not None:
                backward.gradient_arrived(index)
            elif self.reduction.parameters.tensors[index].grad is not None:  # hooks run for an undefined gradient too
                self.reduction.carried.note_local_use([index])

    def users_hook_comes(self, index: int) -> None:
        """The same, of a user's hook that may come before ours."""
        with self.lock:
            if self.synchronises():
                self._enter_with(index)

    def gradient_comes(self) -> None:
        """The same, of a parameter that is not in the buckets."""
        with self.lock:
            if self.synchronises():
                self.enter()

    def _enter_with(self, index: int) -> SynchronisedBackward | None:
        """As `enter`, in a hook of a parameter, which has its gradient already if that begins the backward."""
        begins_here = not self.under_way.has_begun()
        backward = self.enter()
        if begins_here and backward is not None:
            backward.existing.begun_by(index)
        return backward

    def synchronises(self) -> bool:
        """Whether what autograd has just accumulated belongs to a synchronised backward."""
        return self.under_way.has_begun() or (self.forward.awaits_backward and not self.conducted.local)

    # ---- the end of a task -------------------------------------------------------------------------------------------

    @torch_private.dynamo.untraced
    def _task_ended(self, task: int) -> None:
        with self.lock:
            outer = torch_private.autograd.evaluating_node()
            tasks = self.under_way.tasks
            try:
                # With several devices, another task's thread may end the one that is inside of it.
                if outer is None and not tasks.are_running(but=task):
                    conductor.end(task)
            finally:  # only now: other threads must not take the backward for one that has broken off
                tasks.close(task)
                if self.under_way.phase is Phase.EXPECTED:
                    self.under_way.expect_no_more()
            if outer is None:
                return
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

        handle = node.register_prehook(enter)


def _accumulates(reduction: Reduction, _: int) -> bool:
    """Whether this task of autograd, which this thread runs, will bring any parameter a gradient."""
    return "accumulated" in map(torch_private.autograd.fate_of_gradient, reduction.parameters.tensors)


# ---- taking part in other ranks' backwards with nothing but zeros: its data has run out (`join`) ---------------------


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


class Shadowing:
    """Puts aside what this rank had accumulated itself, until the join is over."""

    def __init__(
        self, reduction: Reduction, forwards: ForwardCount, wrapper: ConductedWrapper, lock: threading.RLock
    ) -> None:
        self._reduction, self._forwards, self._wrapper, self._lock = reduction, forwards, wrapper, lock
        self._own: OwnGradients | None = None  # while this rank shadows others

    def shadow_backward(self, forward_count: int) -> None:
        """Skip one, in which .grad becomes what it is on the others, who have begun `forward_count` forwards."""
        with self._lock:
            carried = self._reduction.carried
            if self._own is None:
                self._reduction.agreed.buffers.let_go()  # which hold what is put aside
                self._own = OwnGradients(self._reduction.parameters.tensors, carried.used, carried.piggyback)
            self._own.take_away()
            carried.put_aside()
            self._forwards.follow(forward_count)
            self._wrapper.begin_skipping()
            self._wrapper.end()
            self._own.note_shadowed()

    def end(self, *, if_untouched: bool = False) -> None:
        """Let all that this rank had accumulated itself be as it was before the first `shadow_backward`.

        A no-op without one. With `if_untouched`, a .grad that somebody has changed since stays as it is.
        """
        if self._own is None:
            return
        with self._lock:
            own, self._own = self._own, None
            own.give_back(if_untouched=if_untouched)
            self._reduction.carried.take_up_again(own.unsent, own.piggyback)


# ---- what a wrapper calls --------------------------------------------------------------------------------------------


class Runtime:
    """One wrapper's part of the run time."""

    def __init__(self, wrapped: Wrapped) -> None:
        self.backwards = Backwards(wrapped)
        self.communicator = wrapped.communicator
        self.reduction = self.backwards.reduction
        self._forward, self._under_way = self.backwards.forward, self.backwards.under_way
        self.conducted = self.backwards.conducted  # as others call it: [Note: waiting in one order]
        self._shadowing = Shadowing(self.reduction, self._forward.count, self.conducted, self.backwards.lock)

    @property
    def parameters(self) -> TrainedParameters:
        return self.reduction.parameters

    @property
    def step(self) -> int:
        """The number of the step that is under way: of synchronised forwards begun, or, in a local one, to be begun."""
        begun = self._forward.count.value
        return begun if self._forward.synchronises and begun else begun + 1

    # ---- forward -----------------------------------------------------------------------------------------------------

    def begin_forward(self, *, synchronise: bool, counted: bool) -> None:
        """Note a forward with gradients enabled, which is not a recomputation inside a backward.

        `counted` tells whether every rank is to begin as many such forwards as this one.
        """
        if synchronise and self.reduction.ddp_hook is not None:
            self.reduction.ddp_hook.refuse_if_broken()
        self._forward.begin(synchronise=synchronise, counted=counted)
        self.reduction.defer_users()
        if not self.reduction.options.keep_buffers:
            self.reduction.agreed.buffers.let_go()
        if synchronise and counted:
            self._forward.count.begin(after_exception=conductor.broken_off)
        self.communicator.progress.forward_began(self._forward.count.value)

    def begin_reentrant_forward(self, *, synchronise: bool) -> None:
        """Note a forward that a reentrant checkpoint runs inside a backward: of its own, which was without gradients.

        As under DDP, it is synchronised if this one is called outside of no_sync.
        """
        self._forward.begin_inside_backward(synchronise=synchronise, under_way=self._under_way.has_begun())

    def module_begins(self) -> None:
        """The wrapper's own part of the forward has ended."""
        self.reduction.models_collectives.begin()

    def module_ended(self) -> None:
        """The wrapped module has returned."""
        self.reduction.models_collectives.end()

    def forward_raised(self) -> None:
        """The forward that began has ended with an exception."""
        self._forward.raised()

    def drop_forwards(self) -> None:
        """Take back the forwards that wait for a backward: the step has ended without one, on every rank."""
        self._forward.drop()

    def end_forward(self, calls: Sequence[GraphCall]) -> None:
        """Watch the parameters by hooks unless the segments that this forward called cover every graph section.

        Even then its loss may reach none of these: [Note: tripwire]
        """
        agreed, hooks = self.reduction.agreed, self.reduction.hooks
        if agreed.sequence is not None and not hooks.everywhere:
            called = {call.fingerprint for call in calls}
            if not agreed.graph_sections.keys() <= called:
                hooks.install()
            elif self._forward.awaits_backward or any(map(may_leave_out, calls)):
                hooks.arm()  # also of a local one, whose backward may use outside of a graph what this leaves out

    def watch(self, outputs: Iterable[torch.Tensor]) -> None:
        """Begin a synchronised backward when one reaches these outputs, before it has accumulated any gradient.

        The first gradient after a synchronised forward begins one too: the loss may not be among the outputs. A later
        backward that does not come through them, of `wrapper.module` called by itself, stays local, as under DDP.
        """
        if self._forward.synchronises:
            nodes = {output.grad_fn for output in outputs if output.grad_fn is not None}
            self._forward.returned(nodes)
            for node in nodes:
                if torch_private.autograd.attached(node) is None:  # a captured segment's node begins it by itself
                    until_backward = UntilBackward(self.backwards)
                    node.register_prehook(functools.partial(until_backward.tell, Backwards.output_reached))

    # ---- backward ----------------------------------------------------------------------------------------------------

    @property
    def awaits_backward(self) -> bool:
        """Whether the latest forward was synchronised and no backward has begun since."""
        return self._forward.awaits_backward

    def is_awaited(self) -> bool:
        """Whether a forward still waits for its backward, and its output has not just been thrown away."""
        return self._forward.is_awaited()

    def leaves_local(self) -> bool:
        """Whether the running backward brings parameters a gradient that nothing reduces, which nobody asked for."""
        if self.conducted.local or self.backwards.synchronises():
            return False
        return any(torch_private.autograd.fate_of_gradient(p) != "none" for p in self.parameters.tensors)

    def finish_broken_backward(self) -> None:
        """Take part, with zeros, in what is left of a backward that an exception ended; other ranks may wait in it.

        A no-op where there is none. A backward that another thread runs is none.
        """
        self.conducted.outlast_threads()
        if self._under_way.is_broken_off():
            conductor.finish_broken(also=[self.conducted])

    def shadow_backward(self, forward_count: int) -> None:
        """Take part in the other ranks' backward with nothing but zeros, until `end_shadowing`."""
        self._shadowing.shadow_backward(forward_count)

    def end_shadowing(self, *, if_untouched: bool = False) -> None:
        """Let all that this rank had accumulated itself be as it was before: see `Shadowing`."""
        self._shadowing.end(if_untouched=if_untouched)

    def close(self, why: str, *, abandon: bool = False) -> None:
        """Remove every hook and give the communicator back, or `abandon` it to the next one that is made.

        `why` is the error of backwards that would still be synchronised.
        """
        self.backwards.close(why)
        if abandon:
            self.communicator.abandon()
        else:
            self.communicator.close()
