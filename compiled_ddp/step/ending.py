"""The end of a synchronised backward: stages, one after another, until one of them says that it is over."""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

import torch

from compiled_ddp.backward.flat_buffers import SequenceBuffers
from compiled_ddp.backward.riders import Findings, Flag
from compiled_ddp.backward.synchronised import Circumstances, SynchronisedBackward
from compiled_ddp.plan import Section
from compiled_ddp.step.giving_up import GivingUpAfterAnyException
from compiled_ddp.step.reduction import Reduction


@dataclass(frozen=True)
class _Also:
    """What a further reduction has brought."""

    reduced: set[int]  # parameters whose mean it has left in .grad
    flat_buckets: list[torch.Tensor]


class Ending:
    """Of one backward, everything of which has been reduced."""

    def __init__(
        self, reduction: Reduction, backward: SynchronisedBackward, findings: Findings, not_reduced: Sequence[int] = ()
    ) -> None:
        """`not_reduced` are the parameters whose local gradients a torch.autograd.grad is about to return."""
        self._reduction, self._backward, self._findings, self._not_reduced = reduction, backward, findings, not_reduced
        self.is_first = not reduction.agreed.refined
        self._flat_buckets: list[torch.Tensor] = []
        self._reduced: set[int] = set()  # parameters with the mean in .grad, that hooks have reduced

    def run(self) -> set[int]:
        """All stages; returns the parameters whose users' hooks may see .grad now."""
        self._reduced = self._backward.write_back()
        if self._reduction.sparse.names:
            self._average_sparse()
        if self._backward.circumstances.returned is not None:
            self._return_from_autograd_grad()
        else:
            self._conclude()
        return self._reduced

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
        if self.is_first or self._reduction.proof.verifies or self._backward.averaging.correction != 1.0:
            self._prove()
        if self._backward.observations.graph_and_eager:
            self._refuse_graph_and_eager()
        self._rebuild()

    def run_broken(self) -> None:
        """Of a backward that is broken on this rank alone: what the others' stages communicate in."""
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
        self._reduction.carried.note_reduced()
        if self._backward.circumstances.expected_gradients is not None:
            self._reduction.carried.note_gradients(self._backward.usage.arrived)
        if self._reduction.receive is not None:
            self._reduction.receive(self._flat_buckets)

    def _is_skipped_by_all(self) -> bool:
        """Whether no rank has used anything in this first backward."""
        reduction = self._reduction
        unused = self._backward.launches.riders.unused_everywhere
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
        unused = backward.launches.riders.unused_everywhere() if sets_apart else set()
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
        averaged = self._reduced | backward.of_graphs.addresses.keys() if averages_anew or self.is_first else set()
        if averages_anew:
            backward.averaging.correct(reduction.parameters.tensors[index].grad for index in averaged)
        if reduction.proof.verifies:
            by_hooks = frozenset(self._reduced)
            reduction.proof.conclude(lambda index: backward.outcome(index, by_hooks))
        if self.is_first:
            self._reduced = averaged

    def _refuse_graph_and_eager(self) -> None:
        """A gradient from outside of its graph has not been reduced, and the sequence does not know it."""
        found = self._backward.observations.graph_and_eager
        reduction = self._reduction
        not_reduced = found.difference(*(s.plan.indices for s in reduction.agreed.by_hooks if s.reduces_again))
        if not_reduced:
            reduction.carried.note_lost()  # other ranks may have stepped, and are told in the next backward
            raise RuntimeError(
                f"parameter {reduction.parameters.named(not_reduced)} got a gradient from outside of its captured "
                "graph, which it did on no rank in the first backward (or create_graph=True made autograd copy it); it "
                "was not reduced. Call unwrap() and wrap the model again, or set COMPILED_DDP_MODE=hooks."
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
            also.launcher.launch_rest()
            also.launches.wait()
        reduced = also.write_back()
        self._reduced |= reduced
        return _Also(reduced, also.launches.flat_gradients())
