"""One comparison as a table, and several side by side."""

from collections.abc import Mapping, Sequence
from types import SimpleNamespace

from tabulate import tabulate

from compiled_ddp.tools.comparison.derived import LIMITS, Row, derive
from compiled_ddp.tools.comparison.first_step import why_slow
from compiled_ddp.tools.comparison.result import Comparison

COLUMNS = {
    "name": ("", "s"),
    "forward_ms": ("forward\nms", ".1f"),
    "backward_ms": ("backward\nms", ".1f"),
    "optimizer_ms": ("optim.\nms", ".1f"),
    "step_ms": ("step\nms", ".1f"),
    "p10_ms": ("step\np10", ".1f"),
    "p90_ms": ("step\np90", ".1f"),
    "samples_per_s": ("samples\n/ s", ",.0f"),
    "ratio_to_baseline": ("x torch\nDDP", ".3f"),
    "ratio_spread": ("p10-p90\nof that", "s"),
    "ratio_to_limit": ("x limit\n1", ".3f"),
    "exposed_ms": ("exposed\nms", ".1f"),
    "overlap_in_words": ("over-\nlap", "s"),
    "peak_memory_mb": ("peak\nMiB", ".0f"),
    "first_step_cold_s": ("first\ncold s", ".1f"),
    "first_step_warm_s": ("first\nwarm s", ".1f"),
    "collectives": ("collec-\ntives", "s"),
    "gradient_difference": ("max grad.\ndifference", ".1g"),
}


SHORT_STEP_MS, SMALL_PEAK_MB, FEW_SAMPLES = 10, 100, 100  # below these, another decimal


RULE = "step: median over rounds of step / {0}'s in the same round, times {0}'s median; other figures follow from it"


def _columns(rows: Sequence[Row], left_out: Sequence[str]) -> dict[str, tuple[str, str]]:
    short = max(row.step_ms or 0.0 for row in rows) < SHORT_STEP_MS
    small = max(row.peak_memory_mb or 0.0 for row in rows) < SMALL_PEAK_MB
    finer = {field: (title, ".2f") for field, (title, spec) in COLUMNS.items() if short and spec == ".1f"}
    finer |= {"peak_memory_mb": (COLUMNS["peak_memory_mb"][0], ".1f")} if small else {}
    few = max(row.samples_per_s or 0.0 for row in rows) < FEW_SAMPLES
    finer |= {"samples_per_s": (COLUMNS["samples_per_s"][0], ".1f")} if few else {}
    return {field: column for field, column in (COLUMNS | finer).items() if field not in left_out}


def tabulate_rows(
    rows: Sequence[object], columns: Mapping[str, tuple[str, str]], *, tablefmt: str, missing: str
) -> str:
    """Attributes of `rows` as a table; `columns` maps each to its title and format, None is written as `missing`."""
    cells = [
        [
            missing if (value := getattr(row, field)) is None else format(value, spec)
            for field, (_, spec) in columns.items()
        ]
        for row in rows
    ]
    headers = [title for title, _ in columns.values()]
    if tablefmt == "github":
        headers = [title.replace("-\n", "").replace("\n", " ") for title in headers]
    align = ["left"] + ["right"] * (len(headers) - 1)
    return str(tabulate(cells, headers, tablefmt=tablefmt, disable_numparse=True, colalign=align))


def render(comparison: Comparison, tablefmt: str = "simple", *, left_out: Sequence[str] = ()) -> str:
    """The table as text under a line that says what was run; `tablefmt` is tabulate's ("github" for a document).

    `left_out` names the fields of `Row` that get no column.
    """
    table = derive(comparison)
    rows = [*table.variants, table.communication, *table.limits]
    body = tabulate_rows(rows, _columns(table.variants, left_out), tablefmt=tablefmt, missing="-")
    megabytes = sum(comparison.bucket_bytes) / 2**20
    title = (
        f"{comparison.workload}: {comparison.parameters / 1e6:.2f} M parameters, {megabytes:.1f} MiB of gradients in "
        f"{count(len(comparison.bucket_bytes), 'bucket')}, {count(comparison.world_size, 'rank')} on "
        f"{comparison.device}, link {comparison.link}, {count(len(comparison.communication_samples), 'round')}"
    )
    notes = [] if table.reference is None else [RULE.format(table.reference)]
    notes += [f"{row.name}: {LIMITS[row.name]}, from the compiled floor" for row in table.limits]
    notes += [f"{row.name} failed: {row.error}" for row in table.variants if row.error is not None]
    notes += why_slow(comparison)
    return "\n\n".join(filter(None, [title, body, "\n".join(notes)]))


def count(number: int, of: str) -> str:
    """For example "1 rank", "2 ranks"."""
    return f"{number} {of}" if number == 1 else f"{number} {of}s"


def fields_without_values(comparison: Comparison) -> list[str]:
    """The fields of COLUMNS in which no variant has anything to show."""
    rows = derive(comparison).variants
    return [field for field in COLUMNS if all(getattr(row, field) is None for row in rows)]


def overview(comparisons: Sequence[Comparison], tablefmt: str = "simple") -> str:
    """Each variant's step over torch DDP's, and its peak memory where that was measured, workload beside workload."""
    rows: dict[str, dict[str, float | None]] = {}
    for comparison in comparisons:
        for row in derive(comparison).variants:
            fields = {
                f"{comparison.workload} step": row.ratio_to_baseline,
                f"{comparison.workload} peak": row.peak_memory_mb,
            }
            rows.setdefault(row.name, {}).update(fields)
    workloads = [comparison.workload for comparison in comparisons]
    columns = {"name": ("", "s")}
    columns |= {f"{workload} step": (f"{workload}\nx torch DDP", ".3f") for workload in workloads}
    for workload in workloads:
        if any(fields.get(f"{workload} peak") is not None for fields in rows.values()):
            columns[f"{workload} peak"] = (f"{workload}\npeak MiB", ".1f")
    lines = [SimpleNamespace(**{**dict.fromkeys(columns), **fields, "name": name}) for name, fields in rows.items()]
    return tabulate_rows(lines, columns, tablefmt=tablefmt, missing="-")
