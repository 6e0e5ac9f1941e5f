"""Which function had the core: samples of Linux's `perf` over this process, sorted by what they were taken for."""

import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.threads import MAIN

SAMPLES_PER_SECOND = 999

COMPUTE, PYTHON, GLOO = "compute", "interpreter", "gloo in user space"
COPIES, KERNEL_COPIES = "copies in user space", "copies in the kernel"
PAGES, KERNEL = "page faults", "rest of the kernel"
CONSUMERS = (COMPUTE, PYTHON, COPIES, GLOO, KERNEL_COPIES, PAGES, KERNEL)

_LINE = re.compile(r"\s*(\d+)\s+([\d.]+):\s+[0-9a-f]+\s+(.*) \(([/\[].*)\)$")
_COPY = re.compile(r"copy|memmove|rep_movs")
_PAGE = re.compile(r"page|folio|fault|clear_|mmap|vma|memset")
_PYTHON = re.compile(r"python")


@dataclass(frozen=True)
class Sample:
    """`time_s` is on the clock of time.perf_counter()."""

    thread: int
    time_s: float
    symbol: str
    binary: str


def why_no_perf() -> str | None:
    """Why this process cannot be sampled, or None if nothing speaks against trying."""
    if shutil.which("perf") is None:
        return "perf not found (Debian and Ubuntu: apt-get install linux-perf)"
    if os.geteuid() != 0:
        return "perf sees the kernel's functions as root alone"
    return None


def consumer(group: str, symbol: str, binary: str) -> str:
    """Which of `CONSUMERS` a sample of a thread of this group counts for."""
    if binary.startswith("[kernel"):
        return KERNEL_COPIES if _COPY.search(symbol) else PAGES if _PAGE.search(symbol) else KERNEL
    if re.search(r"mem(cpy|move)|copy_kernel", symbol):
        return COPIES
    if group != MAIN:
        return GLOO
    return PYTHON if _PYTHON.search(Path(binary).name) else COMPUTE


def parse_line(line: str) -> Sample | None:
    """A line of `perf script -F tid,time,ip,sym,dso`; None for one that has no sample."""
    match = _LINE.match(line)
    return match and Sample(int(match[1]), float(match[2]), match[3], match[4])


@contextmanager
def sampled() -> Iterator[list[Sample]]:
    """The list that is yielded holds the samples of all threads of this process once the context has ended."""
    samples: list[Sample] = []
    with tempfile.TemporaryDirectory(prefix="cddp-perf-") as folder:
        data = Path(folder, "perf.data")
        command = f"perf record -q -e cpu-clock -F {SAMPLES_PER_SECOND} -k CLOCK_MONOTONIC -p {os.getpid()} -o {data}"
        recorder = subprocess.Popen(command.split())
        time.sleep(1)  # until it samples
        if recorder.poll() is not None:
            raise RuntimeError(f"`{command}` ended with status {recorder.returncode}; its error stands above")
        try:
            yield samples
        finally:
            recorder.send_signal(signal.SIGINT)
            recorder.wait()
        script = ["perf", "script", "--ns", "-i", str(data), "-F", "tid,time,ip,sym,dso"]
        text = subprocess.run(script, check=True, capture_output=True, text=True).stdout
        samples += filter(None, map(parse_line, text.splitlines()))
