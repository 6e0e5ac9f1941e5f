"""docs/examples/train_gpt.py through torchrun, as its reader would start it, on a model of a few thousand weights."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "docs" / "examples" / "train_gpt.py"
TINY = "--backend aot_eager --batch 2 --context 16 --width 16 --layers 1 --heads 2 --eval-batches 2 --log-every 1"


def run_example(checkpoint: Path, steps: int, eval_every: int = 100) -> str:
    arguments = f"{TINY} --steps {steps} --eval-every {eval_every} --checkpoint {checkpoint}".split()
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    result = subprocess.run([*launcher, str(SCRIPT), *arguments], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.slow
def test_example_resumes_where_it_stopped(tmp_path: Path) -> None:
    whole = run_example(tmp_path / "whole.pt", steps=5)
    run_example(tmp_path / "parts.pt", steps=3)
    resumed = run_example(tmp_path / "parts.pt", steps=5)

    assert "at step 3" in resumed
    last_loss = re.compile(r"step 5: evaluation loss (\S+)")
    assert last_loss.findall(resumed) == last_loss.findall(whole)
    expected, found = (torch.load(tmp_path / name, weights_only=True) for name in ("whole.pt", "parts.pt"))
    assert found["step"] == expected["step"] == 5
    for name, weight in expected["model"].items():
        torch.testing.assert_close(found["model"][name], weight, msg=lambda text, name=name: f"{name}: {text}")
    assert not (tmp_path / "parts.tmp").exists()
