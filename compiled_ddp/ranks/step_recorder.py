"""When the collectives of whole steps are launched, awaited and there, by this rank's clock: `step.profile`."""

import contextlib
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from compiled_ddp import torch_private
from compiled_ddp.passes.ops import GATHERS, all_reduce, all_reduce_in_place
from compiled_ddp.plan import BucketPlan
from compiled_ddp.planning.step_model import GATHERED_LATER, Kind, Mode
from compiled_ddp.ranks.launch_observer import UNNAMED, LaunchObserver, start_collective
from compiled_ddp.ranks.recorder import BucketTimes, now, timing


@dataclass
class RecordedTransfer:
    """One of a bucket, by its position in the plan."""

    kind: Kind
    position: int
    times: BucketTimes = field(default_factory=BucketTimes)


@dataclass
class RecordedStep:
    """One update. Times are by the clock."""

    began: float = field(default_factory=now)
    ended: float = 0.0
    plan: BucketPlan | None = None  # None where no graph has run that communicates
    transfers: list[RecordedTransfer] = field(default_factory=list)  # in launch order
    left: tuple[RecordedTransfer, ...] = ()  # what the step before had left under way

    @property
    def seconds(self) -> float:
        return self.ended - self.began

    @property
    def under_way(self) -> list[RecordedTransfer]:
        """What nobody has awaited yet."""
        return [each for each in self.transfers if each.times.wait_ended is None]


class StepRecorder:
    """Takes times of so many updates. Lasts longer than it records: `remaining` is 0 then."""

    def __init__(self, steps: int, mode: Mode) -> None:
        self.remaining = steps
        self.mode: Mode = mode
        self.recorded: list[RecordedStep] = []
        self._open: RecordedStep | None = None
        self._observer: LaunchObserver | None = None  # one, as some transfers last from step to step
        self._launched: dict[int, RecordedTransfer] = {}  # by its number among the launches of all steps
        self._of_hook: Sequence[int] = ()  # the positions of what a hook launches

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """One update, in here. One that raises is forgotten."""
        left = self.recorded[-1].under_way if self.recorded else ()
        self._open = RecordedStep(left=tuple(left))
        try:
            yield
            self._open.ended = now()
            self.recorded.append(self._open)
            self.remaining -= 1
        finally:
            self._open = None

    def watching(
        self, plan: BucketPlan, group_name: str, group: dist.ProcessGroup, of_hook: Sequence[int] = ()
    ) -> contextlib.AbstractContextManager[object]:
        """Within the context a graph runs that reduces by this plan, on this group.

        Where a communication hook does, `of_hook` has the position of the bucket of each launch, the riders' too.
        """
        if self._open is None:
            return UNNAMED
        self._open.plan, self._of_hook = plan, of_hook
        if self._observer is None:
            self._observer = LaunchObserver(
                group_name,
                launch=lambda number, _: UNNAMED,
                wait=self._waiting,
                start=functools.partial(self._start, group),
                sees_gathers=True,
            )
        return self._observer

    def _start(self, group: dist.ProcessGroup, number: int, operator: Any, args: tuple[Any, ...]) -> torch.Tensor:
        transfer = self._note(_kind(operator))
        if transfer is None:
            return start_collective(operator, args)
        self._launched[number] = transfer
        transfer.times.begin("launch")
        return torch_private.exchanges.start_in_graph(group, operator, args, transfer.times.arrive)

    def _note(self, kind: Kind) -> RecordedTransfer | None:
        """The next one of this kind, as all ranks launch them in one order; None for what is of no bucket."""
        assert self._open is not None and self._open.plan is not None
        kind = "hook" if self._of_hook else kind
        positions = self._of_hook or _positions(kind, self._open.plan, self.mode)
        before = sum(each.kind == kind for each in self._open.transfers)
        if before >= len(positions):
            return None
        self._open.transfers.append(RecordedTransfer(kind, positions[before]))
        return self._open.transfers[-1]

    def _waiting(self, number: int) -> contextlib.AbstractContextManager[object]:
        transfer = self._launched.pop(number, None)
        return UNNAMED if transfer is None else timing(transfer.times, "wait for", UNNAMED)


def _kind(operator: Any) -> Kind:
    if operator in (all_reduce, all_reduce_in_place):
        return "all-reduce"
    return "gather" if operator in GATHERS else "scatter"


def _positions(kind: Kind, plan: BucketPlan, mode: Mode) -> Sequence[int]:
    """Of which buckets there are such transfers, in launch order."""
    if kind == "all-reduce":
        return [plan.place_of_riders] if plan.is_scattered else range(len(plan.buckets))
    places = plan.places_of_gradients
    return places[::-1] if kind == "gather" and mode in GATHERED_LATER else places
