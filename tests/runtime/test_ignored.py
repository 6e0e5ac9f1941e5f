"""Parameters and buffers to ignore: neither broadcast nor reduced nor compared between ranks."""

import copy
from typing import Any

import pytest
import torch
from models import (
    Mlp,
    assert_equal_on_all_ranks,
    gradient_copies,
    local_gradients,
    mean_over_ranks,
    row_batch,
    wrappers,
)
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ranks import RankPool

BOTH = ("compile_ddp", "EagerDDP")


class WithOwnParts(Mlp):
    """Every rank has a table of its own length, a scale and a running sum of its own."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((8,), 1.0 + rank))
        self.table = nn.Embedding(4 + rank, 8)
        self.tied = self.table  # two names for the same parameter
        self.register_buffer("own_sum", torch.full((2,), float(rank)))
        self.register_buffer("shared_sum", torch.full((2,), float(rank)))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x)) * self.scale + self.table(torch.arange(4))
        return self.head(self.norm(hidden)).square().sum()


OWN = ("scale", "table.weight", "tied.weight", "own_sum", "no.such.name")


def _assert_step(ddp: Any, rank: int, step: int, own: set[str]) -> None:
    x = row_batch(rank, step)
    local = local_gradients(copy.deepcopy(ddp.module), lambda module: module(x))
    mean = mean_over_ranks({name: g for name, g in local.items() if name not in own}, _without(ddp.module, own))
    ddp.zero_grad()
    ddp(x).backward()
    for name, gradient in gradient_copies(ddp.module).items():
        expected = local[name] if name in own else mean[name].float()
        torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


def _without(module: nn.Module, own: set[str]) -> nn.Module:
    """The other parameters, in the same order on every rank."""
    rest = nn.Module()
    named = [(name, parameter) for name, parameter in module.named_parameters() if name not in own]
    rest.named_parameters = lambda: iter(named)  # type: ignore[method-assign, assignment]
    return rest


def _ignored(rank: int, wrapper: str) -> None:
    model = WithOwnParts(rank)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, OWN)
    ddp = wrappers([wrapper])[wrapper](model)
    assert_equal_on_all_ranks(ddp.first.weight.tolist())
    assert ddp.scale[0].item() == 1.0 + rank and len(ddp.table.weight) == 4 + rank
    for step in range(3):
        _assert_step(ddp, rank, step, {"scale", "table.weight"})
    assert ddp.own_sum.tolist() == [rank, rank] and ddp.shared_sum.tolist() == [0, 0]
    assert {section.origin for section in ddp.plan.sections} == {"graph" if wrapper == "compile_ddp" else "hooks"}
    assert ddp.explain().left_alone == ("scale", "table.weight")
    assert "wrapper inside: scale, table.weight." in str(ddp.explain())
    assert not any("scale" in row[4] or "table" in row[4] for row in ddp.explain().rows)
    ddp.module.table = nn.Embedding(5, 8)  # nothing of the wrapper's: it may be replaced, and frozen on one rank
    ddp.table.weight.requires_grad_(rank == 0)
    ddp.zero_grad()
    ddp(row_batch(rank)).backward()
    assert_equal_on_all_ranks(ddp.first.weight.grad.tolist())
    assert (ddp.table.weight.grad is None) == (rank != 0)


@pytest.mark.parametrize("wrapper", BOTH)
def test_ignored_parameters_and_buffers_stay_local_and_unscaled(ranks3: RankPool, wrapper: str) -> None:
    ranks3.run(_ignored, wrapper)


class EqualBlocks(nn.Module):
    """One captured graph serves all blocks, also those with parameters to ignore."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
            torch._dynamo.graph_break()
        return x.square().sum()


def _equal_blocks(rank: int) -> None:
    for own in ({"blocks.0.weight"}, {"blocks.1.weight", "blocks.1.bias"}, {"blocks.2.bias"}):
        torch._dynamo.reset()
        model = EqualBlocks()
        model._ddp_params_and_buffers_to_ignore = [*own, ".weight"]
        ddp = wrappers(["compile_ddp"])["compile_ddp"](model)
        for step in range(3):
            _assert_step(ddp, rank, step, own)
        ddp.unwrap()


@pytest.mark.filterwarnings("ignore:gradients of")
def test_a_graph_that_also_serves_ignored_parameters_reduces_the_others(ranks2: RankPool) -> None:
    ranks2.run(_equal_blocks)


def _nothing_left(rank: int, wrapper: str) -> None:
    model = nn.Linear(5, 3)
    model._ddp_params_and_buffers_to_ignore = [".weight", ".bias"]  # as DDP's documentation has them
    with pytest.raises(ValueError, match="requires a gradient besides those to ignore"):
        wrappers([wrapper])[wrapper](model)


@pytest.mark.parametrize("wrapper", BOTH)
def test_a_model_of_which_everything_is_ignored_is_refused(ranks2: RankPool, wrapper: str) -> None:
    ranks2.run(_nothing_left, wrapper)


def _other_names(rank: int) -> None:
    model = Mlp()
    model._ddp_params_and_buffers_to_ignore = ["head.bias"] if rank == 1 else []
    with pytest.raises(RuntimeError, match=r"head\.bias"):
        wrappers(["EagerDDP"])["EagerDDP"](model)


def test_ranks_that_ignore_different_parameters_are_refused(ranks2: RankPool) -> None:
    ranks2.run(_other_names)
