"""A migrated script that is started without torchrun and makes no process group trains alone, and says so."""

import os
import subprocess
import sys

import pytest

SCRIPT = """
import copy, sys
import torch
from torch import nn
from compiled_ddp import EagerDDP, compile_ddp

model = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 3))
plain = copy.deepcopy(model)
options = {"backend": "aot_eager", "smallest_graph_mb": 0} if sys.argv[1] == "compile_ddp" else {}
ddp = {"compile_ddp": compile_ddp, "EagerDDP": EagerDDP}[sys.argv[1]](model, **options)
for number in range(3):
    x = torch.randn(4, 6)
    for module in (ddp, plain):
        module.zero_grad()
        module(x).square().mean().backward()
    for ours, expected in zip(model.parameters(), plain.parameters()):
        torch.testing.assert_close(ours.grad, expected.grad)
assert sys.argv[1] != "compile_ddp" or {section.origin for section in ddp.plan.sections} == {"graph"}, ddp.explain()
torch.distributed.barrier()
print("trained", torch.distributed.get_world_size())
"""

LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")


def _run(wrapper: str, **launched: str) -> "subprocess.CompletedProcess[str]":
    environment = {name: value for name, value in os.environ.items() if name not in LAUNCHERS} | launched
    command = [sys.executable, "-c", SCRIPT, wrapper]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("wrapper", ["compile_ddp", "EagerDDP"])
def test_a_script_without_torchrun_trains_alone_and_says_so_in_one_line(wrapper: str) -> None:
    ran = _run(wrapper, SLURM_NTASKS="1")
    assert ran.returncode == 0 and ran.stdout == "trained 1\n", ran.stderr
    assert ran.stderr.count("this process trains alone, as under plain torch.compile") == 1
    assert "Warning" not in ran.stderr and "Traceback" not in ran.stderr, ran.stderr


@pytest.mark.parametrize("told", [{"WORLD_SIZE": "2"}, {"SLURM_NTASKS": "8"}, {"MASTER_ADDR": "localhost"}])
def test_a_launched_process_that_makes_no_process_group_is_refused(told: dict[str, str]) -> None:
    """Each of them would train alone."""
    ran = _run("EagerDDP", **told)
    assert ran.returncode != 0
    assert "torch.distributed is not initialised: call torch.distributed.init_process_group()" in ran.stderr
