"""300 steps of a functional step and of compile_ddp: the same losses."""

from typing import Any

import pytest
import torch
from models import TokenModel, token_batch
from torch import Tensor

from compiled_ddp import compile_ddp
from compiled_ddp import functional as ddp
from ranks import RankPool

STEPS, RATE = 300, 0.3


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
    first = last = torch.zeros(())
    for number in range(STEPS):
        batch = token_batch(2 * (number % 20) + rank)
        params, value = compiled(params, *batch)
        expected = wrapped(*batch)
        expected.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.testing.assert_close(value, expected.detach(), rtol=1e-3, atol=1e-4, msg=f"step {number}")
        first, last = value if number == 0 else first, value
    assert last < first


@pytest.mark.slow
def test_losses_over_300_steps_are_those_of_compile_ddp(ranks2: RankPool) -> None:
    ranks2.run(_curves)
