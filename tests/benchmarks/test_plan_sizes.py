"""The table that holds planned buckets against sizes: what was said beforehand beside what came."""

import json
from typing import Any

import pytest
from calibrations import calibration

from benchmarks import plan_sizes
from benchmarks.expected_steps import PLANNED, name_of
from compiled_ddp.tools.comparison.result import Comparison, VariantResult


def variant(name: str, milliseconds: float) -> VariantResult:
    """Two rounds on two ranks, all of it in the backward."""
    phases = [0.0, milliseconds / 1e3, 0.0]
    return VariantResult(name, "compiled", communicates=True, samples=[[phases] * 2] * 2)


def result(predicted: dict[str, float], measured: dict[str, float]) -> dict[str, Any]:
    variants = [variant("torch DDP", 100.0), *(variant(name, step) for name, step in measured.items())]
    comparison = Comparison("gpt", "cpu", "1gbit", 2, 10, [40], [[0.01] * 2] * 2, variants)
    said = {name: {"step_ms": step, "buckets": 3} for name, step in predicted.items()}
    expected = {"calibration": json.loads(calibration().to_json()), "plans": said}
    return {"model": "gpt", "link": "1gbit", "expected": expected, "measured": comparison.to_json()}


def test_each_plan_has_what_was_said_what_came_and_how_far_it_is_from_the_best() -> None:
    names = PLANNED, name_of(2.0), name_of(25.0)
    table = plan_sizes.table(
        result(dict(zip(names, (77.0, 80.0, 99.0), strict=True)), dict(zip(names, (70.0, 80.0, 110.0), strict=True)))
    )
    head, *rows = [line for line in table.splitlines() if line.strip() and not line.startswith("-")]
    assert head == "gpt on 1gbit: an all-reduce takes 100 us + bytes / 1,000 MB/s; mean of the errors 6.7 %"
    cells = [row.split()[-6:] for row in rows[1:]]
    assert cells == [
        ["3", "77.0", "70.0", "+10.0", "1.000", "0.700"],
        ["3", "80.0", "80.0", "+0.0", "1.143", "0.800"],
        ["3", "99.0", "110.0", "-10.0", "1.571", "1.100"],
    ]


@pytest.mark.parametrize("wrong", [["--model", "nothing"], ["--sizes", "3"]])
def test_arguments_are_checked(wrong: list[str]) -> None:
    with pytest.raises(SystemExit):
        plan_sizes.parse(wrong)
