"""Tables for people: what is reduced in which bucket, by whom, why, and when."""

import functools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tabulate import tabulate

from compiled_ddp.formatting import format_function, format_names
from compiled_ddp.options import Options
from compiled_ddp.plan import Bucket, BucketPlan, ReductionSequence
from compiled_ddp.planning.cost_model import BackwardWork
from compiled_ddp.planning.planners import SizedBuckets
from compiled_ddp.ranks.recorder import Recorder
from compiled_ddp.ranks.row_sums import CountedRows, bytes_of, sends_rows
from compiled_ddp.report.times import (
    MeasuredBackward,
    PredictedBackward,
    Wait,
    format_ms,
    format_waits,
    measured_backward,
    predict_sequence,
)

Row = tuple[int, str, int, int, str, str]  # order, launched by, gradients, bytes, parameters, why hooks

_TOLD_GAP = 0.01  # of a plan to the bound: less is not worth a line
_NOT_PREDICTED = "Not predicted, as no link was measured: pass calibration=, from compiled_ddp.calibrate()."
SUMMED_BY_ROWS = "Summed by rows, of which zeros are not sent: {}."


@dataclass(frozen=True)
class Explanation:
    """The table of buckets, with the reasons why hooks reduce what graphs do not, and when what happens. `print` it.

    Times are in milliseconds from the beginning of the backward. `to_json()` has all of it.
    """

    rows: tuple[Row, ...]
    fallback_reasons: tuple[str, ...]
    bucket_size: str  # how large a bucket may be, and why
    unused: tuple[str, ...] = ()  # parameters that no rank has used, and that are not reduced until one does
    sparse: tuple[str, ...] = ()  # parameters with sparse gradients, which are averaged at the end of each backward
    left_alone: tuple[str, ...] = ()  # parameters to ignore, or of a wrapper inside
    reduction: str = ""  # what a bucket is reduced to, where that is not the mean by an all-reduce
    chosen: str = ""  # what a warm-up has chosen, and by which times
    compiled: str = ""  # what was compiled here, and what was found in the cache, by whom
    proof: str = ""  # how many parameters are proven to be reduced, and what is pending; empty on one rank
    parameters: tuple[tuple[str, ...], ...] = ()  # of each row, all of them
    predicted: PredictedBackward | None = None  # by the link and the device as they were measured
    not_predicted: str = ""  # why there is no prediction, and how to get one; empty on one rank
    measured: MeasuredBackward | None = None  # by `profile`, on this rank
    waits: tuple[str, ...] = ()  # the longest ones, measured or else predicted: why, and what would shorten them
    by_rows: tuple[str, ...] = ()  # embeddings of whose gradients zeros are not sent, and what was

    def __str__(self) -> str:
        chosen = f"\n{self.chosen}" if self.chosen else ""
        compiled = f"\n{self.compiled}" if self.compiled else ""
        if not self.rows:
            return f"No plan yet: it is made in the first synchronised backward. {self.bucket_size}{chosen}{compiled}"
        notes = "".join(f"\nAt run time some buckets went by hooks: {reason}." for reason in self.fallback_reasons)
        if self.unused:
            notes += f"\nNot reduced, because no rank has used them so far: {', '.join(self.unused)}."
        if self.sparse:
            notes += (
                f"\nSparse gradients, which have no place in a bucket and in a graph, are averaged at the end of each "
                f"backward: {', '.join(self.sparse)}."
            )
        if self.by_rows:
            notes += "".join(f"\n{SUMMED_BY_ROWS.format(line)}" for line in self.by_rows)
        if self.left_alone:
            notes += f"\nLeft alone, to be ignored or of a wrapper inside: {format_names(self.left_alone, 5)}."
        proof = f"\n{self.proof}" if self.proof else ""
        reduction = f"\n{self.reduction}" if self.reduction else ""
        times = "".join(f"\n{line}" for line in self._format_times())
        return f"{self._table()}\n{self.bucket_size}{times}{reduction}{chosen}{compiled}{notes}{proof}"

    def _table(self) -> str:
        headers = ["order", "launched by", "gradients", "bytes"]
        if self.predicted is not None:
            headers += ["ready ms", "predicted start", "end"]
        if self.measured is not None:
            headers += ["measured launch", "wait", "end"]
        rows = []
        for row in self.rows:
            *first, shown, why = row
            rows.append([*first, *self._times_of(row[0]), shown, why])
        return str(tabulate(rows, headers=[*headers, "parameters", "why hooks"], tablefmt="simple"))

    def _times_of(self, position: int) -> Iterator[str]:
        """The cells of a row."""
        if self.predicted is not None:
            transfer = self.predicted.prediction.transfers[position]
            yield from map(format_ms, (transfer.ready, transfer.start, transfer.end))
        if self.measured is not None:
            bucket = self.measured.buckets[position]
            if bucket is None:
                yield from ("", "", "")
            else:
                waited = None if bucket.wait is None else bucket.wait[1] - bucket.wait[0]
                yield from ("" if at is None else format_ms(at) for at in (bucket.launch, waited, bucket.end))

    def _format_times(self) -> Iterator[str]:
        if self.not_predicted:
            yield self.not_predicted
        if self.predicted is not None:
            prediction, assumed = self.predicted.prediction, self.predicted.assumed
            yield (
                f"Predicted: a backward of {format_ms(prediction.seconds)} ms, with exposed communication of "
                f"{format_ms(self.predicted.exposed_seconds)} ms by difference to a local one, "
                f"{format_ms(prediction.exposed_seconds)} ms by the waits."
            )
            gap = prediction.seconds / self.predicted.bound_seconds - 1 if self.predicted.bound_seconds else 0.0
            if gap > _TOLD_GAP:
                yield f"That is {gap:.1%} above {format_ms(self.predicted.bound_seconds)} ms, which no plan can pass."
            if assumed:
                are_all = len(assumed) == len(self.rows)
                which = "all buckets" if are_all else f"bucket {format_names([*map(str, assumed)])}"
                yield f"When {which} will be ready, and how long that takes, is assumed by sizes: no graph tells it."
        if self.measured is not None:
            yield self._format_measured(self.measured)
        yield from self.waits

    def _format_measured(self, measured: MeasuredBackward) -> str:
        exposed, by_waits = measured.exposed_seconds(self.predicted), format_ms(measured.waiting_seconds)
        difference = ""
        if exposed is not None:
            other = "local ones (no_sync)" if measured.local_seconds is not None else "the predicted computation"
            difference = f"{format_ms(exposed)} ms by difference to {other}, "
        return (
            f"Measured on this rank, the median of {measured.backwards}: a backward of "
            f"{format_ms(measured.seconds)} ms, with exposed communication of {difference}{by_waits} ms by the union "
            "of waits."
        )

    # ---- for other programs ------------------------------------------------------------------------------------------

    def to_json(self) -> str:
        """Everything in here as a JSON object. Times are in milliseconds from the beginning of the backward."""
        return json.dumps(self.as_dict(), indent=2)

    def as_dict(self) -> dict[str, Any]:
        """What `to_json` writes. The keys are always the same; null (None) is for what is not known."""
        texts = ("bucket_size", "reduction", "chosen", "compiled", "proof", "not_predicted")
        lists = ("fallback_reasons", "unused", "sparse", "left_alone", "waits", "by_rows")
        return {
            "buckets": [self._bucket(row) for row in self.rows],
            "predicted": None if self.predicted is None else _predicted_totals(self.predicted),
            "measured": None if self.measured is None else self._measured_totals(self.measured),
            **{name: list(getattr(self, name)) for name in lists},
            **{name: getattr(self, name) for name in texts},
        }

    def _bucket(self, row: Row) -> dict[str, Any]:
        order, launched_by, gradients, nbytes, _, why_hooks = row
        predicted, measured = None, None
        if self.predicted is not None:
            transfer = self.predicted.prediction.transfers[order]
            predicted = {
                "ready_ms": transfer.ready * 1e3,
                "start_ms": transfer.start * 1e3,
                "end_ms": transfer.end * 1e3,
                "ready_is_assumed": order in self.predicted.assumed,
            }
        bucket = None if self.measured is None else self.measured.buckets[order]
        if bucket is not None:
            measured = {
                "launch_ms": bucket.launch * 1e3,
                "wait_begin_ms": None if bucket.wait is None else bucket.wait[0] * 1e3,
                "wait_end_ms": None if bucket.wait is None else bucket.wait[1] * 1e3,
                "end_ms": _in_ms(bucket.end),
                "end_is": bucket.end_is,
            }
        return {
            "order": order,
            "launched_by": launched_by,
            "gradients": gradients,
            "bytes": nbytes,
            "parameters": list(self.parameters[order]) if self.parameters else [],
            "why_hooks": why_hooks,
            "predicted": predicted,
            "measured": measured,
        }

    def _measured_totals(self, measured: MeasuredBackward) -> dict[str, Any]:
        return {
            "backwards": measured.backwards,
            "backward_ms": measured.seconds * 1e3,
            "local_backward_ms": _in_ms(measured.local_seconds),
            "exposed_by_difference_ms": _in_ms(measured.exposed_seconds(self.predicted)),
            "exposed_by_waits_ms": measured.waiting_seconds * 1e3,
        }


def _predicted_totals(predicted: PredictedBackward) -> dict[str, float]:
    return {
        "backward_ms": predicted.prediction.seconds * 1e3,
        "local_backward_ms": predicted.local_seconds * 1e3,
        "bound_ms": predicted.bound_seconds * 1e3,
        "exposed_by_difference_ms": predicted.exposed_seconds * 1e3,
        "exposed_by_waits_ms": predicted.prediction.exposed_seconds * 1e3,
    }


def _in_ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3


# ---- of a wrapper ----------------------------------------------------------------------------------------------------


def explain_sequence(
    sequence: ReductionSequence | None,
    fallback_reasons: Sequence[str],
    options: Options,
    proof: str,
    sparse: tuple[str, ...],
    left_alone: tuple[str, ...],
    chosen: str,
    compiled: str,
    times: "Times",
) -> Explanation:
    """Describe a sequence, bucket by bucket in launch order.

    `chosen` is what a warm-up has chosen, `compiled` what was compiled here and what was not.
    """
    bucket_size = str(options.planner)
    reduction = _format_reduction(options)
    if sequence is None:
        nothing = (), tuple(fallback_reasons), bucket_size, (), sparse, left_alone, reduction
        return Explanation(*nothing, chosen, compiled, proof)
    rows, parameters = list[Row](), list[tuple[str, ...]]()
    for section in sequence.launched:
        for bucket in section.plan.buckets:
            names = tuple(sequence.parameter_names[index] for index in bucket.indices)
            shown = format_names(names, 3) or "(riders)"
            rows.append((len(rows), section.origin, len(names), bucket.nbytes, shown, section.reason))
            parameters.append(names)
    planned = {section.reason for section in sequence.sections}
    at_run_time = tuple(reason for reason in fallback_reasons if reason not in planned)
    unused = (sequence.parameter_names[index] for section in sequence.unused for index in section.plan.indices)
    return Explanation(
        tuple(rows),
        at_run_time,
        bucket_size,
        tuple(unused),
        sparse,
        left_alone,
        reduction,
        chosen,
        compiled,
        proof,
        tuple(parameters),
        **times.of(sequence, options),
        by_rows=tuple(_by_rows(sequence, times)),
    )


def _by_rows(sequence: ReductionSequence, times: "Times") -> Iterator[str]:
    if times.counted_rows is not None:
        yield from format_rows(sequence.buckets, sequence.parameter_names, times.counted_rows)


def format_rows(buckets: Iterable[Bucket], names_of: Sequence[str], counted_rows: CountedRows) -> Iterator[str]:
    """What is summed by rows, and how many they were in the latest step, as `RowSums` has counted them."""
    for bucket in buckets:
        if bucket.row is None:
            continue
        names = format_names([names_of[index] for index in bucket.indices], 3)
        rows, counts = bucket.numel // bucket.row, counted_rows.get((bucket.numel, bucket.row), ())
        if not counts:
            yield f"{names}, {rows:,} rows"
            continue
        how = "these were gathered" if sends_rows(counts, rows, bucket.row * bucket.dtype.itemsize) else "all were sent"
        yield f"{names}; in the latest step a rank had up to {max(counts):,} of {rows:,} rows, and {how}"


@dataclass(frozen=True)
class Times:
    """Where a wrapper's times come from."""

    world_size: int
    work_of: Callable[[BucketPlan], BackwardWork | None] = lambda plan: None  # see `predict_sequence`
    recorder: Recorder | None = None
    # None where something else than `RowSums` reduces buckets.
    counted_rows: CountedRows | None = field(default_factory=dict)

    def of(self, sequence: ReductionSequence, options: Options) -> dict[str, Any]:
        """Fields of an `Explanation`."""
        predicted, not_predicted, calibration = None, "", options.calibration
        hooked = any(section.plan.reduction == "hook" for section in sequence.launched)
        if self.world_size == 1 or options.bucket_rule is not None:
            pass  # nothing to predict, or no argument to pass a calibration in
        elif hooked:
            not_predicted = "Not predicted: what is sent is the communication hook's."
        elif calibration is None:
            not_predicted = _NOT_PREDICTED
        else:
            sent = functools.partial(bytes_of, counted=self.counted_rows or {})
            predicted = predict_sequence(sequence, calibration, self.work_of, sent)
        measured = None if self.recorder is None else measured_backward(self.recorder, sequence)
        waits, total = list[Wait](), 0.0
        link = None if calibration is None or hooked else calibration.link
        if measured is not None:
            waits, total = measured.waits([bucket.nbytes for bucket in sequence.buckets], link), measured.seconds
        elif predicted is not None:
            waits, total = predicted.waits, predicted.prediction.seconds
        are_sized = isinstance(options.planner, SizedBuckets)
        lines = format_waits(waits, total, link, are_sized=are_sized, are_compressed=hooked)
        return {"predicted": predicted, "not_predicted": not_predicted, "measured": measured, "waits": lines}


def _format_reduction(options: Options) -> str:
    if options.comm_hook is not None:
        name = format_function(options.comm_hook)
        return f"The communication hook {name} reduces each bucket; in graphs the proof does not see what it launches."
    if options.reduction == "sum":
        return "Gradients are summed over ranks."
    return "Gradients are averaged by each rank's weight." if options.reduction == "weighted" else ""
