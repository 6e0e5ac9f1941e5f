"""A run that is resumed from its checkpoint ends with the bits of one that went through."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpointed import assert_same, batch, made, values
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from compiled_ddp import EagerDDP
from ranks import RankPool

KINDS = ("compile_ddp", "EagerDDP", "the subclass", "the eager subclass")
MICRO_BATCHES = 3  # of a step


class Run:
    """Training with AdamW, a schedule, dropout, batch statistics, accumulation and clipping."""

    def __init__(self, kind: str, rank: int, seed: int) -> None:
        self.model, self.optimizer = made(kind, seed)
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, max_lr=[0.05, 0.02], total_steps=20)
        self.rank, self.losses = rank, list[float]()
        torch.manual_seed(10 * seed + rank)

    def micro_batches(self, first: int, end: int) -> None:
        """Micro-batches counted over all steps; the last one of a step is synchronised, and the optimizer steps."""
        for number in range(first, end):
            if number % MICRO_BATCHES < MICRO_BATCHES - 1:
                with self.model.no_sync():
                    self.loss(number).backward()
                continue
            self.loss(number).backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()

    def loss(self, number: int) -> Tensor:
        tokens = batch(self.rank, number)
        loss = nn.functional.cross_entropy(self.model(tokens), tokens) / MICRO_BATCHES
        self.losses.append(loss.item())
        return loss

    def state(self) -> dict[str, Any]:
        return values(self.model, self.optimizer) | {f"schedule {k}": v for k, v in self.schedule.state_dict().items()}


def save_by_torch(run: Run, folder: str) -> None:
    """A file of each rank, as random states, batch statistics and local gradients are a rank's own."""
    state = {
        "model": run.model.state_dict(),
        "optimizer": run.optimizer.state_dict(),
        "schedule": run.schedule.state_dict(),
        "random": torch.get_rng_state(),
        "gradients": {n: p.grad for n, p in run.model.named_parameters() if p.grad is not None},
    }
    torch.save(state, f"{folder}/{run.rank}.pt")


def load_by_torch(run: Run, folder: str) -> None:
    state = torch.load(f"{folder}/{run.rank}.pt")
    run.model.load_state_dict(state["model"])
    run.optimizer.load_state_dict(state["optimizer"])
    run.schedule.load_state_dict(state["schedule"])
    torch.set_rng_state(state["random"])
    for name, gradient in state["gradients"].items():
        run.model.get_parameter(name).grad = gradient


def of_distributed(run: Run) -> dict[str, Any]:
    model, optimizer = get_state_dict(run.model, run.optimizer)
    random = {f"rank {run.rank}": torch.get_rng_state()}
    return {"model": model, "optimizer": optimizer, "schedule": run.schedule.state_dict(), "random": random}


def save_distributed(run: Run, folder: str) -> None:
    rank_0s = dcp.DefaultSavePlanner(
        dedup_save_to_lowest_rank=True
    )  # batch statistics are a rank's own until a forward
    dcp.save(of_distributed(run), checkpoint_id=folder, planner=rank_0s)


def load_distributed(run: Run, folder: str) -> None:
    state = of_distributed(run)
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(run.model, run.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    run.schedule.load_state_dict(state["schedule"])
    torch.set_rng_state(state["random"][f"rank {run.rank}"])


WAYS = {"torch.save": (save_by_torch, load_by_torch), "distributed": (save_distributed, load_distributed)}


def _resumed(rank: int, kind: str, way: str, folder: str, at: int) -> None:
    through, resumed = both(rank, kind, way, folder, at)
    assert resumed.losses == through.losses and all(map(math.isfinite, resumed.losses))
    assert_same(resumed.state(), through.state())


def both(rank: int, kind: str, way: str, folder: str, at: int) -> tuple[Run, Run]:
    """A run that saves after `at` micro-batches and goes on, and one that is resumed from there."""
    save, load = WAYS[way]
    through = Run(kind, rank, 0)
    through.micro_batches(0, at)
    save(through, folder)
    through.losses.clear()
    through.micro_batches(at, 6 * MICRO_BATCHES)
    resumed = Run(kind, rank, 1)
    load(resumed, folder)
    resumed.micro_batches(at, 6 * MICRO_BATCHES)
    return through, resumed


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_has_the_bits_of_one_that_went_through(
    ranks2: RankPool, tmp_path: Path, kind: str, way: str
) -> None:
    ranks2.run(_resumed, kind, way, str(tmp_path), 3 * MICRO_BATCHES)


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_is_resumed_within_a_step_with_each_ranks_gradients(ranks2: RankPool, tmp_path: Path, kind: str) -> None:
    ranks2.run(_resumed, kind, "torch.save", str(tmp_path), 3 * MICRO_BATCHES + 2)


def test_graphs_resume_to_the_bit_on_three_ranks(ranks3: RankPool, tmp_path: Path) -> None:
    ranks3.run(_resumed, "compile_ddp", "torch.save", str(tmp_path), 3 * MICRO_BATCHES)


def _wrapped_again(rank: int, folder: str) -> None:
    """What differs is the wrapper's age, not what the checkpoint holds."""
    through, resumed = Run("EagerDDP", rank, 0), Run("EagerDDP", rank, 1)
    at, end = 3 * MICRO_BATCHES, 6 * MICRO_BATCHES
    through.micro_batches(0, at)
    save_by_torch(through, folder)
    through.model = EagerDDP(through.model.unwrap())
    through.losses.clear()
    through.micro_batches(at, end)
    load_by_torch(resumed, folder)
    resumed.micro_batches(at, end)
    assert resumed.losses == through.losses
    assert_same(resumed.state(), through.state())


def test_hooks_resume_on_three_ranks_to_the_bits_of_a_run_that_wraps_again(ranks3: RankPool, tmp_path: Path) -> None:
    """In the first backward buckets have another order, and so gloo's ring another order of sums."""
    ranks3.run(_wrapped_again, str(tmp_path))


def _resumed_closely(rank: int, kind: str, folder: str) -> None:
    through, resumed = both(rank, kind, "torch.save", folder, 3 * MICRO_BATCHES)
    torch.testing.assert_close(resumed.losses, through.losses, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", ["EagerDDP", "torch DDP"])
def test_hooks_resume_to_rounding_on_three_ranks(ranks3: RankPool, tmp_path: Path, kind: str) -> None:
    ranks3.run(_resumed_closely, kind, str(tmp_path))
