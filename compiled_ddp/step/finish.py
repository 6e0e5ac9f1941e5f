"""How a synchronised backward ends, well or broken.

    all has been sent -> wait -> read the riders -> raise what they say of other ranks -> stages, see `Ending`

Where an exception has ended the backward on this rank, it takes part in what the others do in these stages.
"""

from collections.abc import Collection

from compiled_ddp.backward.forward_count import ForwardCount
from compiled_ddp.backward.riders import Findings, Flag, RiderReader
from compiled_ddp.backward.synchronised import SynchronisedBackward
from compiled_ddp.checks.same_step import StepCheck
from compiled_ddp.step.ending import Ending
from compiled_ddp.step.errors_elsewhere import broke_off_elsewhere, hook_failed_elsewhere, lost_elsewhere
from compiled_ddp.step.giving_up import GivingUpAfterAnyException, GivingUpAfterSurprises
from compiled_ddp.step.reduction import Reduction
from compiled_ddp.step.under_way import UnderWay


class Finish:
    """Ends backwards. Lasts from one to the next: riders that a GPU tells one backward later."""

    def __init__(self, reduction: Reduction, forwards: ForwardCount, under_way: UnderWay) -> None:
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
                raise
        ending = Ending(reduction, backward, findings, not_reduced)
        with self._giving_up:
            ending.run()
        reduction.communicator.progress.backward_ended()
        if reduction.hooks.deferred:
            reduction.hooks.run_users(ending.averaged(reduction.hooks.deferred))
        if ending.is_first:
            ending.remove_needless_hooks()

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
        riders = backward.launches.riders.of_every_section()
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
        here = reduction.communicator.rank, self._forwards.value
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
