"""Between .grad and the buckets that hooks launch: what goes into these, and what comes back."""

from collections.abc import Collection, Sequence

import torch

from compiled_ddp import torch_private
from compiled_ddp.backward import deferred_hooks
from compiled_ddp.backward.existing_gradients import ExistingGradients
from compiled_ddp.backward.flat_buffers import SequenceBuffers
from compiled_ddp.backward.grad_mode import grad_mode_off
from compiled_ddp.backward.graph_gradients import GraphGradients, sum_in_order
from compiled_ddp.backward.launches import Launches
from compiled_ddp.backward.left_by_hooks import LeftByHooks
from compiled_ddp.backward.streams import on_stream
from compiled_ddp.backward.usage import Usage
from compiled_ddp.checks.proof import Recording
from compiled_ddp.planning.trained_parameters import TrainedParameters
from compiled_ddp.ranks.launch_observer import UNNAMED
from compiled_ddp.reducers.averaging import Averaging

# Gradients up to this size are put into their bucket together, when the last one is there: on a CPU that takes a third
# of the time of one by one. Larger ones at once, so that their memory is free for what follows, as in DDP.
_MOST_ELEMENTS_TOGETHER = 2**15
_MOST_ELEMENTS_GATHERED = 2**16  # of all that wait for that: their memory comes on top of the bucket's


class Gradients:
    """Fills buckets from .grad, and leaves in .grad what has become of them."""

    def __init__(
        self,
        parameters: TrainedParameters,
        buffers: SequenceBuffers,
        launches: Launches,
        *,
        usage: Usage,
        averaging: Averaging,
        existing: ExistingGradients,
        of_graphs: GraphGradients,
        sends_zeros: bool,
        reduced_before: "Gradients | None",
        as_view: bool,
        recording: Recording | None = None,
    ) -> None:
        """`reduced_before` has reduced a part of what these `buffers` reduce again, if not the same backward has.

        With `sends_zeros`, in a torch.autograd.grad, .grad is neither read nor written. With `as_view`, .grad becomes
        a view of its bucket where it can. A `recording` is told of all that goes into buckets.
        """
        self._recording = recording
        self._parameters, self._buffers, self._launches = parameters, buffers, launches
        self._usage, self._averaging, self._existing, self._of_graphs = usage, averaging, existing, of_graphs
        self._sends_zeros, self._as_view = sends_zeros, as_view
        self._again, self._before = buffers.reduced_again, reduced_before
        # Where .grad is not simply a view of its bucket.
        self._not_in_place = buffers.shared.union(existing.apart) if existing.apart else buffers.shared
        self.left = LeftByHooks(parameters.tensors)
        self._in_place: set[int] = set()  # parameters whose .grad was left as a view of their bucket
        self._untouched: dict[int, torch.Tensor] = {}  # .grad as it was, in case that no rank used the parameter
        self._gathered = 0  # elements that have come since something was put into a bucket
        self._streams: dict[int, torch.Stream | None] = {}  # on which a gathered gradient was accumulated, elsewhere

    # ---- into buckets ------------------------------------------------------------------------------------------------

    def fill(self, index: int, positions: Sequence[int], gradient: torch.Tensor) -> None:
        """[Note: one gradient, several sections] Put a gradient into the buckets that hooks launch for it.

        Where a parameter stands in several graphs' sections, other ranks add up what each of them brings: the whole
        gradient goes into the first and zeros into the others. A section that reduces again waits for their sum.
        """
        if len(positions) == 1 and positions[0] not in self._again:
            self.gather(index, positions[0], gradient)
            return
        self.check([index], [gradient])
        first, *others = [p for p in positions if p not in self._again] or positions
        self._put(index, gradient, first)
        for position in others:
            self._buffers[position].put_zeros(index)
        self.left.note([index])
        for position in (first, *others):
            self._launches.buckets[position].missing.discard(index)

    def gather(self, index: int, position: int, gradient: torch.Tensor) -> None:
        """Take what autograd has accumulated, to be put into its only bucket together with others on this stream."""
        launch = self._launches.buckets[position]
        if gradient.numel() > _MOST_ELEMENTS_TOGETHER:
            self._usage.note_any([index])
            self.check([index], [gradient])
            self._put(index, gradient, position)
            self._leave(position, [index])
        else:
            launch.gathered[index] = gradient
            self._gathered += gradient.numel()
            if not self._parameters.on_cpu:
                self._streams[index] = self._buffers[position].writers.here()
        launch.missing.discard(index)
        if not launch.missing or self._gathered > _MOST_ELEMENTS_GATHERED:
            self.put_gathered(position)

    def put_gathered(self, position: int) -> None:
        """Put into a bucket what has been gathered for it; .grad is there from here on, where it may be a view."""
        gathered = self._launches.buckets[position].gathered
        if not gathered:
            return
        if self._parameters.on_cpu:
            self._put_together(position, list(gathered), list(gathered.values()))
        else:
            for stream in dict.fromkeys(map(self._streams.__getitem__, gathered)):
                indices = [index for index in gathered if self._streams[index] == stream]
                with on_stream(stream):
                    self._put_together(position, indices, [gathered[index] for index in indices])
        gathered.clear()
        self._gathered = 0

    def _put_together(self, position: int, indices: Sequence[int], gradients: list[torch.Tensor]) -> None:
        """On the current stream."""
        may_be_there = self._existing.were_any  # some, in their bucket: .grad that has been added to
        self._usage.note_any(indices)
        self.check(indices, gradients)
        buffer = self._buffers[position]
        named = self._launches.named_fold(position) if torch_private.autograd.profiler_is_on() else UNNAMED
        with grad_mode_off(), named:
            if self._recording is not None:
                self._recording.put(indices, gradients, self._averaging.share_brought, is_all=False)
            if self._averaging.has_no_weight:
                for index in indices:
                    buffer.put_zeros(index)
            else:
                share = self._averaging.share(buffer.bucket.dtype)
                buffer.put_all(indices, gradients, share, in_place=may_be_there)
        self._leave(position, indices, elsewhere=not may_be_there)

    def forget_gathered(self) -> None:
        """An exception has ended the backward: what is in no bucket yet counts as missing.

        The user may have cleared .grad since, which must not come back.
        """
        for launch in self._launches.buckets:
            launch.missing.update(launch.gathered)
            launch.gathered.clear()

    def check(self, indices: Sequence[int], gradients: Sequence[torch.Tensor]) -> None:
        """Raise RuntimeError unless these gradients, which have just arrived, can be reduced and seen by users."""
        self._existing.check_all(indices, gradients)
        deferred_hooks.refuse_late(self._parameters, indices)

    def fill_missing(self, index: int, position: int) -> None:
        """Put zeros into a bucket that is about to be launched, or an earlier .grad that is still to be reduced."""
        buffer, gradient = self._buffers[position], self._parameters.tensors[index].grad
        if self._sends_zeros:
            if gradient is not None and buffer.holds(index, gradient):
                self._untouched[index] = gradient.clone()
            buffer.put_zeros(index)
            return
        summed = [p for p in self._launches.positions_by_hooks(index) if p not in self._again]
        if position in self._again and summed:
            self._launches.wait_for(*summed)
            self._put(index, self._sum(index, summed), position)
        elif gradient is None or (summed and position != summed[0]):
            buffer.put_zeros(index)
        else:
            if buffer.holds(index, gradient) and not self._usage.is_used(index):
                self._untouched[index] = gradient.clone()
            self._put(index, gradient, position)
        self.left.note([index])

    @torch.no_grad()
    def _put(self, index: int, gradient: torch.Tensor, position: int) -> None:
        """Put this rank's share of a gradient into its bucket.

        In a section that reduces again a part of it is the same on every rank, as it has been reduced before.
        """
        if position in self._again:
            reduced = (self._before or self)._reduced_so_far(index)
            if reduced is not None:
                gradient = self._averaging.still_to_reduce(gradient, reduced)
        buffer = self._buffers[position]
        if self._recording is not None:
            is_again = position in self._again
            self._recording.put([index], [gradient], self._averaging.share_brought, is_all=is_again)
        if self._averaging.has_no_weight:
            buffer.put_zeros(index)
            return
        with self._launches.named_fold(position) if torch_private.autograd.profiler_is_on() else UNNAMED:
            buffer.put(index, gradient, self._averaging.share(buffer.bucket.dtype))

    def _reduced_so_far(self, index: int) -> torch.Tensor | None:
        """What this backward has reduced of a gradient, except what it reduces again."""
        if index in self._of_graphs.indices:
            return self._of_graphs.sum_of(index)
        positions = [p for p in self._launches.positions_by_hooks(index) if p not in self._again]
        return self._sum(index, positions) if positions else None

    def _sum(self, index: int, positions: Sequence[int]) -> torch.Tensor:
        return sum_in_order([self._buffers[position].views[index] for position in positions])

    # ---- into .grad --------------------------------------------------------------------------------------------------

    def changed_since(self) -> list[int]:
        """The parameters whose .grad somebody has written to, or replaced, since it was put into its bucket."""
        changed = self.left.take_changed()
        if not changed:
            return []
        self._in_place.difference_update(changed)
        return [index for index in changed if self._parameters.tensors[index].grad is not None]

    def write_back(self) -> set[int]:
        """Leave the mean in .grad of what hooks reduced: a view of the bucket, or the tensor that was there before.

        A parameter that no rank has used since the last synchronised backward keeps its .grad untouched. Returns the
        others.
        """
        written: set[int] = set()
        for position, launch in enumerate(self._launches.buckets):
            if launch.work is None:
                continue  # a graph has launched it
            used = self._launches.riders.used_on_any_rank(position)
            if self._as_view and not used <= self._in_place:
                self._buffers[position].leave_in_place(
                    used - self._in_place - self._not_in_place, self._parameters.tensors
                )
            written |= used
        for index in self._untouched.keys() & written:
            del self._untouched[index]
        apart = written & self._not_in_place if self._as_view else written
        if apart:
            self._write_all(sorted(apart))
        if self._untouched:
            self.restore_untouched()
        return written

    def _write_all(self, indices: Sequence[int]) -> None:
        with grad_mode_off():
            for index in indices:
                positions = self._launches.positions_by_hooks(index)
                self._write(index, [position for position in positions if position in self._again] or positions)

    def restore_untouched(self) -> None:
        """Let .grad be as it was where buckets were filled with zeros in its place."""
        with grad_mode_off():
            for index, gradient in self._untouched.items():
                self._parameters.tensors[index].grad.copy_(gradient)  # type: ignore[union-attr]

    def _write(self, index: int, positions: Sequence[int]) -> None:
        """Leave in .grad the sum of what these buckets have of a gradient, which is not in place."""
        parameter = self._parameters.tensors[index]
        existing = self._existing.apart.get(index)
        if existing is not None:
            existing.copy_(self._sum(index, positions))
            parameter.grad = existing
        elif self._as_view and len(positions) == 1:
            self._buffers[positions[0]].leave_in_place([index], self._parameters.tensors)
        elif self._as_view:
            parameter.grad = self._sum(index, positions)
        elif parameter.grad is None:
            parameter.grad = self._sum(index, positions).clone()
        else:
            parameter.grad.copy_(self._sum(index, positions))

    def _leave(self, position: int, indices: Collection[int], *, elsewhere: bool = False) -> None:
        """A bucket has been filled with these: let .grad be where it has them, if it may be, and note what is there.

        `elsewhere` tells that none is there yet.
        """
        own: Collection[int] = ()
        if self._as_view:
            own = indices if self._not_in_place.isdisjoint(indices) else set(indices) - self._not_in_place
        if elsewhere and own:
            self.left.note_new(own, self._buffers[position].put_in_place(own, self._parameters.tensors))
        elif own:
            self._buffers[position].leave_in_place(own, self._parameters.tensors)
            self.left.note(own)
        self._in_place.update(own)
        if len(own) < len(indices):
            self.left.note(set(indices).difference(own))
