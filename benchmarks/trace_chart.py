"""The picture of a profiled step: what computes, what the host launches and awaits, what is on the link.

    python -m benchmarks.trace_chart step.json docs/images/profiled-step.png

`step.json` is what docs/examples/profile_step.py writes.
"""

import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Lane = Literal["computation", "host", "link"]
LANES: tuple[Lane, ...] = ("computation", "host", "link")
LABELS = {"computation": "computation", "host": "launch, wait\n(host)", "link": "all-reduce\n(gloo)"}
COMPUTES = ("aten::addmm", "aten::mm", "Optimizer.step")
# The outermost ranges of a step, and what the picture calls them.
PHASES = {
    "Torch-Compiled Region": "forward",
    "autograd::engine::evaluate_function: CompiledFunctionBackward": "backward",
    "Optimizer.step": "optimizer",
}
OWN = re.compile(r"compiled_ddp: (?P<what>fold|launch|wait for) bucket (?P<bucket>\d+) \(.*; (?P<size>[^;]*)\)")
GREY, COLORS = "#9aa5b1", ("#1f78b4", "#e6862a", "#33a02c", "#8e4fa8", "#c23b3b")


@dataclass(frozen=True)
class Bar:
    """One range of the trace, of which `bucket` is None where it is of none."""

    lane: Lane
    start_ms: float
    length_ms: float
    words: str = ""
    bucket: int | None = None


def read(events: Iterable[Mapping[str, Any]]) -> tuple[list[Bar], list[Bar]]:
    """The bars of the picture, and the phases of the step behind them, in milliseconds from the first one on.

    gloo reduces buckets in the order of their launches, so its n-th range is that of the n-th launch.
    """
    ranges = sorted((event for event in events if event.get("ph") == "X"), key=lambda event: float(event["ts"]))
    phases = [
        Bar("computation", event["ts"] / 1e3, event["dur"] / 1e3, words)
        for event in ranges
        for begins_with, words in PHASES.items()
        if event["name"].startswith(begins_with)
    ]
    bars = list(_bars(ranges))
    begun = min(bar.start_ms for bar in (*bars, *phases))
    return [_moved(bar, begun) for bar in bars], [_moved(bar, begun) for bar in phases]


def _bars(ranges: Iterable[Mapping[str, Any]]) -> Iterator[Bar]:
    launched: list[tuple[int, str]] = []
    reduced = 0
    for event in ranges:
        start, length, name = event["ts"] / 1e3, event["dur"] / 1e3, event["name"]
        if own := OWN.match(name):
            bucket = int(own["bucket"])
            if own["what"] == "launch":
                launched.append((bucket, own["size"]))
            yield Bar("host", start, length, f"{own['what'].removesuffix(' for')} {bucket}", bucket)
        elif name.startswith("gloo:"):
            bucket, size = launched[reduced]
            reduced += 1
            yield Bar("link", start, length, f"bucket {bucket}, {size}", bucket)
        elif name.startswith(COMPUTES):
            yield Bar("computation", start, length)


def _moved(bar: Bar, begun_ms: float) -> Bar:
    return Bar(bar.lane, bar.start_ms - begun_ms, bar.length_ms, bar.words, bar.bucket)


def draw(trace: Path, picture: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    bars, phases = read(json.loads(trace.read_text())["traceEvents"])
    figure, axes = pyplot.subplots(figsize=(11, 3.6), layout="constrained")
    for phase in phases:
        axes.axvspan(phase.start_ms, phase.start_ms + phase.length_ms, color="#eef1f5", zorder=0)
        axes.text(phase.start_ms + phase.length_ms / 2, 3.55, phase.words, ha="center", fontsize=10, color="#444444")
    last_label_ms, raised = -99.0, False
    for bar in bars:
        place = len(LANES) - LANES.index(bar.lane)
        color = GREY if bar.bucket is None else COLORS[bar.bucket % len(COLORS)]
        hatch = "////" if bar.words.startswith("wait") else None
        shape = {"height": 0.42, "color": color, "edgecolor": "white", "linewidth": 0.5, "hatch": hatch}
        axes.barh(place, bar.length_ms, left=bar.start_ms, **shape)
        if bar.lane == "link":
            middle = bar.start_ms + bar.length_ms / 2
            axes.text(middle, place, bar.words.replace(", ", "\n"), ha="center", va="center", fontsize=8, color="white")
        elif bar.words and bar.length_ms > 0.5:
            middle = bar.start_ms + bar.length_ms / 2
            raised = middle - last_label_ms < 3 and not raised  # so that neighbours do not overlap
            last_label_ms = middle
            axes.text(middle, place + (0.42 if raised else 0.26), bar.words, ha="center", fontsize=8)
    axes.set_yticks([len(LANES) - lane for lane in range(len(LANES))], [LABELS[lane] for lane in LANES])
    axes.set_xlabel("ms")
    axes.set_ylim(0.6, len(LANES) + 0.85)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    figure.savefig(picture, dpi=110)


if __name__ == "__main__":
    draw(Path(sys.argv[1]), Path(sys.argv[2]))
