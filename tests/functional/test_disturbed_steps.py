"""Whole steps between which users do what comes to their minds, in an order that is drawn, and seldom look.

Held against the loop that a step stands for, to which the same is done. Who looks at parameters awaits what is under
way: with `pipeline_updates` other faults show where nobody has looked for some steps.
"""

import contextlib
import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import test_whole_step as whole
import torch
import torch.distributed as dist
from test_whole_step import Loop, Net, assert_same, batch
from torch import Tensor, nn

from compiled_ddp.comm_hooks import PowerSGD, StatefulHook, TopK
from ranks import RankPool

MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "pipelined": {"pipeline_updates": True},
    "sharded": {"shard_optimizer": True},
    "both": {"pipeline_updates": True, "shard_optimizer": True},
}
Change = Callable[[Any, torch.optim.Optimizer], object]


def _set(**numbers: Any) -> Change:
    return lambda _, optimizer: optimizer.param_groups[0].update(numbers)


def _evaluate(model: nn.Module, _: object) -> None:
    was_training = model.training
    model.eval()
    with torch.no_grad():
        model(*batch(0, 99))
    model.train(was_training)


def _reload(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def _other_memory(model: Any, _: object) -> None:
    model.first.weight.data = model.first.weight.data.clone()


def _other_buffer(model: Any, _: object) -> None:
    model.norm.running_mean = torch.ones_like(model.norm.running_mean)


def _hooked(model: Any, _: object) -> None:
    model.norm.register_forward_pre_hook(lambda _, args: (args[0] * 0.9,))


CHANGES: dict[str, Change] = {
    "nothing": lambda *_: None,
    "a learning rate": _set(lr=0.05),
    "another one": _set(lr=0.02),
    "betas": _set(betas=(0.5, 0.6)),
    "weight decay": _set(weight_decay=0.3),
    "no weight decay": _set(weight_decay=0.0),
    "eval": lambda model, _: model.eval(),
    "train": lambda model, _: model.train(),
    "an evaluation": _evaluate,
    "frozen": lambda model, _: model.scale.requires_grad_(False),
    "trained again": lambda model, _: model.scale.requires_grad_(True),
    "weights halved": lambda model, _: model.first.weight.data.mul_(0.5),
    "a state dict": lambda model, optimizer: (model.state_dict(), optimizer.state_dict()),
    "a checkpoint": _reload,
    "no state": lambda _, optimizer: optimizer.state.clear(),
    "other memory": _other_memory,
    "another buffer": _other_buffer,
    "a hook": _hooked,
    "zero_grad": lambda _, optimizer: optimizer.zero_grad(),
}
NOTHING = ["nothing"] * 8
NOT_WITHIN = ("frozen", "zero_grad")  # an update of several batches: an error, and what a loop holds in `.grad`


class Worded(Net):
    """With an embedding, of whose rows a batch uses few."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(500, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(x, y) + self.words(x.mul(100).long() % 500).square().mean()


class Disturbed:
    """A step and its loop, to which the same is done."""

    def __init__(
        self, rank: int, seed: int, mode: str, accumulate: int, make: Callable[[], Net] = Net, **options: Any
    ) -> None:
        self.rank, self.drawn, self.accumulate = rank, random.Random(seed), accumulate
        self.log: list[str] = []
        with whole.stepping_with(**MODES[mode], accumulate=accumulate):
            kind = "AdamW" if seed % 2 else "momentum"
            self.step, self.loop = whole.both(kind, lambda: make().double(), **options)
        self.rows, self.batches, self.calls = 5, 0, 0

    def run(self, events: int) -> None:
        try:
            for _ in range(events):
                self._event()
                if self.drawn.random() < 0.15 and not self._is_within:
                    self._look()
            while self._is_within:
                self._call()
            self._look()
        except BaseException as error:
            error.add_note(f"behind {self.log}")
            raise

    @property
    def _is_within(self) -> bool:
        """Whether an update of several batches has been begun."""
        return self.calls % self.accumulate > 0

    def _event(self) -> None:
        draw = self.drawn.random()
        if self._is_within:
            if draw < 0.3:
                self._change()
            self._call()
        elif draw < 0.5:
            self._call()
        elif draw < 0.75:
            self._change()
        elif draw < 0.85:
            self.rows = self.drawn.choice((3, 5, 7))
            self.log.append(f"{self.rows} rows")
        elif draw < 0.9 and self.accumulate == 1:  # else the others raise in another call
            self._fail()
        elif draw < 0.95:
            self.log.append("a rank looks")
            if self.rank == self.drawn.randrange(dist.get_world_size()):
                _ = float(self.step.model.scale.detach())
        else:
            self.log.append("an ordinary step")
            for model, optimizer in self._each():
                Loop.of(model, optimizer).step(*batch(self.rank, 1000 + self.batches))

    def _each(self) -> list[tuple[nn.Module, torch.optim.Optimizer]]:
        return [(each.model, each.optimizer) for each in (self.step, self.loop)]

    def _change(self) -> None:
        name = self.drawn.choice([*CHANGES, *NOTHING])
        if self._is_within and name in NOT_WITHIN:
            return
        if "betas" not in self.loop.optimizer.param_groups[0] and name == "betas":
            return
        self.log.append(name)
        for each in self._each():
            CHANGES[name](*each)

    def _call(self) -> None:
        self.log.append("step")
        # Now and then one rank alone has a smaller batch.
        rows = self.rows - 1 if self.drawn.random() < 0.1 and self.rank == 1 else self.rows
        given = batch(self.rank, self.batches, rows)
        self.batches += 1
        self.calls += 1
        seen = torch.profiler.profile() if self.drawn.random() < 0.05 else contextlib.nullcontext()
        with seen:
            found = self.step(*given)
        expected = self.loop.model(*given)
        (expected / self.accumulate).backward()
        torch.testing.assert_close(found, expected.detach())
        if not self._is_within:
            self.loop.update()

    def _fail(self) -> None:
        """One rank's batch is none: all raise, and nothing has come of it but in the buffers of those that ran."""
        self.log.append("an error")
        buffers = {name: value.clone() for name, value in self.loop.model.named_buffers()}
        failing = self.drawn.randrange(dist.get_world_size())
        given = batch(self.rank, self.batches, self.rows)
        with pytest.raises((RuntimeError, ValueError)):
            self.step(given[0][:, :3] if self.rank == failing else given[0], given[1])
        assert all(torch.equal(value, buffers[name]) for name, value in self.loop.model.named_buffers())

    def _look(self) -> None:
        self.log.append("look")
        assert_same(self.step, self.loop)


def _is_disturbed(rank: int, seed: int, mode: str, accumulate: int, options: dict[str, Any]) -> None:
    Disturbed(rank, seed, mode, accumulate, **options).run(events=40)


@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(10, 30))])
@pytest.mark.parametrize("mode", MODES)
def test_what_users_do_between_steps(ranks2: RankPool, mode: str, seed: int) -> None:
    ranks2.run(_is_disturbed, seed, mode, 1, {}, timeout_seconds=300)


@pytest.mark.parametrize("accumulate", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("hook", [TopK(1.0), PowerSGD(1000)], ids=["TopK", "PowerSGD"])
def test_what_users_do_between_steps_whose_hook_sends_everything(
    ranks2: RankPool, hook: StatefulHook, accumulate: int
) -> None:
    """In several buckets, so that what is kept of them moves where others are trained."""
    ranks2.run(_is_disturbed, 5, "plain", accumulate, {"comm_hook": hook, "bucket_cap_mb": 0.0001}, timeout_seconds=300)


@pytest.mark.parametrize("accumulate", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_what_users_do_between_steps_that_send_rows(ranks3: RankPool, accumulate: int) -> None:
    ranks3.run(_is_disturbed, 6, "plain", accumulate, {"make": Worded, "embedding_rows": True}, timeout_seconds=300)


@pytest.mark.parametrize("mode", ["pipelined", "both"])
def test_what_users_do_on_three_ranks(ranks3: RankPool, mode: str) -> None:
    ranks3.run(_is_disturbed, 3, mode, 1, {}, timeout_seconds=300)


@pytest.mark.slow
@pytest.mark.inductor
@pytest.mark.parametrize("mode", MODES)
def test_what_users_do_between_steps_of_inductors(ranks2: RankPool, mode: str) -> None:
    ranks2.run(_is_disturbed, 4, mode, 1, {"backend": "inductor"}, timeout_seconds=900)


@pytest.mark.parametrize("mode", [m if m == "both" else pytest.param(m, marks=pytest.mark.slow) for m in MODES])
def test_what_users_do_between_updates_of_several_clipped_batches(ranks2: RankPool, mode: str) -> None:
    ranks2.run(_is_disturbed, 7, mode, 2, {"clip_grad_norm": 0.5}, timeout_seconds=300)
