"""The beginning of a synchronised backward: what it is, which graphs run in it, and what is left to hooks."""

import functools
import itertools
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import torch

from compiled_ddp.plan import (
    AMONG_COLLECTIVES,
    BESIDE_TENSOR_HOOK,
    NOT_CALLED,
    TENSOR_HOOK,
    TOO_SMALL,
    ReductionSequence,
)
from compiled_ddp.planning.small_graphs import large_enough
from compiled_ddp.step.channel import Flag, ForwardNumbers, Message
from compiled_ddp.step.conductor import conductor
from compiled_ddp.step.graph_call import GraphCall, may_leave_out
from compiled_ddp.step.graphs import GraphReservations
from compiled_ddp.step.reduction import Reduction
from compiled_ddp.step.synchronised import Circumstances, ReturnedGradients, SynchronisedBackward

NO_GRAPHS = 0  # in place of a number for those to run: everything is sent at once, and waits for no graph
_LARGEST = 2**31 - 2  # of such numbers but one, in 32 bits


class Beginning:
    """Makes the backwards of a wrapper."""

    def __init__(self, reduction: Reduction, reservations: GraphReservations) -> None:
        self._reduction, self._reservations = reduction, reservations

    # ---- three kinds -------------------------------------------------------------------------------------------------

    def in_task(self, forwards: ForwardNumbers, returned: ReturnedGradients | None) -> SynchronisedBackward:
        """The one that autograd runs in this thread; with `returned` it is a torch.autograd.grad, of these.

        `leave_to_hooks` follows.
        """
        return self._new(
            forwards,
            lambda call: call.is_still_to_run(),
            accumulates=self._reduction.will_accumulate,
            returned=returned,
            graphs_to_run=functools.partial(self._graphs_to_run, accumulates=returned is None),
        )

    def after_task(self, forwards: ForwardNumbers, ran: Sequence[GraphCall]) -> SynchronisedBackward:
        """One that was postponed, and has run these calls locally. It sends everything at once."""
        return self._new(forwards, lambda call: call in ran, ran_locally=ran)

    def without_task(self, forwards: ForwardNumbers, weight: float) -> SynchronisedBackward:
        """One that sends what has been accumulated, or zeros where `weight` is 0; `leave_all_to_hooks` follows."""
        return self._new(forwards, lambda call: call.synchronise, weight=weight)

    def _new(
        self,
        forwards: ForwardNumbers,
        takes_part: Callable[[GraphCall], bool],
        *,
        accumulates: Callable[[int], bool] = lambda _: False,
        returned: ReturnedGradients | None = None,
        weight: float | None = None,
        graphs_to_run: Callable[[], int | None] = lambda: NO_GRAPHS,
        ran_locally: Sequence[GraphCall] = (),
    ) -> SynchronisedBackward:
        """A new synchronised backward after so many forwards, of the rank's own weight unless another one is given.

        `takes_part` picks the calls that make the proposal in the first one, `accumulates` tells which parameters get
        a gradient in this one. `graphs_to_run` tells what `_graphs_to_run` does; the default is for one that sends
        everything at once.
        """
        reduction, carried = self._reduction, self._reduction.carried
        self._take_in_what_is_shared(takes_part)
        sequence, some_rank_differs = self._agree(takes_part, graphs_to_run)
        agreed, options = reduction.agreed, reduction.options
        reduction.proof.begin_backward()
        newly_used: set[int] = set()
        if agreed.unused and returned is None:
            newly_used = {i for i in agreed.unused if i in carried.used or accumulates(i)}
        weight = carried.weight if weight is None else weight
        message = Message(forwards, weight, carried.piggyback, carried.take_flags())
        communicates = reduction.models_collectives.seen
        # Graphs that were postponed have run locally; where models communicate, a sequence is due that knows it.
        misfit = not all(map(reduction.leaves_to_hooks, ran_locally))
        if len(conductor.references) > 1:
            communicates = conductor.any_communicates()
        if misfit or (communicates and agreed.why_not_graph is None and not agreed.among_collectives):
            message.note(Flag.GRAPH_MISMATCH)
        if newly_used:
            message.note(Flag.NEWLY_USED)
        expects_several = options.static_graph and agreed.why_not_graph is not None
        circumstances = Circumstances(
            returned=returned,
            delayed=options.bucket_rule is not None and options.bucket_rule.delayed,
            expected_gradients=carried.expected_gradients if expects_several else None,
            observes_order=not (agreed.refined or reduction.keeps_first_buckets),
            looks_at_values=reduction.parameters.on_cpu or not agreed.refined,
            newly_used=newly_used,
            some_rank_differs=some_rank_differs,
        )
        reduction.models_collectives.begin()
        return reduction.new_backward(
            sequence.launched, agreed.buffers, used_before=carried.used, message=message, circumstances=circumstances
        )

    def _agree(
        self, takes_part: Callable[[GraphCall], bool], graphs_to_run: Callable[[], int | None]
    ) -> tuple[ReductionSequence, bool]:
        """The sequence of the backward that begins, and whether some rank does not run its graphs."""
        agreed, live_calls = self._reduction.agreed, self._reduction.live_calls
        must_agree = agreed.must_agree
        if agreed.sequence is not None and not must_agree and not (agreed.among_collectives and agreed.graph_sections):
            return agreed.sequence, False
        self._reduction.communicator.progress.backward_comes()
        running = [call for call in live_calls() if must_agree and takes_part(call) and call.plan.indices]
        calls, repeated = _last_of_equal(running), _repeated(running)
        wholes = [call.every_parameter().plan for call in calls]
        large = large_enough(wholes, self._reduction.options.smallest_graph_bytes)
        whys = {
            i: TOO_SMALL for whole, is_large in zip(wholes, large, strict=True) if not is_large for i in whole.indices
        }
        kept, of_tensor_hooks = self._without_tensor_hooks([*itertools.compress(calls, large)])
        whys |= of_tensor_hooks
        # Before any rank waits for another.
        compiles = self._reservations.compiles
        plans = [call.plan for call in kept if compiles(call, repeated=call.fingerprint in repeated)]
        sequence = agreed.propose(plans, whys)
        if agreed.graph_sections and (agreed.among_collectives or must_agree):
            return self._tell_whether(graphs_to_run(), sequence)
        return sequence, False

    def _without_tensor_hooks(self, calls: Sequence[GraphCall]) -> tuple[list[GraphCall], dict[int, str]]:
        """The calls that may reduce in their graphs; of the others the parameters, with why hooks reduce them."""
        hooked = {call: self._reservations.with_tensor_hooks(call) for call in calls}
        kept = [call for call, indices in hooked.items() if not indices]
        left = [(call, indices) for call, indices in hooked.items() if indices]
        whys = {index: BESIDE_TENSOR_HOOK for call, _ in left for index in call.every_parameter().plan.indices}
        return kept, whys | {index: TENSOR_HOOK for _, indices in left for index in indices}

    def _take_in_what_is_shared(self, takes_part: Callable[[GraphCall], bool]) -> None:
        """[Note: undefined gradients] Calls that share parameters keep their plans, whatever each of them leaves out.

        Which outputs the others' part of the loss uses is not known yet, and hooks could not take what one of the
        graphs has reduced in part.
        """
        live = self._reduction.live_calls()
        if any(map(may_leave_out, live)):
            indices = {call: call.every_parameter().plan.indices for call in live if takes_part(call)}
            count = Counter(itertools.chain.from_iterable(indices.values()))
            shared = {index for index, number in count.items() if number > 1}
            for call, of_call in indices.items():
                call.take_all_in(not shared.isdisjoint(of_call))

    def _graphs_to_run(self, *, accumulates: bool) -> int | None:
        """A number for the calls that the backward which begins will run, equal calls of each graph counted.

        None unless it will run the graphs of the sequence, all of them and in its order.
        """
        reduction = self._reduction
        sections, running = reduction.agreed.graph_sections, self._running()
        repeated, may_reserve = _repeated(running), self._reservations.may_reserve
        if (
            reduction.carried.weight > 0.0
            and [call.fingerprint for call in _last_of_equal(running)] == sorted(sections, key=sections.__getitem__)
            and all(
                may_reserve(call, repeated=call.fingerprint in repeated, accumulates=accumulates) for call in running
            )
        ):
            return zlib.crc32("".join(call.fingerprint for call in running).encode()) % _LARGEST + 1
        return None

    def _running(self) -> list[GraphCall]:
        """The calls that the backward which begins will run, in its order, and whose graphs are to reduce."""
        reduction, running = self._reduction, []
        for call in reduction.live_calls():
            is_reduced = call.fingerprint in reduction.agreed.graph_sections or not reduction.leaves_to_hooks(call)
            if is_reduced and call.plan.indices and call.is_still_to_run():
                running.append(call)
        return running

    def _tell_whether(self, graphs_to_run: int | None, sequence: ReductionSequence) -> tuple[ReductionSequence, bool]:
        """[Note: models that communicate] Returns the sequence of the backward that begins: maybe another one.

        And whether some rank does not run its graphs, so that hooks reduce everything.
        """
        reduction = self._reduction
        agreed, communicator = reduction.agreed, reduction.communicator
        # The largest number of graphs to run, and of its negative: a difference is one between ranks that run any.
        largest = [graphs_to_run, -graphs_to_run] if graphs_to_run else [NO_GRAPHS, -_LARGEST - 1]
        values = [graphs_to_run is None, conductor.any_communicates(), *largest]
        shared = torch.tensor(values, dtype=torch.int32, device=sequence.sections[0].plan.buckets[0].device)
        communicator.progress.note_wait("whether all ranks run the same graphs, in a model that communicates")
        communicator.maximum(shared)
        communicator.progress.note_wait("")
        differs, among_collectives, most, least_negative = shared.tolist()
        differs, among_collectives = differs or most + least_negative > 0, bool(among_collectives)
        agreed.note_among_collectives(among_collectives)
        some_rank_differs = differs and among_collectives
        if some_rank_differs and not agreed.refined:
            # Nor would this backward show which parameters are used outside of graphs too.
            agreed.leave_to_hooks(AMONG_COLLECTIVES)
            reduction.forget_sequence()
            return agreed.propose([]), some_rank_differs
        return sequence, some_rank_differs

    # ---- what is left to hooks ---------------------------------------------------------------------------------------

    def leave_to_hooks(self, backward: SynchronisedBackward) -> None:
        """Let hooks reduce what the graphs of a backward that has begun in a task will not."""
        reduction, has_no_weight = self._reduction, backward.averaging.has_no_weight
        some_rank_differs = backward.circumstances.some_rank_differs
        if reduction.agreed.expects_graphs and not has_no_weight:
            self._leave_unmatched_to_hooks(backward)
        if has_no_weight or some_rank_differs:
            self.leave_all_to_hooks(backward)
        if some_rank_differs:
            reduction.fallback.report(AMONG_COLLECTIVES, reduction.named(range(len(reduction.parameters.names))))

    def leave_all_to_hooks(self, backward: SynchronisedBackward) -> None:
        """Let no graph reduce anything of a backward that has begun; users' hooks see the mean on every rank."""
        if self._reduction.agreed.graph_sections:
            backward.message.note(Flag.GRAPH_MISMATCH)
        backward.reservations.leave_all_to_hooks()
        self._reduction.hooks.install()

    def _leave_unmatched_to_hooks(self, backward: SynchronisedBackward) -> None:
        """Hooks reduce what this backward's calls and the sequence's graph sections do not both have.

        With all that shares a parameter with it: a gradient must not be reduced partly in a graph.
        """
        reduction = self._reduction
        sections, running = reduction.agreed.graph_sections, self._running()
        for call in running:
            if (
                call.may_leave_out
                and call.leaves_out
                and call.fingerprint not in sections
                and call.every_parameter().fingerprint in sections
            ):
                call.take_all_in()
                backward.message.note(Flag.GRAPH_MISMATCH)  # as in `GraphReservations`
        repeated = _repeated(running) if len(running) > 1 else set[str]()
        if repeated:
            backward.folded.expect(repeated)
        fits, unmatched = set[str](), set[int]()
        for call in reduction.live_calls():
            # A local graph that ran before this backward came to a synchronised forward, which has run eagerly: what it
            # gave is added to what comes, outside of any graph.
            if call.ran_locally_in is not None and call.has_run_locally():
                unmatched.update(call.plan.indices)
        accumulates = backward.circumstances.returned is None
        for call in running:
            is_repeated = call.fingerprint in repeated
            may_reserve = self._reservations.may_reserve(call, repeated=is_repeated, accumulates=accumulates)
            if call.fingerprint in sections and may_reserve:
                fits.add(call.fingerprint)
            else:
                unmatched.update(call.plan.indices)
        not_called = set[int]()
        for fingerprint in sections.keys() - fits:
            not_called.update(backward.sections[sections[fingerprint]].plan.indices)
        if unmatched or not_called:
            # What a step skips is sent as zeros, before the graphs that follow; not for ever what is frozen.
            frozen = any(not reduction.parameters.tensors[index].requires_grad for index in not_called)
            if unmatched or frozen or not fits:
                backward.message.note(Flag.GRAPH_MISMATCH)
            backward.reservations.leave_to_hooks(unmatched | not_called)
            reduction.hooks.install()  # what a graph would have reduced may be used outside of it
            # ... and may have been in this backward before it came here, which hooks then did not see.
            outside = [i for i in not_called if reduction.parameters.tensors[i].grad is not None]
            reduction.carried.note_local_use(filter(reduction.will_accumulate, outside))
        if not_called and not unmatched:  # calls that do not match are reported one by one
            reduction.fallback.report(NOT_CALLED, reduction.named(not_called))


def _repeated(calls: Iterable[GraphCall]) -> set[str]:
    """[Note: equal calls] The fingerprints of several of them."""
    return {fingerprint for fingerprint, count in Counter(call.fingerprint for call in calls).items() if count > 1}


def _last_of_equal(calls: Iterable[GraphCall]) -> list[GraphCall]:
    """[Note: equal calls] Those that reduce."""
    last: dict[str, GraphCall] = {}
    for call in calls:
        last.pop(call.fingerprint, None)
        last[call.fingerprint] = call
    return [*last.values()]
