"""A backward like the one before it: run by what was bound once, and looked at once, at its end.

[Note: steady step] Most steps decide nothing: the same buckets, no .grad at the beginning, no hook, join or flag. Such
a backward is run here, in few calls: by hooks, or in the one graph that has all parameters which any rank uses. As soon
as anything asks for more (a second gradient or graph, an exception, what another rank tells), it is turned into the
`SynchronisedBackward` that would have come as far, which goes on from there. So nothing but the usual has code in here,
and whoever asks for the backward under way never sees this one.
"""

import abc
import itertools
import operator
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence, Set
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist

from compiled_ddp import torch_private
from compiled_ddp.options import Options
from compiled_ddp.plan import Bucket
from compiled_ddp.step.buffers import MOST_ELEMENTS_GATHERED, MOST_ELEMENTS_TOGETHER, SequenceBuffers, are_strided
from compiled_ddp.step.channel import Findings, ForwardNumbers, Message, RiderReader, write_riders
from compiled_ddp.step.conductor import conductor
from compiled_ddp.step.gradients import (
    ExistingGradients,
    GraphGradients,
    any_has_gradient,
    gradient_of,
    requires_grad,
)
from compiled_ddp.step.graph_call import GraphCall
from compiled_ddp.step.graphs import ReservedSection
from compiled_ddp.step.hooks import Collected
from compiled_ddp.step.reduction import Reduction
from compiled_ddp.step.synchronised import Circumstances, SynchronisedBackward
from compiled_ddp.torch_private.modules import hooks_registered, own_hooks_registered
from compiled_ddp.torch_private.tensors import tensor_hooks_of, version_of

if TYPE_CHECKING:
    from compiled_ddp.step.runtime import UnderWay

# ---- what both kinds have in common ----------------------------------------------------------------------------------

_NONE = SequenceBuffers(())
_IN_ORDER = Circumstances(looks_at_values=True)


class SteadyStep(abc.ABC):
    """[Note: steady step]"""

    def __init__(self, reduction: Reduction, under_way: "UnderWay") -> None:
        self._reduction, self._under_way = reduction, under_way
        self._reader = RiderReader(reduction.communicator.world_size)
        self._buffers = _NONE  # of the backward that runs
        # To the buffers, and so to the sequence and the parameters: they are not held longer than anybody needs them.
        self._bound_to: Callable[[], SequenceBuffers | None] = lambda: None
        self._options: Options | None = None
        self._is_plain = False
        self._used, self._unused = list[torch.nn.Parameter](), list[torch.nn.Parameter]()  # by any rank so far
        self.is_usual = True  # whether nothing that the beginning has found calls for more
        self.has_rest = False  # whether a bucket has not been launched

    # ---- whether a backward is like the one before it ----------------------------------------------------------------

    def fits(self) -> bool:
        """Whether the backward that is about to begin, in a task of autograd, is. It waits for nobody."""
        reduction, agreed = self._reduction, self._reduction.agreed
        if not agreed.refined:
            return False
        if self._bound_to() is not agreed.buffers or self._options is not reduction.options:
            self._bind()
        return (
            self._is_plain
            and not self._is_set_apart()
            and reduction.communicator.recorder is None
            and not torch_private.autograd.profiler_is_on()
            and all(map(operator.is_, map(gradient_of, reduction.parameters.tensors), itertools.repeat(None)))
            and not torch.is_grad_enabled()
            and not any(map(reduction.will_accumulate, agreed.unused))
            and self._finds_the_usual()
        )

    @abc.abstractmethod
    def _finds_the_usual(self) -> bool:
        """Whether there are the hooks and the calls of graphs that this kind is for."""

    def _is_set_apart(self) -> bool:
        """By what a user, or the step before, has left for this one."""
        reduction, carried, uneven = self._reduction, self._reduction.carried, self._reduction.uneven
        return bool(
            carried.used
            or carried.to_tell
            or carried.piggyback is not None
            or reduction.hooks.deferred
            or reduction.hooks.registered != hooks_registered() - own_hooks_registered()
            or (
                reduction.agreed.why_not_graph is None
                and (
                    reduction.models_collectives.seen
                    or (len(conductor.references) > 1 and conductor.any_communicates())
                )
            )
            or reduction.receive is not None
            or (uneven is not None and uneven.factor != 1.0)
        )

    def _may_be_steady(self, buffers: SequenceBuffers) -> bool:
        reduction, options = self._reduction, self._reduction.options
        sections, launched = buffers.sections, len(reduction.parameters.tensors) - len(reduction.agreed.unused)
        by_rule = (
            options.scaling is None
            and not options.piggyback
            and (options.bucket_rule is None or not options.bucket_rule.delayed)
        )
        by_all_reduce = reduction.ddp_hook is None and reduction.traced_hook is None and not reduction.sparse.names
        each_in_one = not buffers.shared and not buffers.reduced_again and len(buffers.sole_positions) == launched
        return (
            by_rule
            and by_all_reduce
            and each_in_one
            and reduction.parameters.on_cpu
            and all(section.plan.reduction != "weighted" for section in sections)
        )

    def _bind(self) -> None:
        """Take over what does not change as long as the sequence, the parameters and the options stay the same."""
        reduction, buffers = self._reduction, self._reduction.agreed.buffers
        self._bound_to, self._options = weakref.ref(buffers), reduction.options
        self._is_plain = self._may_be_steady(buffers)
        self._collectives = [1] * len(buffers.buckets)
        tensors, unused = reduction.parameters.tensors, reduction.agreed.unused
        self._used = [tensor for index, tensor in enumerate(tensors) if index not in unused]
        self._unused = [*map(tensors.__getitem__, unused)]

    # ---- from its beginning to its end -------------------------------------------------------------------------------

    def begin(self, forwards: ForwardNumbers) -> None:
        """A backward that fits begins."""
        reduction, buffers = self._reduction, self._reduction.agreed.buffers
        self._buffers = buffers
        reduction.proof.begin_backward()
        reduction.models_collectives.begin()
        buffers.renew_all_held()
        self._message = Message(forwards, reduction.carried.weight)
        progress, names = reduction.communicator.progress, reduction.parameters.names
        progress.backward_began(forwards.begun, buffers.buckets, buffers.origins, names, self._collectives)
        self.has_rest = True
        self.is_usual = not reduction.proof.verifies

    def conclude(self) -> Findings | None:
        """Wait for the mean, which is in .grad then, and `end` follows.

        None where more is to be done, and the general way goes on.
        """
        riders = self.wait()
        watch = self._reduction.watch
        has_grown = watch is not None and [*map(len, watch.dictionaries)] != watch.lengths  # in C, as in every step
        if not self.is_as_left() or (has_grown and self._reduction.newcomers()):
            return None
        findings = self._reader.read(riders)
        return findings if findings.are_quiet else None

    @abc.abstractmethod
    def wait(self) -> list[torch.Tensor]:
        """Wait for every bucket, all of which have been launched; returns the riders' sums, of every section."""

    @abc.abstractmethod
    def is_as_left(self) -> bool:
        """Whether each .grad is what was left in it, and nobody has written to it: [Note: what a backward leaves]"""

    @abc.abstractmethod
    def _forget(self) -> None:
        """Hold no tensor any longer: [Note: memory that others hold]"""

    def end(self) -> None:
        """The mean is in .grad, or the general way goes on."""
        self._buffers = _NONE
        self._forget()

    # ---- the general way ---------------------------------------------------------------------------------------------

    def _general(self) -> SynchronisedBackward:
        """The backward under way, which is a steady one no longer."""
        backward = self._under_way.backward
        assert backward is not None
        return backward

    def as_general(self) -> SynchronisedBackward:
        """The backward that has come as far as this one, which ends here."""
        reduction = self._reduction
        backward = reduction.new_backward(
            self._buffers.sections,
            self._buffers,
            used_before=reduction.carried.used,
            message=self._message,
            circumstances=_IN_ORDER,
            existing=ExistingGradients(reduction.parameters, None),
        )
        backward.launches.count_from(reduction.communicator.progress.launches_before)
        self._hand_over_to(backward)
        self.end()
        return backward

    @abc.abstractmethod
    def _hand_over_to(self, backward: SynchronisedBackward) -> None:
        """What has been done is done."""


# ---- by hooks --------------------------------------------------------------------------------------------------------


class SteadyBucket:
    """What has become of a bucket so far."""

    def __init__(self, position: int, bucket: Bucket) -> None:
        self.position, self.bucket = position, bucket
        self._indices = bucket.indices
        self.large = frozenset(g.index for g in bucket.gradients if g.numel > MOST_ELEMENTS_TOGETHER)
        self.begin()

    def begin(self) -> None:
        self.missing = {*self._indices}  # parameters whose gradient has not come
        self.gathered = dict[int, torch.Tensor]()  # gradients to be put into the bucket together
        self.left = dict[int, torch.Tensor]()  # what is in .grad of those that are in it
        self.work: dist.Work | None = None


class SteadyHooks(SteadyStep):
    """One whose gradients hooks take in, as they come."""

    def _finds_the_usual(self) -> bool:
        return self._reduction.hooks.everywhere and not self._reduction.live_calls()

    def _may_be_steady(self, buffers: SequenceBuffers) -> bool:
        options = self._reduction.options
        in_order = options.gradient_as_bucket_view and not options.static_graph
        by_hooks = in_order and all(section.origin == "hooks" for section in buffers.sections)
        return by_hooks and all(bucket.gradients for _, bucket in buffers.buckets) and super()._may_be_steady(buffers)

    def _bind(self) -> None:
        super()._bind()
        self._buckets = list[SteadyBucket]()
        if self._is_plain:
            buffers = self._reduction.agreed.buffers
            self._buckets = [SteadyBucket(n, bucket) for n, (_, bucket) in enumerate(buffers.buckets)]
            self._bucket_of = {i: self._buckets[position] for i, position in buffers.sole_positions.items()}
            self._in_order = [*itertools.chain.from_iterable(b.bucket.indices for b in self._buckets)]
            self._share = buffers.sections[0].plan.share

    # ---- gradients, as they come -------------------------------------------------------------------------------------

    def begin(self, forwards: ForwardNumbers) -> None:
        """A backward that fits begins."""
        self._cursor, self._gathered = 0, 0  # elements that have come since something was put into a bucket
        super().begin(forwards)
        self._collected: dict[int, Collected] = {**self._reduction.hooks.collect(self._buffers)}

    def gradient_arrived(self, index: int) -> None:
        """Take in a gradient that autograd has just accumulated, with those that were only noted before it."""
        bucket = self._bucket_of.get(index)
        if bucket is None:  # no rank has used the parameter so far
            self._general().arrived(index)
            return
        is_large = index in bucket.large
        collected = self._collected.get(bucket.position)
        come = [index]
        if collected is not None and (not is_large or len(bucket.missing) == 1 + len(collected)):
            come = [*collected.take(), index]
        tensors = self._reduction.parameters.tensors
        gradients = [*map(gradient_of, map(tensors.__getitem__, come))]
        if not self._are_usual(bucket, come, gradients):
            for one in come:
                self._general().arrived(one)
            return
        bucket.missing.difference_update(come)
        bucket.gathered.update(zip(come, gradients, strict=True))
        self._gathered += sum(map(torch.Tensor.numel, gradients))
        if is_large:
            self._put_large(bucket, index)
        if bucket.gathered and (not bucket.missing or self._gathered > MOST_ELEMENTS_GATHERED):
            self._put(bucket)
        if not bucket.missing:
            if collected is not None:
                self._collected.pop(bucket.position).stop()
            self._launch_complete()

    def _are_usual(self, bucket: SteadyBucket, indices: Collection[int], gradients: Sequence[torch.Tensor]) -> bool:
        """Whether each is the first of its parameter, as planned, and seen by nobody before it is reduced."""
        planned, missing = bucket.bucket, bucket.missing
        return (
            missing.issuperset(indices)
            and len({*indices}) == len(indices)
            and all(map(operator.is_not, gradients, itertools.repeat(None)))
            and are_strided(gradients, planned.dtype, planned.device)
            and self._reduction.hooks.registered == hooks_registered() - own_hooks_registered()
        )

    def _put_large(self, bucket: SteadyBucket, index: int) -> None:
        """At once, so that its memory is free for what follows."""
        buffer, tensors = self._buffers[bucket.position], self._reduction.parameters.tensors
        gradient = bucket.gathered.pop(index)
        self._gathered -= gradient.numel()
        buffer.put(index, gradient, self._share)
        bucket.left[index] = buffer.put_in_place([index], tensors)[0]

    def _put(self, bucket: SteadyBucket) -> None:
        """Put what has been gathered into the bucket, where .grad is from here on."""
        buffer = self._buffers[bucket.position]
        indices = list(bucket.gathered)
        buffer.put_all(indices, list(bucket.gathered.values()), self._share, in_place=False)
        bucket.left.update(zip(indices, buffer.put_in_place(indices, self._reduction.parameters.tensors), strict=True))
        bucket.gathered.clear()
        self._gathered = 0

    def _launch_complete(self) -> None:
        """Launch every bucket that is full, up to the first one that is not."""
        communicator = self._reduction.communicator
        while self._cursor < len(self._buckets) and not self._buckets[self._cursor].missing:
            position, buffer = self._cursor, self._buffers[self._cursor]
            if buffer.riders is not None and buffer.bucket.riders is not None:
                write_riders(buffer.riders, buffer.bucket.riders, self._message, frozenset())
            try:
                self._buckets[position].work = communicator.all_reduce(buffer.flat, buffer.bucket.row)
            except BaseException as error:
                self._general().launch_failed(error, position)
                raise
            communicator.progress.hooks_launched(position)
            self._cursor += 1
        self.has_rest = self._cursor < len(self._buckets)

    # ---- the end -----------------------------------------------------------------------------------------------------

    def wait(self) -> list[torch.Tensor]:
        progress = self._reduction.communicator.progress
        for bucket in self._buckets:
            work = bucket.work
            assert work is not None
            progress.hooks_await(bucket.position)
            try:
                work.wait()
            except BaseException as error:
                self._general().launches.explain(error, bucket.position, "was launched but not reduced")
                raise
        return [*map(_riders_in, map(self._buffers.__getitem__, self._buffers.with_riders))]

    def is_as_left(self) -> bool:
        left: dict[int, torch.Tensor] = {}
        for bucket in self._buckets:
            left |= bucket.left
        now = map(gradient_of, map(self._reduction.parameters.tensors.__getitem__, self._in_order))
        before = [*map(left.__getitem__, self._in_order)]
        are_there = all(map(operator.is_, now, before)) and not any(map(version_of, before))
        return are_there and not (self._unused and any_has_gradient(self._unused))

    def _forget(self) -> None:
        for bucket in self._buckets:
            bucket.begin()

    def _hand_over_to(self, backward: SynchronisedBackward) -> None:
        for one in self._buckets:
            backward.take_over(one.position, missing=one.missing, gathered=one.gathered, left=one.left, work=one.work)
        backward.go_on_from(self._cursor, self._collected)
        self._collected = {}


_riders_in = operator.attrgetter("riders")


# ---- in a graph ------------------------------------------------------------------------------------------------------

T = TypeVar("T")


class SteadyGraph(SteadyStep):
    """One in which a single graph reduces all that there is, for which this is what `ReservedSection` is elsewhere."""

    def __init__(self, reduction: Reduction, under_way: "UnderWay") -> None:
        super().__init__(reduction, under_way)
        self.awaited: GraphCall | None = None  # of the backward that runs, until its graph begins
        self._lent: dict[int, torch.Tensor] = {}  # position -> memory that it fills
        self._riders: torch.Tensor | None = None  # when it has run
        self._of_graph: GraphGradients | None = None  # what it has returned then

    def _finds_the_usual(self) -> bool:
        calls = self._reduction.live_calls()
        return (
            len(calls) == 1
            and not self._reduction.hooks.everywhere
            and not any(map(tensor_hooks_of, self._used))
            and all(map(requires_grad, self._used))
            and calls[0].fingerprint in self._reduction.agreed.graph_sections
            and calls[0].is_still_to_run()
            and calls[0].compile(folds=False) is None
        )

    def _may_be_steady(self, buffers: SequenceBuffers) -> bool:
        return [section.origin for section in buffers.sections] == ["graph"] and super()._may_be_steady(buffers)

    def begin(self, forwards: ForwardNumbers) -> None:
        self.awaited = self._reduction.live_calls()[0]
        super().begin(forwards)

    # ---- the graph that is about to run ------------------------------------------------------------------------------

    def reserve(self, call: GraphCall, may_wait: Callable[[], bool] | None) -> "SteadyGraph | None":
        """This, for the graph of `call`, which is about to run, if it is the awaited one, as it was planned.

        And if this rank `may_wait` for others in it now, which is asked only then, as it may cost a place in the order
        of several wrappers; None is for one alone.
        """
        is_planned = not call.undefined and call.fingerprint in self._reduction.agreed.graph_sections
        if self.awaited is not call or not is_planned or (may_wait is not None and not may_wait()):
            return None
        self.awaited = None
        return self

    def inputs(
        self, buckets: Iterable[int], compiled: Callable[..., object], fingerprint: str
    ) -> list[torch.Tensor] | None:
        """The riders, by which every parameter gets a gradient, and memory for the graph to pack these buckets into.

        None where `compiled`, for the plan with this fingerprint, needs a proof before it runs: `in_general`.
        """
        if not self._reduction.proof.has_met(compiled, fingerprint):
            return None
        self._lent = self._buffers.lend(buckets, are_renewed=True)
        self._reduction.communicator.progress.graph_began(0, self._lent)
        riders = self._buffers.sections[0].plan.riders
        values = torch.empty(riders.numel, dtype=torch.float32, device="cpu")
        return [write_riders(values, riders, self._message, frozenset()), *self._lent.values()]

    def run(self, graph: Callable[[], T], group_name: str, *, sees_values: bool) -> T:
        """What the graph returns, which calls the process group `group_name`."""
        return self._reduction.communicator.run_graph(graph, group_name, None)

    def complete(
        self, riders: torch.Tensor, indices: Sequence[int], gradients: Sequence[torch.Tensor], left_out: Set[int]
    ) -> list[torch.Tensor]:
        """The graph has run; returns what autograd is to get of the gradients of the parameters `indices`."""
        self._riders, self._lent, self.has_rest = riders, {}, False
        self._of_graph = GraphGradients()
        return self._of_graph.hand_out(indices, gradients)

    # ---- the end -----------------------------------------------------------------------------------------------------

    def wait(self) -> list[torch.Tensor]:
        """The graph has waited."""
        assert self._riders is not None
        return [self._riders]

    def is_as_left(self) -> bool:
        of_graph, tensors = self._of_graph, self._reduction.parameters.tensors
        assert of_graph is not None
        is_left = len(of_graph.addresses) == len(self._used) and not of_graph.changed(tensors)
        return is_left and not (self._unused and any_has_gradient(self._unused))

    def _forget(self) -> None:
        self.awaited, self._riders, self._of_graph, self._lent = None, None, None, {}

    # ---- the general way ---------------------------------------------------------------------------------------------

    def in_general(self) -> ReservedSection:
        """What this is in the general way, for the graph that is about to run."""
        self._reduction.communicator.progress.graph_began(0)
        return self._as_section()

    def _as_section(self) -> ReservedSection:
        plan = self._buffers.sections[0].plan
        return ReservedSection(self._general(), 0, plan, self._reduction)

    def give_up(self) -> None:
        """The graph has launched nothing, and will not."""
        self._as_section().give_up()

    def break_off(self) -> None:
        """An exception has ended the graph."""
        self._as_section().break_off()

    def _hand_over_to(self, backward: SynchronisedBackward) -> None:
        if self.awaited is None:
            backward.go_on_from_graph(self._of_graph or GraphGradients(), self._riders, self._lent)
