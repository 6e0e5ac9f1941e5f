"""Users set torch.set_default_dtype and torch.set_default_device: nothing of the wrappers' own follows them.

A model that was made before keeps its dtype and device, and so do its gradients; the default device here is "meta", on
which anything that forgot to name its device would have no values.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from models import assert_gradients, assert_step, local_gradients, mean_over_ranks, wrappers
from torch import Tensor, nn

from compiled_ddp import verify_parity
from compiled_ddp.comm_hooks import PowerSGD, TopK, bf16_compress
from compiled_ddp.compat.apex import DistributedDataParallel as ApexDDP
from compiled_ddp.compat.apex import Reducer
from ranks import RankPool

BOTH = ("compile_ddp", "EagerDDP")
DEFAULTS = ("float64", "bfloat16", "meta")
STEPS = 18  # the forward count passes what bfloat16 holds exactly of its square


class Net(nn.Module):
    """Layers of float32, one of float64, and a parameter that is used in some steps only."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(5, 6), nn.Linear(6, 2)
        self.wide = nn.Linear(6, 6, dtype=torch.float64)
        self.rare = nn.Linear(6, 6)
        self.register_buffer("seen", torch.zeros(()))
        self.uses_rare = False

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1.0
        x = torch.tanh(self.first(x))
        x = x + self.wide(x.double()).float()
        return self.head(self.rare(x) if self.uses_rare else x).square().sum()


@contextmanager
def defaults(name: str) -> Iterator[None]:
    if name == "meta":
        with torch.device("meta"):
            yield
        return
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, name))
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def batches(rank: int) -> list[Tensor]:
    return [torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * n + rank)) for n in range(STEPS)]


def _trains(rank: int, wrapper: str, name: str) -> None:
    model, data = Net(), batches(rank)
    unused = [f"rare.{n}" for n, _ in model.rare.named_parameters()]
    with defaults(name):
        ddp = wrappers([wrapper])[wrapper](model, piggyback=("tokens",))
        for step, x in enumerate(data):
            ddp.module.uses_rare = step in (5, 6)
            with ddp.no_sync():
                ddp(x).backward()
            ddp.piggyback(tokens=3 + rank)
            assert_step(ddp, lambda module, x=x: module(x), unused=[] if ddp.module.uses_rare else unused)
            assert ddp.piggybacked["tokens"] == 7
            if step == 8:
                ddp.skip_step()
        assert "pending" not in str(ddp.explain()).replace("pending: rare", "")
        with ddp.join():
            for x in data[: 2 + rank]:
                ddp(x).backward()
        ddp.unwrap()


@pytest.mark.parametrize("name", DEFAULTS)
@pytest.mark.parametrize("wrapper", BOTH)
def test_every_step_is_right_under_any_defaults(ranks2: RankPool, wrapper: str, name: str) -> None:
    ranks2.run(_trains, wrapper, name)


def _weighs(rank: int, wrapper: str, name: str) -> None:
    model, (x, *_) = nn.Linear(5, 2), batches(rank)
    weight = 257.0 + 2 * rank  # bfloat16 has 8 bits
    local = local_gradients(copy.deepcopy(model), lambda module: module(x).square().sum())
    summed = mean_over_ranks({key: g.double() * weight for key, g in local.items() if g is not None}, model)
    expected = {key: 2 * total / (257.0 + 259.0) for key, total in summed.items()}
    with defaults(name):
        ddp = wrappers([wrapper])[wrapper](model, reduction="weighted", check_steps="off", init_sync=False)
        ddp.set_weight(weight)
        ddp(x).square().sum().backward()
    assert_gradients(ddp.module, expected)
    ddp.unwrap()


@pytest.mark.parametrize("name", DEFAULTS)
@pytest.mark.parametrize("wrapper", BOTH)
def test_weights_keep_their_precision_under_any_defaults(ranks2: RankPool, wrapper: str, name: str) -> None:
    ranks2.run(_weighs, wrapper, name)


def _with_hooks_and_others(rank: int, name: str) -> None:
    data = batches(rank)
    with defaults(name):
        for hook in (bf16_compress, TopK(1.0), PowerSGD(6)):
            for wrapper in wrappers(BOTH).values():
                with torch.device("cpu"):
                    model = nn.Sequential(nn.Linear(5, 5, dtype=torch.float32), nn.Tanh())
                ddp = wrapper(model, comm_hook=hook)
                local = local_gradients(copy.deepcopy(model), lambda module: module(data[0]).square().sum())
                expected = mean_over_ranks(local, model)
                ddp(data[0]).square().sum().backward()
                assert_gradients(ddp.module, expected, rtol=0.05, atol=0.1)
                ddp.unwrap()
        with torch.device("cpu"):
            embedding = nn.Embedding(9, 3, sparse=True, dtype=torch.float32)
            model = nn.Sequential(embedding, nn.Linear(3, 2, dtype=torch.float32))
        for wrapper in wrappers(BOTH).values():
            ddp = wrapper(model)
            ddp(torch.tensor([rank, 2, 2], device="cpu")).sum().backward()
            assert embedding.weight.grad is not None and embedding.weight.grad.dtype == torch.float32
            assert embedding.weight.grad.to_dense().abs().sum(1).bool().tolist() == [True] * 3 + [False] * 6
            ddp.unwrap()
            model.zero_grad()
        apex = ApexDDP(model[1], gradient_predivide_factor=2.0, allreduce_always_fp32=True)
        apex(data[0][:, :3]).sum().backward()
        Reducer(model[1]).reduce()
        apex.unwrap()


@pytest.mark.parametrize("name", DEFAULTS)
def test_communication_hooks_sparse_gradients_and_apex_under_any_defaults(ranks2: RankPool, name: str) -> None:
    ranks2.run(_with_hooks_and_others, name)


def _verifies(rank: int, name: str) -> float:
    model, (x, *_) = Net(), batches(rank)
    with defaults(name):
        wrap = wrappers(["compile_ddp"])["compile_ddp"]
        return verify_parity(model, (x,), wrap=wrap).largest


@pytest.mark.parametrize("name", DEFAULTS)
def test_parity_is_verified_under_any_defaults(ranks2: RankPool, name: str) -> None:
    for largest in ranks2.run(_verifies, name):
        assert largest < 1e-4
