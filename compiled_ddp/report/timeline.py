"""The picture of a backward, and its trace: what computes and what is on the link, as predicted and as measured."""

import json
import math
from pathlib import Path
from typing import Any

from compiled_ddp.formatting import format_bytes
from compiled_ddp.report.explain import Explanation
from compiled_ddp.report.times import Span, spans_of_measurement, spans_of_prediction

Lanes = dict[str, list[Span]]  # by where they come from: "predicted", "measured"

_NO_PICTURE = (
    "timeline() draws with matplotlib, which is not installed: pip install 'compiled-ddp[plots]', or name a file that "
    "ends in .json, for https://ui.perfetto.dev."
)


def write_timeline(explanation: Explanation, path: Path) -> None:
    """See `DataParallelWrapper.timeline`."""
    if path.suffix not in (".png", ".json"):
        raise ValueError(f"timeline(path) writes a picture, .png, or a trace, .json: found {str(path)!r}.")
    lanes: Lanes = {}
    if explanation.predicted is not None:
        lanes["predicted"] = spans_of_prediction(explanation.predicted)
    if explanation.measured is not None:
        lanes["measured"] = spans_of_measurement(explanation.measured)
    if not lanes:
        raise RuntimeError(
            "timeline() has nothing to show yet: call profile(steps) before some steps, or pass calibration= to the "
            "wrapper, for what is predicted once there is a plan."
        )
    if path.suffix == ".json":
        path.write_text(json.dumps(trace(explanation, lanes)), encoding="utf-8")
    else:
        _draw(explanation, lanes, path)


# ---- a trace ---------------------------------------------------------------------------------------------------------

_FIRST_IDS = {"predicted": 1, "measured": 101}  # of a process, and of its first thread, which viewers show first


def trace(explanation: Explanation, lanes: Lanes) -> dict[str, Any]:
    """In the trace event format: a process for each source, with a thread for each lane.

    What is on the link at once has further threads, as ranges of one thread must not overlap.
    """
    events: list[dict[str, Any]] = []
    for source, spans in lanes.items():
        process = _FIRST_IDS[source]
        rows = max((span.row for span in spans), default=0)
        threads = ["compute", "link", *(f"link, row {row + 1}" for row in range(1, rows + 1))]
        named = {"ph": "M", "pid": process}
        events.append({**named, "tid": process, "name": "process_name", "args": {"name": source}})
        events.append({**named, "tid": process, "name": "process_sort_index", "args": {"sort_index": process}})
        for thread, name in enumerate(threads, start=process):
            events.append({**named, "tid": thread, "name": "thread_name", "args": {"name": name}})
            events.append({**named, "tid": thread, "name": "thread_sort_index", "args": {"sort_index": thread}})
        events += [_event(explanation, process, span) for span in spans]
    return {"displayTimeUnit": "ms", "traceEvents": events}


def _event(explanation: Explanation, process: int, span: Span) -> dict[str, Any]:
    event = {
        "ph": "X",
        "pid": process,
        "tid": process + (1 + span.row if span.doing == "sends" else 0),
        "cat": span.doing,
        "name": _words(explanation, span),
        "ts": span.begin * 1e6,
        "dur": (span.end - span.begin) * 1e6,
    }
    if span.bucket is not None:
        *_, nbytes, _, _ = explanation.rows[span.bucket]
        parameters = [*explanation.parameters[span.bucket]]
        event["args"] = {"bucket": span.bucket, "bytes": nbytes, "parameters": parameters}
    return event


def _words(explanation: Explanation, span: Span) -> str:
    if span.bucket is None:
        return "backward"
    *_, nbytes, shown, _ = explanation.rows[span.bucket]
    before = {"computes": "backward for ", "waits": "wait for ", "sends": ""}[span.doing]
    return f"{before}bucket {span.bucket} ({shown}; {format_bytes(nbytes)})"


# ---- a picture -------------------------------------------------------------------------------------------------------

_COLORS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#e45756", "#72b7b2", "#d4a72c", "#9d755d", "#d37295", "#79706e")
_OTHER, _WORDS = "#c9ced6", "#333333"
_MOST_KEYS, _MOST_NAMED, _LONGEST_NAME = 21, 10, 30  # buckets in the legend, those with a name there, its characters
_HEIGHT, _BETWEEN = 0.74, 2.4  # of a lane, and from one source to the next, in lanes
_NARROW = 0.02  # of the axis: a narrower span has no number in it


def _draw(explanation: Explanation, lanes: Lanes, path: Path) -> None:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure  # not pyplot, which would choose a backend for the user's own pictures
    except ImportError as error:
        raise ImportError(_NO_PICTURE) from error
    keys, columns = _keys(explanation)
    rows_of_keys = math.ceil(len(keys) / columns)
    figure = Figure(figsize=(11, 0.85 + 1.4 * len(lanes) + 0.22 * rows_of_keys), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    end_ms = 1e3 * max(span.end for spans in lanes.values() for span in spans)
    ticks: dict[float, str] = {}
    for place, (source, spans) in enumerate(lanes.items()):
        top = -_BETWEEN * place  # of the compute lane; the link is one below
        ticks |= {top: f"{source}\ncompute", top - 1: f"{source}\nlink"}
        rows = 1 + max(span.row for span in spans)
        for span in spans:
            _draw_span(axes, span, top, rows, end_ms)
        axes.text(end_ms * 1.012, top - 0.5, _totals(explanation, source), va="center", fontsize=9, color=_WORDS)
    axes.set_yticks(list(ticks), list(ticks.values()))
    axes.set_ylim(min(ticks) - 0.5, 0.5)
    axes.set_xlim(0, end_ms)
    axes.set_xlabel("ms from the beginning of the backward")
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
        axes.barh(middle, length, color=color, edgecolor="white", **shape)
    if span.bucket is not None and length > _NARROW * end_ms:
        over_hatches = {"bbox": {"facecolor": "white", "edgecolor": "none", "pad": 1.0}} if waits else {}
        size = 7 if height < _HEIGHT / 2 else 9
        words = {"ha": "center", "va": "center_baseline", "fontsize": size, **over_hatches}
        axes.text(begin + length / 2, middle, str(span.bucket), color=_WORDS if waits else "white", **words)


def _color(bucket: int) -> str:
    return _COLORS[bucket % len(_COLORS)]


def _totals(explanation: Explanation, source: str) -> str:
    """What is said beside the lanes."""
    predicted, measured = explanation.predicted, explanation.measured
    if source == "measured" and measured is not None:
        total, waiting, difference = measured.seconds, measured.waiting_seconds, measured.exposed_seconds(predicted)
        assumed = ""
    else:
        assert predicted is not None
        total, waiting = predicted.prediction.seconds, predicted.prediction.exposed_seconds
        difference, assumed = predicted.exposed_seconds, "\n(ready by sizes)" if predicted.assumed else ""
    by_difference = "" if difference is None else f"{difference * 1e3:.3g} ms by difference\n"
    return f"{total * 1e3:.4g} ms,\nof which exposed:\n{by_difference}{waiting * 1e3:.3g} ms by the waits{assumed}"


def _keys(explanation: Explanation) -> tuple[list[Any], int]:
    """The legend, and in how many columns."""
    from matplotlib.patches import Patch

    rows = explanation.rows
    are_named = len(rows) <= _MOST_NAMED
    keys: list[Any] = [
        Patch(facecolor=_color(row[0]), label=_key(explanation, row[0], named=are_named)) for row in rows[:_MOST_KEYS]
    ]
    if len(rows) > _MOST_KEYS:
        keys.append(Patch(facecolor="none", label=f"and {len(rows) - _MOST_KEYS} more buckets"))
    keys.append(Patch(facecolor=_OTHER, label="the rest of the backward"))
    keys.append(Patch(facecolor="white", edgecolor="#555555", hatch="/////", label="waits for a bucket"))
    return keys, 3 if are_named else 6


def _key(explanation: Explanation, order: int, *, named: bool) -> str:
    size = format_bytes(explanation.rows[order][3])
    names = explanation.parameters[order] or ("riders",)
    if not named:
        return f"{order}: {size}"
    first = names[0] if len(names[0]) <= _LONGEST_NAME else f"{names[0][: _LONGEST_NAME - 3]}..."
    more = f" +{len(names) - 1}" if len(names) > 1 else ""
    return f"{order}: {first}{more} ({size})"
