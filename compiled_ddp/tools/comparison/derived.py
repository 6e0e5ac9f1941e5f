"""The numbers derived from raw samples.

A sample of a round is that of its slowest rank: a step is over when the last rank is done.

[Note: one rule for all figures] In each round a step is divided by the reference's in the same round, which is torch
DDP's, or the first row's where torch DDP was not measured: a machine's drift cancels. The median of these ratios, times
the reference's median step, is the step in the table. Every other figure is arithmetic on steps in the table, so none
contradicts another: a ratio is one over another, exposed communication one minus another, samples a second are those
of a step over it, and the phases of a row add up to its step.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from compiled_ddp.tools.comparison.result import Comparison, VariantResult

BASELINE = "torch DDP"
LIMITS = {"limit 1": "forward + max(backward, communication) + optimizer", "limit 2": "max(compute, communication)"}

Phases = tuple[float, float, float]  # milliseconds of forward, backward and optimizer


@dataclass(frozen=True)
class Steps:
    """What is said of everything that takes time. Milliseconds; None where there is nothing to say."""

    name: str
    step_ms: float | None = None
    p10_ms: float | None = None
    p90_ms: float | None = None
    ratio_to_baseline: float | None = None
    ratio_spread: str | None = None  # of its rounds, from the tenth percentile to the ninetieth
    ratio_to_limit: float | None = None


@dataclass(frozen=True)
class Row(Steps):
    """One line of the table."""

    forward_ms: float | None = None
    backward_ms: float | None = None
    optimizer_ms: float | None = None
    exposed_ms: float | None = None
    overlap: float | None = None  # 1 where all communication is hidden, or more; below 0 where more than that is added
    peak_memory_mb: float | None = None
    first_step_cold_s: float | None = None
    first_step_warm_s: float | None = None
    collectives: str | None = None
    gradient_difference: float | None = None
    samples_per_s: float | None = None  # over all ranks
    error: str | None = None

    @property
    def overlap_in_words(self) -> str | None:
        """A share, or "none" where a step takes longer than its floor and communication one after the other.

        A noisy run may have a step that is shorter than its floor: all of it was hidden, and no more.
        """
        if self.overlap is None:
            return None
        return "none" if self.overlap < 0.0 else f"{min(self.overlap, 1.0):.0%}"


@dataclass(frozen=True)
class Table:
    """Rows of the variants, of communication alone, and of the two limits."""

    variants: list[Row]
    communication: Row
    limits: list[Row]
    reference: str | None  # the row that steps of a round are divided by, if any was measured


def phases_ms(result: VariantResult) -> list[Phases]:
    """Milliseconds of each round's slowest rank."""
    slowest: list[Phases] = []
    for ranks in result.samples:
        forward, backward, optimizer = max(([1e3 * phase for phase in phases] for phases in ranks), key=sum)
        slowest.append((forward, backward, optimizer))
    return slowest


def steps_ms(result: VariantResult) -> list[float]:
    """Milliseconds of each round."""
    return [sum(phases) for phases in phases_ms(result)]


def communication_ms(comparison: Comparison) -> list[float]:
    """Milliseconds of each round for all-reducing the same bytes with nothing else running, on the slowest rank."""
    return [1e3 * max(ranks) for ranks in comparison.communication_samples]


def floor_of(comparison: Comparison, kind: str) -> VariantResult | None:
    """The variant of this kind that does not communicate, if it was run."""
    for result in comparison.variants:
        if result.floor == kind and not result.communicates and result.error is None:
            return result
    return None


def ratios(steps: Sequence[float], others: Sequence[float]) -> list[float]:
    """Each round's step as a multiple of the other's."""
    return [step / other for step, other in zip(steps, others, strict=True)]


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of `values` lie, interpolated between its neighbours."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


@dataclass(frozen=True)
class _Reference:
    """What every round's steps are divided by; see [Note: one rule for all figures]."""

    name: str | None
    steps: Sequence[float]  # milliseconds, one a round

    @staticmethod
    def of(comparison: Comparison) -> "_Reference":
        """Torch DDP's steps, else the first row's; ones where no row has any, so that medians stay as they are."""
        measured = {result.name: steps_ms(result) for result in comparison.variants if result.error is None}
        name = BASELINE if BASELINE in measured else next(iter(measured), None)
        ones = [1.0] * len(comparison.communication_samples)
        return _Reference(name, ones if name is None else measured[name])

    @property
    def is_baseline(self) -> bool:
        return self.name == BASELINE

    @property
    def baseline_ms(self) -> float | None:
        """The baseline's step in the table."""
        return statistics.median(self.steps) if self.is_baseline else None

    def row(self, name: str, steps: Sequence[float]) -> Row:
        """A row with what is said of everything that takes time."""
        paired = ratios(steps, self.steps)
        step_ms = statistics.median(paired) * statistics.median(self.steps)
        scale = step_ms / statistics.median(steps)  # 1 on a machine that does not drift
        return Row(
            name,
            step_ms=step_ms,
            p10_ms=scale * percentile(steps, 0.1),
            p90_ms=scale * percentile(steps, 0.9),
            ratio_to_baseline=_over(step_ms, self.baseline_ms),
            ratio_spread=_spread(paired) if self.is_baseline else None,
        )


def _over(step_ms: float, other_ms: float | None) -> float | None:
    return None if other_ms is None else step_ms / other_ms


def _spread(values: Sequence[float]) -> str:
    return f"{percentile(values, 0.1):.2f}-{percentile(values, 0.9):.2f}"


def derive(comparison: Comparison) -> Table:
    """Every number of the table."""
    reference = _Reference.of(comparison)
    communication = reference.row("communication alone", communication_ms(comparison))
    measured = {
        result.name: _with_phases(reference.row(result.name, steps_ms(result)), phases_ms(result))
        for result in comparison.variants
        if result.error is None
    }
    floors = {
        kind: measured[floor.name]
        for kind in {result.floor for result in comparison.variants}
        if (floor := floor_of(comparison, kind)) is not None
    }
    limits = _limits(floors["compiled"], communication, reference) if "compiled" in floors else []
    limit_ms = limits[0].step_ms if limits else None
    rows = []
    for result in comparison.variants:
        if result.error is not None:
            rows.append(Row(result.name, error=result.error))
            continue
        floor_row = floors.get(result.floor) if result.communicates else None
        row = _with_single_measurements(measured[result.name], result)
        row = _with_communication(row, floor_row, communication)
        rows.append(_with_rates(row, limit_ms, comparison.batch_size))
    return Table(rows, communication, [_with_rates(row, limit_ms, None) for row in limits], reference.name)


def _step_ms(row: Row) -> float:
    assert row.step_ms is not None, "it was measured"
    return row.step_ms


def _with_phases(row: Row, phases: Sequence[Phases]) -> Row:
    """With the row's step cut as the medians of its phases are."""
    medians = [statistics.median(phase) for phase in zip(*phases, strict=True)]
    forward, backward, optimizer = (_step_ms(row) * median / sum(medians) for median in medians)
    return replace(row, forward_ms=forward, backward_ms=backward, optimizer_ms=optimizer)


def _limits(floor: Row, communication: Row, reference: _Reference) -> list[Row]:
    """The rows of LIMITS, from the compiled floor: the first is the best that overlap within the backward can reach,
    the second the best that overlap with the whole step can."""
    assert floor.forward_ms is not None and floor.backward_ms is not None and floor.optimizer_ms is not None
    alone = _step_ms(communication)
    within = floor.forward_ms + max(floor.backward_ms, alone) + floor.optimizer_ms
    steps = zip(LIMITS, (within, max(_step_ms(floor), alone)), strict=True)
    return [Row(name, step, ratio_to_baseline=_over(step, reference.baseline_ms)) for name, step in steps]


def _with_communication(row: Row, floor: Row | None, communication: Row) -> Row:
    """With what of the communication is exposed, where the floor was measured."""
    if floor is None:
        return row
    exposed = _step_ms(row) - _step_ms(floor)
    return replace(row, exposed_ms=exposed, overlap=1 - exposed / _step_ms(communication))


def _with_rates(row: Row, limit_ms: float | None, batch_size: int | None) -> Row:
    step_ms = _step_ms(row)
    samples_per_s = None if batch_size is None else 1e3 * batch_size / step_ms
    return replace(row, ratio_to_limit=_over(step_ms, limit_ms), samples_per_s=samples_per_s)


def _with_single_measurements(row: Row, result: VariantResult) -> Row:
    return replace(
        row,
        peak_memory_mb=None if result.peak_memory_bytes is None else result.peak_memory_bytes / 2**20,
        first_step_cold_s=result.first_step_cold_s,
        first_step_warm_s=result.first_step_warm_s,
        collectives=_collectives(result.collectives),
        gradient_difference=result.gradient_difference,
    )


def _collectives(calls: dict[str, int] | None) -> str | None:
    """For example "13" if all are all-reduces, "13 + 2 broadcast" otherwise."""
    if calls is None:
        return None
    others = [f"{count} {name}" for name, count in sorted(calls.items()) if name != "allreduce"]
    return " + ".join([str(calls.get("allreduce", 0)), *others])
