"""Ranks in one process, without torch.distributed: a wire between them, and what drives a step on it.

What is launched meets by its number, as on a process group, and has to be alike: an order that differs between ranks
is an AssertionError here. Nothing waits longer than a few seconds.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn

from compiled_ddp.comm_hooks import Ranks
from compiled_ddp.options import Options
from compiled_ddp.plan import BucketPlan, GradientSpec, ReductionKind, Section
from compiled_ddp.planning.assignment import assign_buckets
from compiled_ddp.planning.trained_parameters import TrainedParameters
from compiled_ddp.ranks.communicator import Communicator, RankGroup
from compiled_ddp.ranks.progress import Standing
from compiled_ddp.reducers.reducer import Reducer
from compiled_ddp.step.backward import Circumstances, SynchronisedBackward
from compiled_ddp.step.flat_buffers import SequenceBuffers
from compiled_ddp.step.forward_count import Forwards
from compiled_ddp.step.reserved_section import ReservedSection
from compiled_ddp.step.riders import Flag, Message
from compiled_ddp.step.runtime import Runtime

PATIENCE_S = 5.0


# ---- between ranks ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sent:
    """One rank's part in a collective."""

    kind: str
    values: Tensor  # as they were when it was launched

    @property
    def form(self) -> tuple[str, int, torch.dtype]:
        return self.kind, self.values.numel(), self.values.dtype


class Wire:
    """What all ranks have launched and published."""

    def __init__(self, world_size: int) -> None:
        self.sent: list[list[Sent]] = [[] for _ in range(world_size)]
        self._published: dict[str, str] = {}
        self._changed = threading.Condition()

    def send(self, rank: int, sent: Sent) -> int:
        """Launch a collective; returns its number."""
        with self._changed:
            self.sent[rank].append(sent)
            self._changed.notify_all()
            return len(self.sent[rank]) - 1

    def result(self, number: int) -> Tensor:
        """Of a collective, once all ranks have launched it."""
        self._await(lambda: all(len(sent) > number for sent in self.sent), f"collective {number}")
        parts = [sent[number] for sent in self.sent]
        assert len({part.form for part in parts}) == 1, f"collective {number} differs: {[part.form for part in parts]}"
        stacked = torch.stack([part.values for part in parts])
        return stacked.sum(0) if parts[0].kind == "sum" else stacked.amax(0)

    def publish(self, key: str, value: str) -> None:
        with self._changed:
            self._published[key] = value
            self._changed.notify_all()

    def read(self, key: str) -> str:
        self._await(lambda: key in self._published, key)
        return self._published[key]

    def _await(self, has_come: Callable[[], bool], what: str) -> None:
        with self._changed:
            assert self._changed.wait_for(has_come, PATIENCE_S), f"{what} was waited for in vain"


class Work:
    def __init__(self, wire: Wire, number: int, values: Tensor) -> None:
        self._wire, self._number, self._values = wire, number, values
        self._is_done = False

    @torch.no_grad()
    def wait(self) -> None:
        if not self._is_done:
            self._values.copy_(self._wire.result(self._number).view_as(self._values))
            self._is_done = True


class Port:
    """One rank's end of the wire, which counts what it launches as a process group does."""

    _device_types = ("cpu",)

    def __init__(self, wire: Wire, rank: int) -> None:
        self._wire, self._rank = wire, rank

    def _get_backend(self, _: str) -> "Port":
        return self

    def _get_sequence_number_for_group(self) -> int:
        return len(self._wire.sent[self._rank])

    def launch(self, kind: str, values: Tensor) -> Work:
        return Work(self._wire, self._wire.send(self._rank, Sent(kind, values.detach().flatten().clone())), values)


class WiredRanks(RankGroup):
    def __init__(self, wire: Wire, rank: int) -> None:
        self._wire, self.rank, self.world_size = wire, rank, len(wire.sent)
        self.ranks, self.name = tuple(range(self.world_size)), "in one process"
        self.timeout = timedelta(seconds=PATIENCE_S)

    def publish(self, key: str, value: str) -> None:
        self._wire.publish(key, value)

    def read(self, key: str, *, writer: int, purpose: str, patience: float = 1.0) -> str:
        return self._wire.read(key)


class NoHangReport:
    failed_before = ""

    def report(self, _: object) -> str:
        return "(no report)"

    def note_failure(self, why: str) -> None:
        self.failed_before = f"{why}."

    def close(self) -> None: ...


class WiredCommunicator(Communicator):
    """All but the process group is the real one's."""

    def __init__(self, wire: Wire, rank: int) -> None:
        self.ranks = WiredRanks(wire, rank)
        self.rank, self.world_size, self.group_name, self.closed = rank, len(wire.sent), f"wire {rank}", False
        self._port = Port(wire, rank)
        self.standing = Standing(self._port)  # type: ignore[arg-type]
        self._hangs = NoHangReport()  # type: ignore[assignment]

    def for_hooks(self) -> Ranks:
        return Ranks(self.world_size, self.group_name, self.rank)

    def all_reduce(self, flat_buffer: Tensor) -> Any:
        return self._port.launch("sum", flat_buffer)

    def maximum(self, values: Tensor) -> None:
        self.refuse_if_failed()
        self._port.launch("maximum", values).wait()


# ---- backwards without autograd --------------------------------------------------------------------------------------


def plan_of(*sizes: tuple[int, int], capacity_bytes: float = 1024, reduction: ReductionKind = "mean") -> BucketPlan:
    """For gradients of (index, elements), on two ranks."""
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

    def begin_graph(self, section: int, *gradients: Tensor | None) -> "GraphRun":
        """Reserve a section for a graph that computes these, None being the hint that there is none; launch all."""
        return GraphRun(self, section, gradients)


class GraphRun:
    def __init__(self, run: HandRun, section: int, gradients: Sequence[Tensor | None]) -> None:
        self._run, self.plan = run, run.backward.sections[section].plan
        run.backward.reserve(section)
        reduction: Any = None  # is asked about hooks alone
        self.reserved = ReservedSection(run.backward, section, self.plan, reduction)
        places = dict(zip(self.plan.indices, gradients, strict=True))
        folded = self.reserved.gradients_to_fold()
        self.flats = self.reserved.lend_buffers(range(len(self.plan.buckets)))
        earlier = dict(zip(self.plan.indices, folded or [torch.zeros(())] * len(places), strict=True))
        riders = self.reserved.rider_values([index for index, gradient in places.items() if gradient is None])
        self.works = []
        for bucket, flat in zip(self.plan.buckets, self.flats, strict=True):
            for gradient in bucket.gradients:
                brought = places[gradient.index]
                total = earlier[gradient.index] + (0.0 if brought is None else brought)
                gradient.view(flat).copy_(total * self.plan.share)
            if bucket.riders is not None:
                bucket.riders.view(flat).copy_(riders)
            self.works.append(run.rank.communicator.all_reduce(flat))

    def complete(self) -> dict[int, Tensor]:
        """Wait, and give autograd the means; returns these."""
        for work in self.works:
            work.wait()
        riders = self.plan.riders.view(self.flats[-1]).clone()
        left_out = self.reserved.unused_everywhere(riders)
        of_buckets = zip(self.plan.buckets, self.flats, strict=True)
        means = {g.index: g.view(flat).clone() for bucket, flat in of_buckets for g in bucket.gradients}
        means = {index: mean for index, mean in means.items() if index not in left_out}
        self.reserved.complete(riders, list(means.items()), left_out)
        for index, mean in means.items():
            self._run.accumulate(index, mean)
        return means


def end_all(*runs: HandRun) -> list[set[int]]:
    """All ranks send what is left, and then write back; returns what each has written."""
    for run in runs:
        run.backward.send_rest()
    for run in runs:
        run.backward.launches.wait()
    return [run.backward.write_back() for run in runs]
