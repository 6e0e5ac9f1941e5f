"""Which section of the backward under way a captured graph may launch, if any."""

import operator

from compiled_ddp import torch_private
from compiled_ddp.backward.existing_gradients import any_has_gradient
from compiled_ddp.backward.riders import Flag
from compiled_ddp.backward.synchronised import SynchronisedBackward
from compiled_ddp.plan import TENSOR_HOOK
from compiled_ddp.step.conductor import Conducted, conductor
from compiled_ddp.step.fallback import DOES_NOT_FIT, FROZEN
from compiled_ddp.step.graph_call import GraphCall
from compiled_ddp.step.reduction import Reduction
from compiled_ddp.step.reserved_section import ReservedSection


class GraphReservations:
    """Finds the section for a call, or leaves its parameters to hooks and says why."""

    def __init__(self, reduction: Reduction) -> None:
        self._reduction = reduction

    def reserve(self, backward: SynchronisedBackward, call: GraphCall, wrapper: Conducted) -> ReservedSection | None:
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

    def _reserve_for(self, backward: SynchronisedBackward, call: GraphCall, wrapper: Conducted) -> int | None:
        reduction, launcher = self._reduction, backward.launcher
        section = reduction.agreed.graph_sections.get(call.fingerprint)
        if section is None or not self.compiles(call, repeated=call.fingerprint in backward.folded.withheld.repeated):
            return None
        launcher.launch_complete()
        if not launcher.is_next(section):
            # Hooks may be waiting for graphs that this step skips, or cannot take what is reduced in part.
            shares = backward.reservations.shares_with_reserved(call.plan.indices)
            if not shares and not launcher.waits_for_skipped_graphs_before(section):
                return None
            if not launcher.waits_in_vain_before(section, reduction.will_accumulate):
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

    def _may_run_graph(self, backward: SynchronisedBackward, section: int, wrapper: Conducted) -> bool:
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
        if torch_private.tensors.any_has_hooks(parameters) and self.with_tensor_hooks(call):
            return False
        if accumulates and not all(map(_requires_grad, parameters)):  # in C, for every parameter in every backward
            return False
        return self.compiles(call, repeated=repeated)

    def with_tensor_hooks(self, call: GraphCall) -> list[int]:
        """The call's parameters whose gradients tensor hooks of the user's see."""
        return list(filter(self._reduction.with_tensor_hooks, call.plan.indices))

    def _frozen(self, call: GraphCall) -> list[int]:
        """Those that were frozen since the call."""
        return [index for index in call.plan.indices if not _requires_grad(self._reduction.parameters.tensors[index])]


_requires_grad = operator.attrgetter("requires_grad")
