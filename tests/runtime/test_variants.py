"""Which backward of a graph runs is decided when it starts, whatever the graph was compiled for."""

import contextlib

import pytest
import torch
from models import TokenModel, assert_gradients, local_gradients, mean_over_ranks, token_batch, wrappers
from torch import Tensor, nn

from compiled_ddp import compile_ddp, torch_private
from ranks import RankPool


def _accumulates(rank: int, dynamic: bool | None, autocast: bool) -> None:
    """Local and synchronised backwards over changing shapes; a local one comes first."""
    ddp = compile_ddp(TokenModel(), backend="aot_eager", dynamic=dynamic, bucket_cap_mb=0.002, first_bucket_mb=0.001)
    total: dict[str, Tensor] = {}
    for step in range(7):
        x, y = token_batch(10 * step + rank, batch=2 + step % 3)

        def loss(module: nn.Module) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                return module(x, y)  # noqa: B023

        local = local_gradients(ddp.module, loss)
        total = {name: gradient + total.get(name, 0) for name, gradient in local.items()}
        synchronised = step in (1, 4, 5)
        with contextlib.nullcontext() if synchronised else ddp.no_sync():
            loss(ddp).backward()
        if synchronised:
            assert_gradients(ddp.module, mean_over_ranks(total, ddp.module), rtol=1e-4, atol=1e-6)
            ddp.zero_grad()
            total = {}
    assert {section.origin for section in ddp.plan.sections} == {"graph"}
    assert not ddp.explain().fallback_reasons


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dynamic", [None, True])
def test_accumulates_over_changing_shapes_and_under_autocast(
    ranks2: RankPool, dynamic: bool | None, autocast: bool
) -> None:
    ranks2.run(_accumulates, dynamic, autocast)


def _captures(rank: int) -> list[int]:
    """How many graphs Dynamo has captured after each step of local, synchronised and folding backwards."""
    ddp = wrappers(["compile_ddp"])["compile_ddp"](TokenModel())
    captured = []
    for _ in range(3):
        for synchronised in (False, True, True):
            with contextlib.nullcontext() if synchronised else ddp.no_sync():
                ddp(*token_batch(rank)).backward()
            captured.append(torch_private.for_tests.compiler_counters()["stats"]["unique_graphs"])
    return captured


def test_a_backward_variant_captures_nothing_anew(ranks2: RankPool) -> None:
    for captured in ranks2.run(_captures):
        assert len(set(captured)) == 1, captured
