"""When buckets are ready, launched and there, as `explain()` and `timeline()` tell it: hand-made plans and records."""

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from compiled_ddp.options import Options
from compiled_ddp.plan import BucketPlan, GradientSpec, ReductionSequence, Section
from compiled_ddp.planning.assignment import assign_buckets
from compiled_ddp.planning.calibration import Calibration
from compiled_ddp.planning.cost_model import BackwardWork, Compute, Link, Work
from compiled_ddp.ranks.recorder import BucketTimes, RecordedBackward, Recorder
from compiled_ddp.report.explain import Explanation, Times, explain_sequence
from compiled_ddp.report.timeline import timeline_of_backward, write_timeline
from compiled_ddp.report.times import (
    MeasuredBackward,
    MeasuredBucket,
    Wait,
    format_waits,
    measured_backward,
    predict_sequence,
    spans_of_measurement,
    spans_of_prediction,
    union_seconds,
)

LINK = Link(startup_seconds=0.0, bytes_per_second=1000.0)
CALIBRATION = Calibration("gloo", 2, 1, "cpu", LINK, Compute(100.0, 1e9))
SIZED = Options(bucket_cap_mb=1.0)
NAMES = ("a", "b", "c", "d")


def plan(*indices: int, numel: int = 100, cap: float = 400.0) -> BucketPlan:
    """Gradients of 400 bytes; the last bucket has the riders' besides."""
    specs = [GradientSpec.of(index, torch.empty(numel)) for index in indices]
    return assign_buckets(specs, capacities_bytes=(cap,), world_size=2)


def of_graph(*plans: BucketPlan) -> ReductionSequence:
    sections = tuple(Section(each, "graph") for each in plans)
    return ReductionSequence(sections, NAMES[: sum(len(each.indices) for each in plans)])


def by_hooks(*indices: int) -> Section:
    return Section(plan(*indices), "hooks", "the model runs eagerly")


def work(*flops: float, total: float) -> BackwardWork:
    return BackwardWork(tuple(Work(each) for each in flops), Work(total))


def recorded(
    sequence: ReductionSequence | None, *buckets: tuple[float | None, ...], seconds: float, began: float = 50.0
) -> RecordedBackward:
    """Of buckets (launched, arrived, wait began, wait ended), in seconds since it began."""
    backward = RecordedBackward(1, began, began + seconds, sequence)
    for position, moments in enumerate(buckets):
        backward.buckets[position] = BucketTimes(*(None if at is None else began + at for at in moments))
    return backward


def recorder_of(*backwards: RecordedBackward, local: Sequence[float] = ()) -> Recorder:
    recorder = Recorder(0, follows_collectives=True)
    recorder.recorded += backwards
    recorder.local_seconds += local
    return recorder


def explanation_of(
    sequence: ReductionSequence | None, options: Options = SIZED, times: Times | None = None
) -> Explanation:
    return explain_sequence(sequence, (), options, "Proven.", (), (), "", "", times or Times(2))


# ---- predicted -------------------------------------------------------------------------------------------------------


def test_buckets_of_a_graph_are_ready_when_their_last_gradients_are_computed() -> None:
    sequence = of_graph(plan(2, 1, 0))
    predicted = predict_sequence(sequence, CALIBRATION, lambda _: work(10.0, 20.0, 60.0, total=90.0))
    transfers = predicted.prediction.transfers
    assert [transfer.ready for transfer in transfers] == pytest.approx([0.1, 0.2, 0.6])
    assert [transfer.start for transfer in transfers] == pytest.approx([0.1, 0.5, 0.9])
    assert transfers[-1].nbytes == sequence.buckets[-1].nbytes > 400, "riders travel too"
    assert predicted.prediction.backward_seconds == pytest.approx(0.9)
    assert predicted.assumed == ()


def test_a_section_begins_where_the_one_before_it_has_been_computed() -> None:
    sequence = of_graph(plan(1), plan(0))
    predicted = predict_sequence(sequence, CALIBRATION, lambda _: work(10.0, total=50.0))
    assert [transfer.ready for transfer in predicted.prediction.transfers] == pytest.approx([0.1, 0.6])
    assert predicted.prediction.backward_seconds == pytest.approx(1.0)


def test_hooks_buckets_are_assumed_to_be_ready_by_their_sizes_and_so_are_those_of_an_unknown_graph() -> None:
    sequence = ReductionSequence((Section(plan(2), "graph"), by_hooks(1, 0)), NAMES[:3])
    of_first = predict_sequence(sequence, CALIBRATION, lambda _: work(100.0, total=100.0))
    assert of_first.assumed == (1, 2)
    assert [transfer.ready for transfer in of_first.prediction.transfers] == pytest.approx([1.0, 1.4, 1.8])
    assert predict_sequence(sequence, CALIBRATION, lambda _: None).assumed == (0, 1, 2)


def test_what_the_reduction_takes_of_the_device_delays_the_backward_and_counts_as_exposed() -> None:
    slow = replace(CALIBRATION, link=replace(LINK, host_seconds_per_byte=1e-4))
    sequence = of_graph(plan(0))
    predicted = predict_sequence(sequence, slow, lambda _: work(100.0, total=100.0))
    assert predicted.local_seconds == pytest.approx(1.0)
    assert predicted.prediction.transfers[0].ready == pytest.approx(1.0 + 1e-4 * sequence.nbytes)
    measured = MeasuredBackward((None,), 3, 1.5, 0.0)
    assert measured.exposed_seconds(predicted) == pytest.approx(0.5)
    assert predicted.exposed_seconds == pytest.approx(predicted.prediction.exposed_seconds + 1e-4 * sequence.nbytes)


def test_riders_in_a_bucket_of_their_own_are_ready_with_the_last_gradient() -> None:
    specs = [GradientSpec.of(index, torch.empty(100, dtype=torch.bfloat16)) for index in (1, 0)]
    sequence = of_graph(assign_buckets(specs, capacities_bytes=(1.0,), world_size=2))
    assert sequence.buckets[-1].indices == ()
    predicted = predict_sequence(sequence, CALIBRATION, lambda _: work(10.0, 30.0, total=30.0))
    assert [transfer.ready for transfer in predicted.prediction.transfers] == pytest.approx([0.1, 0.3, 0.3])


def test_a_bucket_of_empty_gradients_alone_is_predicted() -> None:
    specs = [GradientSpec.of(1, torch.empty(100)), GradientSpec.of(0, torch.empty(0, 3, dtype=torch.float64))]
    sequence = of_graph(assign_buckets(specs, capacities_bytes=(1e6,), world_size=2))
    assert 0 in [bucket.nbytes for bucket in sequence.buckets]
    predicted = predict_sequence(sequence, CALIBRATION, lambda _: None)
    assert [each.nbytes for each in predicted.prediction.transfers] == [each.nbytes for each in sequence.buckets]


def test_what_is_left_behind_the_computation_is_waited_for_bucket_by_bucket() -> None:
    predicted = predict_sequence(of_graph(plan(1, 0)), CALIBRATION, lambda _: work(10.0, 20.0, total=40.0))
    first, second = predicted.waits
    assert first.interval == pytest.approx((0.4, 0.5))
    assert second.interval == pytest.approx((0.5, predicted.prediction.seconds))


# ---- measured --------------------------------------------------------------------------------------------------------


def test_a_union_counts_once_what_overlaps() -> None:
    assert union_seconds([]) == 0.0
    assert union_seconds([(5.0, 6.0), (0.0, 2.0), (1.0, 3.0), (1.5, 2.5)]) == pytest.approx(4.0)


def test_the_backward_of_median_length_is_shown_and_the_first_one_left_out() -> None:
    sequence, other = of_graph(plan(1, 0)), of_graph(plan(0, 1))
    moments = ((0.1, 0.4, 0.6, 0.65), (0.5, 0.8, 0.65, 0.9))
    backwards = [
        recorded(sequence, *moments, seconds=100.0),  # warm-up
        recorded(sequence, *moments, seconds=3.0),
        recorded(sequence, *moments, seconds=1.0, began=7.0),
        recorded(other, *moments, seconds=1.5),
        recorded(sequence, *moments, seconds=0.95),
    ]
    measured = measured_backward(recorder_of(*backwards, local=[9.0, 0.7, 0.5, 0.6]), sequence)
    assert measured is not None
    assert (measured.backwards, measured.seconds) == (3, pytest.approx(1.0))
    assert measured.local_seconds == pytest.approx(0.6)
    assert measured.waiting_seconds == pytest.approx(0.3)
    first, second = measured.buckets
    assert first is not None and second is not None
    assert first.wait is not None
    assert (first.launch, *first.wait, first.end) == pytest.approx((0.1, 0.6, 0.65, 0.4)), "by its own clock"
    assert (first.end_is, second.end) == ("completion", pytest.approx(0.8))
    assert measured_backward(recorder_of(backwards[0]), sequence) is None


def test_the_end_of_the_wait_stands_for_that_of_a_transfer_of_which_nothing_is_known() -> None:
    sequence = of_graph(plan(2, 1, 0))
    unseen = (None, None, None, None)
    warm_up, backward = (
        recorded(sequence, (0.1, None, 0.6, 0.7), (0.5, None, None, None), unseen, seconds=1.0) for _ in range(2)
    )
    measured = measured_backward(recorder_of(warm_up, backward), sequence)
    assert measured is not None
    first, second, third = measured.buckets
    assert first is not None and (first.end, first.end_is) == (pytest.approx(0.7), "wait")
    assert second is not None and (second.wait, second.end) == (None, None)
    assert third is None


def test_exposed_communication_is_the_difference_to_local_backwards_or_to_what_was_counted() -> None:
    sequence = of_graph(plan(1, 0))
    counted = predict_sequence(sequence, CALIBRATION, lambda _: work(10.0, 20.0, total=40.0))
    assumed = predict_sequence(sequence, CALIBRATION, lambda _: None)
    alone = MeasuredBackward((None, None), 3, 1.0, 0.0)
    assert alone.exposed_seconds(None) is None
    assert alone.exposed_seconds(assumed) is None, "what is assumed is not compared with"
    assert alone.exposed_seconds(counted) == pytest.approx(0.6)
    assert MeasuredBackward((None, None), 3, 1.0, 0.0, local_seconds=0.7).exposed_seconds(counted) == pytest.approx(0.3)


def test_a_recorder_keeps_no_backward_that_was_broken_off() -> None:
    recorder = Recorder(2, follows_collectives=False)
    recorder.backward_began(1)
    recorder.backward_began(2)  # after an exception
    recorder.backward_ended(3, None)  # of zeros, in place of it
    assert (recorder.recorded, recorder.remaining) == ([], 2)
    recorder.backward_began(4)
    recorder.backward_ended(4, None)
    assert (len(recorder.recorded), recorder.remaining) == (1, 1)


# ---- why -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wait", "cause"),
    [
        (Wait(0, 100, launch=0.2, end=1.0, others_seconds=0.6, interval=(0.5, 1.0)), "the link was busy"),
        (Wait(0, 400, launch=0.5, end=0.95, others_seconds=0.0, interval=(0.5, 0.95)), "ready late"),
        (Wait(0, 100, launch=0.2, end=0.9, others_seconds=0.1, interval=(0.5, 0.9)), "peers or link"),
    ],
)
def test_a_wait_has_the_cause_that_takes_most_of_its_transfer(wait: Wait, cause: str) -> None:
    assert wait.cause(LINK) == cause


def test_without_a_known_link_a_bucket_launched_just_before_its_wait_was_late() -> None:
    late, early = (Wait(0, 400, launch, 0.9, others_seconds=0.0, interval=(0.5, 0.9)) for launch in (0.49, 0.2))
    assert (late.cause(None), early.cause(None)) == ("ready late", "peers or link")


def test_what_others_take_of_the_link_is_what_they_send_while_a_bucket_is_under_way() -> None:
    buckets = (
        MeasuredBucket(0.0, end=0.4),
        MeasuredBucket(0.2, wait=(0.5, 1.0), end=1.0),
        MeasuredBucket(0.8, end=1.2),
    )
    measured = MeasuredBackward(buckets, 1, 1.2, 0.5)
    (shared,) = measured.waits([100, 200, 300], LINK)
    assert shared.others_seconds == pytest.approx(0.1 / 2 + 0.3 / 2)
    (unknown,) = measured.waits([100, 200, 300], None)
    assert unknown.others_seconds == pytest.approx(0.2), "of those before it"


def test_a_line_for_each_of_the_three_longest_waits_says_what_would_shorten_it() -> None:
    busy = [Wait(n, 100, 0.0, n + 1.0, others_seconds=n + 0.8, interval=(n, n + 1.0 + n / 10)) for n in range(5)]
    short = Wait(9, 100, launch=0.0, end=0.001, others_seconds=0.0, interval=(0.0, 0.001))
    lines = format_waits([*busy, short], 5.0, LINK, are_sized=True, are_compressed=False)
    assert [line.partition(" is awaited")[0] for line in lines] == ["Bucket 4", "Bucket 3", "Bucket 2"]
    assert all("ms of the link meanwhile" in line and "bf16_compress" in line for line in lines)
    late = [Wait(0, 400, launch=0.5, end=0.9, others_seconds=0.0, interval=(0.5, 0.9))]
    (sized,) = format_waits(late, 1.0, LINK, are_sized=True, are_compressed=False)
    (planned,) = format_waits(late, 1.0, LINK, are_sized=False, are_compressed=True)
    assert "ready as late as 500 ms" in sized and "smaller buckets at the end" in sized
    assert "smaller" not in planned and "bf16_compress" not in planned and "a faster link" in planned
    slow = [Wait(0, 100, launch=0.5, end=0.9, others_seconds=0.0, interval=(0.5, 0.9))]
    (peers,) = format_waits(slow, 1.0, LINK, are_sized=True, are_compressed=False)
    assert "its bytes take 100 ms: peers or link" in peers
    assert format_waits([short], 5.0, LINK, are_sized=True, are_compressed=False) == ()


# ---- as a table ------------------------------------------------------------------------------------------------------


def test_the_table_has_no_times_where_none_are_known_and_says_how_to_get_them() -> None:
    text = str(explanation_of(of_graph(plan(1, 0))))
    assert " ".join(text.splitlines()[0].split()) == "order launched by gradients bytes parameters why hooks"
    assert "pass calibration=" in text
    assert text.splitlines()[-1] == "Proven."
    assert "calibration" not in str(explanation_of(of_graph(plan(1, 0)), times=Times(1))), "one rank sends nothing"
    assert "ms" not in str(explanation_of(None)).split()


def full(recorder: Recorder | None = None, **options: object) -> Explanation:
    sequence = of_graph(plan(1, 0))
    times = Times(2, lambda _: work(10.0, 20.0, total=40.0), recorder)
    return explanation_of(sequence, Options(calibration=CALIBRATION, **options), times)  # type: ignore[arg-type]


def measured_example() -> Explanation:
    sequence = of_graph(plan(1, 0))
    moments = ((0.1, 0.5, 0.6, 0.6), (0.2, 0.9, 0.6, 0.9))
    return full(recorder_of(*(recorded(sequence, *moments, seconds=1.0) for _ in range(2)), local=[0.7, 0.7]))


def test_the_table_shows_when_each_bucket_is_ready_on_the_link_and_there() -> None:
    text = str(full())
    assert "ready ms    predicted start" in text and "measured" not in text
    assert text.splitlines()[2].split()[4:7] == ["100", "100", "500"]
    assert "Predicted: a backward of" in text and "assumed" not in text
    assert "is assumed by sizes" in str(explanation_of(of_graph(plan(1, 0)), Options(calibration=CALIBRATION)))


def test_the_table_shows_what_was_measured_beside_what_was_predicted() -> None:
    text = str(measured_example())
    assert text.splitlines()[2].split()[4:10] == ["100", "100", "500", "100", "0", "500"]
    assert text.splitlines()[3].split()[7:10] == ["200", "300", "900"]
    assert "exposed communication of 300 ms by difference to local ones (no_sync), 300 ms by the union of waits" in text
    assert "Bucket 1 is awaited for 300 ms: " in text


def test_a_bucket_of_rows_is_predicted_by_what_the_latest_step_has_sent() -> None:
    """100 rows of 4 elements: with two ranks, 24 bytes for each of ten rows of the one that has most."""
    spec = replace(GradientSpec.of(0, torch.empty(100, 4)), row=4)
    of_rows = assign_buckets([spec], capacities_bytes=(1e6,), world_size=2)
    sequence = ReductionSequence((Section(of_rows, "graph"),), ("a",))
    assert [bucket.row for bucket in of_rows.buckets] == [4, None]  # riders are apart
    options = replace(SIZED, calibration=CALIBRATION)

    def told(counts: dict[tuple[int, int], list[int]]) -> tuple[int, str]:
        explanation = explanation_of(sequence, options, Times(2, lambda _: work(1.0, total=1.0), None, counts))
        assert explanation.predicted is not None
        return explanation.predicted.prediction.transfers[0].nbytes, "".join(explanation.by_rows)

    assert told({}) == (1600, "a, 100 rows")
    nbytes, text = told({(400, 4): [10, 3]})
    assert nbytes == 10 * 24 and "up to 10 of 100 rows, and these were gathered" in text
    nbytes, text = told({(400, 4): [90, 3]})
    assert nbytes == 1600 and "and all were sent" in text


def test_under_a_communication_hook_nothing_is_predicted() -> None:
    specs = [GradientSpec.of(0, torch.empty(100))]
    sequence = of_graph(assign_buckets(specs, capacities_bytes=(400.0,), world_size=2, reduction="hook"))
    explanation = explanation_of(sequence, Options(calibration=CALIBRATION))
    assert explanation.predicted is None and "communication hook" in explanation.not_predicted


# ---- as JSON ---------------------------------------------------------------------------------------------------------

TOTALS = {
    *("buckets", "predicted", "measured", "fallback_reasons", "unused", "sparse", "left_alone", "waits", "by_rows"),
    *("bucket_size", "reduction", "chosen", "compiled", "proof", "not_predicted"),
}
OF_A_BUCKET = {
    *("order", "launched_by", "gradients", "bytes", "parameters", "why_hooks", "predicted", "measured"),
}


@pytest.mark.parametrize(
    "explanation",
    [explanation_of(None), explanation_of(of_graph(plan(1, 0))), full(), measured_example()],
    ids=["no plan", "nothing known", "predicted", "measured"],
)
def test_json_has_the_same_keys_whatever_is_known(explanation: Explanation) -> None:
    read = json.loads(explanation.to_json())
    assert read == explanation.as_dict()
    assert read.keys() == TOTALS
    for bucket in read["buckets"]:
        assert bucket.keys() == OF_A_BUCKET


def test_json_has_all_times_in_milliseconds() -> None:
    read = measured_example().as_dict()
    assert read["predicted"]["local_backward_ms"] == pytest.approx(400.0)
    assert read["predicted"]["bound_ms"] <= read["predicted"]["backward_ms"]
    assert read["predicted"]["exposed_by_waits_ms"] == read["predicted"]["exposed_by_difference_ms"] > 0
    assert read["measured"] == pytest.approx(
        {
            "backwards": 1,
            "backward_ms": 1000.0,
            "local_backward_ms": 700.0,
            "exposed_by_difference_ms": 300.0,
            "exposed_by_waits_ms": 300.0,
        }
    )
    bucket = read["buckets"][1]
    assert bucket["parameters"] == ["a"]
    assert bucket["predicted"].pop("ready_is_assumed") is False
    assert bucket["predicted"]["ready_ms"] == pytest.approx(200.0)
    assert bucket["measured"].pop("end_is") == "completion"
    assert bucket["measured"] == pytest.approx(
        {"launch_ms": 200.0, "wait_begin_ms": 600.0, "wait_end_ms": 900.0, "end_ms": 900.0}
    )


# ---- as a picture, and as a trace ------------------------------------------------------------------------------------


def test_the_lanes_cover_the_backward_without_overlap() -> None:
    explanation = measured_example()
    assert explanation.predicted is not None and explanation.measured is not None
    predicted, measured = spans_of_prediction(explanation.predicted), spans_of_measurement(explanation.measured)
    for spans, end in ((predicted, explanation.predicted.prediction.seconds), (measured, 1.0)):
        of_host = sorted((span.begin, span.end) for span in spans if span.doing != "sends")
        assert union_seconds(of_host) == pytest.approx(end)
        assert sum(last - first for first, last in of_host) == pytest.approx(end)
        assert {span.bucket for span in spans if span.doing == "sends"} == {0, 1}
    computing = [(span.bucket, span.begin, span.end) for span in measured if span.doing == "computes"]
    assert computing == [
        (0, 0.0, pytest.approx(0.1)),
        (1, pytest.approx(0.1), pytest.approx(0.2)),
        (None, pytest.approx(0.2), pytest.approx(0.6)),
        (None, pytest.approx(0.9), 1.0),
    ]


def test_what_is_on_the_link_at_once_has_rows_of_its_own() -> None:
    buckets = [MeasuredBucket(0.0, end=0.4), MeasuredBucket(0.1, end=0.3), MeasuredBucket(0.35, end=0.6), None]
    spans = spans_of_measurement(MeasuredBackward(tuple(buckets), 1, 1.0, 0.0))
    assert [(span.bucket, span.row) for span in spans if span.doing == "sends"] == [(0, 0), (1, 1), (2, 1)]


def test_a_trace_has_a_process_for_each_source_and_a_thread_for_each_lane(tmp_path: Path) -> None:
    write_timeline(timeline_of_backward(measured_example()), tmp_path / "step.json")
    trace = json.loads((tmp_path / "step.json").read_text())
    events = trace["traceEvents"]
    names = {(e["pid"], e["tid"], e["name"]): e["args"]["name"] for e in events if e["name"].endswith("_name")}
    assert {name for (_, _, kind), name in names.items() if kind == "process_name"} == {"predicted", "measured"}
    threads = {(process, thread): name for (process, thread, kind), name in names.items() if kind == "thread_name"}
    assert {name for (process, _), name in threads.items() if process == 1} == {"compute", "link"}
    assert {name for (process, _), name in threads.items() if process == 101} == {"compute", "link", "link, row 2"}
    ranges = [event for event in events if event["ph"] == "X"]
    assert len(ranges) + sum(event["ph"] == "M" for event in events) == len(events)
    for event in ranges:
        assert event["ts"] >= 0 and event["dur"] > 0 and (event["pid"], event["tid"]) in threads
    for lane in threads:
        of_lane = [event for event in ranges if (event["pid"], event["tid"]) == lane]
        assert union_seconds((e["ts"], e["ts"] + e["dur"]) for e in of_lane) == pytest.approx(
            sum(event["dur"] for event in of_lane)
        ), "viewers draw no ranges over each other"
    sent = next(event for event in ranges if event["pid"] == 101 and event["name"].startswith("bucket 1 (a; "))
    assert (sent["ts"], sent["dur"]) == pytest.approx((0.2e6, 0.7e6))
    assert sent["args"]["parameters"] == ["a"]


@pytest.mark.parametrize("explanation", [full(), measured_example()], ids=["predicted", "measured"])
def test_a_picture_is_drawn_of_whatever_is_known(explanation: Explanation, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    backend = sys.modules["matplotlib"].get_backend() if "matplotlib.pyplot" in sys.modules else None
    write_timeline(timeline_of_backward(explanation), tmp_path / "step.png")
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")
    assert backend is None or sys.modules["matplotlib"].get_backend() == backend


def test_a_picture_of_many_buckets_is_drawn_too(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    specs = [GradientSpec.of(index, torch.empty(100)) for index in range(40)]
    many = assign_buckets(specs, capacities_bytes=(400.0,), world_size=2)
    sequence = ReductionSequence((Section(many, "graph"),), tuple(f"p{index}" for index in range(40)))
    write_timeline(
        timeline_of_backward(explanation_of(sequence, Options(calibration=CALIBRATION))), tmp_path / "step.png"
    )
    assert (tmp_path / "step.png").stat().st_size > 10_000


def test_without_matplotlib_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("matplotlib", "matplotlib.figure", "matplotlib.backends.backend_agg"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=r"compiled-ddp\[plots\]"):
        write_timeline(timeline_of_backward(full()), tmp_path / "step.png")
    write_timeline(timeline_of_backward(full()), tmp_path / "step.json")


def test_a_timeline_of_nothing_or_under_another_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="call profile"):
        write_timeline(timeline_of_backward(explanation_of(of_graph(plan(1, 0)))), tmp_path / "step.png")
    with pytest.raises(ValueError, match=r"path.*step\.svg"):
        write_timeline(timeline_of_backward(full()), tmp_path / "step.svg")
