"""When what happens in whole steps, as they tell and draw it: hand-made plans and records."""

import json
from pathlib import Path
from typing import get_args

import pytest
import torch

from compiled_ddp.plan import BucketPlan, GradientSpec
from compiled_ddp.planning.assignment import place_buckets
from compiled_ddp.planning.calibration import Calibration
from compiled_ddp.planning.cost_model import BackwardWork, Compute, Link, Work
from compiled_ddp.planning.step_model import Mode
from compiled_ddp.ranks.recorder import BucketTimes
from compiled_ddp.ranks.step_recorder import RecordedStep, RecordedTransfer, StepRecorder
from compiled_ddp.report.step_times import MeasuredStep, StepTimes, predict_whole
from compiled_ddp.report.timeline import write_timeline

CALIBRATION = Calibration("gloo", 2, 1, "cpu", Link(0.0, 1000.0), Compute(100.0, 1000.0))
NAMES = ("a", "b")


def plan(*, is_scattered: bool) -> BucketPlan:
    """Two gradients of 400 bytes, each in a bucket, the last one first; riders are in the first bucket, or the last."""
    specs = [[GradientSpec.of(index, torch.empty(100))] for index in (1, 0)]
    return place_buckets(specs, 2, riders_apart=True, reduction="sum", passengers=0, is_scattered=is_scattered)


def work() -> BackwardWork:
    return BackwardWork((Work(100.0), Work(200.0)), Work(200.0))


def transfer(kind: str, position: int, *moments: float | None) -> RecordedTransfer:
    """(launched, arrived, wait began, wait ended)."""
    return RecordedTransfer(kind, position, BucketTimes(*moments))  # type: ignore[arg-type]


def recorded(plan_: BucketPlan, seconds: float, *transfers: RecordedTransfer, left: object = ()) -> RecordedStep:
    return RecordedStep(10.0, 10.0 + seconds, plan_, [*transfers], tuple(left))  # type: ignore[arg-type]


def recorder_of(mode: Mode, *steps: RecordedStep) -> StepRecorder:
    recorder = StepRecorder(2, mode)
    recorder.recorded += steps
    return recorder


@pytest.mark.parametrize("mode", get_args(Mode))
def test_an_update_takes_the_memory_that_it_reads_and_writes_shared_where_state_is(mode: Mode) -> None:
    predicted = predict_whole(mode, plan(is_scattered=mode != "all-reduced"), CALIBRATION, work(), states=2)
    update = 7 * 800 / 1000 / (2 if mode in ("sharded", "pipelined") else 1)
    assert predicted.compute_seconds == pytest.approx(1.0 + 2.0 + update)
    assert [each.bucket for each in predicted.transfers if each.kind != "gather"] == [0, 1]


def pipelined() -> StepTimes:
    own = plan(is_scattered=True)
    left = [transfer("gather", 2, 9.9, 10.3, 10.1, 10.4), transfer("gather", 1, 9.95, 10.6, 10.45, 10.6)]
    step = recorded(
        own,
        2.0,
        transfer("all-reduce", 0, 10.1, 10.2, 11.5, 11.5),
        transfer("scatter", 1, 11.0, 11.4, 11.5, 11.5),
        transfer("scatter", 2, 11.2, 11.8, 11.6, 11.8),
        transfer("gather", 2, 11.9, 12.2, 12.1, 12.2),
        transfer("gather", 1, 11.95, 12.4, None, None),
        left=left,
    )
    measured = MeasuredStep.of(recorder_of("pipelined", recorded(own, 9.0), step, recorded(own, 99.0)), own)
    predicted = predict_whole("pipelined", own, CALIBRATION, work(), states=0)
    return StepTimes(own, NAMES, predicted, False, measured)


def test_the_step_of_median_length_is_shown_with_what_the_one_before_has_left() -> None:
    measured = pipelined().measured
    assert measured is not None and (measured.steps, measured.seconds) == (2, pytest.approx(2.0))
    assert [(each.kind, each.position) for each in measured.transfers][:2] == [("gather", 2), ("gather", 1)]
    assert [round(each.times.launch, 6) for each in measured.transfers][:2] == [-0.1, -0.05]
    own = [each for each in measured.transfers if each.kind == "gather" and each.times.launch > 0]
    assert [each.times.wait for each in own] == [None, None], "awaited in the next step"
    assert measured.waiting_seconds == pytest.approx(0.3 + 0.15 + 0.2)
    other = plan(is_scattered=False)
    assert MeasuredStep.of(recorder_of("pipelined", recorded(other, 1.0), recorded(other, 1.0)), other) is not None
    assert MeasuredStep.of(recorder_of("pipelined", recorded(other, 1.0)), other) is None, "a warm-up"


def test_the_table_has_a_row_for_each_transfer_in_launch_order() -> None:
    table, predicted, measured = pipelined().lines()
    rows = [line.split() for line in table.splitlines()[2:]]
    assert [row[:2] for row in rows] == [
        *(["gather", "2"], ["gather", "1"], ["all-reduce", "0"], ["scatter", "1"], ["scatter", "2"]),
        *(["gather", "2"], ["gather", "1"]),
    ]
    assert rows[0][3:9] == ["0", "0", "200", "-100", "300", "300"]
    assert rows[3][-1] == "b" and rows[2][-1] == "(riders)"
    assert predicted.startswith("Predicted: a step of") and measured.endswith("are 650 ms.")


def test_the_lanes_cover_the_step_and_show_what_is_on_the_link_within_it(tmp_path: Path) -> None:
    timeline = pipelined().timeline()
    for lanes, seconds in ((timeline.lanes["measured"], 2.0), (timeline.lanes["predicted"], None)):
        busy = [span for span in lanes.spans if span.doing != "sends"]
        total = max(span.end for span in busy)
        assert seconds is None or total == pytest.approx(seconds)
        assert sum(span.end - span.begin for span in busy) == pytest.approx(total)
    measured = timeline.lanes["measured"].spans
    sent = [(span.transfer, span.bucket, span.begin, span.end) for span in measured if span.doing == "sends"]
    assert sent == [
        ("gather", 2, 0.0, pytest.approx(0.3)),
        ("gather", 1, pytest.approx(0.3), pytest.approx(0.6)),  # and riders meanwhile
        ("scatter", 1, pytest.approx(1.0), pytest.approx(1.4)),
        ("scatter", 2, pytest.approx(1.4), pytest.approx(1.8)),
        ("gather", 2, pytest.approx(1.9), 2.0),
    ]
    computing = [(span.bucket, span.begin) for span in measured if span.doing == "computes" and span.begin < 1.1]
    assert computing == [
        (None, 0.0),
        (2, pytest.approx(0.4)),
        (1, pytest.approx(0.6)),
        (2, pytest.approx(1.0)),
    ], "forward, behind what was gathered, and then the backward"
    write_timeline(timeline, tmp_path / "step.json")
    names = [event["name"] for event in json.loads((tmp_path / "step.json").read_text())["traceEvents"]]
    assert "gather of bucket 2 (a; 400 bytes)" in names and "wait for scatter of bucket 2 (a; 400 bytes)" in names


def test_a_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    write_timeline(pipelined().timeline(), tmp_path / "step.png")
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")


def test_nothing_is_told_where_nothing_is_known() -> None:
    assert [*StepTimes(plan(is_scattered=False), NAMES).lines()] == []
