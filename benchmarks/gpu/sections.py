"""The sections in order, and how each runs: in a process of its own, for so long, whatever the others do."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.gpu import deadline
from benchmarks.gpu.placement import CPU
from benchmarks.gpu.settings import Settings
from benchmarks.launch import REPOSITORY

PASSED, FAILED, BROKEN, TIMED_OUT, NOT_RUN = "passed", "failed", "broken", "timed out", "not run"
GRACE_SECONDS = 10.0  # in which a launcher that is told to end may end its ranks
TAIL_LINES = 120


@dataclass(frozen=True)
class Section:
    """`module` has `measure` and `render`, see benchmarks/gpu/__init__.py."""

    name: str
    title: str
    module: str
    timeout_s: float
    needs_gpu: bool = False


SECTIONS = (
    Section("environment", "Environment", "benchmarks.gpu.environment", 120),
    Section("tests", "Tests marked `gpu`", "benchmarks.gpu.gpu_tests", 3600),
    Section("sanitizer", "Stream sanitizer", "benchmarks.gpu.sanitizer", 900, needs_gpu=True),
    Section("graphs", "CUDA graphs", "benchmarks.gpu.cuda_graphs", 900, needs_gpu=True),
    Section("memory", "Peak memory", "benchmarks.gpu.memory", 1800),
    Section("overhead", "What a step costs, one rank", "benchmarks.gpu.overhead", 1800),
    Section("table", "The benchmark's table", "benchmarks.gpu.variants_table", 1800),
)


@dataclass(frozen=True)
class Outcome:
    """What became of a section. `answer` is what it measured; `output_tail` is kept where it has none."""

    name: str
    title: str
    status: str  # PASSED, or what else; FAILED where it measured something that is wrong
    seconds: float
    reason: str | None = None
    answer: dict[str, Any] | None = None
    output_tail: str | None = None

    @property
    def is_good(self) -> bool:
        return self.status in (PASSED, NOT_RUN)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def run_all(sections: Iterable[Section], settings: Settings, timeout_s: float | None = None) -> Iterator[Outcome]:
    """Each outcome as it ends; a title is printed as it begins. `timeout_s` stands in for every section's own."""
    for section in sections:
        print(f"==> {section.title}", flush=True)
        if section.needs_gpu and settings.device == CPU:
            yield Outcome(section.name, section.title, NOT_RUN, 0.0, "needs a CUDA device")
        else:
            yield run_one(section, settings, timeout_s or section.timeout_s)


def run_one(section: Section, settings: Settings, timeout_s: float) -> Outcome:
    """Run a section in a process of its own, which ends after so many seconds with all that it has started."""
    with tempfile.TemporaryDirectory(prefix="cddp-gpu-") as folder:
        answer, output = Path(folder, "answer.json"), Path(folder, "output.txt")
        command = [sys.executable, "-m", "benchmarks.gpu.child", section.module, json.dumps(settings.to_json())]
        begin = time.monotonic()
        with output.open("wb") as written:
            process = subprocess.Popen(
                [*command, str(answer)],
                stdout=written,
                stderr=subprocess.STDOUT,
                cwd=REPOSITORY,
                env=_environment(settings, timeout_s),
            )
            try:
                code: int | None = process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                _end(process)
        seconds = time.monotonic() - begin
        found = json.loads(answer.read_text()) if answer.exists() and code == 0 else None
        tail = None if found else _tail(output)
    status, reason = _judge(found, code, timeout_s)
    return Outcome(section.name, section.title, status, seconds, reason, found, tail)


def _judge(found: dict[str, Any] | None, code: int | None, timeout_s: float) -> tuple[str, str | None]:
    """The status, and why it is not PASSED."""
    if found is not None:
        return (FAILED, "; ".join(found["failed"])) if found["failed"] else (PASSED, None)
    if code is None:
        return TIMED_OUT, f"it had not ended after {timeout_s:g} s"
    return BROKEN, f"its process ended with status {code}"


def _environment(settings: Settings, timeout_s: float) -> dict[str, str]:
    path = os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])])
    unseen = {"CUDA_VISIBLE_DEVICES": ""} if settings.device == CPU else {}
    return {**os.environ, "PYTHONPATH": path, **unseen, **deadline.environment(timeout_s)}


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a section's process, if it has not ended, and what it has started: ranks have sessions of their own."""
    if process.poll() is not None:
        return
    below = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGTERM)
    psutil.wait_procs(below, GRACE_SECONDS)
    for left in below:
        if left.is_running():  # the same process, not another one with its id
            left.kill()
    process.kill()
    process.wait()


def _tail(output: Path) -> str:
    return "\n".join(output.read_text(errors="replace").splitlines()[-TAIL_LINES:])
