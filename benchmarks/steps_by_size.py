"""What one variant needs for a model of so many parameters: its constructor, its first steps and later ones."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn

from benchmarks.workload import load_fresh
from compiled_ddp.tools.comparison.ranks import Rank
from compiled_ddp.tools.comparison.variants import Variant


@dataclass(frozen=True)
class SizedSteps:
    """Seconds of the slowest rank; `forward_s` and `backward_s` have one entry per step, none where none was taken.

    `first_step_cpu_s` is the CPU time of the first forward and backward, of all threads of a rank's process.
    """

    variant: str
    parameters: int
    backend: str | None  # None where nothing is compiled
    constructor_s: float | None  # None without a wrapper
    forward_s: list[float]
    backward_s: list[float]
    first_step_cpu_s: float | None = None

    @property
    def first_backward_s(self) -> float | None:
        return self.backward_s[0] if self.backward_s else None

    @property
    def second_backward_s(self) -> float | None:
        return self.backward_s[1] if len(self.backward_s) > 1 else None

    @property
    def first_step_s(self) -> float | None:
        """Forward and backward, which hold the compiler's time where there is one."""
        return self.forward_s[0] + self.backward_s[0] if self.forward_s else None

    @property
    def later_forward_s(self) -> float | None:
        return statistics.median(self.forward_s[2:]) if len(self.forward_s) > 2 else None

    @property
    def later_backward_s(self) -> float | None:
        return statistics.median(self.backward_s[2:]) if len(self.backward_s) > 2 else None


def median_of(repetitions: Sequence[SizedSteps]) -> SizedSteps:
    """One variant at one size, measured several times."""
    cpu_s = [steps.first_step_cpu_s for steps in repetitions if steps.first_step_cpu_s is not None]
    constructor_s = [steps.constructor_s for steps in repetitions if steps.constructor_s is not None]
    return replace(
        repetitions[0],
        constructor_s=statistics.median(constructor_s) if constructor_s else None,
        forward_s=[statistics.median(each) for each in zip(*(steps.forward_s for steps in repetitions), strict=True)],
        backward_s=[statistics.median(each) for each in zip(*(steps.backward_s for steps in repetitions), strict=True)],
        first_step_cpu_s=statistics.median(cpu_s) if cpu_s else None,
    )


def measure(
    variant: Variant, *, parameters: int, steps: int, backend: str, rank: Rank, depth: int = 0
) -> dict[str, Any]:
    """A `SizedSteps` as a JSON value, the same on every rank. Without `steps` it is the constructor alone.

    It runs below `depth` more frames of Python's: how long compilers take depends on it (`compiled_ddp/frames.py`).
    """
    if depth:
        return measure(variant, parameters=parameters, steps=steps, backend=backend, rank=rank, depth=depth - 1)
    if steps:
        _run(variant, "small", 2, steps=2, rank=rank)  # what is imported and set up once is no part of any size
    return asdict(_run(variant, "sized", parameters, steps=steps, rank=rank, backend=backend))


def _run(
    variant: Variant, label: str, parameters: int, *, steps: int, rank: Rank, backend: str | None = None
) -> SizedSteps:
    model = load_fresh("benchmarks.models", label).Chain(parameters).to(rank.device)
    module, constructor_s, _ = _timed(lambda: variant.wrap(model), rank)
    forward_s, backward_s, cpu_s = [], [], []
    x = torch.ones(2, device=rank.device)
    for _ in range(steps):
        loss, seconds, of_forward = _timed(lambda: module(x), rank)
        forward_s.append(seconds)
        _, seconds, of_backward = _timed(loss.backward, rank)
        backward_s.append(seconds)
        cpu_s.append(of_forward + of_backward)
        _check_gradients(model)
        module.zero_grad()
    return SizedSteps(
        variant.name,
        parameters,
        backend if variant.floor == "compiled" else None,
        constructor_s if variant.communicates else None,
        forward_s,
        backward_s,
        max(rank.gather(cpu_s[0])) if cpu_s else None,
    )


def _timed(action: Callable[[], Any], rank: Rank) -> tuple[Any, float, float]:
    """What `action` returns, the seconds of the slowest rank from a barrier on, and this rank's of CPU time."""
    rank.barrier()
    begin, cpu_begin = time.perf_counter(), time.process_time()
    result = action()
    rank.synchronize()
    seconds, cpu_s = time.perf_counter() - begin, time.process_time() - cpu_begin
    return result, max(rank.gather(seconds)), cpu_s


def _check_gradients(model: nn.Module) -> None:
    """Every factor is 1, so every gradient is the input: 1."""
    wrong = sum(parameter.grad is None or not bool((parameter.grad == 1).all()) for parameter in model.parameters())
    if wrong:
        raise RuntimeError(f"{wrong} gradients of the chain are not 1: what was timed did not reduce them to the mean")
