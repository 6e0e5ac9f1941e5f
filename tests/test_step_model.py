"""The model of whole steps: by hand, against that of backwards, and against what no step can pass."""

import itertools
import random
from typing import get_args

import pytest

from compiled_ddp.planning.cost_model import Link, Readiness
from compiled_ddp.planning.optimal import predict_plan
from compiled_ddp.planning.step_model import Job, Mode, predict_step

LINK = Link(startup_seconds=0.0, bytes_per_second=100.0)
JOB = Job((100, 100), Readiness((2.0, 4.0), 4.0), 2.0, 0.4)
EACH_ALONE = [(0,), (1,)]
MODES = get_args(Mode)


def test_an_all_reduced_step_is_its_backward_with_forward_and_update_around() -> None:
    step = predict_step("all-reduced", EACH_ALONE, JOB, LINK)
    assert [(each.launched, each.start, each.end) for each in step.transfers] == [(4.0, 4.0, 5.0), (6.0, 6.0, 7.0)]
    assert [(each.kind, each.bucket, each.begin, each.end) for each in step.waits] == [("all-reduce", 1, 6.0, 7.0)]
    assert step.seconds == pytest.approx(7.4) and step.exposed_seconds == pytest.approx(1.0)


def test_a_sharded_step_gathers_behind_its_backward() -> None:
    """Scattered till 4.5 and 6.5; bucket 0 is updated at 6.2 and gathered till 7.0, as the link carries 1 till 6.5."""
    step = predict_step("sharded", EACH_ALONE, JOB, LINK)
    sent = [(each.kind, each.bucket, each.start, each.end) for each in step.transfers]
    assert sent[:2] == [("scatter", 0, 4.0, 4.5), ("scatter", 1, 6.0, 6.5)]
    assert sent[2] == ("gather", 0, pytest.approx(6.5), pytest.approx(7.0))
    assert sent[3] == ("gather", 1, pytest.approx(7.0), pytest.approx(7.5))
    assert step.seconds == pytest.approx(7.5)


def test_a_pipelined_step_awaits_the_first_layer_alone_and_hides_the_rest() -> None:
    step = predict_step("pipelined", EACH_ALONE, JOB, LINK)
    assert [(each.kind, each.bucket, each.end) for each in step.transfers[:2]] == [
        ("gather", 1, 0.5),
        ("gather", 0, 1.0),
    ]
    assert [(each.kind, each.bucket) for each in step.waits] == [("gather", 1), ("scatter", 1)]
    assert step.seconds == pytest.approx(0.5 + 2.0 + 4.0 + 0.5 - 0.2 + 0.4), "bucket 0 is updated while 1 is scattered"
    assert step.bound_seconds == pytest.approx(6.4)


def test_a_deferred_step_updates_each_bucket_before_its_forward_reads_it() -> None:
    step = predict_step("deferred", EACH_ALONE, JOB, LINK)
    assert [(each.kind, each.bucket) for each in step.waits] == [("gather", 1), ("scatter", 1)]
    first, *_ = [each for each in step.computing if each.bucket == 1]
    assert (first.begin, first.end) == (0.5, pytest.approx(0.7)), "the update of half of the bytes"
    assert step.seconds == pytest.approx(0.5 + 0.4 + 2.0 + 4.0 + 0.5)
    assert step.bound_seconds == pytest.approx(6.4)


def drawn(random_: random.Random) -> tuple[list[range], Job, Link]:
    gradients = random_.randint(1, 8)
    ready = sorted(random_.random() for _ in range(gradients))
    readiness = Readiness(tuple(ready), ready[-1] + random_.random() / 5)
    nbytes = tuple(random_.randint(1, 1000) for _ in range(gradients))
    job = Job(nbytes, readiness, random_.random(), random_.random() / 3)
    cuts = sorted({0, gradients, *(random_.randint(0, gradients) for _ in range(3))})
    link = Link(random_.random() / 10, 10 ** random_.uniform(2, 5), random_.random() / 100, random_.random() / 100)
    return [range(*each) for each in itertools.pairwise(cuts)], job, link


def test_no_step_passes_its_bound_and_the_lanes_fill_it() -> None:
    for seed, mode in itertools.product(range(200), MODES):
        buckets, job, link = drawn(random.Random(seed))
        step = predict_step(mode, buckets, job, link)
        assert step.seconds >= max(step.bound_seconds, step.compute_seconds) - 1e-9
        busy = sorted([(each.begin, each.end) for each in (*step.computing, *step.waits)])
        assert busy[0][0] == 0.0 and busy[-1][1] == pytest.approx(step.seconds)
        assert all(one[1] == pytest.approx(other[0]) for one, other in itertools.pairwise(busy))
        sent = sorted((each.start, each.end) for each in step.transfers)
        assert all(one[1] <= other[0] + 1e-9 for one, other in itertools.pairwise(sent))
        assert len(step.transfers) == len(buckets) * (1 if mode == "all-reduced" else 2)


def test_an_all_reduced_step_is_what_the_model_of_backwards_says() -> None:
    for seed in range(50):
        buckets, job, link = drawn(random.Random(seed))
        backward = predict_plan([len(each) for each in buckets], job.nbytes, job.readiness, link)
        step = predict_step("all-reduced", buckets, job, link)
        assert step.seconds == pytest.approx(job.forward_seconds + backward.seconds + job.optimizer_seconds)


def test_reducing_on_the_cores_that_compute_makes_a_step_longer() -> None:
    slow = Link(0.0, 100.0, host_seconds_per_byte=0.01)
    step, alone = (predict_step("pipelined", EACH_ALONE, JOB, link) for link in (slow, LINK))
    computing, before = (sum(each.end - each.begin for each in one.computing) for one in (step, alone))
    assert computing == pytest.approx(before + 2.0)
    assert step.compute_seconds == alone.compute_seconds
