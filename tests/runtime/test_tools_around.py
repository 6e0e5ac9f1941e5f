"""torch's own tools around a wrapper: torch.export, compiled autograd, torch.utils.checkpoint of both kinds.

torch.compile around steps is tested in test_compiled_steps.py, where a backward that torch would trace is refused.
"""

import contextlib
from typing import Any

import pytest
import torch
from models import Mlp, assert_gradients, assert_step, mean_by_hand, row_batch, wrappers
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from compiled_ddp import torch_private
from ranks import RankPool

BOTH = ("compile_ddp", "EagerDDP")


def wrapped(wrapper: str) -> Any:
    return wrappers([wrapper])[wrapper](Mlp())


def loss_of(module: nn.Module, x: Tensor) -> Tensor:
    return module(x).square().sum()


# ---- torch.export ----------------------------------------------------------------------------------------------------


class Step(nn.Module):
    def __init__(self, ddp: nn.Module) -> None:
        super().__init__()
        self.ddp = ddp

    def forward(self, x: Tensor) -> Tensor:
        loss = loss_of(self.ddp, x)
        loss.backward()
        return loss.detach()


def _exported(rank: int, wrapper: str, strict: bool) -> None:
    ddp = wrapped(wrapper)
    for number in range(2):  # before the first step, and after one
        x = row_batch(rank, number)
        for what in (ddp, Step(ddp)):
            for grad in (True, False):
                with torch.set_grad_enabled(grad), pytest.raises(Exception, match=r"compiled_ddp|wrapper\.module"):
                    torch.export.export(what, (x,), strict=strict)
        program = torch.export.export(ddp.module, (x,), strict=strict)
        torch.testing.assert_close(program.module()(x), ddp.module(x))
        assert_step(ddp, lambda module: loss_of(module, x))  # noqa: B023


@pytest.mark.parametrize("strict", [False, True], ids=["not strict", "strict"])
@pytest.mark.parametrize("wrapper", BOTH)
def test_an_export_of_a_wrapper_is_refused_and_of_the_wrapped_model_is_right(
    ranks2: RankPool, wrapper: str, strict: bool
) -> None:
    ranks2.run(_exported, wrapper, strict)


# ---- compiled autograd -----------------------------------------------------------------------------------------------


def _switched_on(rank: int, wrapper: str) -> None:
    """It is on while what runs is compiled, which a backward outside of that is not."""
    with torch._dynamo.config.patch(compiled_autograd=True):
        ddp = wrapped(wrapper)
        for number in range(3):
            assert_step(ddp, lambda module: loss_of(module, row_batch(rank, number)))  # noqa: B023


@pytest.mark.parametrize("wrapper", BOTH)
def test_a_step_that_is_not_compiled_is_right_with_compiled_autograd_switched_on(
    ranks2: RankPool, wrapper: str
) -> None:
    ranks2.run(_switched_on, wrapper)


def _on_one_rank(rank: int, wrapper: str) -> str:
    ddp = wrapped(wrapper)
    assert_step(ddp, lambda module: loss_of(module, row_batch(rank)))
    ddp.zero_grad()
    loss = loss_of(ddp, row_batch(rank, 1))
    traced = torch_private.for_tests.compiled_autograd("eager") if rank == 1 else contextlib.nullcontext()
    with traced, pytest.raises(RuntimeError) as raised:
        loss.backward()
    ddp.abandon_backward()  # the refusing rank takes part with zeros, and the other one is told
    ddp.zero_grad()
    assert_step(ddp, lambda module: loss_of(module, row_batch(rank, 2)))
    return str(raised.value)


@pytest.mark.parametrize("wrapper", BOTH)
def test_compiled_autograd_on_one_rank_is_an_error_on_every_rank(ranks2: RankPool, wrapper: str) -> None:
    others, refused = ranks2.run(_on_one_rank, wrapper)
    assert "torch._dynamo.config.compiled_autograd" in refused
    assert "broke off on 1 other rank(s) and was not reduced" in others


# ---- torch.utils.checkpoint ------------------------------------------------------------------------------------------


def _checkpointed(rank: int, wrapper: str, reentrant: bool, ranks: tuple[int, ...]) -> None:
    ddp = wrapped(wrapper)

    def around(x: Tensor) -> Tensor:
        return checkpoint(ddp, x, use_reentrant=reentrant).square().sum() if rank in ranks else loss_of(ddp, x)

    for number in range(4):
        first, second = (row_batch(rank, 2 * number + which).requires_grad_() for which in range(2))
        micro_batches = (first, second) if number % 2 else (second,)
        total = mean_by_hand(ddp, lambda module: sum(loss_of(module, x) for x in micro_batches))  # noqa: B023
        ddp.zero_grad()
        if number % 2:
            with ddp.no_sync():
                around(first).backward()
        around(second).backward()
        assert_gradients(ddp.module, total, atol=1e-6)


@pytest.mark.parametrize(
    ("reentrant", "ranks"),
    [(False, (0, 1)), (False, (0,)), (True, (0, 1))],
    ids=["not reentrant", "not reentrant, on one rank", "reentrant"],
)
@pytest.mark.parametrize("wrapper", BOTH)
def test_a_wrapper_in_a_checkpoint_of_either_kind_is_averaged(
    ranks2: RankPool, wrapper: str, reentrant: bool, ranks: tuple[int, ...]
) -> None:
    ranks2.run(_checkpointed, wrapper, reentrant, ranks)


def _reentrant_on_one_rank(rank: int, wrapper: str) -> None:
    with pytest.raises(RuntimeError, match="averaged gradients of different steps"):
        _checkpointed(rank, wrapper, True, (0,))


@pytest.mark.parametrize("wrapper", BOTH)
def test_a_reentrant_checkpoint_on_one_rank_alone_is_an_error_on_every_rank(ranks2: RankPool, wrapper: str) -> None:
    """Its forward runs without gradients first, which counts as evaluation does: as no step."""
    ranks2.run(_reentrant_on_one_rank, wrapper)
