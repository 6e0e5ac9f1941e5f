"""Ranks in one process, without torch.distributed: backwards that a test runs by hand, and whole run times."""

import functools
from collections.abc import Callable, Mapping, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from wire import PATIENCE_S, Wire, WiredCommunicator

from compiled_ddp.options import Options
from compiled_ddp.plan import BucketPlan, GradientSpec, ReductionKind, Section
from compiled_ddp.planning.assignment import assign_buckets
from compiled_ddp.planning.trained_parameters import TrainedParameters
from compiled_ddp.step.backward import Circumstances, SynchronisedBackward
from compiled_ddp.step.conductor import conductor
from compiled_ddp.step.flat_buffers import SequenceBuffers
from compiled_ddp.step.forward_count import Forwards
from compiled_ddp.step.reduction import Reduction
from compiled_ddp.step.reserved_section import ReservedSection
from compiled_ddp.step.riders import Message
from compiled_ddp.step.runtime import Runtime


def plan_of(*sizes: tuple[int, int], capacity_bytes: float = 1024, reduction: ReductionKind = "mean") -> BucketPlan:
    """Of gradients of (index, elements), for two ranks."""
    specs = [GradientSpec.of(index, torch.empty(numel)) for index, numel in sizes]
    return assign_buckets(specs, capacities_bytes=(capacity_bytes,), world_size=2, reduction=reduction)


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
        self.reduction = Reduction(
            self.parameters,
            self.communicator,
            Options(bucket_cap_mb=1, **options),
            live_calls=list,
            hooks_reason="by hand",
            sparse=parameters_of(()),
            backwards=Nobody(),  # type: ignore[arg-type]
        )
        self.reduction.hooks.remove()

    @property
    def gradients(self) -> list[Tensor | None]:
        return [tensor.grad for tensor in self.tensors]

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
                buffers or SequenceBuffers(sections),
                used_before=set(used_before),
                message=Message(Forwards(1, 1), weight),
                circumstances=Circumstances(**circumstances),
            ),
        )


class HandRun:
    """A backward, and what autograd and graphs do in it."""

    def __init__(self, rank: Rank, backward: SynchronisedBackward) -> None:
        self.rank, self.backward, self.launcher = rank, backward, backward.launcher

    @property
    def first_reduction(self) -> SynchronisedBackward:
        """What `Circumstances.reduces_again` of a further backward takes."""
        return self.backward

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
        self.reserved = ReservedSection(run.backward, section, self.plan, run.rank.reduction)
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


# ---- whole run times -------------------------------------------------------------------------------------------------


class _Raises(torch.autograd.Function):
    """Raises in backward, where it `breaks`."""

    @staticmethod
    def forward(context: Any, tensor: Tensor, breaks: bool) -> Tensor:
        context.breaks = breaks
        return tensor.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        if context.breaks:
            raise Broken("an exception of the user's")
        return gradient, None


class Broken(Exception): ...


class Wrapped:
    """One rank's run time, with a thread of its own in which its hooks see real backwards."""

    def __init__(self, wire: Wire, rank: int, sizes: Sequence[int], options: Options) -> None:
        self.rank, self._thread = rank, ThreadPoolExecutor(1)
        self.tensors = tuple(nn.Parameter(torch.zeros(numel)) for numel in sizes)
        parameters = TrainedParameters(tuple(f"p{index}" for index in range(len(sizes))), self.tensors)
        nothing = TrainedParameters((), ())
        communicator = WiredCommunicator(wire, rank)
        self.runtime = Runtime(parameters, communicator, options, live_calls=list, hooks_reason=None, sparse=nothing)
        self.reduction, self.communicator = self.runtime.reduction, communicator
        self.carried, self.agreed = self.reduction.carried, self.reduction.agreed

    def forward(self, *used: int, breaks_before: bool = False, breaks_after: bool = False) -> Tensor:
        """A loss whose gradients are `values` of the used parameters.

        Its backward may raise, before it has come to any parameter or after it has come to all.
        """
        self.runtime.begin_forward(synchronise=True, counted=True)
        self.runtime.module_begins()
        output = _Raises.apply(torch.zeros((), requires_grad=True), breaks_after)  # its backward runs last
        for index in used:
            output = output + (self.tensors[index] * self.values(index)).sum()
        output = _Raises.apply(output, breaks_before)
        self.runtime.module_ended()
        self.runtime.watch([output])
        return output

    def step(self, *used: int, **breaks: bool) -> None:
        """What an exception leaves to be sent follows, as it would before the next forward."""
        try:
            self.forward(*used, **breaks).backward()
        except BaseException:
            self.runtime.finish_broken_backward()
            raise

    def skip(self) -> None:
        self.runtime.begin_forward(synchronise=True, counted=True)
        conductor.skip([self.runtime.conducted])

    def values(self, index: int) -> Tensor:
        return torch.full((self.tensors[index].numel(),), 2.0 * index + 4.0 * self.rank + 2.0)

    def submit(self, call: "Callable[[Wrapped], object]") -> "Future[object]":
        return self._thread.submit(call, self)

    def close(self) -> None:
        self._thread.shutdown()
        self.runtime.close("the test is over")


def together(ranks: Sequence[Wrapped], *calls: Callable[[Wrapped], object]) -> list[BaseException | None]:
    """Let each rank run its call, or all the one, at the same time; returns what each has raised."""
    calls = calls * len(ranks) if len(calls) == 1 else calls
    futures = [rank.submit(call) for rank, call in zip(ranks, calls, strict=True)]
    return [future.exception(timeout=2 * PATIENCE_S) for future in futures]
