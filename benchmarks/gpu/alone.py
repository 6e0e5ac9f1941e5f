"""One rank: steps of all variants in turn, in which the host may run ahead of the device as it does in training.

The clock stops twice, when the host has launched the whole step and when the device has run it. benchmarks/compare.py
waits for the device after each phase, and so cannot tell the host's part. With one rank nothing is waited for, and a
variant that fails costs its own row.
"""

import time
import traceback
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from benchmarks.workload import Workload
from compiled_ddp import torch_private
from compiled_ddp.tools.comparison.measure import Contender, take_turns, untimed_steps
from compiled_ddp.tools.comparison.ranks import Rank
from compiled_ddp.tools.comparison.reference import Reference, trainable
from compiled_ddp.tools.comparison.variants import Variant

LAUNCHES = {
    "cudaGraphLaunch": "graph launches",
    "cudaLaunchKernel": "kernel launches",
    "cuLaunchKernel": "kernel launches",
}


def measure(workload: Workload, variants: Sequence[Variant], warmup: int, rounds: int, rank: Rank) -> dict[str, Any]:
    """Of each variant that works: `samples` (seconds of the host and of the whole step, round by round), the largest
    gradient difference, launches of one step, CUDA graphs recorded and skipped. Errors of the others are in `errors`.
    """
    reference = Reference.compute(workload, rank)
    ready: dict[str, Contender] = {}
    found: dict[str, dict[str, Any]] = {}
    errors: dict[str, str] = {}
    for variant in variants:
        try:
            before = _graphs(rank)
            ready[variant.name] = contender = Contender(variant, workload, rank)
            difference = contender.warm_up(reference, warmup)
            recorded, skipped = (after - then for after, then in zip(_graphs(rank), before, strict=True))
            found[variant.name] = {"gradient_difference": difference, "recorded": recorded, "skipped": skipped}
        except Exception as error:  # of a wrapper or a compiler: the other rows are measured all the same
            traceback.print_exc()
            errors[variant.name] = f"{type(error).__name__}: {error}"[:2000]
            ready.pop(variant.name, None)
    untimed = untimed_steps([contender.step_s for contender in ready.values()])
    slots = [partial(_take_turn, contender, untimed) for contender in ready.values()]
    samples = take_turns(slots, range(rounds))
    for name, of_variant in zip(ready, samples, strict=True):
        found[name]["samples"] = of_variant
    for name, contender in ready.items():  # last, as what the profiler sets up may stay
        try:
            found[name]["launches"] = count_launches(contender)
        except Exception as error:  # the times are known all the same
            traceback.print_exc()
            found[name]["launches"], errors[name] = {}, f"under the profiler {type(error).__name__}: {error}"[:2000]
    parameters = sum(p.numel() for contender in [*ready.values()][:1] for p in trainable(contender.module))
    measured = {name: found[name] for name in ready}
    return {"workload": workload.name, "parameters": parameters, "variants": measured, "errors": errors}


def _take_turn(contender: Contender, untimed: int) -> tuple[float, float]:
    for _ in range(untimed):
        _step(contender, contender.next_batch())
    return host_and_step(contender)


def host_and_step(contender: Contender) -> tuple[float, float]:
    """Seconds until the host has launched a whole step, and until the device has run it."""
    batch = contender.next_batch()
    contender.rank.synchronize()
    begin = time.perf_counter()
    _step(contender, batch)
    launched = time.perf_counter()
    contender.rank.synchronize()
    return launched - begin, time.perf_counter() - begin


def count_launches(contender: Contender) -> dict[str, int]:
    """How often one more step launches a CUDA graph, or a kernel outside of them, by torch's profiler."""
    batch = contender.next_batch()
    with torch.profiler.profile() as profile:
        _step(contender, batch)
        contender.rank.synchronize()
    counts: Counter[str] = Counter()
    for event in profile.events() or ():
        for prefix, kind in LAUNCHES.items():
            counts[kind] += str(event.name).startswith(prefix)
    return dict(counts)


def _step(contender: Contender, batch: Any) -> None:
    contender.workload.loss(contender.module, batch).backward()
    contender.optimizer.step()
    contender.optimizer.zero_grad()


def _graphs(rank: Rank) -> tuple[int, int]:
    """How many CUDA graphs are recorded, and how many graphs Inductor has compiled without one that was asked for."""
    on_cuda = rank.device.type == "cuda"
    recorded = torch_private.for_tests.recorded_cuda_graphs(rank.device.index) if on_cuda else 0
    return recorded, torch_private.for_tests.compiler_counters().get("inductor", {}).get("cudagraph_skips", 0)
