"""One rank of a comparison: its place in the group, its device and its cores, and a control group of its own."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Rank:
    """`control` is a gloo group apart from every group under test: for barriers before timed steps and for results."""

    index: int
    world_size: int
    device: torch.device
    control: dist.ProcessGroup

    def barrier(self) -> None:
        """Wait for every rank."""
        dist.barrier(self.control)

    def synchronize(self) -> None:
        """Wait for the device; on the CPU there is nothing to wait for."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)

    def gather(self, value: Any) -> list[Any]:
        """Every rank's `value`, in rank order, on every rank."""
        gathered: list[Any] = [None] * self.world_size
        dist.all_gather_object(gathered, value, self.control)
        return gathered


def pin_to_core(local_rank: int, local_world_size: int) -> None:
    """One core and one compute thread per rank, if there are enough cores; otherwise one thread and no pin."""
    torch.set_num_threads(1)
    cores = available_cores()
    if len(cores) >= local_world_size:
        os.sched_setaffinity(0, {cores[local_rank]})


def share_cores(local_rank: int, local_world_size: int) -> None:
    """An equal share of this machine's cores for each rank, and as many compute threads unless OMP_NUM_THREADS is set.

    Without a core for each rank none is pinned, and each computes with one thread.
    """
    cores = available_cores()
    share = len(cores) // local_world_size
    if share:
        os.sched_setaffinity(0, set(cores[local_rank * share : (local_rank + 1) * share]))
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, share))


def available_cores() -> list[int]:
    """The cores that this process may use; empty where the system does not tell."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


@contextmanager
def joined_rank(device: str, process_group: str | None = None) -> Iterator[Rank]:
    """This process as a rank of the group that the launcher's environment describes; `device` is "cpu" or "cuda".

    `process_group` is NCCL's on CUDA and gloo's on the CPU unless it is given. Ranks of gloo may share a GPU.
    """
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    backend = process_group or ("nccl" if device == "cuda" else "gloo")
    if device == "cuda":
        place = torch.device("cuda", local_rank % torch.cuda.device_count() if backend == "gloo" else local_rank)
        torch.cuda.set_device(place)
    else:
        pin_to_core(local_rank, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        place = torch.device("cpu")
    dist.init_process_group(backend)
    try:
        yield Rank(dist.get_rank(), dist.get_world_size(), place, gloo_group())
    finally:
        dist.destroy_process_group()


def gloo_group() -> dist.ProcessGroup:
    """A new gloo group of all ranks."""
    group = dist.new_group(backend="gloo")
    assert isinstance(group, dist.ProcessGroup), "every rank is a member"
    return group
