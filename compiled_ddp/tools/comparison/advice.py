"""Which variant to choose, and why, in figures of the table."""

from dataclasses import dataclass

from compiled_ddp.tools.comparison.arguments import FLOORS, WARMED_UP
from compiled_ddp.tools.comparison.derived import Row, derive, ratios, steps_ms
from compiled_ddp.tools.comparison.result import Comparison, VariantResult

# The simplest first: of what cannot be told apart the first one is chosen.
SIMPLEST_FIRST = ("torch DDP", "EagerDDP", "torch.compile(DDP)", "DDP(torch.compile)", "compile_ddp", WARMED_UP)
LEAST_GAIN = 0.01  # of a step
SHARE_OF_ROUNDS = 0.75  # in which the faster one has to be faster

# Compilers round in another way; above this a gradient is not the mean over ranks.
LARGEST_DIFFERENCE = 1e-2


@dataclass(frozen=True)
class Advice:
    """The name of a variant, None where none can be recommended, and the reasons, a sentence each."""

    choice: str | None
    reasons: list[str]

    def __str__(self) -> str:
        first = f"Choose {self.choice}." if self.choice else "None of them can be recommended."
        return "\n".join([first, *(f"- {reason}" for reason in self.reasons)])


def advise(comparison: Comparison) -> Advice:
    """The fastest variant whose gradients are right; the simplest of those that cannot be told from it."""
    rows = {row.name: row for row in derive(comparison).variants}
    wrappers = [result for result in comparison.variants if result.communicates]
    reasons = [f"{result.name} failed ({result.error})." for result in wrappers if result.error is not None]
    own_difference = _difference_without_a_wrapper(comparison)
    if own_difference is not None:
        reasons.append(
            f"Gradients were not judged: without any wrapper they differ by {own_difference:.1g} of the "
            "largest from one run to the next, so the forward draws random numbers. Return the model without dropout "
            "to have them judged."
        )
    candidates = []
    for result in wrappers:
        if result.error is not None:
            continue
        difference = result.gradient_difference
        if own_difference is None and difference is not None and not difference <= LARGEST_DIFFERENCE:
            reasons.append(f"{result.name} has other gradients, by {difference:.1g} of the largest.")
        else:
            candidates.append(result)
    if not candidates:
        return Advice(None, reasons)
    fastest = min(candidates, key=lambda result: _step_ms(rows, result))
    slowest_tied = max(_step_ms(rows, result) for result in candidates if not is_faster(fastest, result, rows))
    tied = [result for result in candidates if _step_ms(rows, result) <= slowest_tied]
    choice = min(tied, key=lambda result: SIMPLEST_FIRST.index(result.name))
    return Advice(choice.name, [*_reasons(choice, tied, candidates, rows), *reasons])


def _difference_without_a_wrapper(comparison: Comparison) -> float | None:
    """By how much gradients of the eager model alone are not those of the reference; None where they are."""
    floors = [result.gradient_difference for result in comparison.variants if result.name == FLOORS[0]]
    found = [difference for difference in (comparison.own_difference, *floors) if difference is not None]
    return next((difference for difference in found if difference > LARGEST_DIFFERENCE), None)


def is_faster(one: VariantResult, other: VariantResult, rows: dict[str, Row]) -> bool:
    """Whether the first is faster in most rounds, and in the table by more than a hundredth."""
    paired = ratios(steps_ms(one), steps_ms(other))
    share = sum(ratio < 1 for ratio in paired) / len(paired)
    return share >= SHARE_OF_ROUNDS and _step_ms(rows, one) <= (1 - LEAST_GAIN) * _step_ms(rows, other)


def _step_ms(rows: dict[str, Row], result: VariantResult) -> float:
    """Its step in the table."""
    step_ms = rows[result.name].step_ms
    assert step_ms is not None, "it was measured"
    return step_ms


def _reasons(
    choice: VariantResult, tied: list[VariantResult], candidates: list[VariantResult], rows: dict[str, Row]
) -> list[str]:
    chosen = rows[choice.name]
    text = f"A step takes {chosen.step_ms:.4g} ms"
    if chosen.exposed_ms is not None:
        text += f", {max(chosen.exposed_ms, 0.0):.3g} ms of it waiting for communication"
    reasons = [f"{text}."]
    others = [result.name for result in tied if result is not choice]
    if others:
        reasons.append(f"{' and '.join(others)} cannot be told from it in {len(choice.samples)} rounds; it is simpler.")
    for other in candidates:
        if other in tied:
            continue
        ratio = _step_ms(rows, other) / _step_ms(rows, choice)
        exposed = rows[other.name].exposed_ms
        waiting = "" if exposed is None else f", {max(exposed, 0.0):.3g} ms of it waiting"
        reasons.append(f"{other.name} takes {ratio:.3g} times as long ({rows[other.name].step_ms:.4g} ms{waiting}).")
    return [*reasons, *_break_even(choice, candidates, rows)]


def _break_even(choice: VariantResult, candidates: list[VariantResult], rows: dict[str, Row]) -> list[str]:
    """After how many steps a longer first step has paid for itself, against the fastest with a shorter one."""
    first = rows[choice.name].first_step_cold_s
    sooner = [
        result
        for result in candidates
        if first is not None and (other := rows[result.name].first_step_cold_s) is not None and other < first
    ]
    if first is None or not sooner:
        return []
    rival = min(sooner, key=lambda result: _step_ms(rows, result))
    gain_ms = _step_ms(rows, rival) - _step_ms(rows, choice)
    cost_s = first - (rows[rival.name].first_step_cold_s or 0.0)
    if gain_ms <= 0:
        return []
    steps = 1e3 * cost_s / gain_ms
    return [f"Its first step takes {cost_s:.3g} s longer than {rival.name}'s, which {steps:,.0f} steps pay back."]
