"""A migrated script that is started without torchrun and makes no process group trains alone, and says so."""

import os
import subprocess
import sys

import forked
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


def _environment(**launched: str) -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in LAUNCHERS} | launched


@pytest.mark.parametrize("wrapper", ["compile_ddp", "EagerDDP"])
def test_a_script_without_torchrun_trains_alone_and_says_so_in_one_line(wrapper: str) -> None:
    environment = _environment(SLURM_NTASKS="1")
    if wrapper == "compile_ddp":  # in all of its own: what the interpreter's end would say, too
        command = [sys.executable, "-c", SCRIPT, wrapper]
        ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    else:
        ran = forked.run(SCRIPT, wrapper, environment=environment)
    assert ran.returncode == 0 and ran.stdout == "trained 1\n", ran.stderr
    assert ran.stderr.count("this process trains alone, as under plain torch.compile") == 1
    assert "Warning" not in ran.stderr and "Traceback" not in ran.stderr, ran.stderr


@pytest.mark.parametrize("told", [{"WORLD_SIZE": "2"}, {"SLURM_NTASKS": "8"}, {"MASTER_ADDR": "localhost"}])
def test_a_launched_process_that_makes_no_process_group_is_refused(told: dict[str, str]) -> None:
    """Each of them would train alone."""
    ran = forked.run(SCRIPT, "EagerDDP", environment=_environment(**told))
    assert ran.returncode != 0
    assert "torch.distributed is not initialised: call torch.distributed.init_process_group()" in ran.stderr


AGAIN = """
import os, sys
import torch
from torch import nn
from compiled_ddp import EagerDDP

EagerDDP(nn.Linear(2, 2))
if sys.argv[1] == "forked" and (child := os.fork()):
    os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
if sys.argv[1] == "destroyed":
    torch.distributed.destroy_process_group()
    torch.distributed.init_process_group(store=torch.distributed.HashStore(), rank=0, world_size=1)
if sys.argv[1] != "same":
    os.environ["WORLD_SIZE"] = "2" if sys.argv[1] != "forked" else "1"
os.environ.update(RANK="0", MASTER_ADDR="localhost")
EagerDDP(nn.Linear(2, 2))
"""


@pytest.mark.parametrize(("how", "refused"), [("forked", True), ("told", True), ("same", False), ("destroyed", False)])
def test_a_group_of_one_that_was_made_here_is_refused_as_one_of_several(how: str, refused: bool) -> None:
    """A notebook has trained alone, and launches then."""
    ran = forked.run(AGAIN, how, environment=_environment())
    assert (ran.returncode != 0) == refused, ran.stderr
    told = "this process inherited a process group of one rank" in ran.stderr
    assert told == refused, ran.stderr
    assert not refused or "restart the kernel, or call torch.distributed.destroy_process_group()" in ran.stderr
