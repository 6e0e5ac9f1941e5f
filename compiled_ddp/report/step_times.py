"""A whole step in time: as the cost model predicts it, and as `step.profile` has measured it.

All times are in seconds from the beginning of the step.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Self

from tabulate import tabulate

from compiled_ddp.formatting import format_names
from compiled_ddp.plan import Bucket, BucketPlan
from compiled_ddp.planning.calibration import Calibration
from compiled_ddp.planning.cost_model import BackwardWork, Readiness
from compiled_ddp.planning.step_model import Job, Kind, Mode, PredictedStep, predict_step
from compiled_ddp.ranks.row_sums import CountedRows, bytes_of
from compiled_ddp.ranks.step_recorder import RecordedStep, StepRecorder
from compiled_ddp.report.timeline import Lanes, Named, Timeline, totals
from compiled_ddp.report.times import (
    Interval,
    MeasuredBucket,
    Span,
    computing_spans,
    format_ms,
    measured_bucket,
    of_median_length,
    union_seconds,
)

_FORWARD = 0.5  # of the backward: a product has two of its own size there
_UPDATED_BYTES = 3  # a parameter is read and written, its gradient read; each tensor of state is read and written

# ---- predicted -------------------------------------------------------------------------------------------------------


def predict_whole(
    mode: Mode,
    plan: BucketPlan,
    calibration: Calibration,
    work: BackwardWork | None,
    *,
    states: int,
    counted: CountedRows = MappingProxyType({}),
) -> PredictedStep:
    """A step of this plan, on the link and the device that were measured.

    `work` is what its backward computes until each gradient is ready, in launch order; None where it is assumed by
    sizes. The forward is thought to take half of that, and an update the memory that it reads and writes, with so many
    tensors of state for each parameter. What is summed by rows sends as many as were `counted` in the latest step.
    """
    buckets = plan.of_gradients
    numbers = {index: number for number, index in enumerate(plan.indices)}
    nbytes = [gradient.numel * bucket.dtype.itemsize for bucket in buckets for gradient in bucket.gradients]
    if work is None:
        readiness = Readiness.by_sizes(nbytes, calibration.link)
    else:
        readiness = work.readiness(calibration.compute)
    update = (_UPDATED_BYTES + 2 * states) * sum(nbytes) / calibration.compute.bytes_per_second
    shares = [bytes_of(bucket, counted) / bucket.nbytes for bucket in buckets for _ in bucket.gradients]
    sent = tuple(round(size * share) for size, share in zip(nbytes, shares, strict=True))
    job = Job(sent, readiness, _FORWARD * readiness.backward_seconds, update)
    places = [[numbers[index] for index in bucket.indices] for bucket in buckets]
    return predict_step(mode, places, job.in_mode(mode, plan.world_size), calibration.link)


# ---- measured --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MeasuredTransfer:
    """One of a bucket, by its position in the plan; begun before 0 where the step before has left it under way."""

    kind: Kind
    position: int
    times: MeasuredBucket


@dataclass(frozen=True)
class MeasuredStep:
    """The one of median length, of so many that were recorded of one plan, by this rank's clock."""

    transfers: tuple[MeasuredTransfer, ...]
    steps: int
    seconds: float

    @classmethod
    def of(cls, recorder: StepRecorder, plan: BucketPlan) -> Self | None:
        """None for nothing. The first step is left out, as a warm-up."""
        recorded = [step for step in recorder.recorded[1:] if step.plan == plan]
        if not recorded:
            return None
        typical = of_median_length(recorded)
        return cls(tuple(_transfers_of(typical)), len(recorded), typical.seconds)

    @property
    def waits(self) -> list[Interval]:
        """Those within the step."""
        return [each.times.wait for each in self.transfers if each.times.wait is not None]

    @property
    def waiting_seconds(self) -> float:
        """In which the host waited for some bucket: of the union of the waits."""
        return union_seconds(self.waits)


def _transfers_of(step: RecordedStep) -> Iterator[MeasuredTransfer]:
    for each in (*step.left, *step.transfers):
        times = measured_bucket(each.times, step.began)
        if times is None:
            continue
        if times.wait is not None and times.wait[0] >= step.seconds:  # awaited in the next one
            end = times.end if times.end_is == "completion" else None
            times = MeasuredBucket(times.launch, None, end, times.end_is)
        yield MeasuredTransfer(each.kind, each.position, times)


# ---- told ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StepTimes:
    """What is known of a step's times."""

    plan: BucketPlan
    names: tuple[str, ...]  # of gradients, by their indices
    predicted: PredictedStep | None = None
    is_assumed: bool = False  # when gradients are ready, by their sizes
    measured: MeasuredStep | None = None

    def lines(self) -> Iterator[str]:
        """A table, of a row for each transfer, and what it comes to; nothing where nothing is known."""
        if self.predicted is None and self.measured is None:
            return
        yield self._table()
        if self.predicted is not None:
            assumed = "; when gradients are ready is assumed by sizes" if self.is_assumed else ""
            yield (
                f"Predicted: a step of {format_ms(self.predicted.seconds)} ms, of which exposed communication is "
                f"{format_ms(self.predicted.exposed_seconds)} ms by difference, "
                f"{format_ms(self.predicted.waiting_seconds)} ms by the waits; no buckets pass "
                f"{format_ms(self.predicted.bound_seconds)} ms{assumed}."
            )
        if self.measured is not None:
            yield (
                f"Measured on this rank, the median of {self.measured.steps}: a step of "
                f"{format_ms(self.measured.seconds)} ms, in which the waits for some bucket are "
                f"{format_ms(self.measured.waiting_seconds)} ms."
            )

    def _table(self) -> str:
        """In launch order, as measured or else as predicted; what is gathered of the step before stands first."""
        rows: dict[tuple[Kind, int, bool, int], list[float | None]] = {}
        parts = Counter[tuple[Kind, int, bool]]()  # which one of a hook's it is
        positions = self.plan.places_of_gradients
        for each in self.predicted.transfers if self.predicted is not None else ():
            key = each.kind, positions[each.bucket], each.kind == "gather" and each.launched == 0.0, 0
            rows[key] = [each.launched, each.start, each.end, None, None, None]
        for seen in self.measured.transfers if self.measured is not None else ():
            times = seen.times
            waited = None if times.wait is None else times.wait[1] - times.wait[0]
            same = seen.kind, seen.position, times.launch < 0
            key = *same, parts[same]
            parts[same] += 1
            rows[key] = [*rows.get(key, [None] * 3)[:3], times.launch, waited, times.end]
        first, last = (0 if self.predicted is not None else 3), (6 if self.measured is not None else 3)
        headers = ["predicted launch", "start", "end", "measured launch", "wait", "end"][first:last]
        table = []
        for (kind, position, *_), times_of in sorted(rows.items(), key=lambda row: _launch(row[1])):
            bucket, cells = self.plan.buckets[position], ["" if at is None else format_ms(at) for at in times_of]
            table.append([kind, position, bucket.nbytes, *cells[first:last], self._shown(bucket)])
        return str(tabulate(table, headers=["", "bucket", "bytes", *headers, "parameters"], tablefmt="simple"))

    def _shown(self, bucket: Bucket) -> str:
        return format_names([self.names[index] for index in bucket.indices], 3) or "(riders)"

    def timeline(self) -> Timeline:
        """What is drawn of it."""
        lanes = dict[str, Lanes]()
        if self.predicted is not None:
            told = totals(self.predicted.seconds, self.predicted.exposed_seconds, self.predicted.waiting_seconds)
            told += "\n(ready by sizes)" if self.is_assumed else ""
            lanes["predicted"] = Lanes(tuple(self._predicted_spans(self.predicted)), told)
        if self.measured is not None:
            told = totals(self.measured.seconds, None, self.measured.waiting_seconds)
            lanes["measured"] = Lanes(tuple(_measured_spans(self.measured)), told)
        buckets = [
            Named(bucket.nbytes, self._shown(bucket), tuple(self.names[index] for index in bucket.indices))
            for bucket in self.plan.buckets
        ]
        return Timeline("step", tuple(buckets), lanes)

    def _predicted_spans(self, predicted: PredictedStep) -> Iterator[Span]:
        positions = self.plan.places_of_gradients
        for part in predicted.computing:
            yield Span("computes", part.begin, part.end, None if part.bucket is None else positions[part.bucket])
        for wait in predicted.waits:
            yield Span("waits", wait.begin, wait.end, positions[wait.bucket], transfer=wait.kind)
        for each in predicted.transfers:
            yield Span("sends", each.start, each.end, positions[each.bucket], transfer=each.kind)


def _measured_spans(measured: MeasuredStep) -> Iterator[Span]:
    """What is computed behind the wait for what was gathered counts for that bucket, until gradients are launched.

    Of a transfer only that part is on the link which is left when those launched before it have ended.
    """
    seconds, every = measured.seconds, measured.transfers
    waits = [
        Span("waits", *each.times.wait, each.position, transfer=each.kind)
        for each in every
        if each.times.wait is not None
    ]
    launches = sorted((each.times.launch, each.position) for each in every if each.times.launch >= 0)
    kinds = {each.kind for each in every}
    of_gradients = next((kind for kind in ("scatter", "hook") if kind in kinds), "all-reduce")  # else of riders
    backward = min((each.times.launch for each in every if each.kind == of_gradients), default=seconds)

    def bucket_of(begin: float, end: float) -> int | None:
        if end <= backward:
            awaited = [wait for wait in waits if wait.transfer == "gather" and wait.end <= begin]
            return max(awaited, key=lambda wait: wait.end).bucket if awaited else None
        return next((position for at, position in launches if at >= end), None)

    yield from computing_spans(seconds, [at for at, _ in launches], waits, bucket_of)
    yield from waits
    free = 0.0
    for each in sorted(every, key=lambda each: each.times.launch):
        if each.times.end is None:
            continue
        begin, end = max(each.times.launch, free), min(each.times.end, seconds)
        if end > begin:
            yield Span("sends", begin, end, each.position, transfer=each.kind)
            free = end


def _launch(times: Sequence[float | None]) -> float:
    """When it was launched, or else would be."""
    predicted, measured = times[0], times[3]
    return measured if measured is not None else predicted or 0.0
