"""Which ranks there are, on which devices and with which process group: decided here, for all sections."""

import sys
from dataclasses import dataclass

import torch
import torch.distributed as dist

CPU = "cpu"


@dataclass(frozen=True)
class Placement:
    """Ranks of one job. With gloo they share a GPU where there are fewer GPUs than ranks."""

    device: str  # kind of device: "cpu" or "cuda"
    process_group: str
    ranks: int

    @property
    def label(self) -> str:
        """In words, for a table."""
        if self.device == CPU:
            where = "on the CPU"
        elif self.process_group == "gloo":
            where = "on one GPU"
        else:
            where = "each on a GPU of its own" if self.ranks > 1 else "on one GPU"
        return f"{self.ranks} {self.process_group} rank{'s' * (self.ranks > 1)} {where}"

    def job(self) -> dict[str, str]:
        """What a rank of the job has to know of it."""
        return {"device": self.device, "process_group": self.process_group}


def alone(device: str) -> Placement:
    """One rank, with the process group of that kind of device: NCCL on CUDA."""
    return Placement(device, dist.get_default_backend_for_device(device), 1)


def together(device: str) -> Placement:
    """A rank on every GPU with the process group of GPUs; two of gloo on one GPU, or on the CPU."""
    gpus = 0 if device == CPU else torch.accelerator.device_count()
    if gpus > 1:
        return Placement(device, dist.get_default_backend_for_device(device), gpus)
    return Placement(device, "gloo", 2)


def why_missing(device: str) -> str | None:
    """Why nothing can run on this kind of device here, and what to do; None where it can."""
    if device == CPU or torch.cuda.is_available():
        return None
    built_for = torch.version.cuda or torch.version.hip
    if built_for is None:
        reason = f"torch {torch.__version__} of {sys.executable} is built for the CPU alone"
        remedy = "name a Python that has a torch with CUDA, `make gpu GPU_PYTHON=/path/to/python`"
    else:
        reason = f"torch {torch.__version__} finds no GPU, or no driver that is new enough for CUDA {built_for}"
        remedy = "look at `nvidia-smi`"
    return f"no CUDA device: {reason}. To do: {remedy}, or run what needs none, --device cpu."
