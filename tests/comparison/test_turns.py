"""What a turn of a variant is made of."""

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from compiled_ddp.tools.comparison.measure import Contender, untimed_steps


@pytest.mark.parametrize(
    ("step_s", "expected"), [([0.001], 5), ([0.03], 3), ([0.01, 0.06], 1), ([0.4], 0), ([0.0], 1), ([], 1)], ids=str
)
def test_the_slowest_step_says_how_many_go_before_a_timed_one(step_s: Sequence[float], expected: int) -> None:
    assert untimed_steps(step_s) == expected


def test_of_a_turn_the_last_step_is_timed_behind_a_barrier() -> None:
    seen: list[Any] = []

    def batches() -> Iterator[int]:
        yield from range(10)

    workload = SimpleNamespace(
        build_model=lambda label, device: nn.Linear(1, 1),
        optimizer=lambda parameters: None,
        batches=lambda rank, world_size: batches(),
    )
    rank = SimpleNamespace(index=0, world_size=1, device="cpu", barrier=lambda: seen.append("barrier"))
    variant = SimpleNamespace(label="toy", wrap=lambda model: model)

    class Counting(Contender):
        def step(self, batch: Any) -> list[float]:
            seen.append(batch)
            return [float(batch)]

    contender = Counting(variant, workload, rank)  # type: ignore[arg-type]
    assert contender.take_turn(2) == [2.0]
    assert contender.take_turn(0) == [3.0]
    assert seen == [0, 1, "barrier", 2, "barrier", 3]
