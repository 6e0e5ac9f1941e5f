"""Several graphs in one backward: those too small for an all-reduce of their own leave their gradients to hooks."""

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
from models import assert_gradients, assert_step, expected_mean
from torch import Tensor, nn

from compiled_ddp import compile_ddp, torch_private
from compiled_ddp.plan import TOO_SMALL
from ranks import RankPool

WIDTH = 64


class Part(nn.Module):
    """A graph of its own in `Parts`."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.linear(x)).view(len(x), -1, WIDTH).mean(1)


class Parts(nn.Module):
    """Parts of these widths, one after another, of which `skipped` ones are left out."""

    def __init__(self, *widths: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList(map(Part, widths))
        self.skipped = set[int]()

    def forward(self, x: Tensor) -> Tensor:
        for number, part in enumerate(self.parts):
            if number not in self.skipped:
                x = self.run(part, x)
        return x.square().mean()

    @torch.compiler.disable(recursive=False)
    def run(self, part: nn.Module, x: Tensor) -> Tensor:
        return part(x)


SMALL = (WIDTH, WIDTH, WIDTH, WIDTH)
WITH_A_LARGE_ONE = (WIDTH, WIDTH, 64 * WIDTH, WIDTH)  # 1 MiB of gradients, between two small graphs and one


def batch(rank: int, step: int) -> Callable[[nn.Module], Tensor]:
    rows = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))
    return lambda module: module(rows)


def described(ddp: nn.Module) -> list[tuple[str, str, list[int]]]:
    """Origin, reason and which parts, of each launched section."""
    return [
        (section.origin, section.reason, sorted({index // 2 for index in section.plan.indices}))
        for section in ddp.plan.launched
    ]


def collectives_of(ddp: nn.Module) -> int:
    """How many collectives the wrapper has launched."""
    return torch_private.groups.collectives_launched(ddp._runtime.communicator.group)


def _train(
    rank: int, widths: tuple[int, ...], skips: dict[tuple[int, int], set[int]]
) -> tuple[list[tuple[str, str, list[int]]], list[int], str]:
    """`skips` maps (rank, step) to the parts that are skipped; returns the plan, collectives a step, explain()."""
    torch.manual_seed(0)
    ddp = compile_ddp(Parts(*widths), backend="aot_eager", strict=True, verify="off")
    collectives = []
    for step in range(5):
        ddp.module.skipped = skips.get((rank, step), set())
        before = collectives_of(ddp)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert_step(ddp, batch(rank, step))
        collectives.append(collectives_of(ddp) - before)
    return described(ddp), collectives, str(ddp.explain())


def test_several_small_graphs_share_a_bucket_and_strict_does_not_raise(ranks2: RankPool) -> None:
    for plan, collectives, explained in ranks2.run(_train, SMALL, {}):
        assert plan == [("hooks", TOO_SMALL, [0, 1, 2, 3])]
        assert collectives[1:] == [1, 1, 1, 1]
        assert TOO_SMALL in explained


def test_of_one_large_and_several_small_graphs_the_large_one_alone_has_a_section(ranks2: RankPool) -> None:
    for plan, collectives, _ in ranks2.run(_train, WITH_A_LARGE_ONE, {}):
        assert plan == [("graph", "", [2]), ("hooks", TOO_SMALL, [0, 1, 3])]
        assert collectives[1:] == [2, 2, 2, 2]


@pytest.mark.parametrize("widths", [SMALL, WITH_A_LARGE_ONE], ids=["small ones", "one large"])
def test_a_rank_may_skip_small_graphs(ranks2: RankPool, widths: tuple[int, ...]) -> None:
    skips = {(1, 0): {1}, (1, 2): {0, 3}, (0, 3): {3}}
    for plan, collectives, _ in ranks2.run(_train, widths, skips):
        assert len(plan) == len(set(widths))
        assert collectives[1:] == [len(plan)] * 4


def test_one_small_graph_alone_keeps_its_section(ranks2: RankPool) -> None:
    for plan, _, _ in ranks2.run(_train, (WIDTH,), {}):
        assert plan == [("graph", "", [0])]


def _accumulate(rank: int, widths: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    ddp = compile_ddp(Parts(*widths), backend="aot_eager", strict=True)
    for step in range(3):
        twin = copy.deepcopy(ddp.module)
        losses = [batch(rank, 10 * step + number) for number in range(3)]
        expected = expected_mean(twin, lambda module, all_of=losses: sum(loss(module) for loss in all_of))
        ddp.zero_grad()
        with ddp.no_sync():
            for loss in losses[:2]:
                loss(ddp).backward()
        losses[2](ddp).backward()
        assert_gradients(ddp.module, expected)


@pytest.mark.parametrize("widths", [SMALL, WITH_A_LARGE_ONE], ids=["small ones", "one large"])
def test_gradients_accumulated_under_no_sync_are_averaged(ranks2: RankPool, widths: tuple[int, ...]) -> None:
    ranks2.run(_accumulate, widths)
