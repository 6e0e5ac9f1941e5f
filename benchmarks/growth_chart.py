"""The picture of what size costs: seconds over the number of parameters, both logarithmic."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.passes_by_size import SizedPasses
from benchmarks.steps_by_size import SizedSteps

QUANTITIES: dict[str, tuple[str, Callable[[SizedSteps], float | None]]] = {
    "constructor": ("#6a3d9a", lambda steps: steps.constructor_s),
    "first forward": ("#33a02c", lambda steps: steps.forward_s[0] if steps.forward_s else None),
    "first backward": ("#e31a1c", lambda steps: steps.first_backward_s),
    "later backward": ("#1f78b4", lambda steps: steps.later_backward_s),
}
REFERENCE_STYLE, OWN_STYLE = "--", "-"  # torch's variants, and this project's


def curves(found: Sequence[SizedSteps]) -> dict[tuple[str, str], list[tuple[int, float]]]:
    """(parameters, seconds) of each variant and quantity that was measured, by rising size."""
    points: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for steps in sorted(found, key=lambda steps: steps.parameters):
        for quantity, (_, seconds_of) in QUANTITIES.items():
            seconds = seconds_of(steps)
            if seconds is not None:
                points.setdefault((steps.variant, quantity), []).append((steps.parameters, seconds))
    return points


def _draw_steps(axes: Any, title: str, found: Sequence[SizedSteps]) -> None:
    for (variant, quantity), points in curves(found).items():
        own = variant in ("EagerDDP", "compile_ddp")
        style = {"linestyle": OWN_STYLE if own else REFERENCE_STYLE, "marker": "o" if own else "x"}
        axes.plot(*zip(*points, strict=True), **style, color=QUANTITIES[quantity][0], label=f"{variant}: {quantity}")
    _finish(axes, title)


def _draw_passes(axes: Any, found: Sequence[SizedPasses]) -> None:
    sizes = [sized.parameters for sized in found]
    for name in found[0].seconds:
        axes.plot(sizes, [sized.seconds[name] for sized in found], marker="o", label=name)
    _finish(axes, "graph passes")


def _finish(axes: Any, title: str) -> None:
    """Add a line of slope 1 through the lowest point: what rises faster is more than linear."""
    lines = [line.get_xydata() for line in axes.get_lines()]
    lowest_x, lowest_y = min((tuple(point) for line in lines for point in line), key=lambda point: point[1] / point[0])
    sizes = sorted({int(point[0]) for line in lines for point in line})
    ends = [sizes[0], sizes[-1]]
    axes.plot(ends, [lowest_y / lowest_x * x for x in ends], ":", color="#969696", label="linear")
    axes.set(xscale="log", yscale="log", xlabel="parameters", ylabel="seconds")
    axes.set_xticks(sizes, map(str, sizes))
    axes.set_xticks([], minor=True)
    axes.set_title(title, loc="left")
    axes.grid(True, which="major", color="#e0e0e0")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=2)


def draw(steps: Sequence[SizedSteps], passes: Sequence[SizedPasses], path: Path) -> None:
    """A PNG file with a panel for what compiles nothing, one for each compiler backend, and one for the passes."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels: dict[str, list[SizedSteps]] = {}
    for sized in steps:
        compiles = sized.backend is not None and sized.forward_s  # a constructor alone compiles nothing
        title = f"graphs, {sized.backend}" if compiles else "hooks, and constructors alone"
        panels.setdefault(title, []).append(sized)
    columns = len(panels) + bool(passes)
    if not columns:
        return
    figure, rows = plt.subplots(1, columns, figsize=(6 * columns, 6.5), squeeze=False, layout="constrained")
    for axes, (title, found) in zip(rows[0], panels.items(), strict=False):
        _draw_steps(axes, title, found)
    if passes:
        _draw_passes(rows[0][-1], passes)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)
