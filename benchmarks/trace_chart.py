"""The picture of a profiled step: what computes, what is launched and awaited, what is on its way.

    python -m benchmarks.trace_chart step.json docs/images/profiled-step.png

`step.json` is what docs/examples/profile_step.py writes.
"""

import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

OWN = "compiled_ddp: "
COMPUTES = ("aten::addmm", "aten::mm", "Optimizer.step")
LANES = ("computes", "launches and waits", "all-reduces (gloo)")
COLORS = ("#1f78b4", "#e31a1c", "#33a02c")


def spans(events: Iterable[Mapping[str, Any]]) -> list[tuple[int, float, float, str]]:
    """Lane, beginning and length in milliseconds, and what is written there, of what the picture shows."""
    found = []
    for event in sorted((event for event in events if event.get("ph") == "X"), key=lambda event: float(event["ts"])):
        name = event["name"]
        if name.startswith(OWN):
            lane, words = 1, name.removeprefix(OWN).partition(" (")[0]
        elif name.startswith("gloo:"):
            lane, words = 2, ""
        elif name.startswith(COMPUTES):
            lane, words = 0, "optimizer" if name.startswith("Optimizer") else ""
        else:
            continue
        found.append((lane, event["ts"] / 1e3, event["dur"] / 1e3, words))
    begun = min(start for _, start, _, _ in found)
    return [(lane, start - begun, length, words) for lane, start, length, words in found]


def draw(trace: Path, picture: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(11, 3.6), layout="constrained")
    heights = [0, 0, 0]
    for lane, start, length, words in spans(json.loads(trace.read_text())["traceEvents"]):
        place = len(LANES) - lane
        axes.barh(place, length, left=start, height=0.4, color=COLORS[lane], edgecolor="white", linewidth=0.5)
        if words:
            above = 0.24 + 0.13 * (heights[lane] % 4 if lane == 1 else 0)
            heights[lane] += 1
            axes.text(start, place + above, words, fontsize=7)
    axes.set_yticks([len(LANES) - lane for lane in range(len(LANES))], LANES)
    axes.set_xlabel("ms")
    axes.set_ylim(0.5, len(LANES) + 0.8)
    axes.set_title("One step of rank 0: six layers, three buckets, two ranks on two cores")
    figure.savefig(picture, dpi=110)


if __name__ == "__main__":
    draw(Path(sys.argv[1]), Path(sys.argv[2]))
