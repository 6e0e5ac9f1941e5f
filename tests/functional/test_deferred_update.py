"""compile_step(pipeline_updates=True) alone: parameters and the optimizer's state wait for the update of a call."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import test_whole_step as whole
import torch
from test_sharded_step import Breaking
from test_whole_step import assert_same, batch, both
from torch import Tensor, nn

from compiled_ddp import compile_step
from ranks import RankPool

BUCKETS = {"pipeline_updates": True, "bucket_cap_mb": 0.0001}


def state_of(step: Any) -> list[Tensor]:
    return [each for own in step.optimizer.state.values() for each in own.values()]


def is_behind(step: Any) -> bool:
    return {type(each) for each in state_of(step)}.isdisjoint({Tensor})


# ---- whoever reads the optimizer's state has it ----------------------------------------------------------------------

READINGS: dict[str, Callable[[Any], Any]] = {
    "a count of steps": lambda step: state_of(step)[0].item(),
    "a norm": lambda step: nn.utils.get_total_norm(state_of(step)),
    "state_dict": lambda step: step.optimizer.state_dict(),
    "load_state_dict": lambda step: step.optimizer.load_state_dict(copy.deepcopy(step.optimizer.state_dict())),
    "deepcopy": lambda step: copy.deepcopy(step.optimizer),
    "pickle": lambda step: pickle.dumps(step.optimizer),
    "save": lambda step: torch.save(step.optimizer.state, io.BytesIO()),
    "printing": lambda step: repr(step.optimizer.state),
    "a parameter": lambda step: step.model.scale.item(),
    "flush": lambda step: step.flush(),
}


def _lands(rank: int) -> None:
    step, loop = both("AdamW", **BUCKETS)
    for n, (name, read) in enumerate(READINGS.items()):
        step(*batch(rank, n)), loop.step(*batch(rank, n))
        assert is_behind(step), name
        assert [each.shape for each in state_of(step)] and is_behind(step), "shapes are told without"
        read(step)
        assert not is_behind(step), name
        assert {type(each) for each in step.model.parameters()} == {nn.Parameter}
        for found, value in zip(state_of(step), state_of(loop), strict=True):
            torch.testing.assert_close(found, value, msg=name)
    assert_same(step, loop)


def test_whatever_reads_the_optimizers_state_awaits_all(ranks2: RankPool) -> None:
    ranks2.run(_lands)


def _is_of_its_own_step(rank: int) -> None:
    """What is changed behind a call is not that call's: the learning rate, the state, and what is loaded into it."""
    step, loop = both("AdamW", **BUCKETS)

    def change(n: int, optimizer: torch.optim.Optimizer) -> None:
        (group, *_) = optimizer.param_groups
        if n in (1, 2):
            group["lr"] *= 3.0
        if n == 3:
            optimizer.state.clear()
        if n == 4:
            group["weight_decay"] = 0.0  # another graph
        if n == 5:
            optimizer.load_state_dict(saved[optimizer])
        if n == 6:
            group["params"].pop()
        saved[optimizer] = copy.deepcopy(optimizer.state_dict())

    saved: dict[torch.optim.Optimizer, Any] = {}
    for n in range(9):
        torch.testing.assert_close(step(*batch(rank, n)), loop.step(*batch(rank, n)), rtol=1e-5, atol=1e-6)
        for optimizer in (step.optimizer, loop.optimizer):
            change(n, optimizer)
        if n == 7:  # for a moment only, as a schedule that is written by hand
            for optimizer in (step.optimizer, loop.optimizer):
                optimizer.param_groups[0]["lr"] *= 0.5
    assert_same(step, loop)


def test_what_changes_behind_a_call_is_not_that_calls(ranks2: RankPool) -> None:
    ranks2.run(_is_of_its_own_step)


# ---- what goes wrong -------------------------------------------------------------------------------------------------


def _raises_in_backward(rank: int, kind: str) -> None:
    """When the update of the step before has been made, bucket by bucket: it is not made twice, and nothing is torn."""
    step, loop = both(kind, Breaking, pipeline_updates=True, bucket_cap_mb=0.0)
    good, bad = torch.tensor(False), torch.tensor(rank == 1)
    for n in range(5):
        if n in (0, 2, 3):
            with pytest.raises((RuntimeError, ValueError), match="a kernel has raised"):
                step(*batch(rank, n), bad)
        if n == 3:
            assert_same(step, loop)
        step(*batch(rank, n), good), loop.step(*batch(rank, n), good)
    assert_same(step, loop)


@pytest.mark.parametrize("kind", ["SGD", "AdamW"])
def test_a_backward_that_raises_leaves_the_update_before_it(ranks2: RankPool, kind: str) -> None:
    ranks2.run(_raises_in_backward, kind)


class Raising(torch.autograd.Function):
    """Its argument, unless it `fails`."""

    @staticmethod
    def forward(x: Tensor, fails: Tensor) -> Any:
        return torch.ops.compiled_ddp_tests.raising(x, fails)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return *gradients, None


class BreakingAhead(Breaking):
    """Raises in its forward, between its two layers, where it `fails`."""

    def forward(self, x: Tensor, y: Tensor, fails: Tensor) -> Tensor:
        hidden = Raising.apply(torch.tanh(self.first(x)), fails)
        return nn.functional.mse_loss(self.second(hidden).squeeze(1), y)


def _raises_in_forward(rank: int) -> None:
    """When some buckets of the update have been made, and others have not."""
    step, loop = both("AdamW", BreakingAhead, pipeline_updates=True, bucket_cap_mb=0.0)
    good, bad = torch.tensor(False), torch.tensor(rank == 1)
    for n in range(4):
        if n == 2:
            with pytest.raises((RuntimeError, ValueError), match="a kernel has raised"):
                step(*batch(rank, n), bad)
            assert_same(step, loop)
        step(*batch(rank, n), good), loop.step(*batch(rank, n), good)
    assert_same(step, loop)


def test_a_forward_that_raises_between_two_buckets_leaves_the_update_whole(ranks2: RankPool) -> None:
    ranks2.run(_raises_in_forward)


# ---- what is there besides -------------------------------------------------------------------------------------------


def _rescales_rows(rank: int) -> None:
    """Each rank updates whole rows."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(6, 4, max_norm=0.5), nn.Linear(4, 1))
    other = copy.deepcopy(model)
    rows, found = torch.tensor([1, 2, 5]), []
    for net, options in ((model, {"pipeline_updates": True}), (other, {})):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        step = compile_step(net, optimizer, lambda net, rows: net(rows).mean(), backend="aot_eager", **options)
        found.append(torch.stack([step(rows) for _ in range(4)]))
    assert torch.equal(*found) and all(map(torch.equal, model.parameters(), other.parameters()))


def test_rows_that_a_forward_rescales_are_those_of_the_loop(ranks2: RankPool) -> None:
    ranks2.run(_rescales_rows)


def _tells(rank: int) -> str:
    step, _ = both("AdamW", **BUCKETS)
    step(*batch(rank, 0))
    return str(step.explain())


def test_it_is_told_that_the_next_call_makes_the_update(ranks2: RankPool) -> None:
    assert "The update is made by the next call" in ranks2.run(_tells)[0]


def _is_alone(rank: int) -> None:
    """A group of one rank has nothing under way."""
    alone = [torch.distributed.new_group([each]) for each in range(2)][rank]
    with whole.stepping_with(pipeline_updates=True):
        step, loop = both("AdamW", process_group=alone)
    for n in range(3):
        step(*batch(0, n))
        loop.step(*batch(0, n))
        assert not is_behind(step)
    assert_same(step, loop)


def test_one_rank_alone_updates_in_its_own_step(ranks2: RankPool) -> None:
    ranks2.run(_is_alone)
