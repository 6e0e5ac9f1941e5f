"""Starts the ranks of a job: by torch's elastic launcher, or one by one at the ends of a shaped link."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.link import ShapedLink
from compiled_ddp.tools.command_line.own_ranks import run_on_own_ranks

REPOSITORY = Path(__file__).resolve().parent.parent


def run_job(
    kind: str,
    arguments: Mapping[str, Any],
    *,
    ranks: int,
    link: ShapedLink | None = None,
    environment: Mapping[str, str] | None = None,
) -> Any:
    """Run `benchmarks.worker` on `ranks` fresh processes and return the JSON value that rank 0 wrote.

    `kind` and `arguments` name the work (see worker.py). `environment` is added to each rank's environment. A rank
    that fails ends the others and raises here.
    """
    with tempfile.TemporaryDirectory(prefix="cddp-job-") as folder:
        job, answer = Path(folder, "job.json"), Path(folder, "answer.json")
        job.write_text(json.dumps({"kind": kind, "arguments": dict(arguments), "answer": str(answer)}))
        command = [sys.executable, "-m", "benchmarks.worker", str(job)]
        settings = {
            "PYTHONPATH": os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]),
            "OMP_NUM_THREADS": "1",
            "KINETO_LOG_LEVEL": "99",  # counting collectives would print the profiler's own lines
            "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"),  # no names to resolve in a namespace
            **(environment or {}),
        }
        if link is None:
            run_on_own_ranks(ranks, command[0], *command[1:], environment=settings)
        else:
            _launch_on_link(command, ranks, settings, link)
        return json.loads(answer.read_text())


def _launch_on_link(command: Sequence[str], ranks: int, settings: Mapping[str, str], link: ShapedLink) -> None:
    processes: list[subprocess.Popen] = []
    try:
        for rank in range(ranks):
            environment = {**os.environ, **settings, **link.environment(rank, ranks)}
            processes.append(subprocess.Popen(link.command(rank, ranks, command), env=environment))
        while any(process.poll() is None for process in processes):
            if any(process.poll() for process in processes):
                break
            time.sleep(0.1)
        for rank, process in enumerate(processes):
            if process.poll():
                raise RuntimeError(f"Rank {rank} ended with status {process.returncode}; its error stands above")
    finally:
        for process in processes:
            if process.poll() is None:
                process.terminate()
        for process in processes:
            process.wait()
