"""torchrun starts a job again after one rank was killed: it goes on from its checkpoint and ends with the same bits."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpointed import assert_same

from ranks import RANK_ENVIRONMENT

# Else a restarted rank may read from torchrun's store where the killed ones listened, and gloo's "Connection refused"
# costs a restart (pytorch/pytorch#135712; torch's own default group, before any wrapper: 12 such lines with torch DDP).
ENVIRONMENT = RANK_ENVIRONMENT | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}

JOB = Path(__file__).resolve().parents[1] / "killed_job.py"
SECONDS = 240.0


def run_job(folder: Path, kind: str, *killed_in: str) -> tuple[list[dict[str, Any]], str]:
    """What both ranks had at their end, and what torchrun wrote. All its processes are gone when it returns."""
    folder.mkdir()
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "2"]
    command = [*launcher, "--standalone", str(JOB), str(folder), kind, *killed_in]
    process = subprocess.Popen(
        command,
        env=os.environ | ENVIRONMENT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=SECONDS)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)  # torchrun ends its ranks, which have sessions of their own
        process.wait(timeout=60)
    assert process.returncode == 0, output
    return [torch.load(folder / f"ended {rank}.pt") for rank in range(2)], output


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["compile_ddp", "EagerDDP"])
def test_a_job_whose_rank_is_killed_ends_with_the_bits_of_one_that_was_not(tmp_path: Path, kind: str) -> None:
    through, _ = run_job(tmp_path / "through", kind)
    killed, output = run_job(tmp_path / "killed", kind, "3")
    assert "exitcode: -9" in output, output
    for rank, (expected, found) in enumerate(zip(through, killed, strict=True)):
        assert (expected["first"], expected["restarts"]) == (0, 0), rank
        assert (found["first"], found["restarts"]) == (3, 1), rank
        assert_same(found["values"], expected["values"])
        assert torch.equal(found["random"], expected["random"]), rank
