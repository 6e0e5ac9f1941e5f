"""What only a fresh process shows: seconds of the first step, and the memory that training needs at its peak.

Peak memory on the CPU is the high-water mark of resident memory over some settled steps, minus what is still resident
after the model, its optimizer and its wrapper are gone. So the compiler's own memory, which stays, is not counted, and
gradients, optimizer state, activations, buckets and gloo's buffers are. The caller starts the process with
MALLOC_ENVIRONMENT, so that glibc returns freed blocks to the system and the high-water mark follows what is in use.
"""

import ctypes
import gc
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from compiled_ddp import torch_private
from compiled_ddp.tools.comparison.measure import Contender
from compiled_ddp.tools.comparison.ranks import Rank
from compiled_ddp.tools.comparison.reference import trainable
from compiled_ddp.tools.comparison.result import FirstStep
from compiled_ddp.tools.comparison.variants import Variant
from compiled_ddp.tools.comparison.workload import Workload

MALLOC_ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}


class MemoryUnknown(RuntimeError):
    """Peak memory cannot be told here; the message says why."""


def probe(workload: Workload, variant: Variant, *, warmup: int, steps: int, rank: Rank) -> dict[str, Any]:
    """Wrap and train one variant in this fresh process. The answer is the slowest rank's seconds, the largest's bytes.

    Raises MemoryUnknown, after the first step, where the peak of `steps` settled steps cannot be told.
    """
    contender, first = first_step(workload, variant, rank)
    peak_bytes = peak_memory(contender, warmup=warmup - 1, steps=steps)
    parts = of_all_ranks(rank.gather(first))
    return {
        "first_step_s": parts.seconds,
        "first_step_parts": asdict(parts),
        "peak_memory_bytes": max(rank.gather(peak_bytes)),
    }


def first_step(workload: Workload, variant: Variant, rank: Rank) -> tuple[Contender, FirstStep]:
    """A contender after one step, and this rank's seconds for both, and for `warmup()` where the variant is warmed up.

    The seconds begin before the model is built and wrapped, so they hold what a wrapper does at once. Nothing may have
    been compiled before in this process.
    """
    rank.barrier()
    begin = time.perf_counter()
    contender = Contender(variant, workload, rank)
    wrapping_s = time.perf_counter() - begin
    batch = contender.next_batch()  # reads the data: no part of the first step
    rank.barrier()
    begin = time.perf_counter()
    contender.compile_ahead(batch)
    contender.step(batch)
    seconds = wrapping_s + time.perf_counter() - begin
    times = torch_private.compile_times.compile_times()
    return contender, FirstStep(seconds, wrapping_s, **times._asdict())


def of_all_ranks(of_ranks: Sequence[FirstStep]) -> FirstStep:
    """The parts of the rank that compiled for longest, in the seconds of the slowest one."""
    compiled_longest = max(of_ranks, key=lambda first: (first.inductor_s, first.seconds))
    return replace(compiled_longest, seconds=max(first.seconds for first in of_ranks))


def peak_memory(contender: Contender, *, warmup: int, steps: int) -> int:
    """This rank's peak in bytes over `steps` steps that follow `warmup` others.

    Empties `contender` on the CPU: the model has to die so that what outlives it can be subtracted.
    """
    for _ in range(warmup):
        contender.step(contender.next_batch())
    on_cuda = contender.rank.device.type == "cuda"
    return _cuda_peak(contender, steps) if on_cuda else _resident_peak(contender, steps)


def _cuda_peak(contender: Contender, steps: int) -> int:
    torch.cuda.reset_peak_memory_stats()
    for _ in range(steps):
        contender.step(contender.next_batch())
    return torch.cuda.max_memory_allocated()


def peak_within(call: Callable[[], object]) -> int:
    """The resident memory that a call needs at its peak beyond what there is before it, in bytes; on Linux."""
    _forget_peak()
    before = _status_bytes("VmRSS")
    call()
    return _status_bytes("VmHWM") - before


def _resident_peak(contender: Contender, steps: int) -> int:
    _forget_peak()
    for _ in range(steps):
        contender.step(contender.next_batch())
    peak = _status_bytes("VmHWM")
    parameters = [weakref.ref(parameter) for parameter in trainable(contender.module)]
    contender.give_up()
    torch.compiler.reset()
    _return_freed_memory()
    alive = sum(parameter() is not None for parameter in parameters)
    if alive:
        raise MemoryUnknown(
            f"{alive} of {len(parameters)} parameters of '{contender.variant.name}' outlive their wrapper; "
            "expected none, or peak memory would be understated"
        )
    return peak - _status_bytes("VmRSS")


def _forget_peak() -> None:
    if not Path("/proc/self/clear_refs").exists():
        raise MemoryUnknown("there is no /proc/self/clear_refs: peak memory on the CPU needs Linux")
    _return_freed_memory()
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM


def _return_freed_memory() -> None:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise MemoryUnknown(f"/proc/self/status has no line '{field}'")
