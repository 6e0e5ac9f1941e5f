"""The words of a report: who is behind, and equal ranks together. Without ranks."""

import dataclasses
import operator

import pytest
import torch

from compiled_ddp.plan import Bucket, Gradient
from compiled_ddp.ranks.hang_report import Answer, compare, who_parted
from compiled_ddp.ranks.progress import (
    Course,
    Position,
    failed_in_collective,
    format_bucket,
    frames_of_error,
    python_position,
)


def position(launches: int, point: tuple[int, int, bool] = (3, 1, True), text: str = "somewhere") -> Position:
    return Position(launches, point, text, ("train.py:7 in step",))


def test_ranks_with_fewer_launches_are_behind() -> None:
    positions = {0: position(9), 1: position(7, (3, 0, False), "early"), 2: position(9)}
    assert compare((0, 1, 2), 2, positions).split("\n") == [
        "rank 1 is behind (collectives launched: 7, by others 9).",
        "  ranks 0, 2: somewhere",
        "    Python: train.py:7 in step",
        "  rank 1: early",
        "    Python: train.py:7 in step",
    ]


def test_only_the_ranks_that_are_furthest_behind_are_named() -> None:
    positions = {0: position(8), 1: position(9), 2: position(7)}
    assert compare((0, 1, 2), 0, positions).startswith("rank 2 is behind (collectives launched: 7, by others 9).")


def test_with_equal_launches_the_rank_that_does_not_wait_yet_is_behind() -> None:
    positions = {0: position(9), 1: position(9, (3, 1, False))}
    assert compare((4, 6), 0, positions).startswith("rank 6 is behind (at an earlier point).")


def test_a_rank_that_has_finished_is_not_behind() -> None:
    positions = {0: position(9), 1: position(9, (3, 2, False))}
    assert compare((0, 1), 0, positions).startswith("rank 0 is behind (at an earlier point).")


def test_ranks_that_are_level_are_not_behind() -> None:
    report = compare((0, 1), 0, {0: position(9), 1: position(9)})
    assert report.startswith("No rank is behind (collectives launched by each: 9).\n  ranks 0, 1: somewhere")


def test_a_rank_that_broadcasts_where_others_are_in_a_backward_has_parted_from_them() -> None:
    level, behind, parted = (
        dataclasses.replace(position(9, text=text), course=Course(backwards=backwards, broadcasts=broadcasts))
        for text, backwards, broadcasts in (("level", 3, 3), ("behind", 2, 3), ("parted", 2, 4))
    )
    report = compare((4, 5, 6), 0, {0: level, 1: behind, 2: parted})
    assert report.startswith("rank 6 has begun another forward, which brings the buffers"), report
    assert "where rank 4 is in the backward of the one before." in report
    assert "skip_step()" in report and "\n  rank 5: behind" in report
    assert not who_parted((4, 5), {0: level, 1: behind}), "one that has begun less is late"
    assert not who_parted((4, 5), {0: behind, 1: parted}), "one that has begun more is early"


def test_a_report_of_64_ranks_stays_short() -> None:
    equal = {place: position(9) for place in range(64) if place not in (5, 6, 20)}
    report = compare(range(64), 0, equal)
    assert report.startswith("ranks 5, 6, 20 did not answer: stopped")
    assert "  ranks 0-4, 7-19, 21-63: somewhere" in report
    assert len(report.split("\n")) == 3

    different = {place: position(9, text=f"place {place}") for place in range(0, 64, 2)}
    report = compare(range(64), 30, different)
    verdict, first, *_, last = report.split("\n")
    assert "and 22 more runs of ranks" in verdict
    assert first == "  rank 30: place 30", "the rank's own place is always among those shown"
    assert last == "  and 24 more ranks at 24 other positions"
    assert len(report.split("\n")) == 18


def test_an_answer_comes_back_as_it_was_written() -> None:
    answer = Answer(3, True, dataclasses.replace(position(9), course=Course(2, 4)))
    assert Answer.decode(answer.encode()) == answer


@pytest.mark.parametrize(
    ("numel", "name"),
    [(6, "24 bytes"), (5_000, "20 kB"), (300_000, "1.2 MB")],
)
def test_a_bucket_is_named_by_its_place_its_parameters_and_its_size(numel: int, name: str) -> None:
    gradient = Gradient(1, size=(numel,), stride=(1,), offset_elements=0, numel=numel)
    bucket = Bucket((gradient,), torch.float32, torch.device("cpu"), numel)
    assert format_bucket(3, bucket, ("head.bias", "head.weight")) == f"bucket 3 (head.weight; {name})"


def _raised(call: object, *args: object) -> RuntimeError:
    with pytest.raises(RuntimeError) as failure:
        operator.call(call, *args)  # type: ignore[arg-type]
    return failure.value


def test_errors_of_collectives_are_told_from_others() -> None:
    collective = torch.ops._c10d_functional.all_reduce.default
    assert failed_in_collective(_raised(collective, torch.ones(2), "sum", "no such group"))
    assert not failed_in_collective(_raised(torch.ops.aten.mm.default, torch.ones(2, 3), torch.ones(2, 3)))


def test_a_position_in_python_is_the_users_alone() -> None:
    (here, *_) = python_position(frames_of_error(_raised(torch.mm, torch.ones(2, 3), torch.ones(2, 3))))
    assert here.startswith(f"{__file__}:")
    assert here.endswith(" in _raised")
