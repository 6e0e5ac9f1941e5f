"""What only a fresh process shows: seconds of the first step, and the memory that training needs at its peak.

Peak memory on the CPU is the high-water mark of resident memory over some settled steps, minus what is still resident
after the model, its optimizer and its wrapper are gone. So the compiler's own memory, which stays, is not counted, and
gradients, optimizer state, activations, buckets and gloo's buffers are. launch.py's caller sets MALLOC_ENVIRONMENT, so
that glibc returns freed blocks to the system and the high-water mark follows what is in use.
"""

import ctypes
import gc
import time
import weakref
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure import Contender
from benchmarks.parity import trainable
from benchmarks.ranks import Rank
from benchmarks.variants import Variant
from benchmarks.workload import Workload

MALLOC_ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}


def probe(workload: Workload, variant: Variant, *, warmup: int, steps: int, rank: Rank) -> dict[str, Any]:
    """Wrap and train one variant in this fresh process. The answer is the slowest rank's seconds, the largest's bytes.

    The first step's seconds begin before the model is built and wrapped, so they hold what a wrapper does at once.
    """
    rank.barrier()
    begin = time.perf_counter()
    contender = Contender(variant, workload, rank)
    wrapping_s = time.perf_counter() - begin
    batch = contender.next_batch()  # reads the data: no part of the first step
    rank.barrier()
    first_step_s = wrapping_s + sum(contender.step(batch))
    for _ in range(warmup - 1):
        contender.step(contender.next_batch())
    peak_bytes = _cuda_peak(contender, steps) if rank.device.type == "cuda" else _resident_peak(contender, steps)
    return {
        "first_step_s": max(rank.gather(first_step_s)),
        "peak_memory_bytes": max(rank.gather(peak_bytes)),
    }


def _cuda_peak(contender: Contender, steps: int) -> int:
    torch.cuda.reset_peak_memory_stats()
    for _ in range(steps):
        contender.step(contender.next_batch())
    return torch.cuda.max_memory_allocated()


def _resident_peak(contender: Contender, steps: int) -> int:
    """Empties `contender`: the model has to die so that what outlives it can be subtracted."""
    _return_freed_memory()
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    for _ in range(steps):
        contender.step(contender.next_batch())
    peak = _status_bytes("VmHWM")
    parameters = [weakref.ref(parameter) for parameter in trainable(contender.module)]
    if contender.variant.unwrap is not None:
        contender.variant.unwrap(contender.module)
    del contender.module, contender.optimizer
    torch.compiler.reset()
    _return_freed_memory()
    alive = sum(parameter() is not None for parameter in parameters)
    if alive:
        raise RuntimeError(
            f"{alive} of {len(parameters)} parameters of '{contender.variant.name}' outlive their wrapper; "
            "expected none, or peak memory would be understated"
        )
    return peak - _status_bytes("VmRSS")


def _return_freed_memory() -> None:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no line '{field}'; peak memory on the CPU needs Linux")
