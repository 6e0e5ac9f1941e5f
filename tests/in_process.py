"""Ranks in one process, without torch.distributed: backwards that a test runs by hand."""

import functools
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, TypeVar

import torch
from stand_in_graph import GraphRun
from torch import Tensor, nn
from wire import Wire, WiredCommunicator

from compiled_ddp.options import Options
from compiled_ddp.plan import BucketPlan, GradientSpec, ReductionKind, Riders, Section
from compiled_ddp.planning.assignment import assign_buckets
from compiled_ddp.planning.trained_parameters import TrainedParameters
from compiled_ddp.step.buffers import SequenceBuffers
from compiled_ddp.step.channel import ForwardNumbers, Message, write_riders
from compiled_ddp.step.gradients import Gradients
from compiled_ddp.step.graphs import ReservedSection
from compiled_ddp.step.reduction import Reduction, Wrapped
from compiled_ddp.step.synchronised import Circumstances, SynchronisedBackward


def plan_of(*sizes: tuple[int, int], capacity_bytes: float = 1024, reduction: ReductionKind = "mean") -> BucketPlan:
    """Of gradients of (index, elements), for two ranks."""
    specs = [GradientSpec.of(index, torch.empty(numel)) for index, numel in sizes]
    return assign_buckets(specs, capacities_bytes=(capacity_bytes,), world_size=2, reduction=reduction)


def riders_with(riders: Riders, message: Message) -> Tensor:
    """What a rank that has used every parameter writes into its riders."""
    return write_riders(torch.zeros(riders.numel), riders, message, set())


def parameters_of(sizes: Sequence[int]) -> TrainedParameters:
    names = tuple(f"p{index}" for index in range(len(sizes)))
    return TrainedParameters(names, tuple(nn.Parameter(torch.zeros(numel)) for numel in sizes))


class Nobody:
    """Listens to hooks, which are removed."""


class Rank:
    """A rank with parameters of these numbers of elements, whose backwards a test runs by hand."""

    def __init__(self, wire: Wire, rank: int, sizes: Sequence[int], **options: Any) -> None:
        self.rank, self.communicator, self.parameters = rank, WiredCommunicator(wire, rank), parameters_of(sizes)
        self.tensors = self.parameters.tensors
        options_ = Options(bucket_cap_mb=1, **options)
        self.reduction = Reduction(
            Wrapped(self.parameters, parameters_of(()), self.communicator, options_, why_not_graph="by hand"),
            Nobody(),  # type: ignore[arg-type]
        )
        self.reduction.hooks.remove()

    @property
    def gradients(self) -> list[Tensor | None]:
        return [tensor.grad for tensor in self.tensors]

    def forget_gradients(self) -> None:
        for tensor in self.tensors:
            tensor.grad = None

    def begin(
        self,
        sections: Sequence[Section],
        buffers: SequenceBuffers | None = None,
        *,
        used_before: Set[int] = frozenset(),
        weight: float = 1.0,
        **circumstances: Any,
    ) -> "HandRun":
        return HandRun(
            self,
            self.reduction.new_backward(
                sections,
                SequenceBuffers(sections) if buffers is None else buffers,
                used_before=set(used_before),
                message=Message(ForwardNumbers(1, 1), weight),
                circumstances=Circumstances(**circumstances),
            ),
        )


class HandRun:
    """A backward, and what autograd and graphs do in it."""

    def __init__(self, rank: Rank, backward: SynchronisedBackward) -> None:
        self.rank, self.backward = rank, backward

    @property
    def first_reduction(self) -> Gradients:
        """What `Circumstances.reduces_again` of a further backward takes."""
        return self.backward.gradients

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

    def begin_graph(self, section: int, *gradients: Tensor | None, most: int = 99, lent: bool = True) -> GraphRun:
        """Reserve a section for a graph that computes these, None where there is none, and let it launch its buckets.

        `most` so many of them, if an exception ends it then; not `lent` on a GPU, where it allocates them itself.
        """

        def begin() -> GraphRun:
            self.backward.reserve(section)
            plan = self.backward.sections[section].plan
            reserved = ReservedSection(self.backward, section, plan, self.rank.reduction)
            brought = dict(zip(plan.indices, gradients, strict=True))
            return GraphRun(reserved, plan, brought, self.rank.communicator, most=most, lent=lent)

        return in_a_backward(self.rank.tensors, begin)


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


def end_all(*runs: HandRun) -> list[set[int]]:
    """All ranks send what is left, and then write back; returns what each has written."""
    for run in runs:
        run.backward.send_rest()
    for run in runs:
        run.backward.launches.wait()
    return [run.backward.write_back() for run in runs]
