"""What whole steps of one rank are compared with: the same steps without a compiler."""

from collections.abc import Callable

import torch
from torch import Tensor, nn


def batch(number: int, rows: int = 3) -> Tensor:
    return torch.randn(rows, 4, generator=torch.Generator().manual_seed(number))


def square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).pow(2).mean()


def plain_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, loss: Callable[..., Tensor], *, accumulate: int = 1
) -> Callable[..., Tensor]:
    """A function that takes a batch, as `compile_step` returns one, and updates in every `accumulate`-th call."""
    calls = 0

    def step(*batch: Tensor) -> Tensor:
        nonlocal calls
        value = loss(model, *batch)
        (value / accumulate).backward()
        calls += 1
        if calls % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
        return value.detach()

    return step
