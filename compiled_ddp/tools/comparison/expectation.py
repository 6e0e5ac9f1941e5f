"""How long a comparison may still take."""

import statistics
from collections.abc import Mapping

from compiled_ddp.tools.comparison.measure import untimed_steps
from compiled_ddp.tools.comparison.variants import Floor

COMPILING_S = 30.0  # of a variant that compiles, until one has: what small models take on two cores


class Expectation:
    """By what was measured so far: first the reference's process, then those of the variants and their steps."""

    def __init__(self, floors: Mapping[str, Floor], *, rounds: int, starts: int, start_s: float, step_s: float) -> None:
        """`floors` names the variants in the order that they are started in.

        Of each `starts` processes are started; that of the reference took `start_s`, and its step `step_s`.
        """
        self._floors, self._rounds = floors, rounds
        self._start_s, self._step_s = starts * start_s, step_s
        self._took: dict[str, float] = {}  # seconds
        self._steps: dict[str, float | None] = {}  # seconds; None of a variant that has failed

    def note(self, name: str, seconds: float, step_s: float | None) -> None:
        """A variant's first steps took so many seconds, the last of them `step_s`; None where it has failed."""
        self._took[name], self._steps[name] = seconds, step_s

    def seconds_left(self, elapsed_s: float = 0.0) -> float:
        """Until the last round is over, where the next variant's first steps began so long ago."""
        starts = [self._start_of(floor) for name, floor in self._floors.items() if name not in self._took]
        under_way = min(elapsed_s, starts[0]) if starts else 0.0
        return sum(starts) - under_way + self._rounds * self._round()

    def _start_of(self, floor: Floor) -> float:
        alike = [seconds for name, seconds in self._took.items() if self._floors[name] == floor]
        if alike:
            return statistics.mean(alike)
        return self._start_s + (COMPILING_S if floor == "compiled" else 0.0)

    def _round(self) -> float:
        known = [step_s for step_s in self._steps.values() if step_s is not None]
        other = statistics.mean(known) if known else self._step_s
        steps = [self._steps.get(name, other) for name in self._floors]
        taking_part = [step_s for step_s in steps if step_s is not None]
        return (1 + untimed_steps(taking_part)) * sum(taking_part)
