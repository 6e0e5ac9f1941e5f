"""Trainers with our class in the place of torch's, by `replace_ddp` and by their adapter: docs/trainers.md.

They need the real packages, which `make trainers` installs in an environment of its own.
"""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from loop_scripts import run_loops
from torchrun import free_port

TRAINERS = ("accelerate", "transformers", "lightning", "ignite", "trl")
# Autocast rounds elsewhere in a compiled graph, and so does what Dynamo captures of a step that calls backward itself.
# A Llama's gradients differ in the last digits under torch.compile alone, in one process. Why GPT-2's do under TRL, and
# not in transformers' own trainer, is not known.
ROUNDED = {
    ("transformers", "replaced", "bf16"),
    ("transformers", "adapter", "bf16"),
    ("lightning", "replaced", "manual, 32-true"),
    ("lightning", "replaced", "manual, bf16-mixed"),
    ("trl", "replaced", "fp32"),
    ("trl", "adapter", "fp32"),
    ("trl", "replaced", "bf16"),
    ("trl", "adapter", "bf16"),
    ("trl", "replaced", "Llama"),
    ("trl", "adapter", "Llama"),
}
WAYS = {(way, backend) for way in ("replaced", "adapter") for backend in ("aot_eager", "hooks")}


def _run(trainer: str, folder: Path) -> list[dict[str, Any]]:
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port()))
    return run_loops(f"with_{trainer}.py", folder, launcher=torchrun, timeout_s=300, HF_HUB_OFFLINE="1")


@pytest.mark.slow
@pytest.mark.parametrize("trainer", TRAINERS)
def test_trainers_get_what_torchs_ddp_gives(trainer: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(trainer) is None:
        pytest.skip("`make trainers` installs it")
    found = _run(trainer, tmp_path)
    assert {(line["way"], line["backend"]) for line in found} == WAYS
    assert len({(line["case"], line["way"], line["backend"]) for line in found}) == len(found) >= 4
    for line in found:
        hooks = line["backend"] == "hooks"
        ours = "EagerDistributedDataParallel" if hooks else "DistributedDataParallel"
        assert (line["torchs"], line["ours"]) == ("DistributedDataParallel", f"compiled_ddp.integrations.torch.{ours}")
        if hooks or (trainer, line["way"], line["case"]) not in ROUNDED:
            assert line["same"], line
        else:
            assert line["apart"] < 1e-3, line
