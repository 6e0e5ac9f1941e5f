"""Which variant is recommended, and the reasons, from samples small enough to check by hand."""

from dataclasses import replace
from pathlib import Path

import pytest

from compiled_ddp.tools.comparison import chart, table
from compiled_ddp.tools.comparison.advice import SIMPLEST_FIRST, advise, is_faster
from compiled_ddp.tools.comparison.arguments import DEFAULT, FLOORS, VARIANTS
from compiled_ddp.tools.comparison.derived import derive
from compiled_ddp.tools.comparison.record import recipe
from compiled_ddp.tools.comparison.result import Comparison, VariantResult
from compiled_ddp.tools.comparison.variants import WrapperOptions, make_variants


def variant(name: str, *steps_ms: float, floor: str = "eager", **fields: object) -> VariantResult:
    """One rank whose backward takes so long in each round."""
    samples = [[[0.0, step / 1e3, 0.0]] for step in steps_ms]
    return replace(VariantResult(name, floor, name not in FLOORS, samples), **fields)


def comparison(*variants: VariantResult) -> Comparison:
    rounds = max(len(result.samples) for result in variants)
    return Comparison("toy", "cpu", "gloo within one machine", 1, 10, [40], [[0.004]] * rounds, [*variants])


def test_the_fastest_is_chosen_and_the_others_are_said_to_be_slower() -> None:
    given = advise(
        comparison(
            variant("no communication, eager", 10, 10, 10, 10),
            variant("no communication, compiled", 6, 6, 6, 6, floor="compiled"),
            variant("torch DDP", 20, 20, 20, 20),
            variant("compile_ddp", 10, 10, 10, 10, floor="compiled"),
        )
    )
    assert given.choice == "compile_ddp"
    assert given.reasons == [
        "A step takes 10 ms, 4 ms of it waiting for communication.",
        "torch DDP takes 2 times as long (20 ms, 10 ms of it waiting).",
    ]


def test_of_what_cannot_be_told_apart_the_simplest_is_chosen() -> None:
    noisy = variant("compile_ddp", 9, 11, 9, 11, floor="compiled")
    given = advise(comparison(variant("torch DDP", 10, 10, 10, 10), noisy, variant("EagerDDP", 9.95, 9.95, 9.95, 9.95)))
    assert given.choice == "torch DDP"
    assert given.reasons[1] == "compile_ddp and EagerDDP cannot be told from it in 4 rounds; it is simpler."


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ([9, 9, 9, 11], [10, 10, 10, 10], True),
        ([9, 9, 11, 11], [10, 10, 10, 10], False),
        ([9.95] * 4, [10] * 4, False),
        ([1, 2, 30, 4], [2, 4, 60, 8], True),
    ],
)
def test_faster_is_in_three_rounds_of_four_and_by_a_hundredth(one: list, other: list, expected: bool) -> None:
    found = comparison(variant("a", *one), variant("b", *other))
    assert is_faster(*found.variants, {row.name: row for row in derive(found).variants}) is expected


def test_the_advice_says_what_the_table_does() -> None:
    """Round by round compile_ddp is the fastest; by the medians of their steps EagerDDP would be."""
    found = comparison(
        variant("torch DDP", 7.0, 7.8, 8.0),
        variant("EagerDDP", 5.58, 5.58, 8.0),
        variant("compile_ddp", 5.5, 5.59, 5.0, floor="compiled"),
    )
    rows = {row.name: row for row in derive(found).variants}
    given = advise(found)
    assert given.choice == "EagerDDP"  # which cannot be told from the fastest
    assert rows["compile_ddp"].step_ms < rows["EagerDDP"].step_ms
    assert given.reasons == [
        f"A step takes {rows['EagerDDP'].step_ms:.4g} ms.",
        "compile_ddp cannot be told from it in 3 rounds; it is simpler.",
        f"torch DDP takes {1 / rows['EagerDDP'].ratio_to_baseline:.3g} times as long (7.8 ms).",
    ]


def test_what_the_table_shows_between_two_that_cannot_be_told_apart_cannot_be_told_from_them_either() -> None:
    """EagerDDP is slower than compile_ddp in every round, and yet not slower than the noisy torch DDP."""
    found = comparison(
        variant("torch DDP", 8, 12, 12, 9),
        variant("EagerDDP", 10.2, 10.2, 10.2, 10.2),
        variant("compile_ddp", 10, 10, 10, 10, floor="compiled"),
    )
    given = advise(found)
    assert given.choice == "torch DDP"
    assert given.reasons[1:] == ["EagerDDP and compile_ddp cannot be told from it in 4 rounds; it is simpler."]


def test_a_longer_first_step_is_paid_back_after_so_many_steps() -> None:
    given = advise(
        comparison(
            variant("torch DDP", 20, 20, 20, 20, first_step_cold_s=1.0),
            variant("EagerDDP", 18, 18, 18, 18, first_step_cold_s=1.5),
            variant("compile_ddp", 10, 10, 10, 10, floor="compiled", first_step_cold_s=9.5),
        )
    )
    assert given.reasons[-1] == "Its first step takes 8 s longer than EagerDDP's, which 1,000 steps pay back."


@pytest.mark.parametrize("difference", [0.5, float("nan")])
def test_what_has_other_gradients_is_not_recommended_however_fast(difference: float) -> None:
    wrong = variant("compile_ddp", 1, 1, 1, 1, floor="compiled", gradient_difference=difference)
    given = advise(comparison(variant("torch DDP", 10, 10, 10, 10, gradient_difference=1e-7), wrong))
    assert given.choice == "torch DDP"
    assert given.reasons[-1] == f"compile_ddp has other gradients, by {difference:.1g} of the largest."


def test_where_the_model_alone_has_other_gradients_none_are_judged() -> None:
    alone = variant("no communication, eager", 8, 8, 8, 8, gradient_difference=0.8)
    wrapped = variant("torch DDP", 10, 10, 10, 10, gradient_difference=0.8)
    given = advise(comparison(alone, wrapped))
    assert given.choice == "torch DDP"
    assert "Gradients were not judged: without any wrapper they differ by 0.8 of the largest" in given.reasons[-1]


def test_a_forward_that_draws_is_noticed_where_the_model_alone_has_no_row() -> None:
    found = comparison(variant("torch DDP", 10, 10, 10, 10, gradient_difference=0.8))
    given = advise(replace(found, own_difference=0.7))
    assert given.choice == "torch DDP"
    assert "without any wrapper they differ by 0.7 of the largest" in given.reasons[-1]
    assert advise(replace(found, own_difference=1e-7)).choice is None


def test_what_failed_is_named_and_has_a_row_without_figures_and_no_bar(tmp_path: Path) -> None:
    failed = variant("torch DDP", error="rank 1: RuntimeError: no gradient")
    found = comparison(variant("EagerDDP", 10, 10, 10, 10), failed)
    given = advise(found)
    assert given.choice == "EagerDDP"
    assert given.reasons[-1] == "torch DDP failed (rank 1: RuntimeError: no gradient)."
    lines = table.render(found).splitlines()
    assert next(line for line in lines if line.startswith("torch DDP ")).split()[2:] == ["-"] * (len(table.COLUMNS) - 1)
    assert lines[-1] == "torch DDP failed: rank 1: RuntimeError: no gradient"
    chart.draw([found], tmp_path / "picture.png", recipe(tmp_path))
    assert (tmp_path / "picture.png").stat().st_size > 10_000


def test_nothing_is_recommended_where_everything_failed() -> None:
    given = advise(comparison(variant("no communication, eager", 1, 1), variant("torch DDP", error="rank 0: it broke")))
    assert given.choice is None
    assert given.reasons == ["torch DDP failed (rank 0: it broke)."]


def test_where_nothing_was_measured_there_is_a_picture_without_bars(tmp_path: Path) -> None:
    failed = replace(comparison(variant("torch DDP", error="rank 0: it broke")), communication_samples=[[0.004]])
    chart.draw([failed], tmp_path / "picture.png", recipe(tmp_path))
    assert "torch DDP failed: rank 0: it broke" in table.render(failed)


def test_a_failure_survives_json() -> None:
    found = comparison(variant("EagerDDP", 1, 1), variant("torch DDP", error="rank 0: it broke"))
    assert Comparison.from_json(found.to_json()) == found


def test_the_command_line_names_the_variants_as_they_are() -> None:
    known = make_variants(WrapperOptions())
    assert tuple(known) == VARIANTS
    assert set(DEFAULT) <= set(VARIANTS)
    assert {name for name, kind in known.items() if not kind.communicates} == set(FLOORS)
    assert set(SIMPLEST_FIRST) == set(VARIANTS) - set(FLOORS)
