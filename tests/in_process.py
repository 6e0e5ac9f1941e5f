"""Ranks in one process, without torch.distributed: backwards that a test runs by hand, and whole run times."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from wire import Wire, WiredCommunicator

from compiled_ddp.plan import BucketPlan, GradientSpec, ReductionKind, Section
from compiled_ddp.planning.assignment import assign_buckets
from compiled_ddp.planning.trained_parameters import TrainedParameters
from compiled_ddp.reducers.reducer import Reducer
from compiled_ddp.step.backward import Circumstances, SynchronisedBackward
from compiled_ddp.step.flat_buffers import SequenceBuffers
from compiled_ddp.step.forward_count import Forwards
from compiled_ddp.step.reserved_section import ReservedSection
from compiled_ddp.step.riders import Flag, Message


def plan_of(*sizes: tuple[int, int], capacity_bytes: float = 1024, reduction: ReductionKind = "mean") -> BucketPlan:
    """Of gradients of (index, elements), for two ranks."""
    specs = [GradientSpec.of(index, torch.empty(numel)) for index, numel in sizes]
    return assign_buckets(specs, capacities_bytes=(capacity_bytes,), world_size=2, reduction=reduction)


class Rank:
    """A rank with parameters of these numbers of elements, whose backwards a test runs by hand."""

    def __init__(self, wire: Wire, rank: int, sizes: Sequence[int]) -> None:
        self.rank, self.communicator = rank, WiredCommunicator(wire, rank)
        self.tensors = tuple(nn.Parameter(torch.zeros(numel)) for numel in sizes)
        self.parameters = TrainedParameters(tuple(f"p{index}" for index in range(len(sizes))), self.tensors)

    @property
    def gradients(self) -> list[Tensor | None]:
        return [tensor.grad for tensor in self.tensors]

    def begin(
        self,
        sections: Sequence[Section],
        buffers: SequenceBuffers | None = None,
        *,
        used_before: set[int] = frozenset(),  # type: ignore[assignment]
        weight: float = 1.0,
        as_view: bool = True,
        reducer: Reducer | None = None,
        flags: set[Flag] = frozenset(),  # type: ignore[assignment]
        **circumstances: Any,
    ) -> "HandRun":
        return HandRun(
            self,
            SynchronisedBackward(
                sections,
                SequenceBuffers(sections) if buffers is None else buffers,
                self.communicator,
                self.parameters,
                used_before=set(used_before),
                message=Message(Forwards(1, 1), weight, flags=set(flags)),
                circumstances=Circumstances(**circumstances),
                gradient_as_bucket_view=as_view,
                launching=lambda bucket, flat: None,
                reducer=reducer or Reducer(self.communicator),
            ),
        )


class HandRun:
    """A backward, and what autograd and graphs do in it."""

    def __init__(self, rank: Rank, backward: SynchronisedBackward) -> None:
        self.rank, self.backward, self.launcher = rank, backward, backward.launcher

    @torch.no_grad()
    def accumulate(self, index: int, values: Tensor) -> None:
        """Hand the very tensor to .grad, or add it, and call the hook."""
        parameter = self.rank.tensors[index]
        if parameter.grad is None:
            parameter.grad = values
        else:
            parameter.grad.add_(values)
        self.backward.gradient_arrived(index)

    def accumulate_all(self, *brought: Mapping[int, Tensor]) -> None:
        """Add up, as autograd does before it accumulates, what graphs and others have brought."""
        for index in dict.fromkeys(index for part in brought for index in part):
            self.accumulate(index, functools.reduce(torch.add, [part[index] for part in brought if index in part]))

    def begin_graph(self, section: int, *gradients: Tensor | None, most: int = 99, lent: bool = True) -> "GraphRun":
        """Reserve a section for a graph that computes these, None where there is none, and let it launch its buckets.

        `most` so many of them, if an exception ends it then; not `lent` on a GPU, where it allocates them itself.
        """
        return in_a_backward(self.rank.tensors, lambda: GraphRun(self, section, gradients, most, lent=lent))


Result = TypeVar("Result")


class _Inside(torch.autograd.Function):
    """Calls something in a backward, and brings no gradient."""

    @staticmethod
    def forward(context: Any, call: Callable[[], None], *tensors: Tensor) -> Tensor:
        context.call, context.count = call, len(tensors)
        return tensors[0].new_zeros(())

    @staticmethod
    def backward(context: Any, _: Tensor) -> Any:  # type: ignore[override]
        context.call()
        return (None,) * (1 + context.count)


def in_a_backward(tensors: Sequence[Tensor], call: Callable[[], Result]) -> Result:
    """Call it in a backward that reaches these parameters."""
    results: list[Result] = []
    _Inside.apply(lambda: results.append(call()), *tensors).backward()
    return results[0]


class GraphRun:
    def __init__(
        self, run: HandRun, section: int, gradients: Sequence[Tensor | None], most: int, *, lent: bool
    ) -> None:
        self._run, self.plan = run, run.backward.sections[section].plan
        run.backward.reserve(section)
        reduction: Any = None  # is asked about hooks alone
        self.reserved = ReservedSection(run.backward, section, self.plan, reduction)
        places = dict(zip(self.plan.indices, gradients, strict=True))
        folded = self.reserved.gradients_to_fold()
        places_lent = range(len(self.plan.buckets)) if lent else ()
        self.flats = self.reserved.lend_buffers(places_lent) or [torch.empty(b.numel) for b in self.plan.buckets]
        earlier = dict(zip(self.plan.indices, folded or [torch.zeros(())] * len(places), strict=True))
        riders = self.reserved.rider_values([index for index, gradient in places.items() if gradient is None])
        self.works = []
        for bucket, flat in [*zip(self.plan.buckets, self.flats, strict=True)][:most]:
            for gradient in bucket.gradients:
                brought = places[gradient.index]
                total = earlier[gradient.index] + (0.0 if brought is None else brought)
                gradient.view(flat).copy_(total * self.plan.share)
            if bucket.riders is not None:
                bucket.riders.view(flat).copy_(riders)
            self.works.append(run.rank.communicator.all_reduce(flat))

    def complete(self) -> dict[int, Tensor]:
        """Wait; returns the means, which `accumulate_all` takes."""
        for work in self.works:
            work.wait()
        riders = self.plan.riders.view(self.flats[-1]).clone()
        left_out = self.reserved.unused_everywhere(riders)
        of_buckets = zip(self.plan.buckets, self.flats, strict=True)
        means = {g.index: g.view(flat).clone() for bucket, flat in of_buckets for g in bucket.gradients}
        means = {index: mean for index, mean in means.items() if index not in left_out}
        self.reserved.complete(riders, list(means.items()), left_out)
        return means


def end_all(*runs: HandRun) -> list[set[int]]:
    """All ranks send what is left, and then write back; returns what each has written."""
    for run in runs:
        run.backward.send_rest()
    for run in runs:
        run.backward.launches.wait()
    return [run.backward.write_back() for run in runs]
