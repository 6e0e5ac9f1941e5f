"""The numbers derived from raw samples.

A sample of a round is that of its slowest rank: a step is over when the last rank is done. Differences and ratios are
taken within a round and then their median over rounds, so that they hold on a machine whose speed drifts.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from compiled_ddp.comparison.result import Comparison, VariantResult

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
    overlap: float | None = None  # 1 where all communication is hidden, below 0 where more than that is added
    peak_memory_mb: float | None = None
    first_step_cold_s: float | None = None
    first_step_warm_s: float | None = None
    collectives: str | None = None
    gradient_difference: float | None = None
    error: str | None = None

    @property
    def overlap_in_words(self) -> str | None:
        """A share, or "none" where a step takes longer than its floor and communication one after the other."""
        return None if self.overlap is None else "none" if self.overlap < 0.0 else f"{self.overlap:.0%}"


@dataclass(frozen=True)
class Table:
    """Rows of the variants, of communication alone, and of the two limits."""

    variants: list[Row]
    communication: Row
    limits: list[Row]


def phases_ms(result: VariantResult) -> list[Phases]:
    """Of each round's slowest rank."""
    slowest: list[Phases] = []
    for ranks in result.samples:
        forward, backward, optimizer = max(([1e3 * phase for phase in phases] for phases in ranks), key=sum)
        slowest.append((forward, backward, optimizer))
    return slowest


def steps_ms(result: VariantResult) -> list[float]:
    """Of each round."""
    return [sum(phases) for phases in phases_ms(result)]


def communication_ms(comparison: Comparison) -> list[float]:
    """Of each round: all-reducing the same bytes with nothing else running, on the slowest rank."""
    return [1e3 * max(ranks) for ranks in comparison.communication_samples]


def floor_of(comparison: Comparison, kind: str) -> VariantResult | None:
    """The variant of this kind that does not communicate, if it was run."""
    for result in comparison.variants:
        if result.floor == kind and not result.communicates and result.error is None:
            return result
    return None


def limits_ms(comparison: Comparison) -> tuple[list[float], list[float]] | None:
    """Per round, from the compiled floor: forward + max(backward, communication) + optimizer, and
    max(compute, communication). The first is the best that overlap within the backward can reach, the second the best
    that overlap with the whole step can."""
    floor = floor_of(comparison, "compiled")
    if floor is None:
        return None
    rounds = [*zip(phases_ms(floor), communication_ms(comparison), strict=True)]
    within = [forward + max(backward, alone) + optimizer for (forward, backward, optimizer), alone in rounds]
    return within, [max(sum(phases), alone) for phases, alone in rounds]


def ratios(steps: Sequence[float], others: Sequence[float]) -> list[float]:
    """Of each round, how many times the others' step this one takes."""
    return [step / other for step, other in zip(steps, others, strict=True)]


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of `values` lie, interpolated between its neighbours."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def _step_statistics(
    name: str, steps: Sequence[float], baseline: Sequence[float] | None, limit: Sequence[float] | None
) -> Row:
    to_baseline = None if baseline is None else ratios(steps, baseline)
    return Row(
        name,
        step_ms=statistics.median(steps),
        p10_ms=percentile(steps, 0.1),
        p90_ms=percentile(steps, 0.9),
        ratio_to_baseline=None if to_baseline is None else statistics.median(to_baseline),
        ratio_spread=None if to_baseline is None else _spread(to_baseline),
        ratio_to_limit=None if limit is None else statistics.median(ratios(steps, limit)),
    )


def _spread(values: Sequence[float]) -> str:
    return f"{percentile(values, 0.1):.2f}-{percentile(values, 0.9):.2f}"


def derive(comparison: Comparison) -> Table:
    """Every number of the table."""
    measured = {result.name: result for result in comparison.variants if result.error is None}
    baseline = steps_ms(measured[BASELINE]) if BASELINE in measured else None
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
    comparison: Comparison,
    result: VariantResult,
    baseline: Sequence[float] | None,
    limit: Sequence[float] | None,
) -> Row:
    if result.error is not None:
        return Row(result.name, error=result.error)
    steps = steps_ms(result)
    forward, backward, optimizer = (statistics.median(phase) for phase in zip(*phases_ms(result), strict=True))
    floor = floor_of(comparison, result.floor) if result.communicates else None
    exposed = None
    if floor is not None:
        exposed = statistics.median(step - least for step, least in zip(steps, steps_ms(floor), strict=True))
    alone = statistics.median(communication_ms(comparison))
    return replace(
        _step_statistics(result.name, steps, baseline, limit),
        forward_ms=forward,
        backward_ms=backward,
        optimizer_ms=optimizer,
        exposed_ms=exposed,
        overlap=None if exposed is None else 1 - exposed / alone,
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
