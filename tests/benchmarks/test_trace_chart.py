"""The trace that docs/guides/profile.md links to, which trace viewers are to open, and the picture drawn from it."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from benchmarks.trace_chart import draw, read

ROOT = Path(__file__).resolve().parent.parent.parent
TRACE = ROOT / "docs" / "examples" / "profiled-step.json"

# What the Trace Event Format asks of a phase, besides `ph`.
REQUIRED = {
    "X": {"name", "ts", "dur", "pid", "tid"},
    "M": {"name", "pid", "args"},
    "i": {"name", "ts", "pid", "tid", "s"},
    "s": {"name", "ts", "pid", "tid", "id", "cat"},
    "f": {"name", "ts", "pid", "tid", "id", "cat"},
}


def faults(events: list[dict[str, Any]]) -> list[str]:
    """What a viewer of the Trace Event Format would drop, or draw in a wrong place."""
    found = [f"{event} has no {REQUIRED[event['ph']] - event.keys()}" for event in events if _lacks(event)]
    if found:
        return found
    flows = {kind: Counter((e["cat"], e["id"]) for e in events if e["ph"] == kind) for kind in "sf"}
    if flows["s"] != flows["f"]:
        found.append(f"flows begin and do not end, or the reverse: {flows}")
    open_until: dict[tuple[object, object], list[float]] = {}
    ranges = [event for event in events if event["ph"] == "X"]
    for event in sorted(ranges, key=lambda event: (event["ts"], -event["dur"])):
        around = open_until.setdefault((event["pid"], event["tid"]), [])
        while around and around[-1] <= event["ts"]:
            around.pop()
        end = event["ts"] + event["dur"]
        if event["dur"] < 0 or (around and end > around[-1] + 0.002):  # microseconds, as they are rounded
            found.append(f"{event['name']} does not end within the range around it")
        around.append(end)
    return found


def _lacks(event: dict[str, Any]) -> bool:
    numbers = [event[key] for key in ("ts", "dur") if key in event]
    return bool(REQUIRED[event["ph"]] - event.keys()) or not all(isinstance(number, int | float) for number in numbers)


def test_the_documented_trace_is_of_the_format_that_viewers_read() -> None:
    assert faults(json.loads(TRACE.read_text())["traceEvents"]) == []


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"tid": None}, "has no {'tid'}"),
        ({"dur": 5.0}, "does not end within the range around it"),
        ({"ph": "s", "id": 1, "cat": "c"}, "flows begin and do not end"),
    ],
)
def test_a_fault_of_a_trace_is_found(change: dict[str, Any], fault: str) -> None:
    outer = {"ph": "X", "name": "outer", "ts": 1.0, "dur": 4.0, "pid": 1, "tid": 1}
    inner = {**outer, "name": "inner", "ts": 2.0, "dur": 3.0}
    assert faults([outer, inner]) == []
    changed = {key: value for key, value in {**inner, **change}.items() if value is not None}
    (found,) = faults([outer, changed])
    assert fault in found


def test_the_picture_shows_each_bucket_launched_awaited_and_on_the_link() -> None:
    bars, phases = read(json.loads(TRACE.read_text())["traceEvents"])
    assert [phase.words for phase in phases] == ["forward", "backward", "optimizer"]
    assert [bar.words for bar in bars if bar.lane == "host" and "launch" in bar.words] == [
        "launch 0",
        "launch 1",
        "launch 2",
    ]
    assert [bar.words for bar in bars if bar.words.startswith("wait")] == ["wait 0", "wait 1", "wait 2"]
    on_link = [bar.words for bar in bars if bar.lane == "link"]
    assert on_link == ["bucket 0, 2.4 MB", "bucket 1, 7.1 MB", "bucket 2, 4.7 MB"]


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    draw(TRACE, tmp_path / "step.png")
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")
