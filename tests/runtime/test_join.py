"""Uneven inputs: ranks with fewer batches shadow the others, and end with the same parameters."""

import copy
import functools
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import Mlp, assert_equal_on_all_ranks, assert_step, row_batch, wrappers
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer

from ranks import RankPool

BOTH = ("compile_ddp", "EagerDDP")


class WithBuffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp, self.norm = Mlp(), nn.BatchNorm1d(5)

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.norm(x)).square().mean()


def batches_of(rank: int) -> int:
    """Rank 0 has the fewest."""
    return 2 + 2 * rank


def by_hand(model: nn.Module, rank: int, steps: int, *, by_all: bool) -> nn.Module:
    """Plain SGD on what this rank would see if all ranks stepped alike; a rank without data has zero gradients."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        training = [other for other in range(dist.get_world_size()) if batches_of(other) > step]
        optimizer.zero_grad()
        if rank in training:
            model(row_batch(rank, step)).backward()
        for parameter in model.parameters():
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            dist.all_reduce(gradient)
            parameter.grad = gradient / (dist.get_world_size() if by_all else len(training))
        optimizer.step()
        for buffer in model.buffers():
            dist.broadcast(buffer, src=training[0])
    return model


def _uneven(rank: int, wrapper: str, by_all: bool) -> None:
    torch.manual_seed(7)
    model = WithBuffers()
    ddp = wrappers([wrapper])[wrapper](copy.deepcopy(model), verify="always")
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    with ddp.join(divide_by_initial_world_size=by_all):
        for step in range(batches_of(rank)):
            if step % 2:  # .grad of the last step is there while this rank shadows
                optimizer.zero_grad()
            with torch.no_grad():
                for _ in range(rank):  # forwards for evaluation: as many as a rank likes
                    ddp.eval()(row_batch(rank))
            loss = ddp.train()(row_batch(rank, step))
            if not step % 2:
                optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    expected = by_hand(model, rank, batches_of(dist.get_world_size() - 1), by_all=by_all)
    for (name, parameter), other in zip(ddp.module.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(parameter, other, rtol=1e-4, atol=1e-5, msg=lambda m: f"{name}: {m}")  # noqa: B023
        assert_equal_on_all_ranks(parameter.tolist())
    for buffer in ddp.module.buffers():
        assert_equal_on_all_ranks(buffer.tolist())

    # Outside of the join, a step is like any other; a second join begins anew.
    for context in (ddp.join(enable=False), ddp.join()):
        with context:
            ddp.zero_grad()
            ddp(row_batch(rank)).backward()
        assert_equal_on_all_ranks(ddp.module.mlp.head.weight.grad.tolist())
    ddp.zero_grad()
    ddp(row_batch(rank)).backward()


@pytest.mark.parametrize("by_all", [True, False])
@pytest.mark.parametrize("wrapper", BOTH)
def test_ranks_with_fewer_batches_count_as_zeros_and_end_equal(ranks2: RankPool, wrapper: str, by_all: bool) -> None:
    ranks2.run(_uneven, wrapper, by_all)


@pytest.mark.parametrize("by_all", [True, False])
def test_the_same_on_three_ranks(ranks3: RankPool, by_all: bool) -> None:
    ranks3.run(_uneven, "EagerDDP", by_all)


def _in_other_loops(rank: int, wrapper: str) -> None:
    """Accumulation, two forwards in one backward, outputs that are dropped, several backwards, a communication hook."""
    ddp = wrappers([wrapper])[wrapper](WithBuffers())
    with ddp.join():
        for step in range(1 + rank):
            with ddp.no_sync():
                ddp(row_batch(rank, step)).backward()
            (ddp(row_batch(rank, step)) + ddp(row_batch(rank, step))).backward()
            ddp.zero_grad()
            ddp(row_batch(rank, step))  # no backward follows
    one, two = (wrappers([wrapper])[wrapper](Mlp()) for _ in range(2))
    one.register_comm_hook(None, default_hooks.allreduce_hook)
    for ddp in (one, two):
        with ddp.join(), ddp.no_sync() if rank == 0 else warnings.catch_warnings():
            for step in range(1 + rank):
                first, second = ddp(row_batch(rank, step)).sum(), ddp(row_batch(rank, step)).sum()
                first.backward()
                if rank == 1:
                    second.backward()
        assert_equal_on_all_ranks(ddp.module.head.bias.tolist())


@pytest.mark.parametrize("reduction", ["weighted", "sum"])
def test_a_rank_without_data_has_no_weight_and_adds_nothing(ranks2: RankPool, reduction: str) -> None:
    ranks2.run(_other_reductions, reduction)


def _other_reductions(rank: int, reduction: str) -> None:
    ddp = wrappers(["EagerDDP"])["EagerDDP"](Mlp(), reduction=reduction)
    with ddp.join(divide_by_initial_world_size=False):
        for step in range(1 + rank):
            ddp.zero_grad()
            loss = ddp(row_batch(rank, step)).square().sum()
            if step:
                reference = copy.deepcopy(ddp.module)
                reference(row_batch(rank, step)).square().sum().backward()
            loss.backward()
    if rank == 1:
        for parameter, other in zip(ddp.module.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad, other.grad)


@pytest.mark.parametrize("wrapper", BOTH)
def test_an_iteration_is_a_synchronised_backward_whatever_forwards_there_are(ranks2: RankPool, wrapper: str) -> None:
    ranks2.run(_in_other_loops, wrapper)


def _with_zero(rank: int, wrapper: str) -> None:
    torch.manual_seed(7)
    model = WithBuffers()
    ddp = wrappers([wrapper])[wrapper](copy.deepcopy(model))
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1)
    with warnings.catch_warnings(), Join([ddp, optimizer]):
        for step in range(batches_of(rank)):
            optimizer.zero_grad()
            ddp(row_batch(rank, step)).backward()
            optimizer.step()
    expected = by_hand(model, rank, batches_of(dist.get_world_size() - 1), by_all=True)
    for parameter, other in zip(ddp.module.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(parameter, other, rtol=1e-4, atol=1e-5)
        assert_equal_on_all_ranks(parameter.tolist())


@pytest.mark.parametrize("wrapper", BOTH)
def test_torchs_join_takes_the_wrapper_with_an_optimizer(ranks2: RankPool, wrapper: str) -> None:
    ranks2.run(_with_zero, wrapper)


def _train(ddp: nn.Module, rank: int, batches: int, context: Any, noted: list[Any]) -> None:
    """Note each loss, whose graph then lives on in the steps that follow, and each backward that has ended."""
    with context:
        for step in range(batches):
            noted.append(ddp(row_batch(rank, step)).sum())
            noted[-1].backward()
            noted.append("backward")


def _terminated(rank: int, wrapper: str, buffers: bool) -> None:
    ddp = wrappers([wrapper])[wrapper](WithBuffers() if buffers else Mlp(), verify="always")
    for join in (ddp.join, functools.partial(Join, [ddp])):
        noted: list[Any] = []
        message = "at least one rank that exhausted inputs" if rank else "Rank 0 exhausted all inputs"
        with pytest.raises(RuntimeError, match=message) as caught:
            _train(ddp, rank, batches_of(rank), join(throw_on_early_termination=True), noted)
        # In the third iteration, where it meets the others first: its forward if that brings buffers, or its backward.
        assert len(noted) == 2 * 2 + (rank == 1 and not buffers)
        for step in range(2):
            assert_step(ddp, lambda module: module(row_batch(rank, step)).sum())  # noqa: B023
        del caught  # until here: a traceback that is kept must not make a backward look as if it still ran


@pytest.mark.parametrize("buffers", [False, True])
@pytest.mark.parametrize("wrapper", BOTH)
def test_early_termination_raises_on_every_rank_and_training_goes_on(
    ranks2: RankPool, wrapper: str, buffers: bool
) -> None:
    ranks2.run(_terminated, wrapper, buffers)


def _with_other_options(rank: int, wrapper: str) -> None:
    ddp = wrappers([wrapper])[wrapper](Mlp())
    for batches in (1, rank):  # in an iteration of both, then in one that rank 0 shadows
        noted: list[Any] = []
        with pytest.raises(RuntimeError, match="divide_by_initial_world_size differs between ranks"):
            _train(ddp, rank, batches, ddp.join(divide_by_initial_world_size=rank == 0), noted)
        assert_step(ddp, lambda module: module(row_batch(rank)).sum())


@pytest.mark.parametrize("wrapper", BOTH)
def test_ranks_that_differ_in_the_options_of_join_raise_and_training_goes_on(ranks2: RankPool, wrapper: str) -> None:
    ranks2.run(_with_other_options, wrapper)
