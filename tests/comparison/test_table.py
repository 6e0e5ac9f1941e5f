"""The table's derived numbers, from samples small enough to check by hand."""

import json
from dataclasses import replace

import pytest

from compiled_ddp.tools.comparison import chart, table
from compiled_ddp.tools.comparison.derived import Row, derive
from compiled_ddp.tools.comparison.result import Comparison, VariantResult


def result(name: str, floor: str, rounds: list[list[list[float]]], communicates: bool = True) -> VariantResult:
    """`rounds`: for each round and rank the milliseconds of forward, backward and optimizer."""
    seconds = [[[phase / 1e3 for phase in phases] for phases in ranks] for ranks in rounds]
    return VariantResult(name, floor, communicates, seconds)


def comparison(*variants: VariantResult, communication_ms: float = 40.0) -> Comparison:
    rounds = len(variants[0].samples)
    alone = [[communication_ms / 2e3, communication_ms / 1e3]] * rounds
    return Comparison("toy", "cpu", "loopback", 2, 1000, [3000, 1000], alone, list(variants))


def steady(name: str, floor: str, phases: list[float], communicates: bool = True) -> VariantResult:
    return result(name, floor, [[phases, phases]] * 3, communicates)


EAGER_FLOOR = steady("eager floor", "eager", [10, 20, 2], communicates=False)
COMPILED_FLOOR = steady("compiled floor", "compiled", [8, 16, 2], communicates=False)
TORCH_DDP = steady("torch DDP", "eager", [10, 60, 2])
FASTER = steady("faster", "compiled", [8, 40, 2])


def rows(of: Comparison) -> dict[str, Row]:
    numbers = derive(of)
    return {row.name: row for row in [*numbers.variants, numbers.communication, *numbers.limits]}


def test_a_step_is_that_of_the_slowest_rank_and_its_phases_are_of_the_same_rank() -> None:
    row = rows(comparison(result("a", "eager", [[[1, 2, 3], [9, 2, 0]]])))["a"]
    assert row.step_ms == pytest.approx(11)
    assert (row.forward_ms, row.backward_ms, row.optimizer_ms) == (pytest.approx(9), pytest.approx(2), 0)


def test_each_row_is_compared_with_the_floor_of_its_own_kind() -> None:
    found = rows(comparison(EAGER_FLOOR, COMPILED_FLOOR, TORCH_DDP, FASTER))
    assert found["torch DDP"].exposed_ms == pytest.approx(72 - 32)
    assert found["faster"].exposed_ms == pytest.approx(50 - 26)
    assert found["eager floor"].exposed_ms is None


def test_overlap_is_the_share_of_communication_that_is_hidden() -> None:
    found = rows(comparison(EAGER_FLOOR, COMPILED_FLOOR, TORCH_DDP, FASTER))
    assert found["torch DDP"].overlap == pytest.approx(0)
    assert found["faster"].overlap == pytest.approx(1 - 24 / 40)


def test_a_row_without_its_floor_has_no_exposed_communication() -> None:
    row = rows(comparison(EAGER_FLOOR, TORCH_DDP, FASTER))["faster"]
    assert row.exposed_ms is None and row.overlap is None and row.ratio_to_limit is None


def test_both_limits_come_from_the_compiled_floor() -> None:
    found = rows(comparison(EAGER_FLOOR, COMPILED_FLOOR, TORCH_DDP, FASTER))
    assert found["communication alone"].step_ms == pytest.approx(40)
    assert found["limit 1"].step_ms == pytest.approx(8 + 40 + 2)
    assert found["limit 2"].step_ms == pytest.approx(40)
    assert found["faster"].ratio_to_limit == pytest.approx(1)


def test_fast_communication_makes_the_compute_the_limit() -> None:
    found = rows(comparison(COMPILED_FLOOR, FASTER, communication_ms=4))
    assert found["limit 1"].step_ms == found["limit 2"].step_ms == pytest.approx(26)


def test_ratios_are_paired_by_round_so_that_drift_cancels() -> None:
    speeds = [1, 2, 10]
    baseline = result("torch DDP", "eager", [[[0, 10 * s, 0]] * 2 for s in speeds])
    half = result("half", "eager", [[[0, 5 * s, 0]] * 2 for s in speeds])
    row = rows(comparison(baseline, half))["half"]
    assert row.ratio_to_baseline == pytest.approx(0.5)
    assert (row.p10_ms, row.p90_ms) == (pytest.approx(6), pytest.approx(42))
    assert row.ratio_spread == "0.50-0.50"


def test_the_spread_of_a_ratio_is_that_of_its_rounds() -> None:
    baseline = steady("torch DDP", "eager", [0, 10, 0])
    other = result("other", "eager", [[[0, step, 0]] * 2 for step in (8, 10, 20)])
    assert rows(comparison(baseline, other))["other"].ratio_spread == "0.84-1.80"


def drifting() -> Comparison:
    """Medians of 7.8, 5.58 and 5.59 ms, whose ratios to torch DDP, round by round, have medians of 1, 0.80 and 0.72."""
    floor = result("compiled floor", "compiled", [[[1, step, 1]] * 2 for step in (3, 2, 2)], communicates=False)
    baseline = result("torch DDP", "eager", [[[1, step - 2, 1]] * 2 for step in (7.0, 7.8, 8.0)])
    one = result("one", "compiled", [[[1, step - 2, 1]] * 2 for step in (5.58, 5.58, 8.0)])
    other = result("other", "compiled", [[[1, step - 2, 1]] * 2 for step in (7.0, 5.59, 5.0)])
    return comparison(floor, baseline, one, other, communication_ms=1.5)


def test_no_figure_of_a_drifting_machine_contradicts_another() -> None:
    found = rows(drifting())
    assert found["one"].ratio_to_baseline == pytest.approx(5.58 / 7)
    assert found["other"].ratio_to_baseline == pytest.approx(5.59 / 7.8)
    baseline, floor, limit = found["torch DDP"], found["compiled floor"], found["limit 1"]
    for row in found.values():
        assert row.ratio_to_baseline == pytest.approx(row.step_ms / baseline.step_ms)
        if row.forward_ms is not None:
            assert row.forward_ms + row.backward_ms + row.optimizer_ms == pytest.approx(row.step_ms)
            assert row.p10_ms <= row.step_ms <= row.p90_ms
            assert row.ratio_to_limit == pytest.approx(row.step_ms / limit.step_ms)
    for name in ("one", "other"):
        assert found[name].exposed_ms == pytest.approx(found[name].step_ms - floor.step_ms)
        overlap = 1 - found[name].exposed_ms / found["communication alone"].step_ms
        assert found[name].overlap == pytest.approx(overlap)
    communication_ms = found["communication alone"].step_ms
    assert limit.step_ms == pytest.approx(
        floor.forward_ms + max(floor.backward_ms, communication_ms) + floor.optimizer_ms
    )


def test_without_torch_ddp_drift_is_taken_out_by_the_first_row() -> None:
    speeds = [1, 2, 10]
    first = result("first", "eager", [[[0, 10 * s, 0]] * 2 for s in speeds])
    halves = result("half", "eager", [[[0, 5 * s, 0]] * 2 for s in (1, 2, 11)])
    row = rows(comparison(first, halves))["half"]
    assert row.step_ms == pytest.approx(10)
    assert row.ratio_to_baseline is None and row.ratio_spread is None


def test_a_slower_row_is_printed_as_it_is() -> None:
    loser = steady("loser", "eager", [10, 90, 2])
    row = rows(comparison(EAGER_FLOOR, TORCH_DDP, loser))["loser"]
    assert row.ratio_to_baseline == pytest.approx(102 / 72)
    assert row.overlap == pytest.approx(1 - 70 / 40)
    text = table.render(comparison(EAGER_FLOOR, TORCH_DDP, loser))
    assert "none" in next(line for line in text.splitlines() if line.startswith("loser"))


def test_no_more_than_all_communication_is_hidden() -> None:
    winner = steady("winner", "eager", [8, 16, 2])
    assert rows(comparison(EAGER_FLOOR, TORCH_DDP, winner))["winner"].overlap_in_words == "100%"


def test_json_has_none_for_a_number_that_is_not_finite() -> None:
    data = comparison(replace(TORCH_DDP, gradient_difference=float("nan"))).to_json()
    json.dumps(data, allow_nan=False)
    assert Comparison.from_json(data) == comparison(TORCH_DDP)


def test_what_was_not_measured_is_a_dash() -> None:
    line = next(line for line in table.render(comparison(TORCH_DDP)).splitlines() if line.startswith("torch DDP"))
    assert line.split()[-1] == "-"


def test_short_steps_have_a_decimal_more() -> None:
    tiny = steady("torch DDP", "eager", [0.123, 1.0, 0.25])
    line = next(line for line in table.render(comparison(tiny)).splitlines() if line.startswith("torch DDP"))
    assert line.split()[2:6] == ["0.12", "1.00", "0.25", "1.37"]


def test_samples_a_second_are_those_of_a_step_over_all_ranks() -> None:
    found = rows(replace(comparison(EAGER_FLOOR, TORCH_DDP), batch_size=144))
    assert found["torch DDP"].samples_per_s == pytest.approx(144 / 0.072)
    assert found["communication alone"].samples_per_s is None
    lines = table.render(replace(comparison(TORCH_DDP), batch_size=144)).splitlines()
    assert "2,000" in next(line for line in lines if line.startswith("torch DDP")).split()
    assert rows(comparison(TORCH_DDP))["torch DDP"].samples_per_s is None


def test_the_rule_of_the_figures_stands_under_the_table() -> None:
    last = table.render(comparison(TORCH_DDP)).splitlines()[-1]
    assert last.startswith("step: median over rounds of step / torch DDP's in the same round, times torch DDP's median")
    assert "step / EagerDDP's in" in table.render(comparison(replace(TORCH_DDP, name="EagerDDP"))).splitlines()[-1]


def test_columns_without_a_value_can_be_left_out() -> None:
    alone = comparison(steady("torch DDP", "eager", [10, 60, 2]))
    left_out = table.fields_without_values(alone)
    assert left_out[:3] == ["samples_per_s", "ratio_to_limit", "exposed_ms"] and "step_ms" not in left_out
    text = table.render(alone, left_out=left_out)
    assert "exposed" not in text and "limit 1" not in text


def test_overview_has_the_ratio_of_each_workload_and_its_peak_where_it_was_measured() -> None:
    probed = replace(TORCH_DDP, peak_memory_bytes=3 << 20)
    small, large = comparison(TORCH_DDP, FASTER), replace(comparison(probed), workload="large")
    lines = {line.split("  ")[0]: line.split()[-3:] for line in table.overview([small, large]).splitlines()[3:]}
    assert lines == {"torch DDP": ["1.000", "1.000", "3.0"], "faster": ["0.694", "-", "-"]}


def test_collectives_other_than_all_reduces_are_named() -> None:
    variant = replace(TORCH_DDP, collectives={"broadcast": 2, "allreduce": 13})
    assert rows(comparison(variant))["torch DDP"].collectives == "13 + 2 broadcast"


def test_a_comparison_survives_json() -> None:
    original = replace(comparison(EAGER_FLOOR, TORCH_DDP), batch_size=16)
    assert Comparison.from_json(original.to_json()) == original


def test_a_comparison_from_before_batch_sizes_is_read() -> None:
    original = comparison(TORCH_DDP)
    data = original.to_json()
    del data["batch_size"]
    assert Comparison.from_json(data) == original


def test_the_parts_of_a_bar_add_up_to_the_phases() -> None:
    found = rows(comparison(EAGER_FLOOR, COMPILED_FLOOR, TORCH_DDP, FASTER))
    parts = chart.parts_ms(found["faster"])
    assert sum(parts.values()) == pytest.approx(50)
    assert parts["exposed communication"] == pytest.approx(24)
