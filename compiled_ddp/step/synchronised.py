"""One synchronised backward.

[Note: what a backward leaves] At its end each .grad is what the wrapper has left in it, at the version at which it did,
or what it was when the backward began. Anything else came past the reduction, whatever brought it: a reentrant backward
behind the launch, a hook that writes to .grad, an assignment. So each place that leaves something in .grad notes what,
and the end compares, by identity and version, in C where nothing has happened.
"""

import functools
import itertools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from compiled_ddp import torch_private
from compiled_ddp.checks.proof import Recording
from compiled_ddp.plan import Section
from compiled_ddp.planning.sequence import Observations
from compiled_ddp.planning.trained_parameters import TrainedParameters
from compiled_ddp.ranks.communicator import Communicator
from compiled_ddp.reducers.averaging import Averaging
from compiled_ddp.reducers.reducer import AllReduceWork, Reducer
from compiled_ddp.step.buffers import SequenceBuffers
from compiled_ddp.step.channel import Flag, Message
from compiled_ddp.step.gradients import ExistingGradients, FoldedGradients, Gradients, GraphGradients, gradient_of
from compiled_ddp.step.hooks import Collected
from compiled_ddp.step.launches import Launch, Launches, Reservations, Usage

# ---- torch.autograd.grad: what it returns, and whether each is the mean that a graph has made ------------------------


class ReturnedGradients:
    """Watches the gradients that a torch.autograd.grad is about to return.

    Nothing can be put in their place, so each must be the very tensor that a graph has reduced.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter], requested: Sequence[int]) -> None:
        self._parameters = {index: parameters[index] for index in requested}
        self._addresses: dict[int, int] = {}
        self._handles: list[Any] = []

    def begin(self) -> None:
        for index, parameter in self._parameters.items():
            watch = functools.partial(self._returned, index)
            self._handles.append(torch_private.tensors.register_own_hook(parameter, watch))

    def end(self) -> None:
        for handle in self._handles:
            handle.remove()

    @torch_private.dynamo.untraced
    def _returned(self, index: int, gradient: torch.Tensor | None) -> None:
        if gradient is not None:  # as it is where this backward brings the parameter none
            self._addresses[index] = gradient.data_ptr()

    def not_reduced(self, graph_gradients: Mapping[int, int | None]) -> list[int]:
        """The parameters with a gradient that was not made by graphs alone.

        `graph_gradients` has the address of each reduced gradient, None where several graphs have reduced parts of it.
        """
        return [
            index
            for index, address in sorted(self._addresses.items())
            if index not in graph_gradients or graph_gradients[index] not in (address, None)
        ]


def watch_returned(parameters: Sequence[torch.nn.Parameter]) -> ReturnedGradients | None:
    """For the running torch.autograd.grad of some of `parameters`; None in a backward that accumulates."""
    requested = []
    for index, parameter in enumerate(parameters):
        fate = torch_private.autograd.fate_of_gradient(parameter)
        if fate == "accumulated":
            return None
        if fate == "returned":
            requested.append(index)
    return ReturnedGradients(parameters, requested) if requested else None


def returns_inputs_alone(parameters: Sequence[torch.nn.Parameter]) -> bool:
    """Whether the running backward is a torch.autograd.grad of tensors that are none of `parameters`."""
    if any(torch_private.autograd.fate_of_gradient(parameter) != "none" for parameter in parameters):
        return False
    return torch_private.autograd.backward_accumulates_nothing()


# ---- the backward ----------------------------------------------------------------------------------------------------


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
    """Told of gradients by hooks and by graphs, it launches them in order, and leaves their mean in .grad.

    A section is launched by the captured segment that reserves it, at the moment it does; otherwise bucket by bucket
    as hooks bring the gradients, and at the end of backward with what there is. [Note: every rank launches in the same
    order]: the cursor only moves forward, over whole buckets, and `launch_rest` moves it to the end, so whatever a
    rank ran, it issues the same collectives with the same sizes in the same order as all others.

    `came_past` are the parameters with something in .grad at its end that nobody expects there and nothing reduced.
    """

    def __init__(
        self,
        sections: Sequence[Section],
        buffers: SequenceBuffers,
        communicator: Communicator,
        parameters: TrainedParameters,
        *,
        usage: Usage,
        message: Message,
        circumstances: Circumstances,
        averaging: Averaging,
        reducer: Reducer,
        recording: Recording | None,
        gradient_as_bucket_view: bool = True,
        existing: ExistingGradients | None = None,
    ) -> None:
        """`reducer` launches what hooks have filled. A backward that verifies has a `recording`.

        With `existing` it has begun as a steady one: `go_on_from` or `go_on_from_graph` follows.
        """
        self.sections, self.circumstances, self.message = sections, circumstances, message
        self.usage, self.averaging, self.observations, self.came_past = usage, averaging, Observations(), set[int]()
        self._again, self._sole_positions = buffers.reduced_again, circumstances.sole_positions(buffers)
        self._parameters, self.existing = parameters, existing or ExistingGradients(parameters, buffers)
        self.folded, self.reservations = FoldedGradients(parameters, self.existing), Reservations(sections)
        self.of_graphs = GraphGradients(copies=averaging.needs_parts and self._may_reduce_again())
        self.launches = Launches(
            buffers,
            self.reservations,
            message=message,
            usage=usage,
            averaging=averaging,
            reducer=reducer,
            communicator=communicator,
            recording=recording,
        )
        self.gradients = Gradients(
            parameters,
            self.launches,
            existing=self.existing,
            of_graphs=self.of_graphs,
            sends_zeros=circumstances.returned is not None,
            reduced_before=circumstances.reduces_again,
            as_view=gradient_as_bucket_view,
        )
        self.positions_in = buffers.positions_in  # the buckets of each section
        # After `break_off`: whether those of all that was launched can be read. Else nobody knows what others do next.
        self.riders_are_known, self._broke_in_launch = True, False  # whether an exception has ended a launch by hooks
        self._cursor, self._rank_progress = 0, communicator.progress
        self._collected: dict[int, Collected] = {}  # by bucket: [Note: collected]

    # ---- what a steady step has done is done: [Note: steady step] ----------------------------------------------------

    def take_over(
        self,
        position: int,
        *,
        missing: set[int],
        gathered: dict[int, torch.Tensor],
        left: Mapping[int, torch.Tensor],
        work: dist.Work | None,
    ) -> None:
        """A bucket has come so far: `missing` has not come, `gathered` is still to be put in, `left` is in .grad."""
        self.launches.take_over(position, missing, gathered, None if work is None else AllReduceWork(work))
        self.gradients.take_over(gathered.values(), left)

    def go_on_from(self, cursor: int, collected: Mapping[int, Collected]) -> None:
        """Hooks have launched the buckets up to `cursor`, and have noted this since."""
        self._cursor = cursor
        self.collect(collected)

    def go_on_from_graph(
        self, of_graph: GraphGradients, riders: torch.Tensor | None, lent: Mapping[int, torch.Tensor]
    ) -> None:
        """The graph of the one section has begun, with this memory; with `riders` it has run, and handed this out."""
        self._cursor = len(self.launches.buckets)
        self.reservations.reserve(0)
        self.launches.has_lent(lent)
        if riders is not None:
            self.reservations.complete(0, riders)
            self.usage.note_gradients(of_graph.addresses)
            self.of_graphs.take_over(of_graph)

    # ---- told by hooks -----------------------------------------------------------------------------------------------

    def gradient_arrived(self, index: int) -> None:
        """Take over a gradient that autograd has just accumulated, and launch every bucket that it completes."""
        position = self._sole_positions.get(index)
        if position is not None and position in self._collected:
            self._take_in(self._collected[position], position)
        if position is None or self.reservations.reserved or index in self.existing.begun_with:
            self.arrived(index)
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
            if position in self._collected:
                self._collected.pop(position).stop()  # a second gradient of one of them is told of
            self.launch_complete()

    @property
    def is_usual(self) -> bool:
        """Whether each gradient goes into one bucket and into an empty .grad, in the order of the steps before."""
        observes, existing = self.circumstances.observes_order, self.existing.were_any
        returned = self.circumstances.returned is not None
        return self._parameters.on_cpu and bool(self._sole_positions) and not observes and not existing and not returned

    def collect(self, collected: Mapping[int, Collected]) -> None:
        """Let gradients be noted as they come, by the position of their bucket: [Note: collected]"""
        self._collected = {**collected}

    def _take_in(self, collected: Collected, position: int) -> Sequence[int]:
        """Gather what has been noted for a bucket; returns of which parameters."""
        indices = collected.take()
        launch = self.launches.buckets[position]
        gradients = [*map(gradient_of, map(self._parameters.tensors.__getitem__, indices))]
        once = len({*indices}) == len(indices) and launch.missing.issuperset(indices)
        if once and all(map(operator.is_not, gradients, itertools.repeat(None))):
            self.gradients.gather_all(position, indices, gradients)
        else:
            for index in indices:
                self.arrived(index)
        return indices

    def _take_in_rest(self) -> None:
        """Gather what has come behind the gradients that were told of."""
        collected, self._collected = self._collected, {}
        for of_bucket in collected.values():
            of_bucket.stop()
        for position, of_bucket in collected.items():
            indices = self._take_in(of_bucket, position)
            if indices and not self.launches.buckets[position].missing:
                of_bucket.note_late(indices[-1])

    def arrived(self, index: int) -> None:
        """As `gradient_arrived`, where more has to be looked at than for most gradients."""
        gradient = self._parameters.tensors[index].grad
        positions = self.launches.positions_by_hooks(index)
        if not positions or gradient is None or not self.existing.has_accumulated(index):
            return
        if self.circumstances.observes_order:
            self.observations.note_arrival("hook", index)
        self.usage.note_gradient(index)
        if self.usage.awaits_more(index) or self._again.issuperset(positions):  # which are launched last, at the end
            self.gradients.check([index], [gradient])
            return
        for position in positions:
            launch = self.launches.buckets[position]
            if launch.work is not None or index not in launch.missing:
                raise self._second_gradient(index)
        self.gradients.fill(index, positions, gradient)
        self.launch_complete()

    def _second_gradient(self, index: int) -> RuntimeError:
        return RuntimeError(
            f"parameter {self._parameters.names[index]} got a second gradient in one backward, after the first one "
            "had been put into its bucket. This happens when reentrant checkpoints share parameters: use "
            "checkpoint(..., use_reentrant=False), or EagerDDP(static_graph=True) if all steps run one graph. And "
            "when two threads run backwards of one wrapper at the same time: let one wait for the other."
        )

    def _may_reduce_again(self) -> bool:
        """Whether what graphs reduce may turn out to be a part of a gradient, or is known to be one."""
        return self.circumstances.observes_order or bool(self._again)

    # ---- the cursor over the sequence: [Note: every rank launches in the same order] --------------------------------

    def is_next(self, section: int) -> bool:
        """Whether a graph may reserve a section: all before it has been launched."""
        return self.reservations.is_free(section) and self._cursor == self.positions_in[section].start

    def has_launched(self, section: int) -> bool:
        """Whether all buckets of a section have been launched, or a graph has reserved them."""
        return self._cursor > self.positions_in[section][-1]

    def waits_in_vain_before(self, section: int, comes: Callable[[int], bool]) -> bool:
        """Whether hooks wait before a section for what will not come; `comes` tells which gradients still may."""
        waiting = self._waiting_before(section)
        if not waiting or not self.reservations.is_free(section):
            return False
        of_graphs = any(self.reservations.waits_for_graph(launch.section) for launch in waiting)
        return not of_graphs and not any(comes(index) for launch in waiting for index in launch.missing)

    def waits_for_skipped_graphs_before(self, section: int) -> bool:
        """Whether all that hooks wait for before a section is of graphs' sections, which were left to them."""
        return all(self.reservations.is_of_graph(launch.section) for launch in self._waiting_before(section))

    def _waiting_before(self, section: int) -> Sequence[Launch]:
        """What is to be launched before a section, in order."""
        return self.launches.buckets[self._cursor : self.positions_in[section].start]

    def reserve(self, section: int) -> None:
        """Hand a section to a captured graph that is about to run; what is missing before it is sent as zeros."""
        positions = self.positions_in[section]
        if self._cursor < positions.start:
            self._launch_to(positions.start)
        self.reservations.reserve(section)
        self._rank_progress.graph_began(self._cursor)
        self._cursor += len(positions)
        if self.circumstances.observes_order:
            self.observations.note_arrival("graph", section)

    def release(self, section: int) -> None:
        """Undo a reservation before the graph has launched anything: hooks launch the section."""
        self.reservations.release(section)
        self._rank_progress.graph_ended()
        self._cursor = self.positions_in[section].start

    def launch_complete(self) -> None:
        """Launch every bucket that hooks have filled, up to the first one that is not."""
        buckets = self.launches.buckets
        while self._cursor < len(buckets):
            launch = buckets[self._cursor]
            if launch.missing or (not launch.bucket.gradients and not self._section_has_begun()):
                return
            self._launch()

    def _section_has_begun(self) -> bool:
        """Whether the bucket before the cursor, of the same section, was launched by hooks."""
        return self._cursor > 0 and self.launches.buckets[self._cursor - 1].work is not None

    def has_rest(self) -> bool:
        """Whether a bucket has not been launched. The last one carries riders, and so the message to every rank."""
        return self._cursor < len(self.launches.buckets)

    def launch_rest(self) -> None:
        """Launch every bucket that has not been, with zeros or an earlier .grad for what this rank did not produce."""
        if self._collected:
            self._take_in_rest()
        if self._cursor < len(self.launches.buckets):
            self._launch_to(len(self.launches.buckets))

    def _launch_to(self, position: int) -> None:
        while self._cursor < position:
            for index in sorted(self.launches.buckets[self._cursor].missing):
                self._note_if_assigned(index)
                self.gradients.fill_missing(index, self._cursor)
            self._launch()

    def _note_if_assigned(self, index: int) -> None:
        """A .grad that has come past every hook, as from a copy of the parameter: it goes into the bucket like others.

        Not beside a graph, which may have left its own part there.
        """
        is_elsewhere = self.circumstances.returned is not None or index in self.of_graphs.indices
        if not is_elsewhere and not self.usage.is_used(index) and self.existing.has_accumulated(index):
            self.usage.note_gradient(index)

    def _launch(self) -> None:
        position = self._cursor
        if self.launches.buckets[position].gathered:
            self.gradients.put_gathered(position)
        flat = self.launches.make_ready(position)
        try:
            self.launches.start(position, flat)
        except BaseException as error:
            self.launch_failed(error, position)
            raise
        self._cursor += 1

    def launch_failed(self, error: BaseException, position: int) -> None:
        """Raise in words what has come of launching a bucket, if that is known."""
        self._broke_in_launch = True
        if self.launches.reducer.has_failed:
            self._send_riders_alone()
            self.launches.explain_failed_reducer(error, position)
        else:
            self.launches.explain(error, position, "could not be launched")

    def _send_riders_alone(self) -> None:
        """To tell the other ranks that the reducer has failed here."""
        self.message.note(Flag.ABORTED, Flag.HOOK_FAILED)
        self._cursor += 1
        self._launch_to(len(self.launches.buckets))

    # ---- an exception ------------------------------------------------------------------------------------------------

    def break_off(self) -> None:
        """An exception has ended this backward; the rest of it can follow if `riders_are_known`.

        The process group's own count of collectives tells what has been launched, however far a graph or a line of ours
        had come. What is left of a bucket that a communication hook reduces by several is launched here.
        """
        if self.circumstances.returned is not None:
            self.circumstances.returned.end()
        self.folded.forget()
        for of_bucket in self._collected.values():
            of_bucket.forget()
        self._collected = {}
        self.gradients.forget_gathered()
        self.message.note(Flag.ABORTED)
        broken = self.reservations.incomplete()
        for section in broken:
            self.reservations.release(section)
        if not self.launches.reducer.counts_collectives:  # and no graph launches anything
            return
        if not self._rank_progress.counts_launches:
            self.riders_are_known = not broken and not self._broke_in_launch
            return
        left = self.launches.launched_collectives
        self._cursor = 0
        while self._cursor < len(self.launches.buckets) and left > 0:
            self.launches.note_launched(self._cursor, left)
            left = max(left - self.launches.collectives[self._cursor], 0)
            self._cursor += 1
        self.riders_are_known = all(map(self.launches.knows_riders_at, range(self._cursor)))

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
            self.message.note(Flag.ABORTED)  # ranks that accumulate would miss what this one returns
        self.launch_rest()
        return not_reduced

    def share(self) -> float:
        """The factor of this rank's gradients in the result. Reads from the device in a weighted mean."""
        return self.averaging.share_of_all(lambda: self.launches.riders()[0])

    def settle_hook_state(self) -> None:
        """This backward has ended well on every rank, so that what was sent in it is used."""
        self.launches.reducer.settle(self.launches.unused_everywhere)

    def write_back(self) -> set[int]:
        """Leave the mean in .grad; returns the parameters that hooks have reduced and some rank has used."""
        self.launches.reducer.settle(self.launches.unused_everywhere)
        if self.circumstances.returned is not None:
            self.gradients.restore_untouched()
            return set()
        self._look_at_what_is_left()
        written = self.gradients.write_back()
        if self.folded.taken:
            self.folded.give_back()
        return written

    def _look_at_what_is_left(self) -> None:
        """Find what has come past the reduction: [Note: what a backward leaves]"""
        tensors, addresses = self._parameters.tensors, self.of_graphs.addresses
        left, empty = self.gradients.left, self.gradients.left_empty
        changed = set(self.of_graphs.changed(tensors)).difference(left) if addresses else ()
        if changed:
            self._find_beside_graphs(changed)
        if len(tensors) not in (len(addresses), len(left) + len(empty)):
            self._find_unexpected(set(range(len(tensors))).difference(addresses, left, empty))
        if left or empty:
            self.came_past.update(self.gradients.changed_since())

    def _find_beside_graphs(self, changed: Iterable[int]) -> None:
        """What is not simply what graphs have left may have another part, which was not reduced."""
        looks = self.circumstances.looks_at_values
        for index in changed:
            gradient = self._parameters.tensors[index].grad
            if self.of_graphs.has_another(index, gradient, looks_at_values=looks):  # type: ignore[arg-type]
                self.observations.graph_and_eager.add(index)

    def _find_unexpected(self, others: Iterable[int]) -> None:
        """Nothing was reduced of these, but for what is announced and will be."""
        for index in others:
            has_come = self._parameters.tensors[index].grad is not None and self.existing.has_accumulated(index)
            if has_come and index not in self.circumstances.newly_used:
                of_graph = index in self.of_graphs.left_out
                (self.observations.graph_and_eager if of_graph else self.came_past).add(index)

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
