"""A step that some ranks drop, in a model with buffers: no rank waits for the timeout, and all are told who it was."""

import contextlib
import re
import time
from collections.abc import Collection
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from models import wrappers
from torch import nn

from ranks import RankPool

TIMEOUT_SECONDS = 40.0  # which nobody is to wait for


class Normalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layers(x).square().mean()
        return result


def _drop(rank: int, wrapper: str, dropping: Collection[int], in_step: int, accumulates: bool) -> tuple[str, float]:
    group = dist.new_group(timeout=timedelta(seconds=TIMEOUT_SECONDS))
    ddp = wrappers([wrapper])[wrapper](Normalised(), process_group=group)
    ddp(torch.ones(3, 4))  # compiled
    dist.barrier()
    for step in range(in_step + 2):
        began = time.monotonic()
        try:
            with ddp.no_sync() if accumulates else contextlib.nullcontext():
                loss = ddp(torch.randn(3, 4))
            if accumulates:
                loss.backward()
                loss = ddp(torch.randn(3, 4))
            if step == in_step and rank in dropping:
                continue
            loss.backward()
        except RuntimeError as error:
            return str(error), time.monotonic() - began
    return "", 0.0


def assert_all_told(results: list[tuple[str, float]], dropping: Collection[int]) -> None:
    who = "rank 0 has" if dropping == {0} else "rank 1 has" if dropping == {1} else "ranks 1, 2 have"
    for rank, (message, seconds) in enumerate(results):
        assert message.startswith(f"rank {rank}: {who} begun another forward, which brings the buffers"), message
        assert "skip_step()" in message, message
        assert re.search(r"Synchronised forwards begun since wrapping, rank 0: \d+, rank 1: \d+", message), message
        assert seconds < TIMEOUT_SECONDS / 2, seconds


@pytest.mark.parametrize(
    ("wrapper", "dropping", "in_step", "accumulates"),
    [
        ("EagerDDP", {1}, 2, False),
        ("EagerDDP", {0}, 1, True),
        ("compile_ddp", {0}, 0, False),  # the others wait in the store, for the first sequence
        ("compile_ddp", {1}, 2, False),
    ],
)
def test_a_step_that_one_rank_drops_in_a_model_with_buffers_is_told_to_all_at_once(
    ranks2: RankPool, wrapper: str, dropping: set[int], in_step: int, accumulates: bool
) -> None:
    assert_all_told(ranks2.run(_drop, wrapper, dropping, in_step, accumulates), dropping)


def test_of_three_ranks_those_that_drop_a_step_are_named(ranks3: RankPool) -> None:
    for dropping in ({1, 2}, {0}):
        assert_all_told(ranks3.run(_drop, "EagerDDP", dropping, 1, False), dropping)


def _slow_rank(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rank 2 comes late to the second of two forwards, when others may be in the backward of both."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    ddp = wrappers(["EagerDDP"])["EagerDDP"](model)
    local = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    local.load_state_dict(model.state_dict())
    first, second = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(rank))
    loss = ddp(first).square().sum()
    if rank == 2:
        time.sleep(1.0)  # longer than the threads that answer let pass between two looks, which is LOOK_SECONDS
    with torch.no_grad():
        ddp(second)
    (loss + ddp(second).square().sum()).backward()
    (local(first).square().sum() + local(second).square().sum()).backward()
    expected = local[0].weight.grad
    assert expected is not None and model[0].weight.grad is not None
    dist.all_reduce(expected)
    return model[0].weight.grad, expected / dist.get_world_size()


def test_ranks_that_wait_for_a_slow_one_are_not_taken_for_parted(ranks3: RankPool) -> None:
    for gradient, expected in ranks3.run(_slow_rank):
        torch.testing.assert_close(gradient, expected)
