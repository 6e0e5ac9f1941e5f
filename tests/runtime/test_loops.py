"""Training loops as users write them: two wrapped models in one step, gradients cleared or shared by hand."""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from models import Mlp, assert_gradients, expected_mean, row_batch, wrappers
from torch import Tensor, nn

from ranks import RankPool

BOTH = ("compile_ddp", "EagerDDP")


class Critic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(3, 6), nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.into(x)))


def _judge(critic: nn.Module, made: Tensor, real: Tensor) -> Tensor:
    return F.softplus(critic(made)).mean() + F.softplus(-critic(real)).mean()


def _adversaries(rank: int, wrapper: str) -> None:
    """A generator and its critic: each learns in its turn, one behind detach(), one through the other."""
    wrap = wrappers([wrapper])[wrapper]
    generator, critic = wrap(Mlp()), wrap(Critic())
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (generator, critic)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(3):
            x, real = row_batch(rank, step), row_batch(rank, step + 7)[:, :3]
            makers, critics = copy.deepcopy(generator.module), copy.deepcopy(critic.module)
            made = makers(x).detach()
            expected = expected_mean(critics, lambda module: _judge(module, made, real))  # noqa: B023
            _judge(critic, generator(x).detach(), real).backward()
            assert_gradients(critic.module, expected)
            assert all(parameter.grad is None for parameter in generator.parameters())
            optimizers[1].step()
            optimizers[1].zero_grad()

            critics = copy.deepcopy(critic.module)
            expected = expected_mean(makers, lambda module: F.softplus(-critics(module(x))).mean())  # noqa: B023
            F.softplus(-critic(generator(x))).mean().backward()
            assert_gradients(generator.module, expected)
            optimizers[0].step()
            for optimizer in optimizers:
                optimizer.zero_grad()


@pytest.mark.parametrize("wrapper", BOTH)
def test_two_wrapped_models_learn_from_each_other(ranks2: RankPool, wrapper: str) -> None:
    ranks2.run(_adversaries, wrapper)


def _cleared_in_between(rank: int, wrapper: str, set_to_none: bool) -> None:
    ddp = wrappers([wrapper])[wrapper](Mlp())
    for step in range(3):
        x = row_batch(rank, step)
        expected = expected_mean(copy.deepcopy(ddp.module), lambda module: module(x).square().sum())  # noqa: B023
        loss = ddp(x).square().sum()
        ddp.zero_grad(set_to_none=set_to_none)
        loss.backward()
        assert_gradients(ddp.module, expected)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("wrapper", BOTH)
def test_gradients_may_be_cleared_between_forward_and_backward(
    ranks2: RankPool, wrapper: str, set_to_none: bool
) -> None:
    ranks2.run(_cleared_in_between, wrapper, set_to_none)
