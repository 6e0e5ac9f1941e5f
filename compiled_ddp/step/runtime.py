"""The state that both wrappers share: which sequence is kept, and which backward is under way."""

import contextlib
import functools
import sys
import threading
import time
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence, Set
from typing import Any, Protocol

import torch

from compiled_ddp import torch_private
from compiled_ddp.checks.proof import Proof
from compiled_ddp.checks.same_step import StepCheck
from compiled_ddp.options import Options
from compiled_ddp.plan import AMONG_COLLECTIVES, NOT_CALLED, BucketPlan, ReductionSequence, Section
from compiled_ddp.planning.trained_parameters import TrainedParameters
from compiled_ddp.ranks.communicator import Communicator
from compiled_ddp.reducers.choice import reducer_of
from compiled_ddp.reducers.ddp_hook import REGISTERED, TorchCommHook
from compiled_ddp.reducers.hook_state import BucketHook
from compiled_ddp.step.agreed_sequence import AgreedSequence
from compiled_ddp.step.backward import Circumstances, SynchronisedBackward
from compiled_ddp.step.conductor import conductor
from compiled_ddp.step.errors_elsewhere import broke_off_elsewhere, hook_failed_elsewhere, lost_elsewhere
from compiled_ddp.step.fallback import DOES_NOT_FIT, TENSOR_HOOK, Fallback
from compiled_ddp.step.flat_buffers import SequenceBuffers
from compiled_ddp.step.forward_count import ForwardCount
from compiled_ddp.step.gradient_hooks import GradientHooks
from compiled_ddp.step.graph_tasks import OpenTasks
from compiled_ddp.step.join import UnevenInputs
from compiled_ddp.step.models_collectives import ModelsCollectives
from compiled_ddp.step.own_gradients import OwnGradients
from compiled_ddp.step.returned_gradients import ReturnedGradients, returns_inputs_alone, watch_returned
from compiled_ddp.step.riders import Findings, Message, RiderReader
from compiled_ddp.step.sparse_gradients import SparseGradients

_DISTRIBUTED_AUTOGRAD = (
    "the backward is torch.distributed.autograd's, which leaves .grad alone: there is nothing that could be averaged. "
    "Call loss.backward() outside of its context, or the forward under no_sync() and average the context's gradients "
    "by hand."
)


class Bound(Protocol):
    """A graph with the parameters that it is to reduce."""

    @property
    def plan(self) -> BucketPlan:
        """Over parameters."""

    @property
    def fingerprint(self) -> str:
        """Of the plan."""


class SegmentCall(Protocol):
    """One call of a captured segment in a forward: a graph and the parameters it was called with."""

    plan: BucketPlan  # over parameters
    fingerprint: str
    synchronise: bool  # whether its forward was called outside of no_sync
    index_of: dict[int, int]  # graph input -> parameter
    undefined: frozenset[int]  # graph inputs that the running backward brings no gradient
    may_leave_out: bool  # whether there can be any

    @property
    def leaves_out(self) -> bool:
        """Whether it is bound to less than every parameter."""

    until_backward: "UntilBackward"

    def will_run(self) -> bool:
        """Whether the backward that this thread runs will evaluate the call's node."""

    def compile(self, *, folds: bool) -> str | None:
        """Compile the backward that reduces in the graph; returns how the compiler has failed, if it has.

        `folds` tells whether gradients of earlier backwards are to go into it.
        """

    def every_parameter(self) -> Bound:
        """What the call is bound to with all of its parameters, also those without gradient."""

    def take_all_in(self, whole: bool = True) -> None:
        """In the backward that begins: be bound to every parameter, whichever of them get no gradient."""

    def when_reached(self, do: Callable[[Any], None]) -> None:
        """Let `do` run before a backward evaluates the call's node, even before its saved tensors are looked at."""


class UntilBackward:
    """Keeps a runtime, and its wrapper, alive for a graph until a backward has freed that.

    All ranks must run the backward alike, also where the wrapper was dropped before it. Afterwards the outputs, which
    users hold on to, keep nothing.
    """

    def __init__(self, runtime: "Runtime") -> None:
        self._held: Runtime | None = runtime
        self._runtime = weakref.ref(runtime)

    def take(self) -> "Runtime | None":
        """The runtime, for the backward that this thread runs; None once it is gone."""
        if not torch_private.autograd.keeps_graph():
            self._held = None
        return self._runtime()


@torch_private.dynamo.untraced
def _reached(graph: UntilBackward, _: object) -> None:
    runtime = graph.take()
    if runtime is not None:
        runtime.output_reached()


class Runtime:
    """Begins and ends synchronised backwards, and keeps what lives longer than one of them."""

    def __init__(
        self,
        parameters: TrainedParameters,
        communicator: Communicator,
        options: Options,
        *,
        live_calls: Callable[[], Sequence[SegmentCall]],
        hooks_reason: str | None,
        sparse: TrainedParameters,
    ) -> None:
        """`live_calls` returns the segment calls whose backward may still run, latest first.

        `sparse` are the trained parameters with sparse gradients, which are none of `parameters`.

        With `hooks_reason`, no graph takes part: the hooks reduce everything, and that is why.
        """
        self.parameters, self.communicator = parameters, communicator
        self.bucket_hook: BucketHook | None = None  # reduces buckets in place of an all-reduce
        if options.comm_hook is not None:
            self.bucket_hook = BucketHook(options.comm_hook, communicator.for_hooks())
        self.agreed = AgreedSequence(options, communicator, hooks_reason, self.bucket_hook)
        self.proof = Proof(parameters, communicator, options.verify)
        self.weight = 1.0  # of this rank in a weighted mean
        self.carried: torch.Tensor | None = None  # the sums over ranks of the user's rider elements
        self._passengers: torch.Tensor | None = None  # the user's rider elements for the next synchronised backward
        self.synchronise = True  # whether the backward of the latest forward does: False under no_sync
        self.torch_hook: TorchCommHook | None = None
        self.uneven: UnevenInputs | None = None
        self.backwards = 0  # synchronised ones begun, the same on ranks that are level
        self.static_graph = options.static_graph  # whether a parameter may get several gradients in one backward
        self.local = False  # whether backwards that begin now stay local, wherever their forward was called
        self.reduced: Callable[[list[torch.Tensor]], None] = lambda _: None  # told of each backward's flat buckets
        self._options = options
        self._live_calls = live_calls
        self._hooks = GradientHooks(parameters.tensors, self)
        self._expected = False  # whether a synchronised forward still waits for its backward
        self._counted = False  # whether the latest forward is one of `_forwards`
        self._forwards = ForwardCount()
        self._step_check = StepCheck(communicator, options.check_steps)
        self._rider_reader = RiderReader(communicator.world_size)
        self._current: SynchronisedBackward | None = None
        self._rest_was_launched = False  # whether something was left to launch when an exception had ended a backward
        self._lost = False  # whether the latest backward ended here with an error when everything of it had been sent
        self._state_lost = False  # whether with it the new state of `bucket_hook`
        self._used: set[int] = set()  # parameters used by local backwards since the last synchronised one
        self._announced: set[int] = set()  # parameters of unused sections that the current backward uses here
        self._tasks = OpenTasks()  # of the running backward
        self._thread = 0  # of the latest forward
        self._skipping: int | None = None  # the thread that is in `skip_step()`, or follows others' backwards
        # Whether the backward under way begins when it has ended here: [Note: waiting in one order]. Meanwhile its
        # gradients are accumulated, and these are the calls that it has run.
        self._postponed: list[SegmentCall] | None = None
        self._reaches: tuple[int, bool] = -1, False  # a task of autograd, and whether it reaches this wrapper
        self._models_collectives = ModelsCollectives()
        self._some_rank_differs = False  # so that hooks reduce all of this backward: [Note: models that communicate]
        self._is_due = False  # whether a backward that has reached another wrapper will reach this one
        conductor.add(self)
        self._closed_because = ""
        self._own_gradients: OwnGradients | None = None  # while this rank shadows others (`join`)
        self.fallback = Fallback(strict=options.strict)
        self._lock = threading.RLock()
        self.sparse = SparseGradients(sparse, communicator, self._synchronises)
        self.forget_sequence()

    # ---- forward -----------------------------------------------------------------------------------------------------

    def begin_forward(self, *, synchronise: bool, counted: bool) -> None:
        """Note a forward with gradients enabled, which is not a recomputation inside a backward.

        `counted` tells whether every rank is to begin as many such forwards as this one.
        """
        if synchronise and self.torch_hook is not None:
            self.torch_hook.refuse_if_broken()
        self.synchronise = self._expected = synchronise
        self._thread = threading.get_ident()
        self._hooks.hold_back_users()
        self.sparse.hold_back_users()
        self._counted = synchronise and counted
        if self._counted:
            self._forwards.begin(after_exception=conductor.any_broken_off())
        self.communicator.progress.forward_began(self._forwards.value)

    def module_begins(self) -> None:
        """The wrapper's own part of the forward has ended."""
        self._models_collectives.begin()

    def module_ended(self) -> None:
        """The wrapped module has returned."""
        self._models_collectives.end()

    def forward_raised(self) -> None:
        """The forward that began has ended with an exception. [Note: forwards that are no step]"""
        if self._counted:
            self._forwards.raised()

    def drop_forwards(self) -> None:
        """Take back the forwards that wait for a backward: the step has ended without one, on every rank."""
        self._expected = False
        self._forwards.take_back()

    def is_broken_off(self) -> bool:
        """Outside of backwards: whether an exception has ended one of this thread's, which nothing has followed yet."""
        return self._thread == threading.get_ident() and self._has_broken_off()

    def _has_broken_off(self) -> bool:
        """Outside of backwards: whether an exception has ended one. One that another thread still runs has not.

        After an exception in one device's thread the others finish what they are at: those of this thread's backward
        are waited for.
        """
        here = threading.get_ident()
        deadline = time.monotonic() + self.communicator.ranks.timeout.total_seconds()
        while (self._is_under_way or self._is_due) and (
            self._tasks.are_running() or self._skipping not in (None, here)
        ):
            if self._thread != here or self._skipping is not None:
                return False
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"rank {self.communicator.rank}: the backward before this forward has not ended in every thread: "
                    "a hook of yours waits for something."
                )
            time.sleep(0.001)
        return self._is_under_way or self._is_due

    @property
    def _is_under_way(self) -> bool:
        """Whether a backward has begun, or has been postponed, that has not ended."""
        return self._current is not None or self._postponed is not None

    def begin_reentrant_forward(self, *, synchronise: bool) -> None:
        """Note a forward that a reentrant checkpoint runs inside a backward: of its own, which was without gradients.

        As under DDP, it is synchronised if this one is called outside of no_sync.
        """
        self.synchronise = synchronise
        self._counted = False
        self._expected = synchronise and not self._is_under_way

    @property
    def awaits_backward(self) -> bool:
        """Whether the latest forward was synchronised and no backward has begun since."""
        return self._expected

    def end_forward(self, calls: Sequence[SegmentCall]) -> None:
        """Watch the parameters by hooks unless the segments that this forward called cover every graph section."""
        if self.agreed.sequence is not None and not self._hooks.everywhere:
            called = {call.fingerprint for call in calls}
            if not self.agreed.graph_sections.keys() <= called:
                self._hooks.install()

    def watch(self, outputs: Iterable[torch.Tensor]) -> None:
        """Begin a synchronised backward when one reaches these outputs, before it has accumulated any gradient.

        The first gradient after a synchronised forward begins one too: the loss may not be among the outputs. A later
        backward that does not come through them, of `wrapper.module` called by itself, stays local, as under DDP.
        """
        if self.synchronise:
            nodes = {output.grad_fn for output in outputs if output.grad_fn is not None}
            if self._counted and self._expected:  # not a recomputation inside a backward
                self._forwards.returned(nodes)
            for node in nodes:
                if torch_private.autograd.attached(node) is None:  # a captured segment's node begins it by itself
                    node.register_prehook(functools.partial(_reached, UntilBackward(self)))

    def output_reached(self) -> None:
        """A backward has come to an output of a synchronised forward."""
        if not self._is_local():
            self.enter_backward()

    def leaves_local(self) -> bool:
        """Whether the running backward brings parameters a gradient that nothing reduces, which nobody asked for."""
        if self.local or not self._accumulates_locally:
            return False
        return any(torch_private.autograd.fate_of_gradient(p) != "none" for p in self.parameters.tensors)

    def _is_local(self) -> bool:
        """Whether the running backward is a torch.autograd.grad of inputs alone, of which other ranks need not know."""
        if self._is_under_way:
            return False
        if not self.local:
            self.sparse.refuse_returned()
        return self.local or returns_inputs_alone(self.parameters.tensors)

    def _synchronises(self) -> bool:
        """Whether what autograd has just accumulated belongs to a synchronised backward, begun if need be."""
        with self._lock:
            if self._accumulates_locally:
                return False
            self.enter_backward()
            return True

    # ---- backward ----------------------------------------------------------------------------------------------------

    def enter_backward(self) -> SynchronisedBackward | None:
        """The synchronised backward that this thread is in, begun if need be; None where it is postponed."""
        if self._closed_because:
            raise RuntimeError(self._closed_because)
        with self._lock:
            if not self._tasks.has_current():  # asked for every gradient
                self._enter_task()
            self._is_due = False
            begins_here = self._current is None and self._postponed is None and self._begin_waits
            if begins_here and not conductor.may_wait(self, [self._begin_event]):
                self._postponed = []
                self._hooks.install()
                self._hooks.hold_back_users()
            if self._current is None and self._postponed is None:
                returned = watch_returned(self.parameters.tensors)
                self._current = self._begin(
                    lambda call: call.will_run(), self._will_accumulate, returned, runs_sequence=self._runs_sequence
                )
                if self.agreed.graph_sections and not self._current.averaging.has_no_weight:
                    self._leave_unmatched_to_hooks(self._current)
                if self._current.averaging.has_no_weight or self._some_rank_differs:
                    self._leave_all_to_hooks(self._current)
                if self._some_rank_differs:
                    self.fallback.report(AMONG_COLLECTIVES, self.parameters.named(range(len(self.parameters.names))))
                if returned is not None:
                    returned.begin()  # with tensor hooks of its own: after what looks for users' ones
            return self._current

    def _enter_task(self) -> None:
        if torch_private.dynamo.in_compiled_autograd():
            raise RuntimeError(torch_private.dynamo.COMPILED_AUTOGRAD)
        if torch_private.autograd.in_distributed_backward():
            warnings.warn(_DISTRIBUTED_AUTOGRAD, stacklevel=3)  # a hook's error becomes "python_error" there
            raise RuntimeError(_DISTRIBUTED_AUTOGRAD)
        if self._on_cpu and self._tasks.are_of_other_threads():
            raise RuntimeError(
                "two threads run backwards of one wrapper at the same time, whose gradients would be mixed up: let "
                "one wait for the other, or give each thread a wrapper of its own."
            )
        self._tasks.note(self._task_ended)
        conductor.backward_reached(self)

    def expect_in_task(self) -> None:
        """If the backward that this thread runs will reach this wrapper: note that it has begun elsewhere."""
        if not self._is_under_way and not self._is_due and self.takes_part():
            self._tasks.note(self._task_ended)
            self._is_due = True

    def _begin(
        self,
        takes_part: Callable[[SegmentCall], bool],
        accumulates: Callable[[int], bool],
        returned: ReturnedGradients | None = None,
        weight: float | None = None,
        runs_sequence: Callable[[], bool] = lambda: True,
    ) -> SynchronisedBackward:
        """A new synchronised backward, of the rank's own weight unless another one is given.

        `takes_part` picks the calls that make the proposal in the first one, `accumulates` tells which parameters get
        a gradient in this one. With `returned` it is a torch.autograd.grad, of these gradients. `runs_sequence` tells
        whether it runs the graphs of the sequence; the default is for one that sends everything at once.
        """
        self.communicator.refuse_if_failed()
        if self.torch_hook is not None:
            self.torch_hook.refuse_if_broken()
        if self.uneven is not None:
            self.uneven.begin_backward(self._forwards.value)
        self.backwards += 1
        self._expected = self._expected and returned is not None
        self._hooks.hold_back_users()
        forwards = self._forwards.backward_began()
        self._take_in_what_is_shared(takes_part)
        must_agree = self.agreed.must_agree
        calls = [call for call in self._live_calls() if must_agree and takes_part(call) and call.plan.indices]
        plans = [call.plan for call in calls if self._compiles(call)]  # before any rank waits for another
        sequence = self.agreed.propose(plans)
        self._some_rank_differs = False
        if self.agreed.graph_sections and (self.agreed.among_collectives or must_agree):
            sequence = self._tell_whether(runs_sequence(), sequence)
        self.proof.begin_backward()
        self._announced = set()
        if returned is None:
            self._announced = {i for i in self.agreed.unused if i in self._used or accumulates(i)}
        message = Message(
            forwards,
            announced=len(self._announced),
            lost=self._lost,
            state_lost=self._state_lost,
            weight=self.weight if weight is None else weight,
            passengers=self._passengers,
            # Graphs that were postponed have run locally; where models communicate, a sequence is due that knows it.
            misfit=bool(self._postponed) or (not self.agreed.among_collectives and conductor.any_communicates()),
        )
        self._lost = self._state_lost = False
        self.reduced([])  # those of the backward before are about to be filled again
        backward = self._new_backward(
            sequence.launched, self.agreed.buffers, self._used, message, self._circumstances(returned)
        )
        self._models_collectives.begin()
        return backward

    def _circumstances(self, returned: ReturnedGradients | None) -> Circumstances:
        rule = self._options.bucket_rule
        return Circumstances(
            returned=returned,
            delayed=rule is not None and rule.delayed,
            expected_gradients=self._due if self.static_graph and self.agreed.hooks_reason is not None else None,
            looks_at_values=self._on_cpu or not self.agreed.refined,
        )

    def _take_in_what_is_shared(self, takes_part: Callable[[SegmentCall], bool]) -> None:
        """[Note: undefined gradients] Calls that share parameters keep their plans, whatever each of them leaves out.

        Which outputs the others' part of the loss uses is not known yet, and hooks could not take what one of the
        graphs has reduced in part.
        """
        live = self._live_calls()
        if any(call.may_leave_out for call in live):
            indices = {call: call.every_parameter().plan.indices for call in live if takes_part(call)}
            count = Counter(index for of_call in indices.values() for index in of_call)
            for call, of_call in indices.items():
                call.take_all_in(any(count[index] > 1 for index in of_call))

    def _runs_sequence(self) -> bool:
        """Whether the backward that begins will run the graphs of the sequence, all of them and in its order."""
        calls = [call for call in self._live_calls() if call.will_run() and call.plan.indices]
        sections = sorted((n, fingerprint) for fingerprint, ns in self.agreed.graph_sections.items() for n in ns)
        return (
            self.weight > 0.0
            and [call.fingerprint for call in calls] == [fingerprint for _, fingerprint in sections]
            and all(self._compiles(call) and not self._with_tensor_hooks(call) for call in calls)
        )

    def _tell_whether(self, runs_sequence: bool, sequence: ReductionSequence) -> ReductionSequence:
        """[Note: models that communicate] Returns the sequence of the backward that begins: maybe another one."""
        values = [not runs_sequence, conductor.any_communicates()]
        shared = torch.tensor(values, dtype=torch.int32, device=sequence.sections[0].plan.buckets[0].device)
        self.communicator.progress.note_wait("whether all ranks run the same graphs, in a model that communicates")
        self.communicator.maximum(shared)
        self.communicator.progress.note_wait("")
        some_rank_differs, self.agreed.among_collectives = map(bool, shared.tolist())
        self._some_rank_differs = some_rank_differs and self.agreed.among_collectives
        if self._some_rank_differs and not self.agreed.refined:
            # Nor would this backward show which parameters are used outside of graphs too.
            self.agreed.leave_to_hooks(AMONG_COLLECTIVES)
            self.forget_sequence()
            return self.agreed.propose([])
        return sequence

    def begin_skipping(self) -> None:
        """Take part in the other ranks' synchronised backward with zeros: launch all, and wait for nothing yet."""
        with self._lock:
            weight = self.weight if self._used or self.sparse.any_used else 0.0
            self._skipping = threading.get_ident()
            self._current = self._begin(lambda call: call.synchronise, lambda _: False, weight=weight)
            self._leave_all_to_hooks(self._current)  # users' hooks see the mean on every rank
            self._current.launch_rest()

    def shadow_backward(self, forward_count: int) -> None:
        """Take part in the other ranks' backward with nothing but zeros: this rank's data has run out (`join`).

        .grad becomes what it is on the others, who have begun `forward_count` forwards, until `end_shadowing`.
        """
        with self._lock:
            if self._own_gradients is None:
                self.agreed.buffers.let_go()  # which hold what is put aside
                self._own_gradients = OwnGradients(self.parameters.tensors, self._used, self._passengers)
            self._own_gradients.take_away()
            self._used, self._passengers = set(), None
            self._forwards.follow(forward_count)
            self.begin_skipping()
            self.end()
            self._own_gradients.note_shadowed()

    def end_shadowing(self, *, if_untouched: bool = False) -> None:
        """Let all that this rank had accumulated itself be as it was before the first `shadow_backward`.

        A no-op without one. With `if_untouched`, a .grad that somebody has changed since stays as it is.
        """
        if self._own_gradients is None:
            return
        with self._lock:
            own, self._own_gradients = self._own_gradients, None
            own.give_back(if_untouched=if_untouched)
            self._used, self._passengers = own.unsent, own.passengers

    def _leave_unmatched_to_hooks(self, backward: SynchronisedBackward) -> None:
        """Hooks reduce what this backward's calls and the sequence's graph sections do not both have.

        With all that shares a parameter with it: a gradient must not be reduced partly in a graph.
        """
        free = {fingerprint: list(sections) for fingerprint, sections in self.agreed.graph_sections.items()}
        unmatched: set[int] = set()
        for call in self._live_calls():
            if call.will_run():
                if call.leaves_out and not free.get(call.fingerprint) and free.get(call.every_parameter().fingerprint):
                    call.take_all_in()
                    backward.message.note_misfit()  # as in `_reserve_whole`
                if free.get(call.fingerprint) and not self._with_tensor_hooks(call) and self._compiles(call):
                    free[call.fingerprint].pop()
                else:
                    unmatched.update(call.plan.indices)
        not_called = {i for sections in free.values() for n in sections for i in backward.sections[n].plan.indices}
        if unmatched or not_called:
            backward.message.note_misfit()
            backward.reservations.leave_to_hooks(unmatched | not_called)
            self._hooks.install()  # what a graph would have reduced may be used outside of it
            # ... and may have been in this backward before it came here, which hooks then did not see.
            outside = [i for i in not_called if self.parameters.tensors[i].grad is not None]
            self._used.update(filter(self._will_accumulate, outside))
        if not_called and not unmatched:  # calls that do not match are reported one by one
            self.fallback.report(NOT_CALLED, self.parameters.named(sorted(not_called)))

    def _leave_all_to_hooks(self, backward: SynchronisedBackward) -> None:
        backward.message.note_misfit(bool(self.agreed.graph_sections))
        backward.reservations.leave_all_to_hooks()
        self._hooks.install()

    def _compiles(self, call: SegmentCall) -> bool:
        """Whether the backward that reduces in the graph has been compiled, or can be, before anything is sent."""
        folds = any(self.parameters.tensors[index].grad is not None for index in call.plan.indices)
        failure = call.compile(folds=folds)
        if failure is not None:
            reason = f"the compiler failed for the backward of their graph: {failure}"
            self.fallback.report(reason, self.parameters.named(call.plan.indices))
        return failure is None

    def with_tensor_hooks(self, index: int) -> bool:
        """Whether users' tensor hooks see this parameter's gradient."""
        return torch_private.tensors.has_tensor_hooks(self.parameters.tensors[index])

    def _with_tensor_hooks(self, call: SegmentCall) -> list[int]:
        return list(filter(self.with_tensor_hooks, call.plan.indices))

    def _new_backward(
        self,
        sections: Sequence[Section],
        buffers: SequenceBuffers,
        used_before: set[int],
        message: Message,
        circumstances: Circumstances,
    ) -> SynchronisedBackward:
        return SynchronisedBackward(
            sections,
            buffers,
            self.communicator,
            self.parameters,
            used_before=used_before,
            message=message,
            circumstances=circumstances,
            gradient_as_bucket_view=self._options.gradient_as_bucket_view,
            launching=self.proof.launching,
            reducer=reducer_of(
                self.communicator,
                sections,
                [bucket for _, bucket in buffers.buckets],
                self.parameters.tensors,
                traced_hook=self.bucket_hook,
                ddp_hook=self.torch_hook,
            ),
            scaling=self._options.scaling,
            correction=self._correction,
        )

    @property
    def _correction(self) -> float:
        """What a mean over all ranks is multiplied by: some may have joined. A hook of torch's kind divides itself."""
        corrects = self._options.planned_reduction == "mean" and self.torch_hook is None
        return self.uneven.factor if self.uneven is not None and corrects else 1.0

    @contextlib.contextmanager
    def launching_alone(self) -> Iterator[None]:
        """Keep other threads from launching anything between the reservation for a graph and what it launches."""
        with self._lock:
            yield

    def reserve(self, call: SegmentCall) -> tuple[SynchronisedBackward, int] | None:
        """The section that `call` may launch in its graph now; None if it must run locally."""
        with self._lock:
            if not self._is_under_way and (not call.synchronise or self._is_local()):
                self._note_local_use(call)
                return None
            backward = self.enter_backward()
            if backward is None:
                self._run_postponed(call)
                return None
            if self.agreed.hooks_reason is not None or backward.averaging.has_no_weight or not call.plan.indices:
                return None
            section = self._reserve_for(backward, call) if self._compiles(call) else None
            if section is None and call.leaves_out:
                section = self._reserve_whole(backward, call)
            if section is None:
                self._report_not_reserved(backward, call)
                self._hooks.install()
                return None
            return backward, section

    def _reserve_whole(self, backward: SynchronisedBackward, call: SegmentCall) -> int | None:
        """`_reserve_for`, of a section that has been planned with parameters that get no gradient here."""
        if not self.agreed.graph_sections.get(call.every_parameter().fingerprint):
            return None
        call.take_all_in()
        backward.message.note_misfit()  # where it is so on all ranks, the next sequence leaves them out
        return self._reserve_for(backward, call) if self._compiles(call) else None

    def _reserve_for(self, backward: SynchronisedBackward, call: SegmentCall) -> int | None:
        sections = self.agreed.graph_sections.get(call.fingerprint, ())
        backward.launch_complete()
        in_turn = [section for section in sections if backward.is_next(section)][:1]
        if not in_turn and backward.reservations.shares_with_reserved(call.plan.indices):
            # Hooks cannot take what is reduced in part. They may be waiting for what this step skips.
            in_turn = [n for n in sections if backward.waits_in_vain_before(n, self._will_accumulate)]
        section = next((n for n in in_turn if self._may_run_graph(backward, n)), None)
        if section is not None:
            backward.reserve(section)
        return section

    def _may_run_graph(self, backward: SynchronisedBackward, section: int) -> bool:
        """Whether this rank may wait for others in the graph of a section now.

        And in those of all sections that share parameters, if this is one: hooks could not take the rest of them.
        """
        return conductor.may_wait(self, map(self.agreed.event_of, backward.reservations.graphs_to_run_with(section)))

    def _run_postponed(self, call: SegmentCall) -> None:
        assert self._postponed is not None
        self._postponed.append(call)
        self._note_local_use(call)

    def _will_accumulate(self, index: int) -> bool:
        return torch_private.autograd.backward_will_accumulate(self.parameters.tensors[index])

    def _note_local_use(self, call: SegmentCall) -> None:
        if self.local:
            self._forwards.take_back()
        self._used.update(filter(self._will_accumulate, set(call.plan.indices) - self._used))

    def _report_not_reserved(self, backward: SynchronisedBackward, call: SegmentCall) -> None:
        backward.message.note_misfit(not self.agreed.refined)  # [Note: what a first backward shows]
        shared = backward.reservations.shares_with_reserved(
            backward.reservations.leave_to_hooks(set(call.plan.indices))
        )
        if shared:
            raise RuntimeError(
                f"parameter {self.parameters.named(shared)} stands in two captured graphs, one of which did not come "
                "at its place in the agreed sequence after the other had been reduced. Run the parts of the model in "
                "the same order in every step, or set COMPILED_DDP_MODE=hooks."
            )
        hooked = self._with_tensor_hooks(call)
        reason = TENSOR_HOOK if hooked else DOES_NOT_FIT
        self.fallback.report(reason, self.parameters.named(hooked or call.plan.indices))

    # ---- told by the hooks -------------------------------------------------------------------------------------------

    def is_reduced_by_hooks(self, index: int) -> bool:
        """Whether hooks will reduce the gradient that autograd has just accumulated into parameter `index`."""
        with self._lock:
            if self._accumulates_locally:
                return False
            backward = self._enter_with(index)
            if backward is None:
                return True
            # Until the first backward has ended, a parameter of a graph may turn out to be used outside of it too.
            return not self.agreed.refined or index in self.agreed.unused or backward.is_by_hooks(index)

    def gradient_accumulated(self, index: int) -> None:
        """Autograd has accumulated a gradient of parameter `index` into its .grad."""
        with self._lock:
            if self._accumulates_locally:
                if self.local:
                    self._forwards.take_back()
                if self.parameters.tensors[index].grad is not None:  # hooks run for an undefined gradient too
                    self._used.add(index)
            else:
                backward = self._enter_with(index)
                self._refuse_unannounced(index)
                if backward is not None:
                    backward.gradient_arrived(index)
                elif self.parameters.tensors[index].grad is not None:
                    self._used.add(index)

    def _enter_with(self, index: int) -> SynchronisedBackward | None:
        """As `enter_backward`, in a hook of a parameter, which has its gradient already if that begins the backward."""
        begins_here = not self._is_under_way
        backward = self.enter_backward()
        if begins_here and backward is not None:
            backward.begun_by(index)
        return backward

    @property
    def _accumulates_locally(self) -> bool:
        return not self._is_under_way and (self.local or not self._expected)

    def _refuse_unannounced(self, index: int) -> None:
        if index in self.agreed.unused and index not in self._announced:
            raise RuntimeError(
                f"parameter {self.parameters.names[index]} had been used on no rank before, and its first gradient "
                "comes from inside a reentrant checkpoint, too late to be reduced. Use "
                "checkpoint(..., use_reentrant=False)."
            )

    # ---- the end of backward -----------------------------------------------------------------------------------------

    @torch_private.dynamo.untraced
    def _task_ended(self, task: int) -> None:
        with self._lock:
            outer = torch_private.autograd.evaluating_node()
            try:
                # With several devices, another task's thread may end the one that is inside of it.
                if outer is None and not self._tasks.are_running(but=task):
                    conductor.end(task)
            finally:  # only now: other threads must not take the backward for one that has broken off
                self._tasks.close(task)
                self._is_due = False
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
            self.enter_backward()

        handle = node.register_prehook(enter)

    # ---- conducted, [Note: waiting in one order] ---------------------------------------------------------------------

    @property
    def name(self) -> str:
        return self.communicator.group_name

    @property
    def _begin_event(self) -> str:
        return f"{self.name} begin {self.agreed.beginnings}"

    @property
    def _begin_waits(self) -> bool:
        """Whether a backward that begins now waits for other ranks."""
        if self.agreed.must_agree or (self.agreed.among_collectives and self.agreed.graph_sections):
            return True
        return self.uneven is not None and self.uneven.is_training

    @property
    def communicates(self) -> bool:
        """Whether the model has collectives of its own, as far as has been seen."""
        return self._models_collectives.seen

    def takes_part(self) -> bool:
        """Whether the backward that this thread runs has reached this wrapper, or will."""
        if self._is_under_way:
            return self._tasks.are_of_this_thread() or self._skipping == threading.get_ident()
        if self.local or not self._expected:
            return False
        task = torch_private.autograd.current_graph_task()
        if self._reaches[0] != task:
            calls = [call for call in self._live_calls() if call.plan.indices]
            reached = any(call.will_run() for call in calls) or any(
                map(torch_private.autograd.backward_will_accumulate, self.parameters.tensors)
            )
            self._reaches = task, reached
        return self._reaches[1]

    def may_take_part(self) -> bool:
        """The same, or nothing tells it beforehand: who takes it for a part of the backward loses overlap at worst.

        A backward may reach no more than the outputs: of parameters that are unused, or in a reentrant checkpoint.
        """
        if self.takes_part():
            return True
        waits = self._expected and not self.local and not self._is_under_way and self._thread == threading.get_ident()
        has_calls = any(call.plan.indices for call in self._live_calls())
        return waits and not has_calls and self._forwards.waits_alive

    def unsent(self) -> Iterable[str]:
        """Of what ranks wait for in the middle of a backward, that which this rank has not sent in this one."""
        if self._current is None and self._begin_waits:
            yield self._begin_event
        all_by_hooks = self._current is not None and self._some_rank_differs  # on every rank
        if not self.agreed.must_agree and not all_by_hooks:
            for section in self.agreed.graph_places:
                if self._current is None or not self._current.has_launched(section):
                    yield self.agreed.event_of(section)

    def ends_with(self, task: int) -> bool:
        """Whether its backward ends when autograd has ended `task`."""
        return self._is_under_way and self._tasks.has(task) and not self._tasks.are_running(but=task)

    def waits_to_send(self) -> str | None:
        """What it waits for, if for anything, to send the rest of a backward that has ended."""
        return self._begin_event if self._current is None and self._begin_waits else None

    def send_rest(self) -> None:
        """Begin a backward that was postponed, and launch what is left."""
        with self._lock:
            if self._postponed is not None:
                ran = self._postponed
                self._current = self._begin(lambda call: call in ran, lambda _: False)
                self._postponed = None
            assert self._current is not None
            self._send_rest(self._current)

    def end(self) -> None:
        """Wait for the results of what was sent, and leave them in .grad."""
        with self._lock:
            try:
                self._finish()
            finally:
                self._skipping = None

    def send_rest_of_broken(self) -> None:
        """Launch what is left of a backward that an exception ended; of none, all that this wrapper was to have."""
        with self._lock:
            self._tasks.forget()
            self._skipping = None
            self.communicator.refuse_if_failed()
            if self._current is None:
                self._current = self._begin(lambda call: call.synchronise, lambda _: False, weight=0.0)
                self._leave_all_to_hooks(self._current)
            self._postponed, self._is_due = None, False
            if self._current.circumstances.returned is not None:
                self._current.circumstances.returned.end()
            if not self._current.break_off():
                self._current = None
                raise self.communicator.give_up("an exception ended a backward, and what it had reduced is lost")
            self._rest_was_launched = self._current.launch_rest()

    def told_ranks(self) -> Collection[int]:
        """The global ranks that the riders of what was left tell of the exception."""
        return self.communicator.ranks.ranks if self._rest_was_launched else ()

    def end_broken(self, told: Collection[int]) -> None:
        """Wait for the results of that, and drop them. `told` are the ranks that know of it through any wrapper."""
        with self._lock:
            assert self._current is not None
            self._finish_broken(self._current, told)

    # ---- the end of a backward ---------------------------------------------------------------------------------------

    def _finish(self) -> None:
        backward = self._current
        if backward is None:
            return
        try:
            local = self._send_rest(backward)
            backward.wait()
            findings = self._read_riders(backward)
        except BaseException:  # the next forward finishes it
            backward.restore_gradients()
            raise
        self._current = None
        self._models_collectives.end()
        if not local:
            try:
                self._heed(findings)
            except RuntimeError:
                backward.restore_gradients()
                raise
        was_refined = self.agreed.refined
        with self._giving_up_after_surprises():
            reduced = self._conclude(backward, findings, local)
        self.communicator.progress.backward_ended()
        self._hooks.run_users(reduced)
        if self.agreed.refined and not was_refined:
            self._remove_needless_hooks()

    def _send_rest(self, backward: SynchronisedBackward) -> Sequence[int]:
        """Launch what is left; returns the parameters that a torch.autograd.grad returns without reduction."""
        if backward.circumstances.returned is not None:
            backward.circumstances.returned.end()
        local = backward.returned_without_reduction()
        if local:
            backward.message.aborted = True  # ranks that accumulate would miss what this one returns
        backward.launch_rest()
        return local

    @contextlib.contextmanager
    def _giving_up_after_surprises(self) -> Iterator[None]:
        """Where collectives follow that an exception in here would keep this rank from: no other is launched then.

        An error of ours is raised on every rank, or after the last of them.
        """
        try:
            yield
        except BaseException as error:
            if not isinstance(error, RuntimeError) or isinstance(error, torch.OutOfMemoryError):
                self.communicator.give_up(f"{type(error).__name__} ended this rank's part in the end of a backward")
            raise

    @contextlib.contextmanager
    def _giving_up_after_any_exception(self) -> Iterator[None]:
        """The same where the code of a communication hook runs in here, whose RuntimeErrors are none of ours."""
        try:
            yield
        except BaseException as error:
            if not self.communicator.has_failed:
                self.communicator.give_up(f"{type(error).__name__} ended this rank's part in the end of a backward")
            raise

    def _conclude(self, backward: SynchronisedBackward, findings: Findings, local: Sequence[int]) -> Set[int]:
        """What follows when everything has been reduced; returns the parameters whose users' hooks may see .grad."""
        reduced = backward.write_back()
        self._average_sparse(backward)
        if backward.circumstances.returned is not None:
            self._finish_returned(backward, local)
            return set()
        flat_buckets = backward.reduced_buckets()
        if findings.announced:
            reduced |= self._admit(backward, flat_buckets)
        self._used = set()
        if backward.circumstances.expected_gradients is not None:
            self._due |= backward.arrived
        self.reduced(flat_buckets)
        first = not self.agreed.refined
        if first and self._is_everyones_skip(backward):
            self.proof.postpone()
            self.forget_sequence()
            return reduced
        if first:
            reduced |= self._refine(backward)
        averaged = reduced | backward.reduced_in_graphs
        backward.averaging.correct(self.parameters.tensors[index].grad for index in averaged)
        self.proof.conclude(lambda index: backward.outcome(index, reduced))
        if first:
            reduced = reduced | backward.reduced_in_graphs
        if backward.observations.mixed:
            self._refuse_mixed(backward.observations.mixed)
        self._forget_if_outgrown(findings)
        return reduced

    def _average_sparse(self, backward: SynchronisedBackward) -> None:
        error = self.sparse.average(backward.share, contributes=backward.circumstances.returned is None)
        if error is not None:
            self.proof.postpone()
            self._forget_unless_refined()
            raise error

    def _finish_returned(self, backward: SynchronisedBackward, local: Sequence[int]) -> None:
        """The end of a torch.autograd.grad: .grad is as it was, and a backward that accumulates may still come.

        `local` are the parameters whose gradients it returns without reduction.
        """
        self.proof.postpone()
        self._forget_unless_refined()
        if backward.averaging.correction != 1.0:
            raise RuntimeError(
                "torch.autograd.grad returns the mean over all ranks, some of which have joined: use loss.backward(), "
                "or join(divide_by_initial_world_size=True)."
            )
        if local:
            raise RuntimeError(
                f"torch.autograd.grad would return this rank's own gradient of {self.parameters.named(local)}, which "
                "no captured graph has reduced. Use loss.backward() and .grad, or call the forward under no_sync() "
                "and average the gradients by hand."
            )

    def _forget_unless_refined(self) -> None:
        """After a torch.autograd.grad, or a backward that broke off: the sequence may lack what others will run."""
        if not self.agreed.refined:
            self.forget_sequence()

    def _forget_if_outgrown(self, findings: Findings) -> None:
        if self.agreed.outgrown(findings.misfits_on):
            self.forget_sequence()

    @property
    def _on_cpu(self) -> bool:
        """Whether the host may read what it reduces without making a device wait."""
        return self.parameters.on_cpu

    def retrain(self, parameters: TrainedParameters) -> None:
        """Reduce these parameters from the next backward on."""
        self._hooks.remove()
        places = {id(tensor): place for place, tensor in enumerate(parameters.tensors)}
        used = (id(self.parameters.tensors[index]) for index in self._used)
        self._used = {places[tensor] for tensor in used if tensor in places}
        self.parameters = parameters
        self._hooks = GradientHooks(parameters.tensors, self)
        self.forget_sequence()

    def forget_sequence(self) -> None:
        """Let the next synchronised backward bring a new one about. On all ranks before the same backward."""
        self.agreed.begin_anew(self.parameters)
        self._due: Counter[int] = Counter()  # the most gradients that each parameter has got in one backward
        self.proof.begin_anew(self.parameters)
        self._hooks.install()

    def register_comm_hook(self, torch_hook: TorchCommHook) -> None:
        """Let a communication hook reduce every bucket. On all ranks before the same backward."""
        self.torch_hook = torch_hook
        self._models_collectives.stop_looking()
        self.agreed.leave_to_comm_hook(REGISTERED)
        self.proof.switch_off(REGISTERED)
        self.forget_sequence()

    def _remove_needless_hooks(self) -> None:
        """Where graphs reduce everything, only parameters that no rank has used are still watched."""
        if not self.agreed.by_hooks:
            self._hooks.remove(keep=self.agreed.unused)

    def _admit(self, backward: SynchronisedBackward, flat_buckets: list[torch.Tensor]) -> set[int]:
        """Reduce what some rank has used of the unused sections, and launch it in every backward from now on.

        `backward` has reduced the others. Returns these parameters; what was reduced is added to `flat_buckets`.
        """
        assert self.agreed.sequence is not None
        unused = self.agreed.sequence.unused
        used = self._used.union(filter(backward.has_accumulated, self._announced))
        message = backward.message.of_the_same_step()
        late = self._new_backward(unused, SequenceBuffers(unused), used, message, Circumstances())
        with self._giving_up_after_any_exception():
            late.launch_rest()
            late.wait()
        reduced = late.write_back()
        flat_buckets += late.reduced_buckets()
        self.agreed.admit(reduced)
        self.proof.look_again()
        return reduced

    def _heed(self, findings: Findings) -> None:
        """Raise on every rank where the riders say that what was reduced is not the mean of one step."""
        here = self.communicator.rank, self._forwards.value
        if findings.hook_failed_on and self.torch_hook is not None:
            self.torch_hook.note_broken()
            raise hook_failed_elsewhere(*here, findings, self.torch_hook.name)
        if findings.aborted_on:
            self.proof.postpone()
            self._forget_unless_refined()
            raise broke_off_elsewhere(*here, findings, told_at_once=self._rider_reader.was_at_once)
        if self._is_dropped(findings):
            self.proof.postpone()
            self._forget_unless_refined()
            raise lost_elsewhere(*here, findings)
        if findings.counts_differ:
            self._report_different_steps()

    def _report_different_steps(self) -> None:
        error = self._step_check.report(self._forwards.value)
        if error is not None:
            self.proof.postpone()
            raise error

    def _read_riders(self, backward: SynchronisedBackward) -> Findings:
        riders = [*backward.reduced_riders()]
        self._unload(riders)
        findings = self._rider_reader.read(riders, at_once=not self.agreed.refined)
        self._forwards.settle(backwards=findings.backwards, forgiven=findings.forgiven)
        self.proof.heed_wish(findings.verify)
        if findings.state_lost_on and self.bucket_hook is not None:
            self.bucket_hook.begin_anew()
        if findings.aborted_on and self._rider_reader.was_at_once:
            self._lost = backward.message.lost  # to be told in the next one: the error of this one hides it
        return findings

    def _unload(self, riders: Sequence[torch.Tensor]) -> None:
        """Keep the sums of what the user has sent along; every section carries the same."""
        if self._options.piggyback and riders:
            self.carried = riders[-1][-len(self._options.piggyback) :].clone()
            self._passengers = None

    def board(self, values: torch.Tensor) -> None:
        """Send these values, of shape (number of names in `Options.piggyback`,), along with the next riders."""
        self._passengers = values

    def _refuse_mixed(self, mixed: set[int]) -> None:
        again = {index for s in self.agreed.by_hooks if s.reduces_again for index in s.plan.indices}
        self._lost = bool(mixed - again)  # other ranks may have stepped, and are told in the next backward
        if mixed - again:
            raise RuntimeError(
                f"parameter {self.parameters.named(mixed - again)} got a gradient from outside of its captured graph, "
                "which it did on no rank in the first backward (or create_graph=True made autograd copy it); it was "
                "not reduced. Call unwrap() and wrap the model again, or set COMPILED_DDP_MODE=hooks."
            )

    def finish_broken_backward(self) -> bool:
        """Take part, with zeros, in what is left of a backward that an exception ended; other ranks may wait in it.

        Returns whether there was one. A backward that another thread runs is none.
        """
        return self._has_broken_off() and self in conductor.finish_broken(also=[self])

    def is_awaited(self) -> bool:
        """Whether a forward still waits for its backward, and its output has not just been thrown away.

        An exception that is being handled may be what has thrown it away.
        """
        return self._expected and (self._forwards.waits_alive or sys.exc_info()[0] is not None)

    def _finish_broken(self, backward: SynchronisedBackward, told: Collection[int]) -> None:
        backward.wait(results=False)
        findings = self._read_riders(backward)
        self._current = None
        others_know = self._rest_was_launched and self._rider_reader.was_at_once
        try:
            with self._giving_up_after_surprises():
                if others_know or self._is_dropped(findings):
                    self.proof.postpone()
                    self._forget_unless_refined()
                else:
                    knows_alone = not set(self.communicator.ranks.ranks).issubset(told)
                    self._state_lost = backward.lost_hook_state()
                    every_rank_raises = self._end_as_the_others(backward, findings)
                    self._lost = knows_alone and not every_rank_raises
        finally:
            self._used = set()
            self.sparse.forget_use()

    def _is_dropped(self, findings: Findings) -> bool:
        """Whether every rank raises on what the riders say before anything else is reduced: see `_heed`."""
        lost_on_some = 0 < findings.lost_on < self.communicator.world_size
        return findings.aborted_on > 0 or lost_on_some or findings.state_lost_on > 0

    def _end_as_the_others(self, backward: SynchronisedBackward, findings: Findings) -> bool:
        """For the other ranks this backward, broken here, has not broken off: take part in what they do at its end.

        Returns whether this lets all of them raise, so that none steps with the mean that is dropped here.
        """
        with self._giving_up_after_any_exception():
            backward.wait()
            backward.settle_hook_state()
        if findings.counts_differ:
            self._report_different_steps()
        every_rank_raises = self.sparse.average(lambda: 0.0, aborted=True) is not None
        if every_rank_raises or backward.circumstances.returned is not None:
            self.proof.postpone()
            self._forget_unless_refined()
            return every_rank_raises
        if findings.announced:
            self._admit(backward, [])
        if not self.agreed.refined:
            if self._is_everyones_skip(backward):
                self.proof.postpone()
                self.forget_sequence()
                return False
            self._refine(backward)
            self._remove_needless_hooks()
        self.proof.postpone()
        self._forget_if_outgrown(findings)
        return False

    # ---- the first backward of a sequence ----------------------------------------------------------------------------

    def _is_everyones_skip(self, backward: SynchronisedBackward) -> bool:
        """Whether no rank has used anything: such a backward decides no sequence, on no rank."""
        return not self.sparse.names and len(backward.unused_everywhere()) == len(self.parameters.names)

    def _refine(self, backward: SynchronisedBackward) -> set[int]:
        """Fix the sequence after the first synchronised backward, and reduce what it left mixed, which is returned."""
        # What is set apart must be announced in the very backward that uses it: elsewhere riders are read too late.
        # A communication hook gets every bucket in every backward, as under DDP: it may keep memory by index.
        unused = backward.unused_everywhere() if self._on_cpu and self.torch_hook is None else set()
        sequence = self.agreed.refine(backward.observations, unused)
        mixed = [section for section in sequence.sections if section.reduces_again]
        reduced: set[int] = set()
        if mixed:
            used = {index for section in mixed for index in section.plan.indices}
            message, follows = backward.message.of_the_same_step(), Circumstances(reduces_again=backward)
            again = self._new_backward(mixed, SequenceBuffers(mixed), used, message, follows)
            with self._giving_up_after_any_exception():
                again.launch_rest()
                again.wait()
            reduced = again.write_back()
        if self.agreed.hooks_reason is None:
            for section in self.agreed.by_hooks:
                self.fallback.report(section.reason, self.parameters.named(section.plan.indices))
        return reduced

    def close(self, why: str, *, abandon: bool = False) -> None:
        """Remove every hook and give the communicator back, or `abandon` it to the next one that is made.

        `why` is the error of backwards that would still be synchronised.
        """
        self._closed_because = why
        for call in self._live_calls():
            if call.synchronise:
                call.when_reached(functools.partial(_reached, call.until_backward))
        self._hooks.remove()
        self.sparse.close()
        if abandon:
            self.communicator.abandon()
        else:
            self.communicator.close()
