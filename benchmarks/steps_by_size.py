"""What one variant needs for a model of so many parameters: its constructor, its first steps and later ones."""

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from benchmarks.ranks import Rank
from benchmarks.variants import Variant
from benchmarks.workload import load_fresh


@dataclass(frozen=True)
class SizedSteps:
    """Seconds of the slowest rank; `forward_s` and `backward_s` have one entry per step, none where none was taken."""

    variant: str
    parameters: int
    backend: str | None  # None where nothing is compiled
    constructor_s: float | None  # None without a wrapper
    forward_s: list[float]
    backward_s: list[float]

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


def measure(variant: Variant, *, parameters: int, steps: int, backend: str, rank: Rank) -> dict[str, Any]:
    """A `SizedSteps` as a JSON value, the same on every rank. Without `steps` it is the constructor alone."""
    if steps:
        _run(variant, "small", 2, steps=2, rank=rank)  # what is imported and set up once is no part of any size
    constructor_s, forward_s, backward_s = _run(variant, "sized", parameters, steps=steps, rank=rank)
    of_wrapper_s = constructor_s if variant.communicates else None
    of_backend = backend if variant.floor == "compiled" else None
    return asdict(SizedSteps(variant.name, parameters, of_backend, of_wrapper_s, forward_s, backward_s))


def _run(
    variant: Variant, label: str, parameters: int, *, steps: int, rank: Rank
) -> tuple[float, list[float], list[float]]:
    model = load_fresh("benchmarks.models", label).Chain(parameters).to(rank.device)
    module, constructor_s = _timed(lambda: variant.wrap(model), rank)
    forward_s, backward_s = [], []
    x = torch.ones(2, device=rank.device)
    for _ in range(steps):
        loss, seconds = _timed(lambda: module(x), rank)
        forward_s.append(seconds)
        _, seconds = _timed(loss.backward, rank)
        backward_s.append(seconds)
        _check_gradients(model)
        module.zero_grad()
    return constructor_s, forward_s, backward_s


def _timed(action: Callable[[], Any], rank: Rank) -> tuple[Any, float]:
    """What `action` returns, and the seconds of the slowest rank from a barrier on."""
    rank.barrier()
    begin = time.perf_counter()
    result = action()
    rank.synchronize()
    seconds = time.perf_counter() - begin
    return result, max(rank.gather(seconds))


def _check_gradients(model: nn.Module) -> None:
    """Every factor is 1, so every gradient is the input: 1."""
    wrong = sum(parameter.grad is None or not bool((parameter.grad == 1).all()) for parameter in model.parameters())
    if wrong:
        raise RuntimeError(f"{wrong} gradients of the chain are not 1: what was timed did not reduce them to the mean")
