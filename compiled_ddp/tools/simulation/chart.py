"""The picture of a simulation: efficiency and exposed communication by the number of ranks."""

import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from compiled_ddp.tools.simulation.simulate import Step

OF_A_LINE = 120  # characters
KINDS = (".png", ".svg", ".pdf")  # of pictures

Quantity = Callable[[Step], float]
CURVES: tuple[tuple[str, str, str, Quantity], ...] = (  # name, line style, colour, seconds of the step
    ("planned for each link", "-", "#3182bd", lambda step: step.seconds),
    ("DDP's buckets", "-", "#e6550d", lambda step: step.fixed_seconds),
    ("limit: no plan is better", "--", "#252525", lambda step: step.limit_seconds),
)


def draw(steps: Sequence[Step], path: Path, title: str) -> None:
    """Two panels under `title`, into the file `path`, whose suffix is one of KINDS. ImportError without matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.6), layout="constrained")
    _draw_curves(left, steps, lambda step, seconds: 100 * step.compute_seconds / seconds)
    _draw_curves(right, steps, lambda step, seconds: 1e3 * (seconds - step.compute_seconds))
    left.set(ylabel="% of the step that computes", ylim=(0, 102))
    right.set(ylabel="exposed communication, ms", yscale="log")
    left.set_title("Scaling efficiency", loc="left", fontsize=11)
    right.set_title("How much longer than its computation a step is", loc="left", fontsize=11)
    _mark_link_bound(left, steps)
    _mark_link_bound(right, steps)
    figure.suptitle("\n".join(textwrap.wrap(title, OF_A_LINE)), x=0.01, ha="left", fontsize=10, color="#525252")
    handles, labels = right.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _draw_curves(axes: Any, steps: Sequence[Step], height: Callable[[Step, float], float]) -> None:
    ranks = [step.ranks for step in steps]
    for name, style, color, seconds in CURVES:
        heights = [height(step, seconds(step)) for step in steps]
        axes.plot(ranks, heights, style, color=color, marker="o" if style == "-" else None, markersize=3.5, label=name)
    axes.set_xscale("log", base=2)
    axes.set_xticks(ranks[:: 1 + len(ranks) // 9], [f"{number:,}" for number in ranks[:: 1 + len(ranks) // 9]])
    axes.set_xticks([], minor=True)
    axes.set_xlabel("ranks")
    axes.grid(True, color="#e0e0e0")
    axes.spines[["top", "right"]].set_visible(False)


def _mark_link_bound(axes: Any, steps: Sequence[Step]) -> None:
    """Where communication is longer than the backward. Nothing where it is nowhere."""
    bound = [step.ranks for step in steps if step.is_link_bound]
    if bound:
        label = "communication alone is longer than the backward"
        axes.axvspan(min(bound), max(bound), color="#fdd0a2", alpha=0.35, zorder=0, label=label)
