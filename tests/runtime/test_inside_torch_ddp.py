"""torch's DistributedDataParallel around one of our wrappers: both would average, which the first forward finds."""

from typing import Any

import pytest
import torch
from models import Mlp, assert_step, row_batch, wrappers
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ranks import RankPool

BOTH = ("compile_ddp", "EagerDDP")


def wrap(wrapper: str, model: nn.Module, **options: Any) -> Any:
    return wrappers([wrapper])[wrapper](model, **options)


class Larger(nn.Module):
    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part, self.head = part, nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.part(x))


def _refused(rank: int, wrapper: str) -> list[str]:
    ddp = wrap(wrapper, Mlp())
    messages = []
    for model in (ddp, Larger(ddp), nn.Sequential(Larger(ddp))):
        theirs = DistributedDataParallel(model)
        for context in (torch.enable_grad(), torch.no_grad(), torch.enable_grad()):
            with pytest.raises(RuntimeError) as caught, context:
                theirs(row_batch(rank))
            messages.append(str(caught.value))
        del theirs
    for _ in range(2):  # by itself it trains
        assert_step(ddp, lambda module: module(row_batch(rank)).square().sum())
    return messages


@pytest.mark.parametrize("wrapper", BOTH)
def test_it_is_an_error_on_every_rank_in_the_first_forward(ranks2: RankPool, wrapper: str) -> None:
    name = {"compile_ddp": "CompiledDDP", "EagerDDP": "EagerDDP"}[wrapper]
    for messages in ranks2.run(_refused, wrapper):
        for message in messages:
            assert message.startswith(
                f"torch's DistributedDataParallel around {name}: both average the gradients of head.weight, head.bias"
            )
            assert "Leave one of them out" in message and "_ddp_params_and_buffers_to_ignore" in message


def _ignored(rank: int, wrapper: str) -> None:
    """What DDP leaves alone is the inner wrapper's, as is what is frozen."""
    part = Mlp()
    ddp = wrap(wrapper, part)
    larger = Larger(ddp)
    names = [name for name, _ in larger.named_parameters() if name.startswith("part.")]
    larger._ddp_params_and_buffers_to_ignore = names
    theirs = DistributedDataParallel(larger)
    bare = Larger(Mlp())
    bare.part.load_state_dict(part.state_dict())
    bare.head.load_state_dict(larger.head.state_dict())
    for step in range(3):
        x = row_batch(rank, step)
        bare.zero_grad()
        bare(x).square().sum().backward()
        theirs.zero_grad()
        theirs(x).square().sum().backward()
        for mine, by_hand in zip(larger.parameters(), bare.parameters(), strict=True):
            total = by_hand.grad.clone()
            torch.distributed.all_reduce(total)
            torch.testing.assert_close(mine.grad, total / 2, rtol=1e-4, atol=1e-5)
    other = DistributedDataParallel(nn.Linear(5, 5))  # one that has nothing to do with ours

    def around(_: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return output + 0 * ddp(args[0]).sum()

    other.module.register_forward_hook(around)
    other(row_batch(rank)).sum().backward()


@pytest.mark.parametrize("wrapper", BOTH)
def test_what_ddp_ignores_is_the_inner_wrappers(ranks2: RankPool, wrapper: str) -> None:
    ranks2.run(_ignored, wrapper)
