"""docs/examples/train_gpt.py on a tiny model, once through torchrun, as its reader would start it."""

import contextlib
import io
import re
import runpy
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
import torchrun

from ranks import RankPool

SCRIPT = Path(__file__).parents[2] / "docs" / "examples" / "train_gpt.py"
TINY = "--backend aot_eager --batch 2 --context 16 --width 16 --layers 1 --heads 2 --eval-batches 2 --log-every 1"


def arguments(checkpoint: Path, steps: int) -> list[str]:
    return [str(SCRIPT), *f"{TINY} --steps {steps} --eval-every 100 --checkpoint {checkpoint}".split()]


def run_by_torchrun(*script: str) -> str:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    result = subprocess.run([*launcher, *script], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    return result.stdout


def _run(rank: int, script: list[str], port: int) -> str:
    output = io.StringIO()
    as_argv = mock.patch.object(sys, "argv", script)
    with torchrun.environment(rank, 2, port), as_argv, contextlib.redirect_stdout(output):
        runpy.run_path(script[0], run_name="__main__")
    return output.getvalue()


@pytest.mark.slow
def test_example_resumes_where_it_stopped(ranks2: RankPool, tmp_path: Path) -> None:
    def run(checkpoint: str, steps: int) -> str:
        script = arguments(tmp_path / checkpoint, steps)
        output: str = ranks2.run(_run, script, torchrun.free_port(), process_group=False, timeout_seconds=300)[0]
        return output

    whole = run("whole.pt", steps=5)
    run("parts.pt", steps=3)
    resumed = run_by_torchrun(*arguments(tmp_path / "parts.pt", steps=5))

    assert "at step 3" in resumed
    last_loss = re.compile(r"step 5: evaluation loss (\S+)")
    assert last_loss.findall(resumed) == last_loss.findall(whole) != []
    expected, found = (torch.load(tmp_path / name, weights_only=True) for name in ("whole.pt", "parts.pt"))
    assert found["step"] == expected["step"] == 5
    for name, weight in expected["model"].items():
        torch.testing.assert_close(found["model"][name], weight, msg=lambda text, name=name: f"{name}: {text}")
    assert not (tmp_path / "parts.tmp").exists()
