"""Captured graphs in a backward: which section one may launch, what it is given, how it runs and what it returns."""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, TypeVar

import torch

from compiled_ddp import torch_private
from compiled_ddp.checks.values import Reference, fill_with_pattern
from compiled_ddp.plan import TENSOR_HOOK, BucketPlan
from compiled_ddp.step.channel import Flag, ranks_using, write_riders
from compiled_ddp.step.conductor import conductor
from compiled_ddp.step.gradients import any_has_gradient, requires_grad
from compiled_ddp.step.graph_call import GraphCall
from compiled_ddp.step.reduction import DOES_NOT_FIT, FROZEN, Reduction
from compiled_ddp.step.synchronised import SynchronisedBackward
from compiled_ddp.torch_private.tensors import tensor_hooks_of

if TYPE_CHECKING:
    from compiled_ddp.step.runtime import Runtime

T = TypeVar("T")

# ---- a section reserved for a graph that is about to run -------------------------------------------------------------


class ReservedSection:
    """Gives the graph its further inputs, and takes what it returns; or hears that it has broken off."""

    def __init__(self, backward: SynchronisedBackward, section: int, plan: BucketPlan, reduction: Reduction) -> None:
        """`plan` is the section's, over the wrapper's parameters."""
        self._backward, self._section, self._plan = backward, section, plan
        self._reduction = reduction
        self._positions = backward.positions_in[section]
        self._unused: set[int] = set()

    # ---- before it runs ----------------------------------------------------------------------------------------------

    def gradients_to_fold(self) -> Sequence[torch.Tensor]:
        """What the graph must fold in, one tensor per gradient in plan order; empty if there is nothing.

        The .grad tensors, which are None until the backward ends and gives the same tensors back, with what earlier
        calls have left: [Note: equal calls].
        """
        returned = self._backward.circumstances.returned is not None  # .grad does not matter
        folded = self._backward.folded
        existing = [] if returned else folded.take(self._plan, self._named_fold)
        return folded.withheld.fold(self._plan, existing, self._named_fold) if folded.withheld.repeated else existing

    def _named_fold(self, place: int) -> AbstractContextManager[object]:
        return self._backward.launches.named_fold(self._positions[place])

    def lend_buffers(self, buckets: Iterable[int]) -> list[torch.Tensor]:
        """Memory for these buckets of the section, for the graph to pack them into."""
        lent = self._backward.launches.lend(map(self._positions.__getitem__, buckets))
        if self._reduction.proof.reference is not None:
            for flat_buffer in lent:
                fill_with_pattern(flat_buffer)
        return lent

    def hook_state(self) -> list[torch.Tensor]:
        """What a communication hook keeps for the section."""
        return self._backward.launches.reducer.state(self._positions)

    def rider_values(self, without_gradient: Iterable[int]) -> torch.Tensor:
        """What the riders carry from this rank, on the plan's device; these parameters get no gradient here.

        Nor have they, where they count as unused, got one in an earlier local backward.
        """
        self._unused = set(without_gradient).difference(self._backward.usage.before)
        riders = self._plan.riders
        values = torch.empty(riders.numel, dtype=torch.float32, device=self._plan.buckets[-1].device)
        return write_riders(values, riders, self._backward.message, self._unused)

    def note_graph(
        self, compiled: Callable[..., object], fingerprint: str, run_without_passes: Callable[[float], Reference]
    ) -> None:
        """It is `compiled` that will run, for the plan with this fingerprint: a new one is to be proven.

        Then it is run without the passes too, which is given the factor of a gradient in its bucket.
        """
        proof = self._reduction.proof
        share = self._backward.message.weight if self._plan.reduction == "weighted" else self._plan.share
        proof.meet_graph(compiled, fingerprint, self._plan.indices, functools.partial(run_without_passes, share))
        if proof.renewed and proof.recording is None:  # in a backward that does not verify here
            self._backward.message.note(Flag.VERIFY)

    def give_up(self) -> None:
        """The graph has launched nothing, and will not: hooks launch the section, others get zeros."""
        self.break_off()
        self._reduction.proof.forget_reference()
        self._backward.release(self._section)

    # ---- while it runs -----------------------------------------------------------------------------------------------

    def run(self, graph: Callable[[], T], group_name: str, *, sees_values: bool) -> T:
        """What the graph returns, which calls the process group `group_name`.

        Without `sees_values` nothing can be computed from what it launches: it runs as a CUDA graph.
        """
        proof, watching = self._reduction.proof, None
        if proof.recording is not None or proof.reference is not None:
            watching = proof.watching(self._plan, group_name, sees_values=sees_values)
        return self._reduction.communicator.run_graph(graph, group_name, watching)

    # ---- after it has run --------------------------------------------------------------------------------------------

    def break_off(self) -> None:
        """An exception has ended the graph: .grad gets back what it was to fold in."""
        self._backward.folded.give_back_as_they_were(self._plan.indices)

    def unused_everywhere(self, riders: torch.Tensor) -> set[int]:
        """The parameters without gradient here that no rank has used, by the reduced `riders`.

        On the CPU; elsewhere a device would have to be waited for, and they keep what the graph has made, zeros.
        """
        if not self._unused or not riders.is_cpu:
            return set()
        ranks = ranks_using(self._plan.riders, riders)
        return {index for index in self._unused if ranks[index] == 0}

    def keep_hook_state(self, state: Sequence[torch.Tensor], left_out: Set[int]) -> None:
        """Note the hook's new state. Before the graph's gradients reach the parameters.

        Nothing becomes of those of the `left_out` parameters.
        """
        self._backward.launches.reducer.keep(self._positions, state, left_out | set(self._without_use()))

    def _without_use(self) -> Iterator[int]:
        """The parameters of which the running backward wants no gradient."""
        for index in self._plan.indices:
            if torch_private.autograd.fate_of_gradient(self._reduction.parameters.tensors[index]) == "none":
                yield index

    def complete(
        self, riders: torch.Tensor, indices: Sequence[int], gradients: Sequence[torch.Tensor], left_out: Set[int]
    ) -> list[torch.Tensor]:
        """The graph has run, with these reduced riders, and gradients of the parameters `indices`.

        The parameters `left_out` get none. Returns what autograd is to get of the gradients.
        """
        backward = self._backward
        if left_out:
            backward.folded.leave_out(left_out)
            backward.of_graphs.note_left_out(left_out)
        backward.reservations.complete(self._section, riders)
        backward.launches.take_back()
        if self._reduction.proof.recording is not None:
            self._reduction.proof.recording.graph_returns(indices, gradients)
        backward.usage.note_gradients(indices)
        return backward.of_graphs.hand_out(indices, gradients)


# ---- which section a graph may launch, if any ------------------------------------------------------------------------


class GraphReservations:
    """Finds the section for a call, or leaves its parameters to hooks and says why."""

    def __init__(self, reduction: Reduction) -> None:
        self._reduction = reduction

    def reserve(self, backward: SynchronisedBackward, call: GraphCall, wrapper: "Runtime") -> ReservedSection | None:
        """The section that `call` may launch in its graph now; None if it must run locally."""
        reduction = self._reduction
        agreed = reduction.agreed
        if agreed.why_not_graph is not None or backward.averaging.has_no_weight or not call.plan.indices:
            return None
        if call.fingerprint not in agreed.graph_sections and reduction.leaves_to_hooks(call):
            return None
        if call.fingerprint in backward.folded.withheld.repeated:
            if self._is_followed_by_its_equal(backward, call):
                backward.folded.withheld.withhold(call)
                return None
            call.note_defined(backward.folded.withheld.indices)
        section = self._reserve_for(backward, call, wrapper)
        if section is None and call.leaves_out and call.every_parameter().fingerprint in agreed.graph_sections:
            # It has been planned with parameters that get no gradient here.
            call.take_all_in()
            backward.message.note(Flag.GRAPH_MISMATCH)  # where it is so on all ranks, the next sequence leaves them out
            section = self._reserve_for(backward, call, wrapper)
        if section is None:
            self._report_not_reserved(backward, call)
            reduction.hooks.install()
            return None
        return ReservedSection(backward, section, call.plan, reduction)

    def _reserve_for(self, backward: SynchronisedBackward, call: GraphCall, wrapper: "Runtime") -> int | None:
        reduction = self._reduction
        section = reduction.agreed.graph_sections.get(call.fingerprint)
        if section is None or not self.compiles(call, repeated=call.fingerprint in backward.folded.withheld.repeated):
            return None
        backward.launch_complete()
        if not backward.is_next(section):
            # Hooks may be waiting for graphs that this step skips, or cannot take what is reduced in part.
            shares = backward.reservations.shares_with_reserved(call.plan.indices)
            if not shares and not backward.waits_for_skipped_graphs_before(section):
                return None
            if not backward.waits_in_vain_before(section, reduction.will_accumulate):
                return None
        if len(conductor.references) > 1 and not self._may_run_graph(backward, section, wrapper):
            return None
        backward.reserve(section)
        return section

    def _is_followed_by_its_equal(self, backward: SynchronisedBackward, call: GraphCall) -> bool:
        """[Note: equal calls] Whether another call, which this backward is still to run, reduces for this one too."""
        equal = (other for other in self._reduction.live_calls() if other.fingerprint == call.fingerprint)
        others = (other for other in equal if other is not call and not backward.folded.withheld.withholds(other))
        return any(other.is_still_to_run() for other in others)

    def _may_run_graph(self, backward: SynchronisedBackward, section: int, wrapper: "Runtime") -> bool:
        """Whether this rank may wait for others in the graph of a section now.

        And in those of all sections that share parameters, if this is one: hooks could not take the rest of them.
        """
        together = backward.reservations.graphs_to_run_with(section)
        return conductor.may_wait(wrapper, map(self._reduction.agreed.event_of, together))

    def _report_not_reserved(self, backward: SynchronisedBackward, call: GraphCall) -> None:
        reduction = self._reduction
        if not reduction.agreed.refined:  # [Note: what a first backward shows]
            backward.message.note(Flag.GRAPH_MISMATCH)
        shared = backward.reservations.shares_with_reserved(
            backward.reservations.leave_to_hooks(set(call.plan.indices))
        )
        if shared:
            raise RuntimeError(
                f"parameter {reduction.parameters.named(shared)} stands in two captured graphs, one of which did not "
                "come at its place in the agreed sequence after the other had been reduced. Run the parts of the model "
                "in the same order in every step, or set COMPILED_DDP_MODE=hooks."
            )
        if reduction.agreed.was_left_for_tensor_hooks(call):
            return  # as has been told when the sequence was made
        hooked, frozen = self.with_tensor_hooks(call), self._frozen(call)
        reason = TENSOR_HOOK if hooked else FROZEN if frozen else self._why_it_does_not_fit()
        reduction.fallback.report(reason, reduction.parameters.named(hooked or frozen or call.plan.indices))

    def _why_it_does_not_fit(self) -> str:
        """With the parameters that have been frozen since: their graph is another one."""
        parameters = self._reduction.parameters
        frozen = [index for index, tensor in enumerate(parameters.tensors) if not tensor.requires_grad]
        return f"{DOES_NOT_FIT}: {parameters.named(frozen)} frozen on this rank since" if frozen else DOES_NOT_FIT

    # ---- what both a backward that begins and a graph that is reached ask --------------------------------------------

    def compiles(self, call: GraphCall, *, repeated: bool) -> bool:
        """Whether the backward that reduces in the graph has been compiled, or can be, before anything is sent.

        `repeated` tells whether this backward calls the graph several times.
        """
        reduction = self._reduction
        parameters = map(reduction.parameters.tensors.__getitem__, call.index_of.values())
        failure = call.compile(folds=repeated or any_has_gradient(parameters))
        if failure is not None:
            reason = f"the compiler failed for the backward of their graph: {failure}"
            reduction.fallback.report(reason, reduction.parameters.named(call.plan.indices))
        return failure is None

    def may_reserve(self, call: GraphCall, *, repeated: bool, accumulates: bool) -> bool:
        """Whether nothing about the call itself keeps it from a section; `repeated` as in `compiles`.

        Where the backward `accumulates`, autograd drops what a graph brings a parameter that was frozen since the
        forward: its rank would keep nothing of a mean in which others find its gradient.
        """
        parameters = [*map(self._reduction.parameters.tensors.__getitem__, call.index_of.values())]
        if any(map(tensor_hooks_of, parameters)) and self.with_tensor_hooks(call):
            return False
        if accumulates and not all(map(requires_grad, parameters)):  # in C, for every parameter in every backward
            return False
        return self.compiles(call, repeated=repeated)

    def with_tensor_hooks(self, call: GraphCall) -> list[int]:
        """The call's parameters whose gradients tensor hooks of the user's see."""
        return list(filter(self._reduction.with_tensor_hooks, call.plan.indices))

    def _frozen(self, call: GraphCall) -> list[int]:
        """The call's parameters that were frozen since."""
        return [index for index in call.plan.indices if not requires_grad(self._reduction.parameters.tensors[index])]
