"""The numbers derived from raw samples, and one table of them.

A sample of a round is that of its slowest rank: a step is over when the last rank is done. Differences and ratios are
taken within a round and then their median over rounds, so that they hold on a machine whose speed drifts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
from tabulate import tabulate

from benchmarks.result import Comparison, VariantResult

BASELINE = "torch DDP"
LIMITS = {"limit 1": "forward + max(backward, communication) + optimizer", "limit 2": "max(compute, communication)"}
FORWARD, BACKWARD, OPTIMIZER = range(3)


@dataclass(frozen=True)
class Row:
    """One line of the table. Times in milliseconds; None where there is nothing to say."""

    name: str
    forward_ms: float | None = None
    backward_ms: float | None = None
    optimizer_ms: float | None = None
    step_ms: float | None = None
    p10_ms: float | None = None
    p90_ms: float | None = None
    ratio_to_baseline: float | None = None
    ratio_to_limit: float | None = None
    exposed_ms: float | None = None
    overlap: float | None = None  # 1 where all communication is hidden
    peak_memory_mb: float | None = None
    first_step_cold_s: float | None = None
    first_step_warm_s: float | None = None
    collectives: str | None = None
    gradient_difference: float | None = None


@dataclass(frozen=True)
class Table:
    """Rows of the variants, of communication alone, and of the two limits."""

    variants: list[Row]
    communication: Row
    limits: list[Row]


def phases_ms(result: VariantResult) -> np.ndarray:
    """(rounds, 3): forward, backward and optimizer of each round's slowest rank."""
    samples = np.asarray(result.samples) * 1e3  # (rounds, ranks, 3)
    slowest = samples.sum(axis=2).argmax(axis=1)
    return samples[np.arange(len(samples)), slowest]


def steps_ms(result: VariantResult) -> np.ndarray:
    """(rounds,)"""
    return phases_ms(result).sum(axis=1)


def communication_ms(comparison: Comparison) -> np.ndarray:
    """(rounds,): all-reducing the same bytes with nothing else running, on the slowest rank."""
    return np.asarray(comparison.communication_samples).max(axis=1) * 1e3


def floor_of(comparison: Comparison, kind: str) -> VariantResult | None:
    """The variant of this kind that does not communicate, if it was run."""
    for result in comparison.variants:
        if result.floor == kind and not result.communicates:
            return result
    return None


def limits_ms(comparison: Comparison) -> tuple[np.ndarray, np.ndarray] | None:
    """Per round, from the compiled floor: forward + max(backward, communication) + optimizer, and
    max(compute, communication). The first is the best that overlap within the backward can reach, the second the best
    that overlap with the whole step can."""
    floor = floor_of(comparison, "compiled")
    if floor is None:
        return None
    phases, communication = phases_ms(floor), communication_ms(comparison)
    within = phases[:, FORWARD] + np.maximum(phases[:, BACKWARD], communication) + phases[:, OPTIMIZER]
    return within, np.maximum(phases.sum(axis=1), communication)


def _median(values: np.ndarray) -> float:
    return float(np.median(values))


def _step_statistics(name: str, steps: np.ndarray, baseline: np.ndarray | None, limit: np.ndarray | None) -> Row:
    return Row(
        name,
        step_ms=_median(steps),
        p10_ms=float(np.percentile(steps, 10)),
        p90_ms=float(np.percentile(steps, 90)),
        ratio_to_baseline=None if baseline is None else _median(steps / baseline),
        ratio_to_limit=None if limit is None else _median(steps / limit),
    )


def derive(comparison: Comparison) -> Table:
    """Every number of the table."""
    by_name = {result.name: result for result in comparison.variants}
    baseline = steps_ms(by_name[BASELINE]) if BASELINE in by_name else None
    limits = limits_ms(comparison)
    limit = None if limits is None else limits[0]
    communication = communication_ms(comparison)
    rows = [_variant_row(comparison, result, baseline, limit) for result in comparison.variants]
    limit_rows = []
    if limits is not None:
        for name, values in zip(LIMITS, limits, strict=True):
            limit_rows.append(_step_statistics(name, values, baseline, limit))
    return Table(rows, _step_statistics("communication alone", communication, baseline, None), limit_rows)


def _variant_row(
    comparison: Comparison, result: VariantResult, baseline: np.ndarray | None, limit: np.ndarray | None
) -> Row:
    phases, steps = phases_ms(result), steps_ms(result)
    row = _step_statistics(result.name, steps, baseline, limit)
    floor = floor_of(comparison, result.floor) if result.communicates else None
    exposed = None if floor is None else _median(steps - steps_ms(floor))
    alone = _median(communication_ms(comparison))
    return Row(
        **{
            **vars(row),
            "forward_ms": _median(phases[:, FORWARD]),
            "backward_ms": _median(phases[:, BACKWARD]),
            "optimizer_ms": _median(phases[:, OPTIMIZER]),
            "exposed_ms": exposed,
            "overlap": None if exposed is None else 1 - exposed / alone,
            "peak_memory_mb": None if result.peak_memory_bytes is None else result.peak_memory_bytes / 2**20,
            "first_step_cold_s": result.first_step_cold_s,
            "first_step_warm_s": result.first_step_warm_s,
            "collectives": _collectives(result.collectives),
            "gradient_difference": result.gradient_difference,
        }
    )


def _collectives(calls: dict[str, int] | None) -> str | None:
    """For example "13" if all are all-reduces, "13 + 2 broadcast" otherwise."""
    if calls is None:
        return None
    others = [f"{count} {name}" for name, count in sorted(calls.items()) if name != "allreduce"]
    return " + ".join([str(calls.get("allreduce", 0)), *others])


COLUMNS = {
    "name": ("", "s"),
    "forward_ms": ("forward\nms", ".1f"),
    "backward_ms": ("backward\nms", ".1f"),
    "optimizer_ms": ("optim.\nms", ".1f"),
    "step_ms": ("step\nmedian", ".1f"),
    "p10_ms": ("step\np10", ".1f"),
    "p90_ms": ("step\np90", ".1f"),
    "ratio_to_baseline": ("x torch\nDDP", ".3f"),
    "ratio_to_limit": ("x limit\n1", ".3f"),
    "exposed_ms": ("exposed\nms", ".1f"),
    "overlap": ("over-\nlap", ".0%"),
    "peak_memory_mb": ("peak\nMiB", ".0f"),
    "first_step_cold_s": ("first\ncold s", ".1f"),
    "first_step_warm_s": ("first\nwarm s", ".1f"),
    "collectives": ("collec-\ntives", "s"),
    "gradient_difference": ("max grad.\ndifference", ".1g"),
}


SHORT_STEP_MS, SMALL_PEAK_MB = 10, 100  # below these, another decimal


def _columns(rows: Sequence[Row]) -> dict[str, tuple[str, str]]:
    short = max(row.step_ms or 0.0 for row in rows) < SHORT_STEP_MS
    small = max(row.peak_memory_mb or 0.0 for row in rows) < SMALL_PEAK_MB
    finer = {field: (title, ".2f") for field, (title, spec) in COLUMNS.items() if short and spec == ".1f"}
    finer |= {"peak_memory_mb": (COLUMNS["peak_memory_mb"][0], ".1f")} if small else {}
    return COLUMNS | finer


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
    return tabulate(cells, headers, tablefmt=tablefmt, disable_numparse=True, colalign=align)


def render(comparison: Comparison, tablefmt: str = "simple") -> str:
    """The table as text under a line that says what was run; `tablefmt` is tabulate's ("github" for a document)."""
    table = derive(comparison)
    rows = [*table.variants, table.communication, *table.limits]
    body = tabulate_rows(rows, _columns(table.variants), tablefmt=tablefmt, missing="-")
    megabytes = sum(comparison.bucket_bytes) / 2**20
    title = (
        f"{comparison.workload}: {comparison.parameters / 1e6:.2f} M parameters, {megabytes:.1f} MiB of gradients in "
        f"{len(comparison.bucket_bytes)} buckets, {comparison.world_size} ranks on {comparison.device}, "
        f"link {comparison.link}, {len(comparison.communication_samples)} rounds"
    )
    notes = "\n".join(f"{name}: {formula}, from the compiled floor" for name, formula in LIMITS.items())
    return f"{title}\n\n{body}\n\n{notes}"


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
