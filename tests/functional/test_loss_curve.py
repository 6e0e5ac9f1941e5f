"""300 steps of a functional step and of compile_ddp: in each the same loss, but for rounding."""

import math
from typing import Any

import pytest
import torch
from models import TokenModel, token_batch
from torch import Tensor

from compiled_ddp import compile_ddp
from compiled_ddp import functional as ddp
from ranks import RankPool

STEPS, RATE = 300, 0.3
# Eight roundings of the first loss, about ln 32; one was found. The optimizers add and multiply in other orders.
ROUNDING = 8 * torch.finfo(torch.float32).eps * math.log(32)


def _next_tokens(number: int, rank: int) -> tuple[Tensor, Tensor]:
    """Other tokens in each step and on each rank; what follows one is a function of it, so that it can be learned."""
    x, _ = token_batch(2 * number + rank)
    return x, (5 * x + 3) % 32


def _curves(rank: int) -> None:
    torch.manual_seed(0)
    model = TokenModel()
    params = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    bare = TokenModel()
    wrapped = compile_ddp(model, backend="aot_eager")
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=RATE)
    gradient = ddp.grad_and_value(lambda p, x, y: torch.func.functional_call(bare, p, (x, y)))

    def step(params: dict[str, Tensor], x: Tensor, y: Tensor) -> Any:
        gradients, value = gradient(params, x, y)
        return {name: value - RATE * gradients[name] for name, value in params.items()}, value

    compiled = ddp.compile(step, donate="params", backend="aot_eager")
    losses = []
    for number in range(STEPS):
        batch = _next_tokens(number, rank)
        params, value = compiled(params, *batch)
        expected = wrapped(*batch)
        expected.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.testing.assert_close(value, expected.detach(), rtol=0, atol=ROUNDING, msg=f"step {number}")
        losses.append(value.item())
    assert losses[0] > 3 and max(losses[-20:]) < 0.02, "ln 32 where nothing is learned, zero where all is"


@pytest.mark.slow
def test_losses_over_300_steps_are_those_of_compile_ddp(ranks2: RankPool) -> None:
    ranks2.run(_curves)
