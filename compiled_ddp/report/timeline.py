"""The picture of a backward or a step, and its trace: what computes and what is on the link, predicted and measured."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compiled_ddp.formatting import format_bytes
from compiled_ddp.report.explain import Explanation
from compiled_ddp.report.times import Span, format_ms, spans_of_measurement, spans_of_prediction


@dataclass(frozen=True)
class Named:
    """A bucket as it is called."""

    nbytes: int
    shown: str  # its parameters, in a few words
    parameters: tuple[str, ...]


@dataclass(frozen=True)
class Lanes:
    """What one source tells: that which computes, and the link."""

    spans: tuple[Span, ...]
    totals: str  # said beside them


@dataclass(frozen=True)
class Timeline:
    """What is drawn: a backward, or a step, by where its times come from ("predicted", "measured")."""

    of: str
    buckets: tuple[Named, ...]
    lanes: dict[str, Lanes]


_NO_PICTURE = (
    "timeline() draws with matplotlib, which is not installed: pip install 'compiled-ddp[plots]', or name a file that "
    "ends in .json, for https://ui.perfetto.dev."
)


def write_timeline(timeline: Timeline, path: Path) -> None:
    """See `DataParallelWrapper.timeline`."""
    if path.suffix not in (".png", ".json"):
        raise ValueError(f"timeline(path) writes a picture, .png, or a trace, .json: found {str(path)!r}.")
    if not timeline.lanes:
        raise RuntimeError(
            "timeline() has nothing to show yet: call profile(steps) before some steps. Predicted is a plan on a "
            "link that was measured: planned buckets measure it, and a wrapper takes calibration=."
        )
    if path.suffix == ".json":
        path.write_text(json.dumps(trace(timeline)), encoding="utf-8")
    else:
        _draw(timeline, path)


# ---- of a wrapper's backward -----------------------------------------------------------------------------------------


def timeline_of_backward(explanation: Explanation) -> Timeline:
    """What `explain()` says of times."""
    lanes, predicted, measured = dict[str, Lanes](), explanation.predicted, explanation.measured
    if predicted is not None:
        told = totals(predicted.prediction.seconds, predicted.exposed_seconds, predicted.prediction.exposed_seconds) + (
            "\n(ready by sizes)" if predicted.assumed else ""
        )
        lanes["predicted"] = Lanes(tuple(spans_of_prediction(predicted)), told)
    if measured is not None:
        told = totals(measured.seconds, measured.exposed_seconds(predicted), measured.waiting_seconds)
        lanes["measured"] = Lanes(tuple(spans_of_measurement(measured)), told)
    buckets = [
        Named(nbytes, shown, parameters)
        for (*_, nbytes, shown, _), parameters in zip(explanation.rows, explanation.parameters, strict=True)
    ]
    return Timeline("backward", tuple(buckets), lanes)


def totals(seconds: float, difference: float | None, waiting: float) -> str:
    """What is said beside the lanes; exposed communication by `difference`, if that is known, and by the waits."""
    by_difference = "" if difference is None else f"{format_ms(difference)} ms by difference\n"
    return f"{format_ms(seconds)} ms,\nof which exposed:\n{by_difference}{format_ms(waiting)} ms by the waits"


# ---- a trace ---------------------------------------------------------------------------------------------------------

_FIRST_IDS = {"predicted": 1, "measured": 101}  # of a process, and of its first thread, which viewers show first


def trace(timeline: Timeline) -> dict[str, Any]:
    """In the trace event format: a process for each source, with a thread for each lane.

    What is on the link at once has further threads, as ranges of one thread must not overlap.
    """
    events: list[dict[str, Any]] = []
    for source, lanes in timeline.lanes.items():
        process = _FIRST_IDS[source]
        rows = max((span.row for span in lanes.spans), default=0)
        threads = ["compute", "link", *(f"link, row {row + 1}" for row in range(1, rows + 1))]
        named = {"ph": "M", "pid": process}
        events.append({**named, "tid": process, "name": "process_name", "args": {"name": source}})
        events.append({**named, "tid": process, "name": "process_sort_index", "args": {"sort_index": process}})
        for thread, name in enumerate(threads, start=process):
            events.append({**named, "tid": thread, "name": "thread_name", "args": {"name": name}})
            events.append({**named, "tid": thread, "name": "thread_sort_index", "args": {"sort_index": thread}})
        events += [_event(timeline, process, span) for span in lanes.spans]
    return {"displayTimeUnit": "ms", "traceEvents": events}


def _event(timeline: Timeline, process: int, span: Span) -> dict[str, Any]:
    event = {
        "ph": "X",
        "pid": process,
        "tid": process + (1 + span.row if span.doing == "sends" else 0),
        "cat": span.doing,
        "name": _words(timeline, span),
        "ts": span.begin * 1e6,
        "dur": (span.end - span.begin) * 1e6,
    }
    if span.bucket is not None:
        named = timeline.buckets[span.bucket]
        event["args"] = {"bucket": span.bucket, "bytes": named.nbytes, "parameters": [*named.parameters]}
    return event


def _words(timeline: Timeline, span: Span) -> str:
    if span.bucket is None:
        return timeline.of
    named = timeline.buckets[span.bucket]
    transfer = f"{span.transfer} of " if span.transfer else ""
    before = {"computes": f"{timeline.of} for ", "waits": f"wait for {transfer}", "sends": transfer}[span.doing]
    return f"{before}bucket {span.bucket} ({named.shown}; {format_bytes(named.nbytes)})"


# ---- a picture -------------------------------------------------------------------------------------------------------

_COLORS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#e45756", "#72b7b2", "#d4a72c", "#9d755d", "#d37295", "#79706e")
_OTHER, _WORDS = "#c9ced6", "#333333"
_MOST_KEYS, _MOST_NAMED, _LONGEST_NAME = 21, 10, 30  # buckets in the legend, those with a name there, its characters
_HEIGHT, _BETWEEN = 0.74, 2.4  # of a lane, and from one source to the next, in lanes
_GATHERED = 0.55  # how opaque what is gathered is
_NARROW = 0.02  # of the axis: a narrower span has no number in it


def _draw(timeline: Timeline, path: Path) -> None:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure  # not pyplot, which would choose a backend for the user's own pictures
    except ImportError as error:
        raise ImportError(_NO_PICTURE) from error
    keys, columns = _keys(timeline)
    rows_of_keys = math.ceil(len(keys) / columns)
    figure = Figure(figsize=(11, 0.85 + 1.4 * len(timeline.lanes) + 0.22 * rows_of_keys), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    end_ms = 1e3 * max(span.end for lanes in timeline.lanes.values() for span in lanes.spans)
    ticks: dict[float, str] = {}
    for place, (source, lanes) in enumerate(timeline.lanes.items()):
        top = -_BETWEEN * place  # of the compute lane; the link is one below
        ticks |= {top: f"{source}\ncompute", top - 1: f"{source}\nlink"}
        rows = 1 + max(span.row for span in lanes.spans)
        for span in lanes.spans:
            _draw_span(axes, span, top, rows, end_ms)
        axes.text(end_ms * 1.012, top - 0.5, lanes.totals, va="center", fontsize=9, color=_WORDS)
    axes.set_yticks(list(ticks), list(ticks.values()))
    axes.set_ylim(min(ticks) - 0.5, 0.5)
    axes.set_xlim(0, end_ms)
    axes.set_xlabel(f"ms from the beginning of the {timeline.of}")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color="#e6e8eb", linewidth=0.8)
    axes.set_axisbelow(True)
    figure.legend(handles=keys, loc="outside lower center", ncols=columns, frameon=False, fontsize=9)
    figure.savefig(path, dpi=130, format="png")


def _draw_span(axes: Any, span: Span, top: float, rows: int, end_ms: float) -> None:
    height, middle = _HEIGHT, top
    if span.doing == "sends":
        height = _HEIGHT / rows
        middle = top - 1 + _HEIGHT / 2 - height * (span.row + 0.5)
    color = _OTHER if span.bucket is None else _color(span.bucket)
    begin, length = span.begin * 1e3, (span.end - span.begin) * 1e3
    shape = {"height": height, "left": begin, "linewidth": 0.6}
    waits = span.doing == "waits"
    if waits:
        axes.barh(middle, length, facecolor="white", edgecolor=color, hatch="/////", **shape)
    else:
        alpha = _GATHERED if span.transfer == "gather" else 1.0
        axes.barh(middle, length, color=color, edgecolor="white", alpha=alpha, **shape)
    if span.bucket is not None and length > _NARROW * end_ms:
        over_hatches = {"bbox": {"facecolor": "white", "edgecolor": "none", "pad": 1.0}} if waits else {}
        size = 7 if height < _HEIGHT / 2 else 9
        words = {"ha": "center", "va": "center_baseline", "fontsize": size, **over_hatches}
        axes.text(begin + length / 2, middle, str(span.bucket), color=_WORDS if waits else "white", **words)


def _color(bucket: int) -> str:
    return _COLORS[bucket % len(_COLORS)]


def _keys(timeline: Timeline) -> tuple[list[Any], int]:
    """The legend, and in how many columns."""
    from matplotlib.patches import Patch

    buckets = timeline.buckets
    are_named = len(buckets) <= _MOST_NAMED
    keys: list[Any] = [
        Patch(facecolor=_color(place), label=_key(place, named, with_name=are_named))
        for place, named in enumerate(buckets[:_MOST_KEYS])
    ]
    if len(buckets) > _MOST_KEYS:
        keys.append(Patch(facecolor="none", label=f"and {len(buckets) - _MOST_KEYS} more buckets"))
    keys.append(Patch(facecolor=_OTHER, label=f"the rest of the {timeline.of}"))
    keys.append(Patch(facecolor="white", edgecolor="#555555", hatch="/////", label="waits for a bucket"))
    if any(span.transfer == "gather" for lanes in timeline.lanes.values() for span in lanes.spans):
        keys.append(Patch(facecolor="#555555", alpha=_GATHERED, label="gathered"))
    return keys, 3 if are_named else 6


def _key(place: int, named: Named, *, with_name: bool) -> str:
    size = format_bytes(named.nbytes)
    if not with_name:
        return f"{place}: {size}"
    names = named.parameters or ("riders",)
    first = names[0] if len(names[0]) <= _LONGEST_NAME else f"{names[0][: _LONGEST_NAME - 3]}..."
    more = f" +{len(names) - 1}" if len(names) > 1 else ""
    return f"{place}: {first}{more} ({size})"
