"""A backward's buckets in time: as the cost model predicts them, and as `ddp.profile` has measured them.

All times are in seconds from the beginning of the backward.
"""

import itertools
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

from compiled_ddp.plan import Bucket, BucketPlan, ReductionSequence, Section
from compiled_ddp.planning.calibration import Calibration
from compiled_ddp.planning.cost_model import BackwardWork, Link, Prediction, Readiness, predict
from compiled_ddp.planning.optimal import lower_bound
from compiled_ddp.ranks.recorder import BucketTimes, RecordedBackward, Recorder
from compiled_ddp.ranks.step_recorder import RecordedStep

Interval = tuple[float, float]  # begin, end
Recorded = TypeVar("Recorded", RecordedBackward, RecordedStep)

# ---- predicted -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PredictedBackward:
    """What the cost model says of a sequence on a link that was measured."""

    prediction: Prediction
    local_seconds: float  # of a backward that reduces nothing
    bound_seconds: float  # before which no plan of these gradients ends, see `optimal.lower_bound`
    assumed: tuple[int, ...] = ()  # positions of buckets of which it is assumed, by sizes, when they are ready

    @property
    def exposed_seconds(self) -> float:
        """How much longer it is than a local one."""
        return self.prediction.seconds - self.local_seconds

    @property
    def waits(self) -> list["Wait"]:
        """The waits that are left when all has been computed, one after the other."""
        waits, free = list[Wait](), 0.0
        computed = self.prediction.backward_seconds
        for position, transfer in enumerate(self.prediction.transfers):
            begin, free = max(computed, free), transfer.end
            if free > begin:
                queued = transfer.start - transfer.ready
                waits.append(Wait(position, transfer.nbytes, transfer.ready, free, queued, (begin, free)))
        return waits


def predict_sequence(
    sequence: ReductionSequence,
    calibration: Calibration,
    work_of: Callable[[BucketPlan], BackwardWork | None],
    sent_bytes: Callable[[Bucket], int] = lambda bucket: bucket.nbytes,
) -> PredictedBackward:
    """The backward that launches this sequence, section after section, on the link and device that were measured.

    `work_of` a graph's plan is what backward computes until each of its gradients is ready, in the plan's order; None
    where that is not known. There, and for hooks, it is assumed by sizes. `sent_bytes` may be fewer than a bucket has.
    """
    nbytes, ready, assumed, begin, local = list[int](), list[float](), list[int](), 0.0, 0.0
    link, sizes, at = calibration.link, list[int](), list[float]()  # of each gradient
    for section in sequence.launched:
        work = work_of(section.plan) if section.origin == "graph" else None
        if work is None:
            assumed += range(len(nbytes), len(nbytes) + len(section.plan.buckets))
        alone = _by_sizes(section, link) if work is None else work.readiness(calibration.compute)
        local += alone.backward_seconds
        readiness, last = alone.beside(link, section.plan.nbytes), 0
        at += (begin + seconds for seconds in readiness.seconds)
        for bucket in section.plan.buckets:
            last += len(bucket.gradients)
            sent = sent_bytes(bucket)
            nbytes.append(sent)
            # A bucket may have empty gradients alone.
            sizes += (each.numel * bucket.dtype.itemsize * sent // max(bucket.nbytes, 1) for each in bucket.gradients)
            ready.append(begin + (readiness.seconds[last - 1] if last else 0.0))
        begin += readiness.backward_seconds
    bound = lower_bound(sizes, Readiness(tuple(at), begin), link)
    return PredictedBackward(predict(nbytes, ready, begin, link), local, bound, tuple(assumed))


def _by_sizes(section: Section, link: Link) -> Readiness:
    return Readiness.by_sizes([g.numel * bucket.dtype.itemsize for bucket, g in section.plan.gradients], link)


# ---- measured --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MeasuredBucket:
    """None for what was not seen."""

    launch: float
    wait: Interval | None = None
    end: float | None = None  # of its transfer
    end_is: Literal["completion", "wait"] = "wait"  # what `end` is: what the backend tells, or the end of the wait


@dataclass(frozen=True)
class MeasuredBackward:
    """The one of median length, of so many that were recorded of one sequence, by this rank's clock."""

    buckets: tuple[MeasuredBucket | None, ...]  # None for one of which nothing was seen
    backwards: int
    seconds: float
    waiting_seconds: float  # in which the host waited for some bucket: of the union of the waits
    local_seconds: float | None = None  # of a backward under `no_sync`, the median

    def exposed_seconds(self, predicted: PredictedBackward | None) -> float | None:
        """How much longer than without communication: than local ones, or than the computation that was counted.

        None where neither is known.
        """
        if self.local_seconds is not None:
            return self.seconds - self.local_seconds
        if predicted is None or predicted.assumed:
            return None
        return self.seconds - predicted.local_seconds

    def transfers(self) -> Iterator[tuple[int, Interval]]:
        """From launch to end, by position. Several may be under way at once."""
        for position, bucket in enumerate(self.buckets):
            if bucket is not None and bucket.end is not None:
                yield position, (bucket.launch, bucket.end)

    def waits(self, nbytes: Sequence[int], link: Link | None) -> list["Wait"]:
        """Those of all buckets, which have so many bytes."""
        waits, transfers = list[Wait](), dict(self.transfers())
        for position, (launch, end) in transfers.items():
            bucket = self.buckets[position]
            if bucket is not None and bucket.wait is not None:
                others = {other: interval for other, interval in transfers.items() if other != position}
                if link is None:
                    earlier = (end_ for other, (_, end_) in others.items() if other < position and end_ <= end)
                    taken = max([launch, *earlier]) - launch
                else:
                    taken = sum(
                        link.seconds(nbytes[other]) * _overlap(interval, (launch, end)) / (interval[1] - interval[0])
                        for other, interval in others.items()
                        if interval[1] > interval[0]
                    )
                waits.append(Wait(position, nbytes[position], launch, end, taken, bucket.wait))
        return waits


def measured_backward(recorder: Recorder, sequence: ReductionSequence) -> MeasuredBackward | None:
    """What was recorded of this sequence; None for nothing. The first backward of each kind is left out as warm-up."""
    recorded = [backward for backward in recorder.recorded[1:] if backward.sequence == sequence]
    if not recorded:
        return None
    typical = of_median_length(recorded)
    positions = range(len(sequence.buckets))
    buckets = tuple(measured_bucket(typical.buckets.get(position), typical.began) for position in positions)
    local = recorder.local_seconds[1:]
    return MeasuredBackward(
        buckets,
        len(recorded),
        typical.seconds,
        union_seconds(bucket.wait for bucket in buckets if bucket is not None and bucket.wait is not None),
        statistics.median(local) if local else None,
    )


def of_median_length(recorded: Sequence[Recorded]) -> Recorded:
    """One of them, as medians of each of their times would not fit together."""
    return sorted(recorded, key=lambda each: each.seconds)[(len(recorded) - 1) // 2]


def measured_bucket(times: BucketTimes | None, began: float) -> MeasuredBucket | None:
    """From `began`, of what the clock has told."""
    if times is None or times.launched is None:
        return None
    wait = None
    if times.wait_began is not None and times.wait_ended is not None:
        wait = times.wait_began - began, times.wait_ended - began
    if times.arrived is not None:
        return MeasuredBucket(times.launched - began, wait, times.arrived - began, "completion")
    return MeasuredBucket(times.launched - began, wait, None if wait is None else wait[1])


def union_seconds(intervals: Iterable[Interval]) -> float:
    """How long at least one of these lasts."""
    total, until = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total


# ---- why a bucket is waited for, and what would shorten that ---------------------------------------------------------

_MOST_WAITS = 3
_LONG_SHARE, _LONG_SECONDS = 0.01, 1e-4  # of the backward; shorter ones are not worth a line
_LATE = 0.9  # of the time until it is awaited

Cause = Literal["the link was busy", "ready late", "peers or link"]


@dataclass(frozen=True)
class Wait:
    """For one bucket."""

    position: int
    nbytes: int
    launch: float
    end: float  # of its transfer
    others_seconds: float  # that other buckets have taken of the link between the two
    interval: Interval

    @property
    def seconds(self) -> float:
        return self.interval[1] - self.interval[0]

    def cause(self, link: Link | None) -> Cause:
        """What most of its transfer is: others' bytes, its own, or what the link does not explain.

        Where no link was measured, its own bytes are thought to explain it if it was launched just before the wait.
        """
        left = self.end - self.launch - self.others_seconds
        if link is not None:
            own = link.seconds(self.nbytes) + link.latency_seconds
        else:
            own = left if self.launch >= _LATE * self.interval[0] else 0.0
        parts: dict[Cause, float] = {
            "the link was busy": self.others_seconds,
            "ready late": own,
            "peers or link": left - own,
        }
        return max(parts, key=parts.__getitem__)


def _overlap(one: Interval, other: Interval) -> float:
    return max(0.0, min(one[1], other[1]) - max(one[0], other[0]))


def format_waits(
    waits: Sequence[Wait], backward_seconds: float, link: Link | None, *, are_sized: bool, are_compressed: bool
) -> tuple[str, ...]:
    """A line for each of the longest waits: why, and what would shorten it.

    `are_sized` tells whether the buckets close at sizes that were given, `are_compressed` whether a communication hook
    reduces them.
    """
    long = [wait for wait in waits if wait.seconds > max(_LONG_SHARE * backward_seconds, _LONG_SECONDS)]
    fewer = "a faster link" if are_compressed else "fewer bytes (comm_hook=bf16_compress) or a faster link"
    smaller = "smaller buckets at the end (without bucket_cap_mb they are planned)" if are_sized else fewer
    lines = []
    for wait in sorted(long, key=lambda wait: wait.seconds, reverse=True)[:_MOST_WAITS]:
        match wait.cause(link):
            case "the link was busy":
                why = f"others take {format_ms(wait.others_seconds)} ms of the link meanwhile. Shorter by: {fewer}"
            case "ready late":
                why = f"its last gradient is ready as late as {format_ms(wait.launch)} ms. Shorter by: {smaller}"
            case "peers or link":
                own = "" if link is None else f" and its bytes take {format_ms(link.seconds(wait.nbytes))} ms"
                why = (
                    f"it was launched at {format_ms(wait.launch)} ms{own}: peers or link. See the launches of all ranks"
                )
        lines.append(f"Bucket {wait.position} is awaited for {format_ms(wait.seconds)} ms: {why}.")
    return tuple(lines)


def format_ms(seconds: float) -> str:
    """In milliseconds."""
    return f"{seconds * 1e3:.4g}" if abs(seconds) >= 1e-3 else f"{seconds * 1e3:.3f}"


# ---- two lanes -------------------------------------------------------------------------------------------------------

Doing = Literal["computes", "waits", "sends"]


@dataclass(frozen=True)
class Span:
    """What is done from `begin` to `end`; `bucket` is the position of the one that it is for, None for none.

    What is on the link at once has different rows. `transfer` says which one of a bucket it is where it has several.
    """

    doing: Doing
    begin: float
    end: float
    bucket: int | None = None
    row: int = 0
    transfer: str = ""


def spans_of_prediction(predicted: PredictedBackward) -> list[Span]:
    """The computation that makes each bucket ready, the waits, and the link's transfers."""
    transfers, computed = predicted.prediction.transfers, predicted.prediction.backward_seconds
    spans, begin = list[Span](), 0.0
    for position, transfer in enumerate(transfers):
        spans.append(Span("computes", begin, transfer.ready, position))
        begin = max(begin, transfer.ready)
    spans.append(Span("computes", begin, computed))
    spans += [Span("waits", *wait.interval, wait.position) for wait in predicted.waits]
    spans += [Span("sends", transfer.start, transfer.end, n) for n, transfer in enumerate(transfers)]
    return [span for span in spans if span.end > span.begin]


def spans_of_measurement(measured: MeasuredBackward) -> list[Span]:
    """As of a prediction: what the host does in between its waits counts for the bucket that it launches next."""
    seen = [(position, bucket) for position, bucket in enumerate(measured.buckets) if bucket is not None]
    waits = [Span("waits", *bucket.wait, position) for position, bucket in seen if bucket.wait is not None]
    launches = sorted((bucket.launch, position) for position, bucket in seen)

    def launched_next(begin: float, end: float) -> int | None:
        return next((position for at, position in launches if at >= end), None)

    computing = computing_spans(measured.seconds, [at for at, _ in launches], waits, launched_next)
    sent = in_rows([Span("sends", begin, end, position) for position, (begin, end) in measured.transfers()])
    return [span for span in (*computing, *waits, *sent) if span.end > span.begin]


def computing_spans(
    seconds: float,
    launches: Sequence[float],
    waits: Sequence[Span],
    bucket_of: Callable[[float, float], int | None],
) -> Iterator[Span]:
    """What the host does from 0 to `seconds` while it does not wait, cut at launches; for the bucket of `bucket_of`."""
    cuts = {0.0, seconds, *launches, *(at for wait in waits for at in (wait.begin, wait.end))}
    for begin, end in itertools.pairwise(sorted(at for at in cuts if 0 <= at <= seconds)):
        if not any(wait.begin < end and begin < wait.end for wait in waits):
            yield Span("computes", begin, end, bucket_of(begin, end))


def in_rows(spans: Iterable[Span]) -> Iterator[Span]:
    """What is on the link, each in the first row that is free."""
    rows = list[float]()  # until when each is taken
    for span in spans:
        row = next((row for row, until in enumerate(rows) if until <= span.begin), len(rows))
        rows[row : row + 1] = [span.end]
        yield replace(span, row=row)
