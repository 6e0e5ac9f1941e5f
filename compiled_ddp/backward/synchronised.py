"""One synchronised backward."""

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

import torch

from compiled_ddp.backward.existing_gradients import ExistingGradients
from compiled_ddp.backward.flat_buffers import SequenceBuffers
from compiled_ddp.backward.folded_gradients import FoldedGradients
from compiled_ddp.backward.gradients import Gradients
from compiled_ddp.backward.graph_gradients import GraphGradients
from compiled_ddp.backward.launcher import Launcher
from compiled_ddp.backward.launches import Launches
from compiled_ddp.backward.reservations import Reservations
from compiled_ddp.backward.returned_gradients import ReturnedGradients
from compiled_ddp.backward.riders import Flag, Message
from compiled_ddp.backward.usage import Usage
from compiled_ddp.plan import Bucket, Section
from compiled_ddp.planning.sequence import Observations
from compiled_ddp.planning.trained_parameters import TrainedParameters
from compiled_ddp.ranks.communicator import Communicator
from compiled_ddp.reducers.averaging import Averaging
from compiled_ddp.reducers.reducer import Reducer


@dataclass(frozen=True)
class Circumstances:
    """What one backward is, and what it follows."""

    # With these, a torch.autograd.grad: no .grad is read or written, and hooks send zeros.
    returned: ReturnedGradients | None = None
    delayed: bool = False  # whether nothing is launched before the backward has ended
    # With static_graph, how many gradients a parameter gets in each backward, where that is known. Else one.
    expected_gradients: Mapping[int, int] | None = None
    observes_order: bool = False  # of arrivals, from which the sequence is made
    looks_at_values: bool = False  # whether the host may read gradients, and wait for a device
    reduces_again: Gradients | None = None  # of the backward a part of which this one reduces once more
    newly_used: Set[int] = frozenset()  # parameters of "unused" sections that it uses here
    some_rank_differs: bool = False  # so that hooks reduce all of it: [Note: models that communicate]

    def sole_positions(self, buffers: SequenceBuffers) -> Mapping[int, int]:
        """The bucket of each gradient that goes into one alone, if no more is noted than when it has arrived."""
        notes_more = self.delayed or self.expected_gradients is not None
        return {} if notes_more else buffers.sole_positions


class SynchronisedBackward:
    """Told of gradients by hooks and by graphs, it lets them be launched in order, and leaves their mean in .grad."""

    def __init__(
        self,
        sections: Sequence[Section],
        buffers: SequenceBuffers,
        communicator: Communicator,
        parameters: TrainedParameters,
        *,
        usage: Usage,
        message: Message,
        circumstances: "Circumstances",
        averaging: Averaging,
        reducer: Reducer,
        launching: Callable[[Bucket, torch.Tensor], None],
        gradient_as_bucket_view: bool = True,
    ) -> None:
        """`launching` is told of every flat buffer right before hooks launch it, which `reducer` does."""
        self.sections, self.circumstances, self.message = sections, circumstances, message
        self.usage, self.averaging, self.observations = usage, averaging, Observations()
        self._parameters = parameters
        self._sole_positions = circumstances.sole_positions(buffers)
        self.existing = ExistingGradients(parameters, buffers)
        self.folded = FoldedGradients(parameters, self.existing)
        self.of_graphs, self.reservations = GraphGradients(), Reservations(sections)
        self.launches = Launches(
            buffers,
            self.reservations,
            message=message,
            usage=usage,
            averaging=averaging,
            reducer=reducer,
            communicator=communicator,
            launching=launching,
        )
        self.gradients = Gradients(
            parameters,
            buffers,
            self.launches,
            usage=usage,
            averaging=averaging,
            existing=self.existing,
            of_graphs=self.of_graphs,
            sends_zeros=circumstances.returned is not None,
            reduced_before=circumstances.reduces_again,
            as_view=gradient_as_bucket_view,
        )
        rank_progress = communicator.progress
        self.launcher = Launcher(buffers, self.launches, self.gradients, self.reservations, message, rank_progress)
        rank_progress.backward_began(
            message.forwards.begun, buffers.buckets, buffers.origins, parameters.names, self.launches.collectives
        )

    # ---- told by hooks -----------------------------------------------------------------------------------------------

    def gradient_arrived(self, index: int) -> None:
        """Take over a gradient that autograd has just accumulated, and launch every bucket that it completes."""
        position = self._sole_positions.get(index)
        if position is None or self.reservations.reserved or index in self.existing.begun_with:
            self._arrived(index)
            return
        gradient, launch = self._parameters.tensors[index].grad, self.launches.buckets[position]
        if gradient is None:
            return  # hooks run for an undefined gradient too
        if launch.work is not None or index not in launch.missing:
            raise self._second_gradient(index)
        if self.circumstances.observes_order:
            self.observations.note_arrival("hook", index)
        self.gradients.gather(index, position, gradient)
        if not launch.missing:
            self.launcher.launch_complete()

    def _arrived(self, index: int) -> None:
        """The same where more has to be looked at than what most gradients of most steps need."""
        gradient = self._parameters.tensors[index].grad
        positions = self.launches.positions_by_hooks(index)
        if not positions or gradient is None or not self.existing.has_accumulated(index):
            return
        if self.circumstances.observes_order:
            self.observations.note_arrival("hook", index)
        self.usage.note_gradient(index)
        if self.usage.awaits_more(index):
            self.gradients.check([index], [gradient])
            return
        for position in positions:
            launch = self.launches.buckets[position]
            if launch.work is not None or index not in launch.missing:
                raise self._second_gradient(index)
        self.gradients.fill(index, positions, gradient)
        self.launcher.launch_complete()

    def _second_gradient(self, index: int) -> RuntimeError:
        return RuntimeError(
            f"parameter {self._parameters.names[index]} got a second gradient in one backward, after the first one "
            "had been put into its bucket. This happens when reentrant checkpoints share parameters: use "
            "checkpoint(..., use_reentrant=False), or EagerDDP(static_graph=True) if all steps run one graph. And "
            "when two threads run backwards of one wrapper at the same time: let one wait for the other."
        )

    def is_by_hooks(self, index: int) -> bool:
        """Whether hooks launch a bucket that carries this gradient."""
        return bool(self.launches.positions_by_hooks(index))

    def reserve(self, section: int) -> None:
        """Hand a section to a captured graph that is about to run."""
        self.launcher.reserve(section)
        if self.circumstances.observes_order:
            self.observations.note_arrival("graph", section)

    # ---- an exception ------------------------------------------------------------------------------------------------

    def break_off(self) -> None:
        """An exception has ended this backward; the rest of it can follow if `launcher.riders_are_known`."""
        if self.circumstances.returned is not None:
            self.circumstances.returned.end()
        self.folded.forget()
        self.gradients.forget_gathered()
        self.message.note(Flag.BROKE_OFF)
        self.launcher.break_off()

    def restore_gradients(self) -> None:
        """Give back the .grad tensors that this backward has taken, where it ends with an error."""
        if self.circumstances.returned is not None:
            self.gradients.restore_untouched()
        self.folded.give_back()

    # ---- the end -----------------------------------------------------------------------------------------------------

    def send_rest(self) -> Sequence[int]:
        """Launch what is left; returns the parameters whose local gradients a torch.autograd.grad will return."""
        returned = self.circumstances.returned
        not_reduced: Sequence[int] = []
        if returned is not None:
            returned.end()
            not_reduced = returned.not_reduced(self.of_graphs.addresses)
        if not_reduced:
            self.message.note(Flag.BROKE_OFF)  # ranks that accumulate would miss what this one returns
        self.launcher.launch_rest()
        return not_reduced

    def share(self) -> float:
        """The factor of this rank's gradients in the result. Reads from the device in a weighted mean."""
        return self.averaging.share_of_all(lambda: self.launches.riders.of_every_section()[0])

    def settle_hook_state(self) -> None:
        """This backward has ended well on every rank, so that what was sent in it is used."""
        self.launches.reducer.settle(self.launches.riders.unused_everywhere)

    def write_back(self) -> set[int]:
        """Leave the mean in .grad; returns the parameters that hooks have reduced and some rank has used."""
        self.launches.reducer.settle(self.launches.riders.unused_everywhere)
        if self.circumstances.returned is not None:
            self.gradients.restore_untouched()
            return set()
        elsewhere = self.of_graphs.found_elsewhere(self._parameters.tensors) if self.of_graphs.addresses else ()
        if elsewhere:
            self._find_graph_and_eager(elsewhere)
        if self.of_graphs.left_out:
            self._find_eager_alone(self.of_graphs.left_out)
        written = self.gradients.write_back()
        if self.folded.taken:
            self.folded.give_back()
        return written

    def _find_graph_and_eager(self, elsewhere: Iterable[tuple[int, torch.Tensor]]) -> None:
        """A .grad that is not what graphs returned has another contribution, which was not reduced."""
        looks = self.circumstances.looks_at_values
        for index, gradient in elsewhere:
            if not self.is_by_hooks(index) and self.of_graphs.has_another(index, gradient, looks_at_values=looks):
                self.observations.graph_and_eager.add(index)

    def _find_eager_alone(self, left_out: Iterable[int]) -> None:
        """A .grad of which graphs were to reduce a part, and have none, came after them: it was not reduced."""
        for index in left_out:
            has_come = self._parameters.tensors[index].grad is not None and self.existing.has_accumulated(index)
            if has_come and not self.is_by_hooks(index):
                self.observations.graph_and_eager.add(index)

    def outcome(self, index: int, written: Set[int]) -> torch.Tensor | None:
        """What the reduction left of a parameter's gradient; None where no rank has produced one.

        `written` are the parameters whose .grad holds what hooks reduced. Where torch.autograd.grad accumulated
        nothing, or a hook of the user's has taken .grad away, it is what graphs returned.
        """
        gradient = self._parameters.tensors[index].grad
        if index in self.of_graphs.indices and index not in written:
            if gradient is None or index in self.folded.not_accumulated:
                return self.of_graphs.sum_of(index)
            return gradient
        return gradient if index in written else None
