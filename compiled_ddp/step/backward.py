"""One synchronised backward: what has been launched, what is missing, and what becomes of .grad at its end."""

import functools
import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

import torch

from compiled_ddp import torch_private
from compiled_ddp.passes.ops import wait_tensor
from compiled_ddp.plan import FIRST_USED, HOOK_FAILED, Bucket, BucketPlan, Section
from compiled_ddp.planning.sequence import Observations
from compiled_ddp.planning.trained_parameters import TrainedParameters
from compiled_ddp.ranks.communicator import Communicator
from compiled_ddp.ranks.launch_observer import profiled
from compiled_ddp.ranks.progress import failed_in_collective
from compiled_ddp.reducers.averaging import Averaging, Scaling
from compiled_ddp.reducers.reducer import Reducer, Work
from compiled_ddp.step import deferred_hooks
from compiled_ddp.step.flat_buffers import SequenceBuffers
from compiled_ddp.step.reservations import Reservations
from compiled_ddp.step.returned_gradients import ReturnedGradients
from compiled_ddp.step.riders import Message, write_riders


class LaunchedByGraph:
    """What stands for the Work of a bucket that a graph had launched when an exception ended it."""

    def __init__(self, flat: torch.Tensor | None) -> None:
        """`flat` is the memory that was launched, None where nobody knows it."""
        self.flat = flat

    def wait(self) -> None:
        self.wait_for_collectives()

    def wait_for_collectives(self) -> None:
        if self.flat is not None:
            wait_tensor(self.flat)  # a no-op where the graph has waited for it


@dataclass
class _Progress:
    """One bucket in one backward."""

    section: int
    bucket: Bucket
    missing: set[int]
    work: Work | None = None
    summed: torch.Tensor | None = None  # what hooks launched, until the mean has been made of it


@dataclass(frozen=True)
class Circumstances:
    """What one backward is, and what it follows."""

    # With these, a torch.autograd.grad: no .grad is read or written, and hooks send zeros.
    returned: ReturnedGradients | None = None
    delayed: bool = False  # whether nothing is launched before the backward has ended
    # With static_graph, how many gradients a parameter gets in each backward, where that is known. Else one.
    expected_gradients: Mapping[int, int] | None = None
    looks_at_values: bool = False  # whether the host may read gradients, and wait for a device
    reduces_again: "SynchronisedBackward | None" = None  # the backward a part of which this one reduces once more


class SynchronisedBackward:
    """Launches the sections of a sequence in order, whoever produces the gradients.

    A section is launched by the captured segment that reserves it, at the moment it does; otherwise bucket by
    bucket as hooks bring the gradients, and at the end of backward with what there is. [Note: every rank launches in
    the same order]: the cursor only moves forward, over whole buckets, and `finish` moves it to the end, so whatever
    a rank ran, it issues the same collectives with the same sizes in the same order as all others.
    """

    def __init__(
        self,
        sections: Sequence[Section],
        buffers: SequenceBuffers,
        communicator: Communicator,
        parameters: TrainedParameters,
        *,
        used_before: set[int],
        message: Message,
        circumstances: "Circumstances",
        gradient_as_bucket_view: bool = True,
        launching: Callable[[Bucket, torch.Tensor], None],
        reducer: Reducer,
        scaling: Scaling | None = None,
        correction: float = 1.0,
    ) -> None:
        """`launching` is told of every flat buffer right before hooks launch it, which `reducer` does."""
        self.arrived: Counter[int] = Counter()  # how many gradients each parameter has got
        self.sections = sections
        self.circumstances, self.message = circumstances, message
        self.observations = Observations()
        self.pending: dict[int, torch.Tensor] = {}  # .grad tensors that a graph folds in; restored at the end
        self._buffers, self._communicator, self._parameters = buffers, communicator, parameters
        self._used = used_before
        self._as_view = gradient_as_bucket_view
        self.averaging = Averaging(sections[0].plan, weight=message.weight, scaling=scaling, correction=correction)
        self._launching, self._reducer = launching, reducer
        self._progress = [_Progress(place, bucket, set(bucket.indices)) for place, bucket in buffers.buckets]
        self._cursor = 0
        self.reservations = Reservations(sections)
        self._graph_gradients: dict[int, int | None] = {}  # parameter -> its gradient's address; None: several
        self._aliases: dict[int, list[torch.Tensor]] = {}  # of graphs' gradients
        self._accumulated: set[int] = set()  # of the pending: those that this backward brings a .grad
        self._not_accumulated: set[int] = set()  # by torch.autograd.grad, where .grad was there before
        self._untouched: dict[int, torch.Tensor] = {}  # .grad as it was, in case that no rank used the parameter
        self._used_on_ranks: dict[int, list[float]] = {}  # section -> on how many ranks, in the order of its riders
        buffers.renew_held(parameter.grad for parameter in parameters.tensors)
        self._existing = dict(self._take_existing())
        self._begun_with = {
            index: (weakref.ref(parameter.grad), torch_private.tensors.version_of(parameter.grad))
            for index, parameter in enumerate(parameters.tensors)
            if parameter.grad is not None and not parameter.grad.is_inference()
        }
        self._sharing = _with_equal_memory(self._existing)
        self._lent: dict[int, torch.Tensor] = {}  # position -> memory that the running graph fills
        self._rank_progress = communicator.progress
        self._launches_before = self._rank_progress.launches
        self._broke_in_launch = False  # whether an exception has ended a launch by hooks
        # How many reduce each bucket.
        self._collectives = [reducer.collectives(position) for position in range(len(self._progress))]
        origins = [section.origin for section in sections]
        self._rank_progress.backward_began(
            message.forwards.begun, buffers.buckets, origins, parameters.names, self._collectives
        )

    def _take_existing(self) -> Iterator[tuple[int, torch.Tensor]]:
        """The .grad tensors that are not views of their own place in a flat buffer."""
        for index, parameter in enumerate(self._parameters.tensors):
            gradient = parameter.grad
            if gradient is None or self._buffers.holds(index, gradient):
                continue
            if self._buffers.contain(gradient):  # where another gradient will be put before this one is read
                gradient = parameter.grad = gradient.detach().clone()
            yield index, gradient

    # ---- launching ---------------------------------------------------------------------------------------------------

    def is_next(self, section: int) -> bool:
        """Whether a graph may reserve a section: all before it has been launched."""
        return self.reservations.is_free(section) and self._cursor == self._buffers.first_position[section]

    def has_launched(self, section: int) -> bool:
        """Whether all buckets of a section have been launched, or a graph has reserved them."""
        return self._cursor >= self._buffers.first_position[section] + len(self.sections[section].plan.buckets)

    def waits_in_vain_before(self, section: int, comes: Callable[[int], bool]) -> bool:
        """Whether hooks wait before a section for what will not come; `comes` tells which gradients still may."""
        waiting = self._progress[self._cursor : self._buffers.first_position[section]]
        if not waiting or not self.reservations.is_free(section):
            return False
        of_graphs = any(self.reservations.waits_for_graph(progress.section) for progress in waiting)
        return not of_graphs and not any(comes(index) for progress in waiting for index in progress.missing)

    def reserve(self, section: int) -> None:
        """Hand a section to the captured segment that is about to run; what is missing before it is sent as zeros."""
        self._launch_to(self._buffers.first_position[section])
        self.reservations.reserve(section)
        self._rank_progress.graph_began(self._cursor)
        self._cursor += len(self.sections[section].plan.buckets)
        self.observations.arrivals.append(("graph", section))

    def release(self, section: int) -> None:
        """Undo a reservation before the graph has launched anything: hooks launch the section."""
        self.reservations.release(section)
        self._rank_progress.graph_ended()
        self._cursor = self._buffers.first_position[section]

    def take_pending(self, plan: BucketPlan) -> list[torch.Tensor]:
        """Take the .grad tensors that a reserved section must fold in, one per gradient in plan order.

        Empty if there are none, or .grad does not matter. Parameters without a .grad get zeros; the .grad of the
        others is None until the backward ends, when `_restore_pending` gives the same tensors back.
        """
        gradients = [(bucket, gradient) for bucket, gradient in plan.gradients]
        parameters = self._parameters.tensors
        if self.circumstances.returned is not None or all(
            parameters[gradient.index].grad is None for _, gradient in gradients
        ):
            return []
        pending = []
        for bucket, gradient in gradients:
            parameter = parameters[gradient.index]
            existing = parameter.grad
            if existing is not None:
                self._check(gradient.index, existing)
                self.pending[gradient.index] = existing
                if torch_private.autograd.backward_will_accumulate(parameter):
                    self._accumulated.add(gradient.index)
                parameter.grad = None
                if existing.stride() == gradient.stride:
                    pending.append(existing.detach())
                    continue
            laid_out = torch.empty_strided(gradient.size, gradient.stride, dtype=bucket.dtype, device=bucket.device)
            pending.append(laid_out.zero_() if existing is None else laid_out.copy_(existing))
        return pending

    def lend_buffers(self, section: int, buckets: Iterable[int]) -> list[torch.Tensor]:
        """Memory for these buckets of a reserved section, for its graph to pack them into."""
        first = self._buffers.first_position[section]
        self._lent = {first + bucket: self._lend(first + bucket) for bucket in buckets}
        self._rank_progress.graph_fills(self._lent.items())
        return list(self._lent.values())

    def _lend(self, position: int) -> torch.Tensor:
        bucket = self._progress[position].bucket
        if bucket.kept:
            return self._buffers[position].lend()
        return torch.empty(bucket.numel, dtype=bucket.dtype, device=bucket.device)

    def hook_state(self, section: int) -> list[torch.Tensor]:
        """What a communication hook keeps for a reserved section: further inputs of its graph."""
        return self._reducer.state(self._positions_in(section))

    def keep_hook_state(self, section: int, state: Sequence[torch.Tensor], unused: Set[int]) -> None:
        """Note the new state that the section's graph returns. Before its gradients reach the parameters.

        Nothing becomes of those of the `unused` parameters.
        """
        indices = self.sections[section].plan.indices
        tensors = self._parameters.tensors
        left_out = {i for i in indices if torch_private.autograd.fate_of_gradient(tensors[i]) == "none"}
        self._reducer.keep(self._positions_in(section), state, left_out | unused)

    def settle_hook_state(self) -> None:
        """This backward has ended well on every rank, so that what was sent in it is used."""
        self._reducer.settle(self.unused_everywhere)

    def _positions_in(self, section: int) -> range:
        first = self._buffers.first_position[section]
        return range(first, first + len(self.sections[section].plan.buckets))

    def rider_values(self, plan: BucketPlan, unused: Set[int]) -> torch.Tensor:
        """What the riders of a graph carry from this rank, on the plan's device: it produces all but the `unused`."""
        values = torch.empty(plan.riders.numel, dtype=torch.float32, device=plan.buckets[-1].device)
        return write_riders(values, plan.riders, self.message, lambda index: index not in unused)

    def without_gradient(self, call_has_none: Iterable[int]) -> set[int]:
        """Of parameters that a graph brings no gradient here, those without one of an earlier local backward."""
        return set(call_has_none) - self._used

    def leave_out_unused(self, plan: BucketPlan, riders: torch.Tensor, unused: Set[int]) -> set[int]:
        """Of these parameters of a graph that has run, those that no rank has used: nothing becomes of what it made.

        On the CPU; elsewhere a device would have to be waited for, and they keep what the graph has made, zeros.
        """
        if not unused or not riders.is_cpu:
            return set()
        ranks = dict(zip(plan.riders.indices, riders[FIRST_USED:].tolist(), strict=False))
        left_out = {index for index in unused if ranks[index] == 0}
        self._accumulated -= left_out
        return left_out

    def segment_ran(self, section: int, riders: torch.Tensor, gradients: Iterable[tuple[int, torch.Tensor]]) -> None:
        """Note the results of a reserved section: its reduced riders, and where its gradients lie in memory."""
        self.reservations.complete(section, riders)
        self._lent = {}
        for index, gradient in gradients:
            self._graph_gradients[index] = None if index in self._graph_gradients else gradient.data_ptr()
            # Shares the storage, so that autograd adds other contributions out of place and `_find_mixed` sees them.
            self._aliases.setdefault(index, []).append(gradient.detach())
            self.arrived[index] += 1

    def gradient_arrived(self, index: int) -> None:
        """Take over a gradient that autograd has just accumulated, and launch every bucket that it completes."""
        gradient = self._parameters.tensors[index].grad
        positions = self._positions_by_hooks(index)
        if not positions:
            return
        self._refuse_users_hook(index)
        if gradient is None or not self.has_accumulated(index):
            return  # hooks run for an undefined gradient too
        if self.circumstances.expected_gradients is not None and index in self.arrived:
            self.observations.arrivals.remove(("hook", index))  # it is ready with the last one
        self.observations.arrivals.append(("hook", index))
        self._check(index, gradient)
        self.arrived[index] += 1
        if self._awaits_more(index):
            return
        if any(self._progress[p].work is not None or index not in self._progress[p].missing for p in positions):
            raise RuntimeError(
                f"parameter {self._parameters.names[index]} got a second gradient in one backward, after the first one "
                "had been put into its bucket. This happens when reentrant checkpoints share parameters: use "
                "checkpoint(..., use_reentrant=False), or EagerDDP(static_graph=True) if all steps run one graph. And "
                "when two threads run backwards of one wrapper at the same time: let one wait for the other."
            )
        self._fill(index, positions, gradient)
        self.launch_complete()

    def begun_by(self, index: int) -> None:
        """This backward begins with a gradient that has been accumulated before."""
        self._begun_with.pop(index, None)

    def has_accumulated(self, index: int) -> bool:
        """Whether .grad is another one than that with which this backward began, or has been added to since."""
        gradient = self._parameters.tensors[index].grad
        begun_with, version = self._begun_with.get(index, (lambda: None, 0))
        return gradient is not begun_with() or (
            gradient is not None and torch_private.tensors.version_of(gradient) != version
        )

    def _awaits_more(self, index: int) -> bool:
        """Whether more may be added to .grad before it goes into its bucket: `launch_rest` takes what is left."""
        expected = self.circumstances.expected_gradients
        return self.circumstances.delayed or (
            expected is not None and self.arrived[index] < expected.get(index, math.inf)
        )

    def _refuse_users_hook(self, index: int) -> None:
        if deferred_hooks.sees_unreduced(self._parameters.tensors[index]):
            raise RuntimeError(
                f"parameter {self._parameters.names[index]} got a post-accumulate hook in the middle of a backward, "
                "which would see its gradient before it is reduced. Register it before the backward."
            )

    def _check(self, index: int, gradient: torch.Tensor) -> None:
        name = self._parameters.names[index]
        parameter = self._parameters.tensors[index]
        if gradient.layout != torch.strided:
            raise RuntimeError(
                f"parameter {name} got a {gradient.layout} gradient; only dense gradients can be reduced. "
                "Pass sparse=False to its nn.Embedding or nn.EmbeddingBag."
            )
        if gradient.dtype != parameter.dtype or gradient.device != parameter.device:
            raise RuntimeError(
                f"the gradient of parameter {name} is {gradient.dtype} on {gradient.device}, the parameter is "
                f"{parameter.dtype} on {parameter.device}. Assign gradients of the parameter's dtype and device."
            )
        if index in self._sharing:
            raise RuntimeError(
                f"the gradients of parameters {self._parameters.named(sorted(self._sharing))} share memory, so that "
                "each would be added to the others. Assign a tensor of its own to each .grad."
            )

    def _fill(self, index: int, positions: Sequence[int], gradient: torch.Tensor) -> None:
        """[Note: one gradient, several sections] Put a gradient into the buckets that hooks launch for it.

        Where a parameter stands in several graphs' sections, other ranks add up what each of them brings: the whole
        gradient goes into the first and zeros into the others. A section that reduces again waits for their sum.
        """
        first, *others = [p for p in positions if not self._reduces_again(p)] or positions
        for position in (first, *others):
            if position == first:
                self._put(index, gradient, position)
            else:
                self._buffers[position].put_zeros(index)
            self._progress[position].missing.discard(index)
        if self._as_view and index not in self._existing and len(positions) == 1:
            # The gradient's own memory is free from here on, as in DDP.
            self._leave_in_place(index, first)

    def _leave_in_place(self, index: int, position: int) -> None:
        """Let .grad be where the bucket has it; a .grad that is there already stays the same object."""
        parameter, buffer = self._parameters.tensors[index], self._buffers[position]
        if not buffer.holds(index, parameter.grad):
            parameter.grad = buffer.alias(index)

    def _reduces_again(self, position: int) -> bool:
        return self.sections[self._progress[position].section].reduces_again

    def _positions_by_hooks(self, index: int) -> list[int]:
        positions = self._buffers.positions_of.get(index, ())
        return [p for p in positions if not self.reservations.is_reserved(self._progress[p].section)]

    def launch_complete(self) -> None:
        """Launch every bucket that hooks have filled, up to the first one that is not."""
        while self._cursor < len(self._progress):
            progress = self._progress[self._cursor]
            if progress.missing or (not progress.bucket.gradients and not self._section_begun(self._cursor)):
                return
            self._launch(self._cursor)
            self._cursor += 1

    def _section_begun(self, position: int) -> bool:
        """Whether the bucket before `position`, of the same section, was launched by hooks."""
        return position > 0 and self._progress[position - 1].work is not None

    def _launch(self, position: int) -> None:
        progress, buffer = self._progress[position], self._buffers[position]
        buffer.writers.before_read()
        layout = progress.bucket.riders
        if layout is not None and buffer.riders is not None:
            write_riders(buffer.riders, layout, self.message, self._is_used)
        self._launching(progress.bucket, buffer.flat)
        progress.summed = self.averaging.outgoing(buffer.flat)
        try:
            with profiled("launch", self._rank_progress.bucket, position):
                progress.work = self._reducer.start(position, progress.summed, lambda: self._unused_in(progress.bucket))
        except BaseException as error:
            self._broke_in_launch = True
            if self._reducer.has_failed:
                self._tell_of_failed_reducer(error, position)
            else:
                self._explain(error, position, "could not be launched")
            raise
        self._rank_progress.hooks_launched(position)

    def _unused_in(self, bucket: Bucket) -> set[int]:
        return {index for index in bucket.indices if not self._is_used(index)}

    def _explain(self, error: BaseException, position: int, what: str) -> None:
        """Raise a failure of a bucket's collective, in words; note where any other exception came from."""
        hooked = self._reducer.runs_users_code(position)
        if isinstance(error, RuntimeError) and (not hooked or failed_in_collective(error)):
            raise self._communicator.failure(error, f"{self._words(position)} {what}") from error
        if hooked:
            error.add_note(f"in the communication hook, for {self._words(position)}")

    def _tell_of_failed_reducer(self, error: BaseException, position: int) -> None:
        """Only the riders go out from here on, to tell the other ranks."""
        self.message.aborted = self.message.hook_failed = True
        self._cursor = position + 1
        self._launch_to(len(self._progress))
        where = f"{self._reducer.name} failed for {self._words(position)}"
        if isinstance(error, RuntimeError):  # of a collective, maybe
            raise self._communicator.failure(error, where) from error
        error.add_note(where)

    def _is_used(self, index: int) -> bool:
        """Whether this rank has a gradient to reduce, produced since the last synchronised backward."""
        if self.circumstances.returned is not None:
            return False
        return index in self.arrived or index in self._used

    # ---- an exception ------------------------------------------------------------------------------------------------

    def graph_broke(self, plan: BucketPlan) -> None:
        """An exception has ended the graph of a reserved section: give back what it was to fold in."""
        for index in plan.indices:
            if index in self.pending and self._parameters.tensors[index].grad is None:
                self._parameters.tensors[index].grad = self.pending.pop(index)

    def break_off(self) -> bool:
        """Find out what has been launched when an exception ended this backward, so that the rest can follow.

        The process group's own count of collectives tells it, however far a graph or a line of ours had come. What is
        left of a bucket that a communication hook reduces by several is launched here. Returns whether the riders of
        all that was launched can be read; where not, nobody knows what the other ranks do next.
        """
        self.pending.clear()  # the user may have cleared .grad since
        self.message.aborted = True
        broken = self.reservations.incomplete()
        for section in broken:
            self.reservations.release(section)
        if not self._reducer.counts_collectives:  # and no graph launches anything
            return True
        if not self._rank_progress.counts_launches:
            return not broken and not self._broke_in_launch
        left = self._rank_progress.launches - self._launches_before
        self._cursor = 0
        while self._cursor < len(self._progress) and left > 0:
            collectives = self._collectives[self._cursor]
            self._note_launched(self._cursor)
            if left < collectives:
                self._progress[self._cursor].work = self._reducer.start_rest(self._cursor, left)
            left = max(left - collectives, 0)
            self._cursor += 1
        return all(
            progress.bucket.riders is None
            or self.reservations.is_reserved(progress.section)
            or self._riders_at(p) is not None
            for p, progress in enumerate(self._progress[: self._cursor])
        )

    def lost_hook_state(self) -> bool:
        """Whether a graph broke off after a bucket's launch, and nothing tells the hook's new state for it."""
        return any(
            isinstance(progress.work, LaunchedByGraph) and self._reducer.has_state(position)
            for position, progress in enumerate(self._progress)
        )

    def _note_launched(self, position: int) -> None:
        progress = self._progress[position]
        progress.missing.clear()
        if self.reservations.is_reserved(progress.section) or progress.work is not None:
            return
        progress.work = LaunchedByGraph(self._lent.get(position))
        if position not in self._lent:
            self._buffers[position].leave_memory()

    # ---- the end -----------------------------------------------------------------------------------------------------

    def launch_rest(self) -> bool:
        """Launch every bucket that has not been, with zeros or an earlier .grad for what this rank did not produce.

        Returns whether there was one; the last of them carries riders, and so the message to every rank.
        """
        launched = self._cursor < len(self._progress)
        self._launch_to(len(self._progress))
        return launched

    def _launch_to(self, position: int) -> None:
        while self._cursor < position:
            for index in sorted(self._progress[self._cursor].missing):
                self._fill_missing(index, self._cursor)
            self._launch(self._cursor)
            self._cursor += 1

    def _fill_missing(self, index: int, position: int) -> None:
        buffer, gradient = self._buffers[position], self._parameters.tensors[index].grad
        if self.circumstances.returned is not None:
            if gradient is not None and buffer.holds(index, gradient):
                self._untouched[index] = gradient.clone()
            buffer.put_zeros(index)
            return
        summed = [p for p in self._positions_by_hooks(index) if not self._reduces_again(p)]
        if self._reduces_again(position) and summed:
            self._wait(*summed)
            self._put(index, self._sum(index, summed), position)
        elif gradient is None or (summed and position != summed[0]):
            buffer.put_zeros(index)
        else:
            if buffer.holds(index, gradient) and not self._is_used(index):
                self._untouched[index] = gradient.clone()
            self._put(index, gradient, position)

    @torch.no_grad()
    def _put(self, index: int, gradient: torch.Tensor, position: int) -> None:
        """Put this rank's share of a gradient into its bucket.

        In a section that reduces again a part of it is the same on every rank, as it has been reduced before.
        """
        if self._reduces_again(position):
            reduced = (self.circumstances.reduces_again or self).reduced_here(index)
            if reduced is not None:
                gradient = self.averaging.still_to_reduce(gradient, reduced)
        buffer = self._buffers[position]
        if self.averaging.has_no_weight:
            buffer.put_zeros(index)
            return
        buffer.put(index, gradient, self.averaging.share(buffer.bucket.dtype))

    def reduced_here(self, index: int) -> torch.Tensor | None:
        """What this backward has reduced of a gradient, but for what it reduces again."""
        if index in self._aliases:
            return self._sum_of_graphs(index)
        positions = [p for p in self._positions_by_hooks(index) if not self._reduces_again(p)]
        return self._sum(index, positions) if positions else None

    def _sum(self, index: int, positions: Sequence[int]) -> torch.Tensor:
        return _sum_in_order([self._buffers[position].views[index] for position in positions])

    def wait(self, *, results: bool = True) -> None:
        """Wait for every bucket that hooks launched; a graph waits for its own.

        Without `results`, a communication hook computes nothing of them, which may raise: the riders alone can be read.
        Not for a communication hook that has failed on some rank: what the others launched may never end.
        """
        if not self._reducer.counts_collectives:
            self._wait(len(self._progress) - 1)
            riders = self._buffers[len(self._progress) - 1].riders
            if riders is not None and riders.device.type == "cpu" and riders[HOOK_FAILED] > 0:
                self._reducer.note_failed()
            if self._reducer.has_failed:
                return
        self._wait(*range(len(self._progress)), results=results)
        if self._reducer.counts_collectives:
            self._rank_progress.all_launched(self._launches_before + sum(self._collectives))

    def _wait(self, *positions: int, results: bool = True) -> None:
        for position in positions:
            work = self._progress[position].work
            if work is not None:
                self._rank_progress.hooks_await(position)
                try:
                    with profiled("wait for", self._rank_progress.bucket, position):
                        if results:
                            work.wait()
                        else:
                            work.wait_for_collectives()
                except BaseException as error:
                    self._explain(error, position, "was launched but not reduced")
                    raise
        self._rank_progress.hooks_await(None)
        for position in positions:
            self._conclude(position)

    def _conclude(self, position: int) -> None:
        """Make of a sum that has arrived what .grad shall be."""
        progress = self._progress[position]
        if progress.summed is not None:
            summed, progress.summed = progress.summed, None
            section = progress.section
            self.averaging.conclude(summed, self._buffers[position].gradients, lambda: self._awaited_riders_of(section))

    def _awaited_riders_of(self, section: int) -> torch.Tensor:
        carrier = self._progress[self._position_of_riders(section)]
        assert carrier.work is not None
        carrier.work.wait()
        return self._riders_of(section)

    def share(self) -> float:
        """The factor of this rank's gradients in the result. Reads from the device in a weighted mean."""
        return self.averaging.share_of_all(lambda: next(iter(self.reduced_riders())))

    def _position_of_riders(self, section: int) -> int:
        return self._buffers.first_position[section] + len(self.sections[section].plan.buckets) - 1

    def _riders_of(self, section: int) -> torch.Tensor:
        position = self._position_of_riders(section)
        of_graph = isinstance(self._progress[position].work, LaunchedByGraph)
        riders = self._riders_at(position) if of_graph else self._buffers[position].riders
        assert riders is not None
        return riders

    def reduced_buckets(self) -> list[torch.Tensor]:
        """The reduced gradients of every bucket that hooks launched, flat, in launch order and without riders."""
        launched = (p for p, progress in enumerate(self._progress) if progress.work is not None)
        return [self._buffers[p].gradients for p in launched if self._progress[p].bucket.gradients]

    def _riders_at(self, position: int) -> torch.Tensor | None:
        """The riders of a bucket that hooks launched, or a graph that broke off; None where there are none."""
        work, layout = self._progress[position].work, self._progress[position].bucket.riders
        if isinstance(work, LaunchedByGraph):
            return None if work.flat is None or layout is None else layout.view(work.flat)
        return None if work is None else self._buffers[position].riders

    def reduced_riders(self) -> Iterable[torch.Tensor]:
        """The sums over ranks of the riders of every section."""
        for position in range(len(self._progress)):
            riders = self._riders_at(position)
            if riders is not None:
                yield riders
        yield from self.reservations.riders()

    def write_back(self) -> set[int]:
        """Leave the mean in .grad: a view of the bucket, or the tensor that was there before.

        A parameter that no rank has used since the last synchronised backward keeps its .grad untouched. Returns the
        others that hooks have reduced.
        """
        self.settle_hook_state()
        written: set[int] = set()
        if self.circumstances.returned is not None:
            self._restore_untouched()
            return written
        self._find_mixed()
        by_hooks = {index for progress in self._progress if progress.work for index in progress.bucket.indices}
        for index in sorted(by_hooks):
            positions = self._positions_by_hooks(index)
            if self._is_used(index) or any(self._used_elsewhere(position, index) for position in positions):
                again = [position for position in positions if self._reduces_again(position)]
                self._write(index, again or positions)
                written.add(index)
                self._untouched.pop(index, None)
        self._restore_untouched()
        self._restore_pending()
        return written

    @torch.no_grad()
    def _restore_untouched(self) -> None:
        for index, gradient in self._untouched.items():
            self._parameters.tensors[index].grad.copy_(gradient)  # type: ignore[union-attr]

    def restore_gradients(self) -> None:
        """Give back the .grad tensors that this backward has taken, where it ends with an error."""
        if self.circumstances.returned is not None:
            self._restore_untouched()
        self._restore_pending()

    def returned_without_reduction(self) -> Sequence[int]:
        """The parameters whose local gradients a torch.autograd.grad is about to return."""
        returned = self.circumstances.returned
        return [] if returned is None else returned.not_reduced(self._graph_gradients)

    @property
    def reduced_in_graphs(self) -> Set[int]:
        """The parameters whose gradients captured graphs have reduced."""
        return self._graph_gradients.keys()

    def is_by_hooks(self, index: int) -> bool:
        """Whether hooks launch a bucket that carries this gradient."""
        return bool(self._positions_by_hooks(index))

    def outcome(self, index: int, written: Set[int]) -> torch.Tensor | None:
        """What the reduction left of a parameter's gradient; None where no rank has produced one.

        `written` are the parameters whose .grad holds what hooks reduced. Where torch.autograd.grad accumulated
        nothing, or a hook of the user's has taken .grad away, it is what graphs returned.
        """
        gradient = self._parameters.tensors[index].grad
        if index in self._aliases and index not in written:
            if gradient is None or index in self._not_accumulated:
                return self._sum_of_graphs(index)
            return gradient
        return gradient if index in written else None

    def _find_mixed(self) -> None:
        """A .grad that is not what graphs returned has another contribution, which was not reduced.

        What one graph returned is the very tensor; what several did is their sum, which only a look at it can tell.
        """
        for index, address in self._graph_gradients.items():
            gradient = self._parameters.tensors[index].grad
            by_hooks = any(self._progress[position].work for position in self._buffers.positions_of[index])
            if gradient is None or by_hooks:
                continue
            if address is not None:
                has_another = gradient.data_ptr() != address
            else:
                has_another = self.circumstances.looks_at_values and not _are_equal(
                    gradient, self._sum_of_graphs(index)
                )
            if has_another:
                self.observations.mixed.add(index)

    def _sum_of_graphs(self, index: int) -> torch.Tensor:
        return _sum_in_order(self._aliases[index])

    def unused_everywhere(self) -> set[int]:
        """Of the parameters that hooks reduced, those that no rank has used since the last synchronised backward."""
        return {
            index
            for position, progress in enumerate(self._progress)
            if progress.work is not None
            for index in progress.bucket.indices
            if not self._is_used(index) and not self._used_elsewhere(position, index)
        }

    def _used_elsewhere(self, position: int, index: int) -> bool:
        """Whether another rank used a parameter that this one did not.

        Reads from the device, once for each section, on ranks that have such a parameter.
        """
        section = self._progress[position].section
        if section not in self._used_on_ranks:
            self._used_on_ranks[section] = self._riders_of(section)[FIRST_USED:].tolist()
        return self._used_on_ranks[section][self.sections[section].plan.riders.indices.index(index)] > 0

    @torch.no_grad()
    def _write(self, index: int, positions: Sequence[int]) -> None:
        """Leave in .grad the sum of what these buckets have of a gradient."""
        parameter = self._parameters.tensors[index]
        existing = self._existing.get(index)
        if existing is not None:
            existing.copy_(self._sum(index, positions))
            parameter.grad = existing
        elif self._as_view and len(positions) == 1:
            self._leave_in_place(index, positions[0])
        elif self._as_view:
            parameter.grad = self._sum(index, positions)
        elif parameter.grad is None:
            parameter.grad = self._sum(index, positions).clone()
        else:
            parameter.grad.copy_(self._sum(index, positions))

    @torch.no_grad()
    def _restore_pending(self) -> None:
        """Give back the .grad tensors that a graph folded in, with the reduced values."""
        for index, tensor in self.pending.items():
            parameter = self._parameters.tensors[index]
            if parameter.grad is not None:
                tensor.copy_(parameter.grad)
            elif index in self._accumulated:
                continue  # a hook of the user's has taken it away
            else:
                self._not_accumulated.add(index)
            parameter.grad = tensor
        self.pending.clear()

    def _words(self, position: int) -> str:
        return f"{self._rank_progress.bucket(position)} on rank {self._communicator.rank}"


def _sum_in_order(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum that autograd makes of what graphs return in this order, so that every rank rounds alike."""
    return functools.reduce(torch.add, parts)


def _are_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.allclose(one, other, rtol=0.0, atol=0.0, equal_nan=True)


def _with_equal_memory(gradients: Mapping[int, torch.Tensor]) -> set[int]:
    """The parameters whose .grad is, or lies where, another one's."""
    addresses = {i: g.data_ptr() for i, g in gradients.items() if g.layout == torch.strided and g.numel()}
    count = Counter(addresses.values())
    return {index for index, address in addresses.items() if count[address] > 1}
