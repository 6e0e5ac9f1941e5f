"""How a synchronised backward ends, well or broken.

    all has been sent -> wait -> read the riders -> raise what they say of other ranks -> stages, see `Ending`

Where an exception has ended the backward on this rank, it takes part in what the others do in these stages.
"""

import functools
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from operator import attrgetter
from types import TracebackType
from typing import TYPE_CHECKING

import torch

from compiled_ddp import torch_private
from compiled_ddp.checks.same_step import StepCheck
from compiled_ddp.formatting import format_names
from compiled_ddp.plan import Section
from compiled_ddp.ranks.communicator import Communicator
from compiled_ddp.step.buffers import SequenceBuffers
from compiled_ddp.step.channel import Findings, Flag, ForwardCount, RiderReader
from compiled_ddp.step.reduction import Reduction
from compiled_ddp.step.synchronised import Circumstances, SynchronisedBackward

if TYPE_CHECKING:
    from compiled_ddp.step.runtime import UnderWay

# ---- where an exception would keep this rank from collectives that the others launch ---------------------------------


class GivingUpAfterSurprises:
    """Where collectives follow that an exception in here would keep this rank from: no other is launched then.

    An error of ours is raised on every rank, or after the last of them.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: TracebackType | None) -> None:
        if error is not None and self._is_surprise(error):
            self._communicator.give_up(f"{type(error).__name__} ended this rank's part in the end of a backward")

    def _is_surprise(self, error: BaseException) -> bool:
        return not isinstance(error, RuntimeError) or isinstance(error, torch.OutOfMemoryError)


class GivingUpAfterAnyException(GivingUpAfterSurprises):
    """As its base, where a communication hook's code runs in here, whose RuntimeErrors are none of ours."""

    def _is_surprise(self, error: BaseException) -> bool:
        return not self._communicator.has_failed


# ---- what this rank raises because of what riders say of other ranks -------------------------------------------------


def broke_off_elsewhere(rank: int, forward: int, findings: Findings, *, told_at_once: bool) -> RuntimeError:
    """`told_at_once` says whether this backward is the one that broke off, and not the one before it."""
    ranks = findings.ranks_with(Flag.ABORTED)
    if told_at_once:
        return RuntimeError(
            f"rank {rank}: the backward of forward {forward} broke off on {ranks} other rank(s) and was "
            "not reduced. Drop this step on every rank (zero_grad), and look for the exception on the other ranks."
        )
    return RuntimeError(
        f"rank {rank}: the backward of forward {forward} finds that the one before it broke off on "
        f"{ranks} rank(s), which a GPU tells one step late: some ranks have stepped with a part of the "
        "mean, and parameters may differ between ranks. Look for the exception on the other ranks, and load a "
        "checkpoint on every rank."
    )


def lost_elsewhere(rank: int, forward: int, findings: Findings) -> RuntimeError:
    """An exception has ended the backward before this one somewhere, when the other ranks had its mean."""
    ranks, state = findings.ranks_with(Flag.LOST), ""
    if findings.ranks_with(Flag.STATE_LOST):
        state = " What the communication hook kept begins anew on every rank: load it from the checkpoint, too."
    return RuntimeError(
        f"rank {rank}: the backward of forward {forward} finds that an exception ended the one before it on "
        f"{ranks} rank(s) when all of it had been sent: the other ranks have stepped with its mean, and "
        "these perhaps not, so that parameters may differ between ranks. Look for the exception there, and load a "
        f"checkpoint on every rank.{state}"
    )


def hook_failed_elsewhere(rank: int, forward: int, findings: Findings, hook: str) -> RuntimeError:
    """`hook` names a communication hook that was registered in torch's way, which cannot be called again."""
    ranks = findings.ranks_with(Flag.HOOK_FAILED)
    return RuntimeError(
        f"rank {rank}: the communication hook {hook} raised on {ranks} rank(s) in the backward of "
        f"forward {forward}, which was not reduced. Look for the exception on the other ranks; the wrapper cannot "
        "reduce any more."
    )


# ---- the stages of a backward that has ended well --------------------------------------------------------------------


@dataclass(frozen=True)
class _Also:
    """What a further reduction has brought."""

    reduced: set[int]  # parameters whose mean it has left in .grad
    flat_buckets: list[torch.Tensor]


class Ending:
    """The stages that follow when everything of one backward has been reduced."""

    def __init__(
        self, reduction: Reduction, backward: SynchronisedBackward, findings: Findings, not_reduced: Sequence[int] = ()
    ) -> None:
        """`not_reduced` are the parameters whose local gradients a torch.autograd.grad is about to return."""
        self._reduction, self._backward, self._findings, self._not_reduced = reduction, backward, findings, not_reduced
        self.is_first = not reduction.agreed.refined
        self._flat_buckets: list[torch.Tensor] = []
        self._reduced: set[int] = set()  # parameters with the mean in .grad, that hooks have reduced

    def run(self) -> None:
        """All stages."""
        self._reduced = self._backward.write_back()
        if self._reduction.sparse.names:
            self._average_sparse()
        if self._backward.circumstances.returned is not None:
            self._return_from_autograd_grad()
        else:
            self._conclude()

    def averaged(self, among: Set[int]) -> set[int]:
        """The parameters among these with the mean in .grad, which users' hooks may see now."""
        if self._backward.circumstances.returned is not None:
            return set()
        tensors = self._reduction.parameters.tensors
        of_graphs = among & self._backward.of_graphs.indices
        return self._reduced & among | {index for index in of_graphs if tensors[index].grad is not None}

    def _conclude(self) -> None:
        """The stages of a backward that has left its mean in .grad."""
        if self._reduction.receive is not None or not self._findings.are_quiet:
            self._admit_newly_used()
        self._account()
        if self.is_first:
            if self._is_skipped_by_all():
                self._forget_a_skip_of_all()
                return
            self._refine()
        try:
            if self._reduction.proof.verifies or self._backward.averaging.correction != 1.0:
                self._prove()
            if self._backward.observations.graph_and_eager or self._backward.came_past:
                self._refuse_what_came_past()
            newcomers = self._reduction.newcomers()
            if newcomers:
                self._refuse_newcomers(newcomers)
        finally:  # as the other ranks do, which may have nothing to raise
            self._rebuild()

    def run_broken(self) -> None:
        """The stages in which the others communicate, of a backward that is broken on this rank alone."""
        self._admit_newly_used()
        if self.is_first and self._is_skipped_by_all():
            self._forget_a_skip_of_all()
        else:
            if self.is_first:
                self._refine()
            self._reduction.proof.postpone()  # and proves nothing
            self._rebuild()
        self.remove_needless_hooks()

    def remove_needless_hooks(self) -> None:
        """After the first backward of a sequence, when users' hooks have seen what it reduced."""
        if self.is_first and self._reduction.agreed.refined:
            self._reduction.remove_needless_hooks()

    # ---- stages ------------------------------------------------------------------------------------------------------

    def _average_sparse(self) -> None:
        backward = self._backward
        contributes = backward.circumstances.returned is None
        error = self._reduction.sparse.average(backward.share, contributes=contributes)
        if error is not None:
            self._reduction.prove_nothing()
            raise error

    def _return_from_autograd_grad(self) -> None:
        """.grad is as it was, and a backward that accumulates may still come."""
        reduction = self._reduction
        reduction.prove_nothing()
        if self._backward.averaging.correction != 1.0:
            raise RuntimeError(
                "torch.autograd.grad returns the mean over all ranks, some of which have joined: use loss.backward(), "
                "or join(divide_by_initial_world_size=True)."
            )
        if self._not_reduced:
            raise RuntimeError(
                f"torch.autograd.grad would return this rank's own gradient of {reduction.named(self._not_reduced)}, "
                "which no captured graph has reduced. Use loss.backward() and .grad, or call the forward under "
                "no_sync() and average the gradients by hand."
            )

    def _admit_newly_used(self) -> None:
        """Reduce what some rank has used of the unused sections, and launch it in every backward from now on."""
        if self._reduction.receive is not None:
            self._flat_buckets = self._backward.launches.flat_gradients()
        if self._findings.are_quiet or not self._findings.ranks_with(Flag.NEWLY_USED):
            return
        reduction, backward = self._reduction, self._backward
        assert reduction.agreed.sequence is not None
        newly_used = filter(backward.existing.has_accumulated, backward.circumstances.newly_used)
        used = reduction.carried.used.union(newly_used)
        late = self._reduce_also(reduction.agreed.sequence.unused, used, Circumstances())
        self._flat_buckets += late.flat_buckets
        reduction.agreed.admit(late.reduced)
        reduction.proof.look_again()

    def _account(self) -> None:
        """All that this rank had accumulated is in the mean."""
        if self._reduction.carried.used:
            self._reduction.carried.note_reduced()
        if self._backward.circumstances.expected_gradients is not None:
            self._reduction.carried.note_gradients(self._backward.usage.arrived)
        if self._reduction.receive is not None:
            self._reduction.receive(self._flat_buckets)

    def _is_skipped_by_all(self) -> bool:
        """Whether no rank has used anything in this first backward."""
        reduction = self._reduction
        unused = self._backward.launches.unused_everywhere
        return not reduction.sparse.names and len(unused()) == len(reduction.parameters.names)

    def _forget_a_skip_of_all(self) -> None:
        """It decides no sequence, on no rank."""
        self._reduction.proof.postpone()
        self._reduction.forget_sequence()

    def _refine(self) -> None:
        """Fix the sequence after its first backward, and reduce again what graphs and eager code have both used."""
        reduction, backward = self._reduction, self._backward
        # What is set apart must be announced in the very backward that uses it: elsewhere riders are read too late.
        # A communication hook gets every bucket in every backward, as under DDP: it may keep memory by index.
        sets_apart = reduction.parameters.on_cpu and reduction.ddp_hook is None
        unused = backward.launches.unused_everywhere() if sets_apart else set()
        sequence = reduction.agreed.refine(backward.observations, unused)
        again = [section for section in sequence.sections if section.reduces_again]
        if again:
            used = {index for section in again for index in section.plan.indices}
            self._reduce_also(again, used, Circumstances(reduces_again=backward.gradients))
        if reduction.agreed.why_not_graph is None:
            for section in filter(attrgetter("falls_back"), reduction.agreed.by_hooks):
                reduction.fallback.report(section.reason, reduction.parameters.named(section.plan.indices))

    def _prove(self) -> None:
        reduction, backward = self._reduction, self._backward
        averages_anew = backward.averaging.correction != 1.0
        if averages_anew:
            by_graphs = backward.of_graphs.addresses.keys() - backward.folded.not_accumulated
            averaged = self._reduced | by_graphs
            backward.averaging.correct(reduction.parameters.tensors[index].grad for index in averaged)
        if reduction.proof.verifies:
            by_hooks = frozenset(self._reduced)
            factor = None if averages_anew else backward.launches.sum_over_result()
            outcome_of = functools.partial(backward.outcome, written=by_hooks)
            reduction.proof.conclude(outcome_of, by_hooks=by_hooks, factor=factor)

    def _refuse_what_came_past(self) -> None:
        """[Note: what a backward leaves] What the sequence does not know has not been reduced."""
        reduction, backward = self._reduction, self._backward
        again = (section.plan.indices for section in reduction.agreed.by_hooks if section.reduces_again)
        beside_graphs, others = backward.observations.graph_and_eager.difference(*again), backward.came_past
        if not beside_graphs and not others:
            return
        reduction.carried.note_lost()  # other ranks may have stepped, and are told in the next backward
        if beside_graphs:
            self._refuse_converted(beside_graphs)
            raise RuntimeError(
                f"parameter {reduction.named(beside_graphs)} got a gradient from outside of its captured graph, which "
                "it did on no rank in the first backward; it was not reduced. It came from code that uses the "
                "parameter besides the graph, or behind it (inside a reentrant checkpoint: pass use_reentrant=False), "
                "or what writes to .grad or replaces it in a backward. Call unwrap() and wrap the model again, or set "
                "COMPILED_DDP_MODE=hooks. A hook that is to change the mean: register_post_accumulate_grad_hook."
            )
        unused = others & reduction.agreed.unused
        if unused:
            raise RuntimeError(
                f"parameter {reduction.named(unused)} had been used on no rank before, and its first gradient came "
                "too late to be reduced: from inside a reentrant checkpoint, or by an assignment to .grad in the "
                "backward. Use checkpoint(..., use_reentrant=False)."
            )
        raise RuntimeError(
            f"the .grad of parameter {reduction.named(others)} was written to, or replaced, in the backward after its "
            "gradient had been put into its bucket, so that what was written was not reduced. Change the mean in a "
            "hook of register_post_accumulate_grad_hook, which runs when the gradient has been reduced, or this "
            "rank's own gradient in one of Tensor.register_hook."
        )

    def _refuse_newcomers(self, newcomers: Mapping[str, torch.nn.Parameter]) -> None:
        """Raise RuntimeError if one put into the model after its forward got a gradient, which nothing has reduced."""
        in_task = torch_private.autograd.current_graph_task() != -1
        brought = torch_private.autograd.backward_will_accumulate
        late = [name for name, p in newcomers.items() if p.grad is not None and in_task and brought(p)]
        if late:
            self._reduction.carried.note_lost()
            raise RuntimeError(
                f"parameter {format_names(late)} was put into the model after its forward and got a gradient in this "
                "backward, which was not reduced. Put it there before the forward, or in it, on every rank."
            )

    def _refuse_converted(self, indices: Iterable[int]) -> None:
        """Raise RuntimeError where autograd had to copy what a graph returned: the parameter is of another kind now."""
        parameters = self._reduction.parameters
        planned = parameters.gradients
        converted = [index for index in sorted(indices) if parameters.gradient_now(index) != planned[index]]
        if converted:
            raise RuntimeError(
                f"parameter {parameters.named(converted)} was converted (dtype, grad_dtype) after the "
                "forward of this backward had begun. Drop this step on every rank (zero_grad), and convert the model "
                "between a backward and the next forward, which takes it as it is."
            )

    def _rebuild(self) -> None:
        self._reduction.agreed.note_mismatches(int(self._findings.most[Flag.GRAPH_MISMATCH]))
        if not self._findings.are_quiet and self._reduction.agreed.should_rebuild:
            self._reduction.forget_sequence()

    def _reduce_also(self, sections: Sequence[Section], used: set[int], circumstances: Circumstances) -> "_Also":
        """A further reduction at the end of this backward."""
        reduction = self._reduction
        also = reduction.new_backward(
            sections,
            SequenceBuffers(sections),
            used_before=used,
            message=self._backward.message.of_the_same_step(),
            circumstances=circumstances,
        )
        with GivingUpAfterAnyException(reduction.communicator):
            also.launch_rest()
            also.launches.wait()
        reduced = also.write_back()
        self._reduced |= reduced
        return _Also(reduced, also.launches.flat_gradients())


# ---- the end of a backward, well or broken ---------------------------------------------------------------------------


class Finish:
    """Ends backwards. Lasts from one to the next: riders that a GPU tells one backward later."""

    def __init__(self, reduction: Reduction, forwards: ForwardCount, under_way: "UnderWay") -> None:
        self._reduction, self._forwards, self._under_way = reduction, forwards, under_way
        self._step_check = StepCheck(reduction.communicator, reduction.options.check_steps)
        self._reader = RiderReader(reduction.communicator.world_size)
        self._giving_up = GivingUpAfterSurprises(reduction.communicator)

    def finish(self) -> None:
        """Wait for the results of what was sent, and leave them in .grad; a no-op where nothing is under way."""
        reduction, backward = self._reduction, self._under_way.backward
        if backward is None:
            return
        try:
            not_reduced = backward.send_rest()
            backward.launches.wait()
            findings = self._read_riders(backward)
        except BaseException:  # the next forward finishes it
            backward.restore_gradients()
            raise
        self._under_way.end()
        reduction.models_collectives.end()
        if not not_reduced and not findings.are_quiet:
            try:
                self._heed(findings)
            except RuntimeError:
                backward.restore_gradients()
                reduction.carried.note_reduced()
                reduction.sparse.forget_use()
                raise
        ending = Ending(reduction, backward, findings, not_reduced)
        with self._giving_up:
            ending.run()
        reduction.communicator.progress.backward_ended()
        if reduction.hooks.deferred or reduction.sparse.names:
            try:
                reduction.hooks.run_users(ending.averaged(reduction.hooks.deferred))
                reduction.sparse.run_users()
            except BaseException:  # the other ranks' hooks have run, and may have stepped an optimizer
                reduction.carried.note_lost()
                raise
        if ending.is_first:
            ending.remove_needless_hooks()
        reduction.agreed.note_graphs(backward.reservations.reserved.keys())

    def finish_broken(self, *, told: Collection[int], rest_was_launched: bool) -> None:
        """Wait for the results of what was sent after an exception, and drop them.

        `told` are the global ranks that know of it through any wrapper; through this one where something was left to
        launch.
        """
        reduction, backward = self._reduction, self._under_way.backward
        assert backward is not None
        backward.launches.wait(results=False)
        findings = self._read_riders(backward)
        self._under_way.end()
        try:
            with self._giving_up:
                if (rest_was_launched and self._reader.was_at_once) or self._is_dropped(findings):
                    reduction.prove_nothing()
                else:
                    knows_alone = not set(reduction.communicator.ranks.ranks).issubset(told)
                    state = backward.launches.lost_hook_state()
                    reduction.carried.note_lost(tell=False, state=state)
                    error_of_others = self._end_as_the_others(backward, findings)
                    reduction.carried.note_lost(tell=knows_alone and error_of_others is None, state=state)
        finally:
            reduction.carried.note_reduced()
            reduction.sparse.forget_use()

    def _end_as_the_others(self, backward: SynchronisedBackward, findings: Findings) -> RuntimeError | None:
        """For the other ranks this backward, broken here, has not broken off: take part in what they do at its end.

        Returns the error that this raises on all of them, so that none steps with the mean that is dropped here.
        """
        reduction = self._reduction
        with GivingUpAfterAnyException(reduction.communicator):
            backward.launches.wait()
            backward.settle_hook_state()
        self._report_different_steps(findings)
        error = reduction.sparse.average(lambda: 0.0, aborted=True)
        if error is not None or backward.circumstances.returned is not None:
            reduction.prove_nothing()
        else:
            Ending(reduction, backward, findings).run_broken()
        return error

    # ---- riders ------------------------------------------------------------------------------------------------------

    def _read_riders(self, backward: SynchronisedBackward) -> Findings:
        """What all ranks have to tell, taken note of."""
        reduction = self._reduction
        riders = backward.launches.riders()
        if reduction.options.piggyback:
            reduction.carried.take_sums(riders, len(reduction.options.piggyback))
        findings = self._reader.read(riders, at_once=not reduction.agreed.refined)
        self._forwards.settle(backwards=findings.backwards, forgiven=findings.forgiven)
        if findings.are_quiet:
            return findings
        reduction.proof.heed_wish(findings.ranks_with(Flag.VERIFY) > 0)
        if findings.ranks_with(Flag.STATE_LOST) and reduction.traced_hook is not None:
            reduction.traced_hook.begin_anew()
        if findings.ranks_with(Flag.ABORTED) and self._reader.was_at_once:
            # To be told in the next one: the error of this one hides it.
            reduction.carried.note_lost(tell=Flag.LOST in backward.message.flags)
        return findings

    def _heed(self, findings: Findings) -> None:
        """Raise on every rank where the riders say that what was reduced is not the mean of one step."""
        reduction = self._reduction
        here = reduction.communicator.global_rank, self._forwards.value
        if findings.ranks_with(Flag.HOOK_FAILED) and reduction.ddp_hook is not None:
            reduction.ddp_hook.note_broken()
            raise hook_failed_elsewhere(*here, findings, reduction.ddp_hook.name)
        if findings.ranks_with(Flag.ABORTED):
            reduction.prove_nothing()
            raise broke_off_elsewhere(*here, findings, told_at_once=self._reader.was_at_once)
        if self._is_dropped(findings):
            reduction.prove_nothing()
            raise lost_elsewhere(*here, findings)
        self._report_different_steps(findings)

    def _is_dropped(self, findings: Findings) -> bool:
        """Whether every rank raises on what the riders say before anything else is reduced: see `_heed`."""
        lost_on_some = 0 < findings.ranks_with(Flag.LOST) < self._reduction.communicator.world_size
        return findings.ranks_with(Flag.ABORTED) > 0 or lost_on_some or findings.ranks_with(Flag.STATE_LOST) > 0

    def _report_different_steps(self, findings: Findings) -> None:
        """Raise, or warn, on every rank, if they have averaged different steps."""
        if findings.counts_differ:
            error = self._step_check.report(self._forwards.value)
            if error is not None:
                self._reduction.proof.postpone()
                raise error
