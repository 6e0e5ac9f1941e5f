"""`compiled-ddp calibrate`: on torchrun's ranks and on own ones, what it prints and writes, and its exit statuses."""

import contextlib
import io
import json
import os
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torchrun import environment, free_port

from compiled_ddp import Calibration, Compute, Link
from compiled_ddp.__main__ import main
from compiled_ddp.planning.calibration import Sample
from compiled_ddp.tools.calibration import command
from ranks import RankPool

FOUND = Calibration(
    "gloo",
    2,
    1,
    "cpu",
    Link(1.5e-4, 1e9, 2e-5, 7e-5),
    Compute(6e10, 2.5e10),
    0.08,
    (Sample(4096, 1, 3e-4), Sample(4096, 4, 9e-4), Sample(2**20, 1, 1e-3), Sample(2**20, 4, 5e-3)),
    "2026-11-28 14:20 UTC, torch 2.13.0",
)


def _run(rank: int, port: int, *arguments: str) -> tuple[int, str, str]:
    out, errors = io.StringIO(), io.StringIO()
    with environment(rank, 2, port), contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        return main(["calibrate", "--seconds", "0.1", "--device", "cpu", *arguments]), out.getvalue(), errors.getvalue()


def test_ranks_of_torchrun_are_measured_and_the_first_one_tells(ranks2: RankPool, tmp_path: Path) -> None:
    path = tmp_path / "link.json"
    first, other = ranks2.run(_run, free_port(), "--out", str(path), process_group=False)
    assert first[0] == other[0] == 0 and other[1:] == ("", "")
    assert "1 at once" not in first[1] and "alone, us" in first[1] and "4 at once, us" in first[1]
    assert first[2] == "calibrate: measuring for about 0.1 s\n"
    assert Calibration.load(path).world_size == 2


def test_json_is_all_that_is_printed_where_it_is_asked_for(ranks2: RankPool) -> None:
    (_, out, _), _ = ranks2.run(_run, free_port(), "--json", process_group=False)
    assert json.loads(out)["world_size"] == 2 and Calibration.from_json(out).backend == "gloo"


def test_a_file_that_cannot_be_written_is_told_before_anything_is_measured(ranks2: RankPool, tmp_path: Path) -> None:
    path = tmp_path / "none" / "link.json"
    first, other = ranks2.run(_run, free_port(), "--out", str(path), process_group=False)
    assert first[:2] == other[:2] == (2, "") and other[2] == ""
    assert first[2] == f"calibrate: {path} cannot be written (No such file or directory): name another file by --out\n"


@pytest.fixture
def without_launcher(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.delenv("RANK", raising=False)
    return monkeypatch


def test_ranks_are_started_where_there_are_none(
    without_launcher: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    started = []

    def start(ranks: int, entry: object, *_: object, environment: dict[str, str]) -> dict[int, Calibration]:
        started.append((ranks, environment["OMP_NUM_THREADS"]))
        return {0: FOUND, 1: FOUND}

    without_launcher.setattr(command, "run_on_own_ranks", start)
    without_launcher.setenv("OMP_NUM_THREADS", "3")
    path = tmp_path / "link.json"
    assert main(["calibrate", "--ranks", "2", "--out", str(path)]) == 0
    assert started == [(2, "3")] and Calibration.load(path) == FOUND
    printed = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["start-up", "us", "150"] in printed and ["MB/s", "1000"] in printed
    assert ["4", "KiB", "300", "224", "900", "686"] in printed
    assert os.listdir(tmp_path) == ["link.json"]


@pytest.mark.parametrize(
    "error", [ChildFailedError("calibrate", {0: ProcessFailure(0, 1, 1, "none")}), RuntimeError("no port is free")]
)
def test_ranks_that_fail_are_status_1(
    error: Exception, without_launcher: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    without_launcher.setattr(command, "run_on_own_ranks", fail)
    assert main(["calibrate"]) == 1
    told = capsys.readouterr()
    assert told.out == "" and ("a rank failed" in told.err or "no port is free" in told.err)


def test_one_rank_started_here_is_alone(
    without_launcher: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """In a process of its own, as for a user."""
    assert main(["calibrate", "--ranks", "1", "--seconds", "0.05", "--device", "cpu"]) == 0
    lines = [line.split() for line in capfd.readouterr().out.splitlines()]
    assert ["MB/s", "inf"] in lines and ["ranks", "1"] in lines


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--ranks", "0"], "--ranks must be at least 1, found 0"),
        (["--seconds", "0"], "--seconds must be positive and finite, found 0"),
        (["--seconds", "inf"], "--seconds must be positive and finite, found inf"),
        (["--device", "cpu", "--process-group", "nccl"], "--process-group nccl reduces no tensors of the cpu"),
        (["--second", "3", "--outt", "x"], "unrecognized arguments: --outt x. Did you mean '--out'?"),
    ],
)
def test_arguments_that_cannot_be_are_told(arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["calibrate", *arguments])
    assert ended.value.code == 2 and told in capsys.readouterr().err
