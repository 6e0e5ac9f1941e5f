"""`make gpu` where there is no GPU: the same code in small, and sections that fail, hang or cannot be shown."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from benchmarks.gpu import __main__ as command
from benchmarks.gpu import page, placement, sections
from benchmarks.gpu.sections import BROKEN, FAILED, NOT_RUN, PASSED, SECTIONS, TIMED_OUT, Outcome, Section, run_all
from benchmarks.gpu.settings import Settings
from benchmarks.launch import REPOSITORY
from compiled_ddp.tools.comparison.ranks import joined_rank
from compiled_ddp.tools.comparison.result import Comparison

SETTINGS = Settings("cpu", "tiny", ("tiny gpt",), ("EagerDDP",), "aot_eager", 1, 2, ("tests",))

FAULTS = {
    "good": "measure = lambda settings: {'failed': [], 'said': settings.size}\nrender = lambda found: found['said']",
    "raises": "def measure(settings):\n    print('on the way')\n    raise ArithmeticError('of its own')",
    "wrong": "measure = lambda settings: {'failed': ['one is wrong', 'another too']}\nrender = lambda found: 'shown'",
    "unshown": "measure = lambda settings: {'failed': []}\nrender = lambda found: found['missing']",
    "dies": "import os\nmeasure = lambda settings: os.kill(os.getpid(), 9)",
    "hangs": (
        "import os, subprocess, sys, time\n"
        "STAYS = 'import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); '\n"
        "STAYS += 'print(1, flush=True); time.sleep(99)'\n"
        "def measure(settings):\n"
        "    below = subprocess.Popen([sys.executable, '-c', STAYS], start_new_session=True, stdout=subprocess.PIPE)\n"
        "    below.stdout.readline()\n"
        "    print('below it:', below.pid, flush=True)\n"
        "    time.sleep(99)"
    ),
}


@pytest.fixture
def faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Section]:
    """Sections by what is wrong with them; what they import lies in a folder of the test's own."""
    for name, source in FAULTS.items():
        (tmp_path / f"section_{name}.py").write_text(source)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.syspath_prepend(tmp_path)  # the page is written in this process
    monkeypatch.setattr(sections, "GRACE_SECONDS", 0.5)
    return {name: Section(name, f"Section {name}", f"section_{name}", 60) for name in FAULTS}


def outcomes_of(found: dict[str, Section], *names: str) -> dict[str, Outcome]:
    return {outcome.name: outcome for outcome in run_all([found[name] for name in names], SETTINGS)}


def test_a_section_that_raises_or_dies_does_not_stop_the_others(faults: dict[str, Section]) -> None:
    outcomes = outcomes_of(faults, "raises", "dies", "good")
    assert [outcome.status for outcome in outcomes.values()] == [BROKEN, BROKEN, PASSED]
    tail = outcomes["raises"].output_tail
    assert tail is not None and "on the way" in tail and "ArithmeticError: of its own" in tail
    assert outcomes["dies"].reason == "its process ended with status -9"
    assert outcomes["good"].answer == {"failed": [], "said": "tiny"}


def test_a_section_that_runs_out_of_time_ends_with_all_that_it_has_started(faults: dict[str, Section]) -> None:
    begin = time.monotonic()
    outcome, after = run_all([faults["hangs"], faults["good"]], SETTINGS, timeout_s=4)
    assert time.monotonic() - begin < 30
    assert (outcome.status, outcome.reason) == (TIMED_OUT, "it had not ended after 4 s")
    assert outcome.output_tail is not None and outcome.output_tail.startswith("below it: ")
    said, *stacks = outcome.output_tail.splitlines()
    assert any("section_hangs.py" in line and "in measure" in line for line in stacks)  # where it stood
    below = int(said.split()[-1])
    assert not psutil.pid_exists(below) or psutil.Process(below).status() == psutil.STATUS_ZOMBIE
    assert after.status == PASSED


def test_what_a_section_finds_wrong_is_its_outcome(faults: dict[str, Section]) -> None:
    outcome = outcomes_of(faults, "wrong")["wrong"]
    assert (outcome.status, outcome.reason, outcome.is_good) == (FAILED, "one is wrong; another too", False)
    assert outcome.answer is not None


def test_what_needs_a_gpu_is_not_run_on_the_cpu(faults: dict[str, Section]) -> None:
    needs = Section("raises", "Section", faults["raises"].module, 60, needs_gpu=True)
    (outcome,) = run_all([needs], SETTINGS)
    assert (outcome.status, outcome.reason, outcome.is_good) == (NOT_RUN, "needs a CUDA device", True)


@pytest.mark.parametrize(("names", "status"), [(("good",), 0), (("wrong", "good"), 1), (("raises", "unshown"), 1)])
def test_the_command_fails_where_a_section_did_and_writes_the_page(
    faults: dict[str, Section],
    names: tuple[str, ...],
    status: int,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(command, "SECTIONS", tuple(faults.values()))
    made = [tmp_path / "out" / name for name in ("gpu.json", "gpu.md")]
    where = ["--json", str(made[0]), "--markdown", str(made[1])]
    assert command.main(["--device", "cpu", "--sections", *names, *where]) == status
    found, text = json.loads(made[0].read_text()), made[1].read_text()
    assert text.startswith("# compiled_ddp on the CPU, without what needs a GPU\n")
    assert {section["name"] for section in found["sections"]} == set(names)
    said = capsys.readouterr().out
    for name in names:
        assert f"Section {name}: " in said and f"## Section {name}\n" in text
    assert ("tiny" in text.splitlines()) == ("good" in names)
    assert ("ArithmeticError: of its own" in text) == ("raises" in names)
    assert ("This section cannot be shown" in text and "KeyError: 'missing'" in text) == ("unshown" in names)


def test_without_a_gpu_the_command_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None)
    where = ["--json", str(tmp_path / "gpu.json"), "--markdown", str(tmp_path / "gpu.md")]
    assert command.main(where) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: no CUDA device: torch ") and "built for the CPU alone" in line
    assert "GPU_PYTHON=" in line and "--device cpu" in line
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert "no driver that is new enough for CUDA 13.0" in str(placement.why_missing("cuda"))
    assert placement.why_missing("cpu") is None


@pytest.mark.parametrize(
    ("device", "gpus", "expected"),
    [
        ("cpu", 4, ("gloo", 2, "2 gloo ranks on the CPU")),
        ("cuda", 1, ("gloo", 2, "2 gloo ranks on one GPU")),
        ("cuda", 4, ("nccl", 4, "4 nccl ranks each on a GPU of its own")),
    ],
)
def test_ranks_are_placed_by_how_many_gpus_there_are(
    monkeypatch: pytest.MonkeyPatch, device: str, gpus: int, expected: tuple[str, int, str]
) -> None:
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: gpus)
    placed = placement.together(device)
    assert (placed.process_group, placed.ranks, placed.label) == expected
    one = placement.alone(device)
    assert (one.ranks, one.process_group) == (1, "gloo" if device == "cpu" else "nccl")


def test_ranks_of_gloo_share_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    ends = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for name, value in ends.items():
        monkeypatch.setenv(name, value)
    with joined_rank("cuda", "gloo") as rank:
        assert rank.device == torch.device("cuda", 0)
    assert chosen == [torch.device("cuda", 0)]


def test_a_cell_has_one_line_and_is_short() -> None:
    assert page.in_a_cell("one\n| two") == "one \\| two"
    assert len(page.in_a_cell("x" * 1000)) == page.CELL_CHARACTERS


@pytest.mark.slow
def test_all_sections_on_the_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = [tmp_path / name for name in ("gpu.json", "gpu.md")]
    small = "--device cpu --backend aot_eager --rounds 2 --warmup 1 --tests tests/runtime/test_nccl.py"
    only = ["--models", "tiny gpt", "--variants", "EagerDDP", "compile_ddp"]
    status = command.main([*small.split(), *only, "--json", str(made[0]), "--markdown", str(made[1])])
    said = capsys.readouterr().out
    assert status == 0, said
    found: dict[str, Any] = json.loads(made[0].read_text())
    answers = {section["name"]: section["answer"] for section in found["sections"]}
    assert list(answers) == [section.name for section in SECTIONS]
    ended = {section["name"]: section["status"] for section in found["sections"]}
    assert ended == {**dict.fromkeys(ended, PASSED), "sanitizer": NOT_RUN, "graphs": NOT_RUN}
    assert found["settings"] == {**found["settings"], "size": "tiny", "rounds": 2, "backend": "aot_eager"}
    assert answers["environment"]["recipe"]["versions"]["torch"] == torch.__version__
    assert {test["outcome"] for test in answers["tests"]["tests"]} == {"skipped"}
    assert [row["variant"] for row in answers["memory"]["rows"]] == ["EagerDDP", "compile_ddp"]
    assert all(row["peak_memory_bytes"] is not None for row in answers["memory"]["rows"])
    (alone,) = answers["overhead"]["workloads"]
    for of_one in alone["variants"].values():
        assert len(of_one["samples"]) == 2 and all(0 < host <= step for host, step in of_one["samples"])
    (compared,) = map(Comparison.from_json, answers["table"]["comparisons"])
    assert compared.world_size == 2 and [result.name for result in compared.variants] == ["EagerDDP", "compile_ddp"]
    text = made[1].read_text()
    headings = [line.removeprefix("## ") for line in text.splitlines() if line.startswith("## ")]
    assert headings == [section.title for section in SECTIONS]
    assert text.count("needs a CUDA device") >= 4  # two sections, each in the overview and below its heading
    assert "1 gloo rank on the CPU" in text and "2 gloo ranks on the CPU" in text
    assert text.count("| compile_ddp ") == 3  # memory, overhead, the table


def make_gpu(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["make", "--no-print-directory", "gpu", *arguments]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False, timeout=120)


NEEDS_MAKE = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")


@NEEDS_MAKE
def test_make_runs_the_command_by_the_python_that_is_named(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\nif [ "$1" = -m ]; then echo by me: "$@"; fi\n')
    python.chmod(0o755)
    ended = make_gpu(f"GPU_PYTHON={python}", "ARGS=--device cpu --sections environment")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.splitlines()[-1] == "by me: -m benchmarks.gpu --device cpu --sections environment"


@NEEDS_MAKE
@pytest.mark.slow
def test_make_uses_the_python_that_is_named(tmp_path: Path) -> None:
    where = f"--json {tmp_path / 'gpu.json'} --markdown {tmp_path / 'gpu.md'}"
    ended = make_gpu(f"GPU_PYTHON={sys.executable}", f"ARGS=--device cpu --sections environment {where}")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "Environment: passed" in ended.stdout and (tmp_path / "gpu.md").exists()


@NEEDS_MAKE
def test_make_says_what_the_python_that_is_named_lacks(tmp_path: Path) -> None:
    ended = make_gpu("GPU_PYTHON=/nowhere/python", "ARGS=--device cpu")
    assert ended.returncode != 0
    said = [line for line in ended.stdout.splitlines() if line.startswith("error: ")]
    assert said == [
        "error: '/nowhere/python' lacks this checkout or its tools: /nowhere/python -m pip install -e '.[test,bench]'"
    ]


@NEEDS_MAKE
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_make_says_in_one_line_that_there_is_no_gpu_and_installs_nothing(tmp_path: Path) -> None:
    ended = make_gpu(f"GPU_FOLDER={tmp_path / 'environment'}")
    (line,) = ended.stdout.splitlines()
    assert ended.returncode != 0 and line.startswith("error: no GPU was found here") and "--device cpu" in line
    assert not list(tmp_path.iterdir())
