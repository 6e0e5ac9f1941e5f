"""`static_graph=True`: a parameter may get several gradients in one backward, where reentrant checkpoints share it."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import (
    Mlp,
    assert_equal_on_all_ranks,
    assert_gradients,
    assert_step,
    expected_mean,
    mean_by_hand,
    row_batch,
    wrappers,
)
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from compiled_ddp import torch_private
from ranks import RankPool

ONE_BUCKET_EACH = {"bucket_cap_mb": 1e-6, "first_bucket_mb": 1e-6}


class Tower(nn.Module):
    """One layer under two reentrant checkpoints, which each accumulate by themselves, behind layers of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.own = nn.Linear(5, 3), nn.ModuleList(nn.Linear(5, 5) for _ in range(2))
        self.layer = nn.Linear(5, 5)
        self.times = 2
        self.look: Callable[[Tensor], None] = lambda _: None  # called when backward reaches the output of a layer

    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:
        for number in range(self.times):
            x = self.looked_at(self.own[number % 2](x))
            x = self.looked_at(checkpoint(self.layer, torch.tanh(x), use_reentrant=True))
        return self.head(x)

    def looked_at(self, x: Tensor) -> Tensor:
        x.register_hook(lambda gradient: self.look(gradient))
        return x


def loss_of(module: nn.Module, x: Tensor) -> Tensor:
    return module(x).square().sum()


def step(ddp: nn.Module, rank: int, number: int) -> None:
    """One step, right on this rank."""
    x = row_batch(rank, number)
    assert_step(ddp, lambda module: loss_of(module, x))


def wrap(**options: Any) -> Any:
    return wrappers(["EagerDDP"])["EagerDDP"](Tower(), **{"static_graph": True, **ONE_BUCKET_EACH, **options})


def _as_under_ddp(rank: int, options: dict[str, Any]) -> None:
    torch.manual_seed(3)
    ddp = wrap(verify="always", **options)
    if not options.get("static_graph", True):
        ddp._set_static_graph()
    theirs = DistributedDataParallel(copy.deepcopy(ddp.module), static_graph=True)
    ours, others = (torch.optim.SGD(module.parameters(), lr=0.1) for module in (ddp, theirs))
    for number in range(3):
        x = row_batch(rank, number)
        expected = expected_mean(copy.deepcopy(ddp.module), lambda module: loss_of(module, x))  # noqa: B023
        for module, optimizer in ((ddp, ours), (theirs, others)):
            optimizer.zero_grad()
            loss_of(module, x).backward()
            assert_gradients(module.module, expected, rtol=1e-4, atol=1e-6)
            optimizer.step()


@pytest.mark.parametrize(
    "options", [{}, {"gradient_as_bucket_view": False}, {"bucket_cap_mb": 25}, {"static_graph": False}]
)
def test_a_layer_of_two_reentrant_checkpoints_is_averaged_as_under_ddp(
    ranks2: RankPool, options: dict[str, Any]
) -> None:
    ranks2.run(_as_under_ddp, options)


def test_the_same_on_three_ranks(ranks3: RankPool) -> None:
    ranks3.run(_as_under_ddp, {})


def _overlap(rank: int) -> None:
    ddp = wrap(verify="off")
    group = ddp._runtime.communicator.group
    for number in range(3):
        loss = loss_of(ddp, row_batch(rank, number))
        launched = [torch_private.groups.collectives_launched(group)]
        ddp.module.look = lambda _: launched.append(torch_private.groups.collectives_launched(group))  # noqa: B023
        loss.backward()
        # Each time a weight and a bias: of the head, of the second layer of its own, then of the shared one.
        expected = [0, 2, 2, 4, 6] if number else [0, 0, 0, 0, 0]
        assert [count - launched[0] for count in launched] == expected


def test_from_the_second_backward_on_a_bucket_is_launched_with_the_last_gradient_of_each_parameter(
    ranks2: RankPool,
) -> None:
    ranks2.run(_overlap)


def _in_other_loops(rank: int) -> None:
    skipping = wrap()
    if rank == 0:
        skipping.skip_step()  # it has counted nothing yet in the others' second backward
    else:
        loss_of(skipping, row_batch(rank)).backward()
    step(skipping, rank, 1)

    local = wrap()
    for number in range(2):
        first, second = row_batch(rank, 2 * number), row_batch(rank, 2 * number + 1)
        total = mean_by_hand(local, lambda module: loss_of(module, first) + loss_of(module, second))  # noqa: B023
        local.zero_grad(set_to_none=False)
        with local.no_sync():
            loss_of(local, first).backward()
        loss_of(local, second).backward()
        assert_gradients(local.module, total)

    hooked = wrappers(["compile_ddp"])["compile_ddp"](Tower(), static_graph=True, **ONE_BUCKET_EACH)
    hooked.register_comm_hook(None, default_hooks.allreduce_hook)  # under which hooks reduce everything here too
    for number in range(2):
        step(hooked, rank, number)

    changing = wrap()
    step(changing, rank, 0)
    changing.module.layer.weight.requires_grad_(False)
    changing.module.head.bias.requires_grad_(False)
    loss_of(changing, row_batch(rank, 1)).backward()
    changing.module.layer.weight.requires_grad_(True)
    changing.module.head.bias.requires_grad_(True)
    step(changing, rank, 2)
    torch.manual_seed(3)
    changing.module.extra = Mlp()
    changing.module.register_forward_hook(lambda module, inputs, output: output + module.extra(*inputs))
    for number in range(3, 5):
        step(changing, rank, number)


def test_skipped_and_local_steps_a_communication_hook_and_a_model_that_changes_are_right(ranks2: RankPool) -> None:
    ranks2.run(_in_other_loops)


def _another_graph(rank: int) -> None:
    ddp = wrap()
    step(ddp, rank, 0)
    ddp.module.times = 1 + rank
    step(ddp, rank, 1)
    ddp.module.times = 3
    with pytest.raises(RuntimeError, match=r"parameter layer\.\w+ got a second gradient in one backward"):
        loss_of(ddp, row_batch(rank, 2)).backward()
    ddp.module.times = 2
    step(ddp, rank, 3)
    assert_equal_on_all_ranks(ddp.module.layer.weight.grad.tolist())


def test_fewer_gradients_than_before_are_right_and_more_are_refused_by_name(ranks2: RankPool) -> None:
    ranks2.run(_another_graph)
