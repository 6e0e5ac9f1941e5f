"""The picture of a comparison: one stacked bar per variant, communication that was not hidden marked in it."""

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from compiled_ddp.tools.comparison.derived import LIMITS, Row, Table, derive
from compiled_ddp.tools.comparison.record import machine, ran_on
from compiled_ddp.tools.comparison.result import Comparison
from compiled_ddp.tools.comparison.table import count

PARTS = {
    "forward": "#9ecae1",
    "backward": "#3182bd",
    "exposed communication": "#e6550d",
    "optimizer": "#bdbdbd",
}
OF_A_LINE, OF_A_TITLE = 110, 80  # characters: over all panels, and over one
LIMIT_STYLES: tuple[tuple[Any, str], ...] = (("--", "#252525"), (":", "#252525"))  # line style, colour


def parts_ms(row: Row) -> dict[str, float]:
    """The row's bar cut into PARTS. Exposed communication is taken out of the phase that it is in, the backward; what
    a noisy run shows below zero counts as zero."""
    assert row.forward_ms is not None and row.backward_ms is not None and row.optimizer_ms is not None
    exposed = min(max(row.exposed_ms or 0.0, 0.0), row.backward_ms)
    return dict(zip(PARTS, (row.forward_ms, row.backward_ms - exposed, exposed, row.optimizer_ms), strict=True))


def _draw_panel(axes: Any, comparison: Comparison, table: Table) -> None:
    rows = [row for row in table.variants if row.error is None]
    names = [row.name for row in rows]
    ends = []
    for position, row in enumerate(rows):
        left = 0.0
        for part, width in parts_ms(row).items():
            hatch = "//" if part == "exposed communication" else None
            axes.barh(position, width, left=left, color=PARTS[part], edgecolor="white", hatch=hatch, linewidth=0.6)
            left += width
        ends.append(left)
        ratio = "" if row.ratio_to_baseline is None else f"  ({row.ratio_to_baseline:.2f}x)"
        # beside the panel, where neither a bar nor a limit's line can cross it
        axes.text(1.01, position, f"{row.step_ms:.4g} ms{ratio}", transform=axes.get_yaxis_transform(), va="center")
    for row, (style, color) in zip(table.limits, LIMIT_STYLES, strict=False):
        axes.axvline(row.step_ms, linestyle=style, color=color, linewidth=1.2)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    longest = max([*ends, *(row.step_ms or 0.0 for row in table.limits)], default=1.0)
    axes.set_xlim(0, longest * 1.02)
    axes.set_xlabel("ms per step; in brackets the ratio to torch DDP")
    axes.set_title(title_of(comparison, table), loc="left", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)


def title_of(comparison: Comparison, table: Table) -> str:
    """What was run, in two lines or more."""
    model = f"{comparison.workload}: {comparison.parameters / 1e6:.2f} M parameters"
    batch = "" if comparison.batch_size is None else f", {comparison.batch_size:,} samples a step"
    run = (
        f"{count(comparison.world_size, 'rank')}, {comparison.link}, "
        f"{count(len(comparison.communication_samples), 'round')}; communication alone "
        f"{table.communication.step_ms:.3g} ms"
    )
    return "\n".join([*textwrap.wrap(model + batch, OF_A_TITLE), *textwrap.wrap(run, OF_A_TITLE)])


def draw(comparisons: Sequence[Comparison], path: Path, recipe: Mapping[str, Any]) -> None:
    """One panel per comparison, into the file `path`, under a line with the machine, the versions and the date.

    Its suffix says what kind of picture it is, PNG without one. `recipe` is what was written with the comparisons.
    Raises ImportError without matplotlib.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    tables = [derive(comparison) for comparison in comparisons]
    heights = [len(table.variants) + 2 for table in tables]
    figure, panels = plt.subplots(
        len(tables),
        1,
        figsize=(10, 0.45 * sum(heights) + 1),
        height_ratios=heights,
        squeeze=False,
        layout="constrained",
    )
    for axes, comparison, table in zip(panels[:, 0], comparisons, tables, strict=True):
        _draw_panel(axes, comparison, table)
    keys: list[Any] = [
        Patch(facecolor=color, edgecolor="white", hatch="//" if part == "exposed communication" else None, label=part)
        for part, color in PARTS.items()
    ]
    for (style, color), row in zip(LIMIT_STYLES, tables[0].limits, strict=False):
        keys.append(Line2D([], [], linestyle=style, color=color, label=f"{row.name}: {LIMITS[row.name]}"))
    where = ran_on(recipe, machine(recipe, comparisons[0].device))
    figure.suptitle("\n".join(textwrap.wrap(where, OF_A_LINE)), x=0.01, ha="left", fontsize=10, color="#525252")
    figure.legend(handles=keys, loc="outside lower center", ncols=3, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    kind = path.suffix[1:].lower() or "png"
    figure.savefig(path, dpi=150, format=kind, metadata={"Description": where} if kind == "png" else None)
    plt.close(figure)


def problem_of(path: Path) -> str | None:
    """What is wrong with the name of a picture, if anything can be told without drawing it."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
    except ImportError:
        return None  # there will be no picture
    known = FigureCanvasAgg.get_supported_filetypes()
    if not path.suffix or path.suffix[1:].lower() in known:
        return None
    return f"{path} is no picture ({path.suffix} is none of {', '.join(sorted(known))}): name another file by --png"
