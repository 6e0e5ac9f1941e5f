"""What was run on: GPUs, driver, libraries, versions."""

import shutil
import subprocess
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.gpu.page import markdown_table
from benchmarks.gpu.placement import CPU, alone, together
from benchmarks.gpu.settings import Settings
from benchmarks.launch import REPOSITORY
from compiled_ddp.tools.comparison.record import PACKAGES, recipe


def measure(settings: Settings) -> dict[str, Any]:
    """The recipe, and what of the GPUs it does not hold."""
    placements = {"one rank": alone(settings.device).label, "several ranks": together(settings.device).label}
    return {
        "recipe": recipe(REPOSITORY, (*PACKAGES, "triton", "nvidia-nccl-cu12", "nvidia-nccl-cu13")),
        "gpus": [] if settings.device == CPU else [_gpu(index) for index in range(torch.cuda.device_count())],
        "driver": _driver(),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "nccl": _nccl() if dist.is_nccl_available() and settings.device != CPU else None,
        "placements": placements,
        "failed": [],
    }


def _gpu(index: int) -> dict[str, Any]:
    found = torch.cuda.get_device_properties(index)
    return {
        "name": found.name,
        "memory_bytes": found.total_memory,
        "capability": f"{found.major}.{found.minor}",
        "multiprocessors": found.multi_processor_count,
    }


def _nccl() -> str:
    return ".".join(map(str, torch.cuda.nccl.version()))


def _driver() -> str | None:
    """The driver's version by nvidia-smi; None where there is none, or it does not tell."""
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    return next(iter(answer.stdout.split()), None) if answer.returncode == 0 else None


def render(answer: dict[str, Any]) -> str:
    """Two columns."""
    made, gpus = (
        answer["recipe"],
        [
            f"{gpu['name']}, {gpu['memory_bytes'] / 2**30:.0f} GiB, compute capability {gpu['capability']}"
            for gpu in answer["gpus"]
        ],
    )
    hardware, versions = made["hardware"], {name: found for name, found in made["versions"].items() if found}
    lines = {
        "GPUs": "; ".join(f"{gpus.count(gpu)} x {gpu}" for gpu in dict.fromkeys(gpus)) or "none used",
        "driver, CUDA, NCCL": ", ".join(str(answer[name] or "none") for name in ("driver", "cuda", "nccl")),
        "CPU": f"{hardware['cpu']}, {hardware['cores']} cores, {hardware['memory_bytes'] / 2**30:.0f} GiB",
        "system": hardware["system"],
        "versions": ", ".join(f"{name} {found}" for name, found in versions.items()),
        **answer["placements"],
    }
    rows = [SimpleNamespace(what=what, found=found) for what, found in lines.items()]
    return markdown_table(rows, {"what": ("", "s"), "found": ("", "s")})
