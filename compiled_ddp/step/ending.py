"""The end of a synchronised backward: stages, one after another, until one of them says that it is over."""

import functools
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from operator import attrgetter

import torch

from compiled_ddp import torch_private
from compiled_ddp.backward.flat_buffers import SequenceBuffers
from compiled_ddp.backward.riders import Findings, Flag
from compiled_ddp.backward.synchronised import Circumstances, SynchronisedBackward
from compiled_ddp.formatting import format_names
from compiled_ddp.plan import GradientSpec, Section
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
        """Of these parameters, those with the mean in .grad, which users' hooks may see now."""
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
        if averages_anew:
            averaged = self._reduced | backward.of_graphs.addresses.keys()
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
        """Of what was put into the model behind its forward, nothing has reduced a gradient of this backward."""
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
        planned, now = parameters.gradients, parameters.tensors
        converted = [index for index in sorted(indices) if GradientSpec.of(index, now[index]) != planned[index]]
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
            also.launcher.launch_rest()
            also.launches.wait()
        reduced = also.write_back()
        self._reduced |= reduced
        return _Also(reduced, also.launches.flat_gradients())
