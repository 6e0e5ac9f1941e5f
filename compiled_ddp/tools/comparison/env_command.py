"""`compiled-ddp env`: what a report of a fault needs to say about where it happened."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from compiled_ddp import torch_private
from compiled_ddp.tools.comparison.record import PACKAGES, recipe

_VARIABLES = (
    "COMPILED_DDP_",
    "TORCH",
    "NCCL_",
    "GLOO_",
    "OMP_",
    "MKL_",
    "CUDA_",
    "CXX",
    "RANK",
    "LOCAL_",
    "WORLD_SIZE",
)


def run() -> int:
    """Print it; returns the exit status."""
    sys.stdout.writelines(f"{name}: {value}\n" for name, value in found().items())
    return 0


def found() -> dict[str, Any]:
    """Names and values, in the order of the print."""
    here = recipe(Path(__file__).parent, (*PACKAGES, "triton"), command="")
    versions, hardware = here["versions"], here["hardware"]
    return {
        "date": here["date"],
        "compiled-ddp": f"{versions.pop('compiled-ddp')}, commit {here['commit'] or 'unknown'}",
        "torch": f"{torch.__version__}, CUDA {torch.version.cuda or 'none'}",
        "torch and compiled-ddp": torch_private.versions.check_torch_version() or "tested together",
        **{name: version or "not installed" for name, version in versions.items() if name != "torch"},
        "backends of torch.distributed": ", ".join(_backends()) or "none",
        "C++ compiler": _compiler(),
        "CPU": f"{hardware['cpu']}, {hardware['cores']} cores, {hardware['memory_bytes'] / 2**30:.0f} GiB",
        "GPUs": ", ".join(hardware["gpus"]) or "none",
        "system": hardware["system"],
        "environment": ", ".join(f"{name}={os.environ[name]}" for name in sorted(os.environ) if _tells(name)) or "none",
    }


def _backends() -> list[str]:
    if not dist.is_available():
        return []
    there = {"gloo": dist.is_gloo_available, "nccl": dist.is_nccl_available, "mpi": dist.is_mpi_available}
    return [name for name, is_available in there.items() if is_available()]


def _compiler() -> str:
    """The one that Inductor takes on the CPU, unless it is told otherwise."""
    command = os.environ.get("CXX", "g++")
    try:
        answer = subprocess.run([command, "--version"], capture_output=True, text=True, check=False)
    except OSError:
        return f"{command} is not there"
    return answer.stdout.partition("\n")[0]


def _tells(name: str) -> bool:
    return name.startswith(_VARIABLES)
