"""Between .grad and the buckets, in one backward: what goes into these, and what comes back."""

import contextlib
import functools
import itertools
import operator
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager

import torch

from compiled_ddp import torch_private
from compiled_ddp.plan import Bucket, BucketPlan, Gradient
from compiled_ddp.planning.trained_parameters import TrainedParameters
from compiled_ddp.ranks.launch_observer import UNNAMED
from compiled_ddp.step.buffers import (
    MOST_ELEMENTS_GATHERED,
    MOST_ELEMENTS_TOGETHER,
    SequenceBuffers,
    are_strided,
    on_stream,
)
from compiled_ddp.step.hooks import refuse_late
from compiled_ddp.step.launches import Launches


def grad_mode_off() -> contextlib.AbstractContextManager[object]:
    """`torch.no_grad()`, where that would change anything: it costs as much as what stands in it."""
    return torch.no_grad() if torch.is_grad_enabled() else contextlib.nullcontext()


# ---- the .grad tensors that are there when a backward begins ---------------------------------------------------------


def any_has_gradient(parameters: Iterable[torch.Tensor]) -> bool:
    """Whether one of them has a .grad. In C, for every parameter in every backward."""
    return any(map(operator.is_not, map(gradient_of, parameters), itertools.repeat(None)))


gradient_of = operator.attrgetter("grad")
requires_grad = operator.attrgetter("requires_grad")
alias_of = operator.attrgetter("data")


class ExistingGradients:
    """What .grad was, to tell what a backward has added, and where its result is to be left."""

    def __init__(self, parameters: TrainedParameters, buffers: SequenceBuffers | None) -> None:
        """Without `buffers` there is no .grad, as is known."""
        self._parameters = parameters
        self.were_any = buffers is not None and any_has_gradient(parameters.tensors)
        self.apart: dict[int, torch.Tensor] = {}  # not views of their own place in a flat buffer
        # Each as it was when the backward began, with its version.
        self.begun_with: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
        self._sharing: set[int] = set()
        if buffers is None:
            return
        if self.were_any:
            self._look_at(buffers)
        else:
            buffers.renew_all_held()

    def _look_at(self, buffers: SequenceBuffers) -> None:
        gradients = [parameter.grad for parameter in self._parameters.tensors]
        there = {index: gradient for index, gradient in enumerate(gradients) if gradient is not None}
        buffers.renew_held(there.values())
        self.apart |= self._taken_out_of(buffers, there)
        self.apart |= self._with_versions_of_their_own()
        self.begun_with |= {
            index: (weakref.ref(gradient), torch_private.tensors.version_if_any(gradient))
            for index, gradient in {**there, **self.apart}.items()
        }
        self._sharing |= _with_equal_memory(self.apart)

    def _taken_out_of(
        self, buffers: SequenceBuffers, there: Mapping[int, torch.Tensor]
    ) -> Iterator[tuple[int, torch.Tensor]]:
        for index, gradient in there.items():
            if buffers.holds(index, gradient):
                continue
            if buffers.contain(gradient):  # where another gradient will be put before this one is read
                gradient = self._parameters.tensors[index].grad = gradient.detach().clone()
            yield index, gradient

    def _with_versions_of_their_own(self) -> dict[int, torch.Tensor]:
        """Aliases, in .grad now, of those that are views of one tensor and so have one version.

        As a user's flat gradients are, or what the backward of `torch.cat` has split, which autograd keeps as .grad.
        A gradient that is added to one of them would count as one for each.
        """
        tracked = {i: g for i, g in self.apart.items() if g.layout == torch.strided and not g.is_inference()}
        memory = torch_private.tensors.memory_of_each(tracked.values())
        if len({*memory}) == len(memory):
            return {}
        times = Counter(memory)
        shared = [index for index, of_one in zip(tracked, memory, strict=True) if times[of_one] > 1]
        aliases = {index: alias_of(tracked[index]) for index in shared if not tracked[index].requires_grad}
        for index, alias in aliases.items():
            self._parameters.tensors[index].grad = alias
        return aliases

    def begun_by(self, index: int) -> None:
        """The backward begins with a gradient of this parameter that has been accumulated before."""
        self.begun_with.pop(index, None)

    def has_accumulated(self, index: int) -> bool:
        """Whether .grad is another one than that with which the backward began, or has been added to since."""
        gradient = self._parameters.tensors[index].grad
        if index not in self.begun_with:
            return gradient is not None
        begun_with, version = self.begun_with[index]
        return gradient is not begun_with() or (
            gradient is not None and torch_private.tensors.version_if_any(gradient) != version
        )

    def check_all(self, indices: Sequence[int], gradients: Sequence[torch.Tensor]) -> None:
        """Raise RuntimeError unless these parameters' gradients, which go into one bucket, can be reduced."""
        planned = self._parameters.gradients[indices[0]]
        usual = are_strided(gradients, planned.dtype, planned.device)
        if not usual or not self._sharing.isdisjoint(indices):
            for index, gradient in zip(indices, gradients, strict=True):
                self.check(index, gradient)

    def check(self, index: int, gradient: torch.Tensor) -> None:
        """Raise RuntimeError unless a parameter's gradient can be reduced."""
        name = self._parameters.names[index]
        if gradient.layout != torch.strided:
            raise RuntimeError(
                f"parameter {name} got a {gradient.layout} gradient; only dense gradients can be reduced. "
                "Pass sparse=False to its nn.Embedding or nn.EmbeddingBag."
            )
        self._check_kind(index, gradient)
        if index in self._sharing:
            raise RuntimeError(
                f"the gradients of parameters {self._parameters.named(sorted(self._sharing))} share memory, so that "
                "each would be added to the others. Assign a tensor of its own to each .grad."
            )

    def _check_kind(self, index: int, gradient: torch.Tensor) -> None:
        """Raise RuntimeError unless a gradient is of the dtype and on the device of its bucket."""
        planned = self._parameters.gradients[index]
        if gradient.dtype == planned.dtype and gradient.device == planned.device:
            return
        name, parameter = self._parameters.names[index], self._parameters.tensors[index]
        advice = "Assign gradients of the parameter's dtype, or its grad_dtype, and device."
        if parameter.grad_dtype is None:
            advice = (
                "Its grad_dtype is None, which admits any dtype, and ranks add up gradients of one: set its grad_dtype "
                f"to {gradient.dtype} between two steps, on every rank."
            )
        elif parameter.grad_dtype != planned.dtype:
            advice = (
                "Its grad_dtype was set after the forward of this backward had begun. Drop this step on every rank "
                "(zero_grad): the next forward takes it as it is."
            )
        raise RuntimeError(
            f"the gradient of parameter {name} is {gradient.dtype} on {gradient.device}, where {planned.dtype} on "
            f"{planned.device} is reduced. {advice}"
        )


def _with_equal_memory(gradients: Mapping[int, torch.Tensor]) -> set[int]:
    """The parameters whose .grad is, or lies where, another one's."""
    if not gradients:
        return set()
    addresses = {i: g.data_ptr() for i, g in gradients.items() if g.layout == torch.strided and g.numel()}
    count = Counter(addresses.values())
    return {index for index, address in addresses.items() if count[address] > 1}


# ---- of graphs that one backward calls several times, until the last call of each reduces their sum ------------------

# [Note: equal calls] Two forwards before one backward, or a block that runs twice, are several calls of one graph with
# the same parameters. All but the last one that the backward reaches run locally, and autograd gets None for their
# parameters. The last one folds the sum in, as it does a .grad of earlier backwards, and reduces it once. So a backward
# fits the sequence however often it calls a graph, if the last calls of several graphs come in the agreed order.


def as_planned(value: torch.Tensor | None, gradient: Gradient, bucket: Bucket) -> torch.Tensor:
    """What a graph folds in for a gradient of `bucket`: the value itself, if it lies as planned; zeros for None."""
    if value is not None and value.stride() == gradient.stride and value.dtype == bucket.dtype:
        return value.detach()
    laid_out = torch.empty_strided(gradient.size, gradient.stride, dtype=bucket.dtype, device=bucket.device)
    return laid_out.zero_() if value is None else laid_out.copy_(value)


class WithheldGradients:
    """[Note: equal calls] Those of one backward."""

    def __init__(self, repeated: Iterable[str] = ()) -> None:
        """`repeated` are the fingerprints of the graphs that the backward calls several times."""
        self.repeated: Set[str] = frozenset(repeated)
        self._calls: set[object] = set()  # whose gradients wait for another call
        self._sums: dict[int, torch.Tensor] = {}
        self._made_on: dict[torch.device, torch.Stream] = {}

    def withhold(self, call: object) -> None:
        """The gradients of `call`, which is about to run locally, wait for another one."""
        self._calls.add(call)

    def withholds(self, call: object) -> bool:
        """Whether the gradients of `call` wait for another one."""
        return call in self._calls

    @property
    def indices(self) -> Set[int]:
        """The parameters of which something waits."""
        return self._sums.keys()

    def pass_on(
        self, call: object, gradients: Sequence[torch.Tensor | None], index_of: Mapping[int, int]
    ) -> tuple[torch.Tensor | None, ...]:
        """What autograd gets of `gradients`, by graph input, which a call has produced locally.

        Of the parameters, `index_of` graph input, it gets None where they wait for another call; from the last one all
        that has waited, if that has to run locally too.
        """
        produced = {index: gradient for place, index in index_of.items() if (gradient := gradients[place]) is not None}
        self._follow_streams(gradient.device for gradient in produced.values())
        with grad_mode_off():  # out of place: a graph may return one tensor twice, or what came to it
            self._sums |= {i: self._sums[i].add(g) if i in self._sums else g for i, g in produced.items()}
        passed_on: dict[int, torch.Tensor | None] = dict.fromkeys(index_of)
        if not self.withholds(call):
            passed_on = {place: self._sums.pop(index, None) for place, index in index_of.items()}
        return tuple(passed_on.get(place, gradient) for place, gradient in enumerate(gradients))

    def fold(
        self,
        plan: BucketPlan,
        existing: Sequence[torch.Tensor],
        named: Callable[[int], AbstractContextManager[object]],
    ) -> Sequence[torch.Tensor]:
        """What a graph must fold in: the `existing` gradients, if there are any, with what waits.

        One tensor per gradient in plan order; nothing waits any more. `named` is that of `FoldedGradients.take`.
        """
        if self._sums.keys().isdisjoint(plan.indices):
            return existing
        self._follow_streams(bucket.device for bucket in plan.buckets)
        there: Iterator[torch.Tensor | None] = iter(existing) if existing else itertools.repeat(None)
        to_fold = []
        for place, bucket in enumerate(plan.buckets):
            with grad_mode_off(), named(place):
                to_fold += [as_planned(self._joined(g.index, next(there)), g, bucket) for g in bucket.gradients]
        return to_fold

    def _joined(self, index: int, existing: torch.Tensor | None) -> torch.Tensor | None:
        """What waits for a parameter, which no longer does, and the `existing` gradient."""
        waiting = self._sums.pop(index, None)
        if existing is None or waiting is None:
            return waiting if existing is None else existing
        return existing.add(waiting)

    def _follow_streams(self, devices: Iterable[torch.device]) -> None:
        """Let the current streams wait for those on which what waits was made."""
        for device in {device for device in devices if device.type != "cpu"}:
            here = torch.accelerator.current_stream(device)
            if self._made_on.setdefault(device, here) != here:
                here.wait_stream(self._made_on[device])
                for gradient in self._sums.values():
                    if gradient.device == device:
                        gradient.record_stream(here)
                self._made_on[device] = here


# ---- the .grad tensors that captured graphs fold in ------------------------------------------------------------------

_NOTHING_WITHHELD = WithheldGradients()  # as in most backwards: nothing is added where no graph is called several times


class FoldedGradients:
    """Each is None in .grad from the moment its graph takes it until the backward ends, which gives it back."""

    def __init__(self, parameters: TrainedParameters, existing: ExistingGradients) -> None:
        self._parameters, self._existing = parameters, existing
        self.withheld = _NOTHING_WITHHELD  # what graphs fold in too
        self.taken: dict[int, torch.Tensor] = {}
        self._accumulated: set[int] = set()  # those of them that the backward brings a .grad
        self._left_out: set[int] = set()
        self.not_accumulated: set[int] = set()  # by torch.autograd.grad, where .grad was there before

    def expect(self, repeated: Iterable[str]) -> None:
        """[Note: equal calls] The backward will call the graphs with these fingerprints several times."""
        self.withheld = WithheldGradients(repeated)

    def take(self, plan: BucketPlan, named: Callable[[int], AbstractContextManager[object]]) -> list[torch.Tensor]:
        """What a graph must fold in, one tensor per gradient in plan order; empty if no parameter has a .grad.

        Those without one get zeros. `named` gives the name in a profile of what is done for a bucket of the plan.
        """
        parameters = self._parameters.tensors
        if not any_has_gradient(map(parameters.__getitem__, plan.indices)):
            return []
        inputs = []
        for place, bucket in enumerate(plan.buckets):
            with named(place):
                inputs += [as_planned(self._take(gradient.index), gradient, bucket) for gradient in bucket.gradients]
        return inputs

    def _take(self, index: int) -> torch.Tensor | None:
        """What .grad was, which is None from here on."""
        parameter = self._parameters.tensors[index]
        existing = parameter.grad
        if existing is not None:
            self._existing.check(index, existing)
            self.taken[index] = existing
            if torch_private.autograd.backward_will_accumulate(parameter):
                self._accumulated.add(index)
            parameter.grad = None
        return existing

    def leave_out(self, indices: Set[int]) -> None:
        """The graph brings these no .grad after all: it has reduced nothing of them, nor what it has taken."""
        self._accumulated -= indices
        self._left_out |= indices

    def give_back_as_they_were(self, indices: Iterable[int]) -> None:
        """Where an exception has ended the graph that took them."""
        for index in indices:
            if index in self.taken and self._parameters.tensors[index].grad is None:
                self._parameters.tensors[index].grad = self.taken.pop(index)

    def forget(self) -> None:
        """An exception has ended the backward: the user may have cleared .grad since."""
        self.taken.clear()

    def give_back(self) -> None:
        """Put the same tensors into .grad again, with the reduced values."""
        for index, tensor in self.taken.items():
            parameter = self._parameters.tensors[index]
            if parameter.grad is not None:
                with grad_mode_off():
                    if index in self._left_out:
                        tensor.add_(parameter.grad)
                    else:
                        tensor.copy_(parameter.grad)
            elif index in self._accumulated:
                continue  # a hook of the user's has taken it away
            else:
                self.not_accumulated.add(index)
            parameter.grad = tensor
        self.taken.clear()


# ---- what captured graphs have reduced -------------------------------------------------------------------------------


class GraphGradients:
    """Knows each by its address and its version, to tell it from what else may reach .grad."""

    def __init__(self, *, copies: bool = False) -> None:
        """With `copies` what was reduced is known also where somebody has written into it since."""
        # None where several graphs have reduced parts of it.
        self.addresses: dict[int, int | None] = {}
        self._of_each: list[dict[int, torch.Tensor]] = []  # what each graph has returned
        self._copies = copies
        self._left_out: set[int] = set()  # parameters of a graph that no rank's loss reaches through it

    def hand_out(self, indices: Sequence[int], tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Note what a graph returns of the parameters `indices`; returns what autograd is to get in its place.

        Aliases that nobody else holds, which autograd makes .grad instead of a copy, each with a version of its own.
        They share the storage with what is kept, so that autograd adds what comes before that out of place, and what
        comes behind it in place: `changed` tells of both.
        """
        several = self.addresses.keys() & indices if self.addresses else ()
        self.addresses |= zip(indices, map(torch.Tensor.data_ptr, tensors), strict=True)
        self.addresses |= dict.fromkeys(several)
        kept = map(torch.Tensor.clone, tensors) if self._copies else tensors
        self._of_each.append(dict(zip(indices, kept, strict=True)))
        return [*map(alias_of, tensors)]

    def take_over(self, other: "GraphGradients") -> None:
        """What has been handed out there has been handed out here: [Note: steady step]"""
        self.addresses |= other.addresses
        self._of_each += other._of_each

    def note_left_out(self, indices: Set[int]) -> None:
        """A graph returns nothing of these parameters: [Note: undefined gradients]"""
        self._left_out |= indices

    @property
    def left_out(self) -> Set[int]:
        """The parameters of which a graph was to reduce a gradient, and none has."""
        return self._left_out and self._left_out - self.addresses.keys()

    @property
    def indices(self) -> Set[int]:
        return self.addresses.keys()

    def sum_of(self, index: int) -> torch.Tensor:
        """What graphs have reduced of a gradient."""
        return sum_in_order([of_one[index] for of_one in self._of_each if index in of_one])

    def changed(self, parameters: Sequence[torch.Tensor]) -> list[int]:
        """The parameters among these whose .grad is not simply what a graph has left in it."""
        gradients = [*map(gradient_of, map(parameters.__getitem__, self.addresses))]
        are_there = all(map(operator.is_not, gradients, itertools.repeat(None)))
        if (
            are_there
            and [*map(torch.Tensor.data_ptr, gradients)] == [*self.addresses.values()]
            and not any(map(torch_private.tensors.version_of, gradients))
        ):
            return []  # in C, as for every parameter in every step
        found = zip(self.addresses.items(), gradients, strict=True)
        return [
            index
            for (index, address), gradient in found
            if gradient is not None
            and (gradient.data_ptr() != address or torch_private.tensors.version_of(gradient) != 0)
        ]

    def has_another(self, index: int, gradient: torch.Tensor, *, looks_at_values: bool) -> bool:
        """Whether .grad, which is `gradient` and `changed`, has a contribution besides what graphs have reduced.

        Autograd makes a copy of what one graph has returned where somebody else holds it, or under create_graph. What
        several have returned is a sum, of which only a look at it can tell: on a GPU, which would have to be waited
        for in every step, without `looks_at_values` only where the version is not that of a sum of so many. (Autograd
        adds the second one out of place, and those behind it in place.)
        """
        address = self.addresses[index]
        if address is None and not looks_at_values:
            parts = sum(index in of_one for of_one in self._of_each)
            if torch_private.tensors.version_of(gradient) == max(parts - 2, 0):
                return False
        return gradient.data_ptr() == address or not _are_equal(gradient, self.sum_of(index))


def sum_in_order(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum that autograd makes of what graphs return in this order, so that every rank rounds alike."""
    return functools.reduce(torch.add, parts)


def _are_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    alike = (one.layout, one.dtype, one.device, one.shape) == (other.layout, other.dtype, other.device, other.shape)
    return alike and torch.allclose(one, other, rtol=0.0, atol=0.0, equal_nan=True)


# ---- into buckets that hooks launch, and back ------------------------------------------------------------------------


class Gradients:
    """Fills buckets from .grad, and leaves in .grad what has become of them."""

    def __init__(
        self,
        parameters: TrainedParameters,
        launches: Launches,
        *,
        existing: ExistingGradients,
        of_graphs: GraphGradients,
        sends_zeros: bool,
        reduced_before: "Gradients | None",
        as_view: bool,
    ) -> None:
        """`reduced_before` has reduced a part of what these buffers reduce again, if not the same backward has.

        With `sends_zeros`, in a torch.autograd.grad, .grad is neither read nor written. With `as_view`, .grad becomes
        a view of its bucket where it can.
        """
        buffers = launches.buffers
        self._parameters, self._buffers, self._launches = parameters, buffers, launches
        self._usage, self._averaging, self._recording = launches.usage, launches.averaging, launches.recording
        self._existing, self._of_graphs = existing, of_graphs
        self._sends_zeros, self._as_view = sends_zeros, as_view
        self._again, self._before = buffers.reduced_again, reduced_before
        # Where .grad is not simply a view of its bucket.
        self._not_in_place = buffers.shared.union(existing.apart) if existing.apart else buffers.shared
        # What has been left in .grad, to tell by the very object and its version whether anybody has added to it since.
        self.left: dict[int, torch.Tensor] = {}
        self.left_empty: set[int] = set()  # the parameters without .grad, for which zeros were sent
        self._versions: dict[int, int] = {}  # where they are not 0
        self._untracked: dict[int, torch.Tensor] = {}  # what was left without a version
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
        self._note_left([index])
        for position in (first, *others):
            self._launches.buckets[position].missing.discard(index)

    def gather(self, index: int, position: int, gradient: torch.Tensor) -> None:
        """Take what autograd has accumulated, to be put into its only bucket together with others on this stream."""
        launch = self._launches.buckets[position]
        if gradient.numel() > MOST_ELEMENTS_TOGETHER:
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
        if not launch.missing or self._gathered > MOST_ELEMENTS_GATHERED:
            self.put_gathered(position)

    def gather_all(self, position: int, indices: Sequence[int], gradients: Sequence[torch.Tensor]) -> None:
        """As `gather`, for several small gradients on a CPU, which go into no other bucket."""
        launch = self._launches.buckets[position]
        launch.gathered.update(zip(indices, gradients, strict=True))
        launch.missing.difference_update(indices)
        self._gathered += sum(map(torch.Tensor.numel, gradients))

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

    def take_over(self, gathered: Iterable[torch.Tensor], left: Mapping[int, torch.Tensor]) -> None:
        """So much is `gathered` already, and so much has been left in .grad as a view of its bucket."""
        self._gathered += sum(map(torch.Tensor.numel, gathered))
        self.left.update(left)
        self._in_place.update(left)

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
        refuse_late(self._parameters, indices)

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
        self._note_left([index])

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
        changed = self._take_changed()
        if not changed:
            return []
        self._in_place.difference_update(changed)
        return [index for index in changed if self._parameters.tensors[index].grad is not None]

    def _note_left(self, indices: Collection[int]) -> None:
        """What .grad is now of these parameters, if it is anything, has been put into a bucket."""
        for index in indices:
            gradient = self._parameters.tensors[index].grad
            if gradient is None:
                self.left_empty.add(index)
            elif gradient.is_inference():
                self._untracked[index] = gradient
            else:
                self.left[index] = gradient
                self._versions[index] = torch_private.tensors.version_of(gradient)

    def _take_changed(self) -> list[int]:
        """The parameters whose .grad is not as it was left: another object, or one that has been written to.

        Holds none of them any longer: [Note: memory that others hold]
        """
        there, parameters = self.left, self._parameters.tensors
        gradients = [*map(gradient_of, map(parameters.__getitem__, there))]
        before = [*map(self._versions.get, there, itertools.repeat(0))]
        now = [*map(torch_private.tensors.version_of, there.values())]
        changed = []
        if now != before or not all(map(operator.is_, gradients, there.values())):  # else in C, as in most steps
            found = zip(there.items(), gradients, now, before, strict=True)
            changed = [i for (i, one), gradient, is_, was in found if gradient is not one or is_ != was]
        if self._untracked:
            changed += [index for index, one in self._untracked.items() if parameters[index].grad is not one]
        if self.left_empty and any_has_gradient(map(parameters.__getitem__, self.left_empty)):
            changed += [index for index in sorted(self.left_empty) if parameters[index].grad is not None]
        self.left, self.left_empty, self._untracked = {}, set(), {}
        return changed

    def write_back(self) -> set[int]:
        """Leave the mean in .grad of what hooks reduced: a view of the bucket, or the tensor that was there before.

        A parameter that no rank has used since the last synchronised backward keeps its .grad untouched. Returns the
        others.
        """
        written: set[int] = set()
        for position, launch in enumerate(self._launches.buckets):
            if launch.work is None:
                continue  # a graph has launched it
            used = self._launches.used_on_any_rank(position)
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
            self.left.update(zip(own, self._buffers[position].put_in_place(own, self._parameters.tensors), strict=True))
        elif own:
            self._buffers[position].leave_in_place(own, self._parameters.tensors)
            self._note_left(own)
        self._in_place.update(own)
        if len(own) < len(indices):
            self._note_left(set(indices).difference(own))
