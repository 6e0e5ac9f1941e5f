"""On a CUDA device: two gloo ranks that share one GPU. With NCCL: test_nccl.py.

What a CPU cannot show: streams, riders that are read one backward late, generated CUDA code, CUDA graphs, memory that
the caching allocator hands out again while a collective still reads it.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import Mlp, TokenModel, assert_gradients, expected_mean, row_batch, token_batch, wrappers
from test_models_collectives import Between, MeetsOthersWithTiedWeight
from torch import Tensor, nn

from compiled_ddp import EagerDDP, compile_ddp
from compiled_ddp.comm_hooks import PowerSGD, TopK, bf16_compress
from ranks import RankPool

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
BOTH = ("compile_ddp", "EagerDDP")
WRAPPERS: dict[str, Callable[..., nn.Module]] = {
    "EagerDDP": lambda model, **options: EagerDDP(model, **{"bucket_cap_mb": 0.01, **options}),
    "aot_eager": lambda model, **options: compile_ddp(
        model, **{"backend": "aot_eager", "bucket_cap_mb": 0.01, **options}
    ),
    "inductor": lambda model, **options: compile_ddp(model, **{"bucket_cap_mb": 0.01, **options}),
}


def tokens(rank: int, step: int) -> tuple[Tensor, ...]:
    return tuple(part.to(DEVICE) for part in token_batch(10 * step + rank))


def delayed(x: Tensor) -> Tensor:
    """Keep the stream busy, so that whoever does not wait for it reads too early."""
    if x.is_cuda:
        busy = torch.ones(4096, 4096, device=x.device)
        for _ in range(4):  # milliseconds
            busy = busy @ busy
    return x


def check(ddp: nn.Module, expected: dict[str, Tensor], **tolerance: float) -> None:
    assert_gradients(ddp.module, expected, **{"rtol": 1e-4, "atol": 1e-6, **tolerance})


# ---- steps -----------------------------------------------------------------------------------------------------------


def _steps(rank: int, wrapper: str) -> str:
    torch.manual_seed(0)
    ddp = WRAPPERS[wrapper](TokenModel().to(DEVICE))
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2)
    for step in range(6):
        batch = tokens(rank, step)
        expected = expected_mean(copy.deepcopy(ddp.module), lambda module: module(*batch))  # noqa: B023
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        delayed(ddp(*batch)).backward()
        check(ddp, expected)
        torch.nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
        optimizer.step()
    return str(ddp.explain())


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_steps_are_those_of_autograd_averaged_by_hand(ranks2: RankPool, wrapper: str) -> None:
    for explanation in ranks2.run(_steps, wrapper, timeout_seconds=300):
        assert "Proven to be reduced: 15 of 15" in explanation, explanation


def _accumulation(rank: int, wrapper: str) -> None:
    ddp = WRAPPERS[wrapper](TokenModel().to(DEVICE))
    for step in range(4):
        batches = [tokens(rank, 3 * step + n) for n in range(3)]
        expected = expected_mean(
            copy.deepcopy(ddp.module),
            lambda module: sum(module(*batch) for batch in batches),  # type: ignore[arg-type, return-value] # noqa: B023
        )
        ddp.zero_grad()
        with ddp.no_sync():
            for batch in batches[:-1]:
                delayed(ddp(*batch)).backward()
        ddp(*batches[-1]).backward()
        check(ddp, expected)


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_accumulation(ranks2: RankPool, wrapper: str) -> None:
    ranks2.run(_accumulation, wrapper, timeout_seconds=300)


def _kept(rank: int, wrapper: str) -> None:
    ddp = WRAPPERS[wrapper](Mlp().to(DEVICE))
    kept = []
    for step in range(5):
        ddp.zero_grad()
        delayed(ddp(row_batch(rank, step).to(DEVICE))).square().sum().backward()
        kept += [(p.grad, p.grad.clone()) for p in ddp.module.parameters()]
        assert all(torch.equal(gradient, copied) for gradient, copied in kept), f"after step {step}"


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_gradient_that_the_user_keeps_stays_what_it_was(ranks2: RankPool, wrapper: str) -> None:
    ranks2.run(_kept, wrapper, timeout_seconds=300)


class Branches(nn.Module):
    """`active` picks which parameters are used."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(5, 5) for _ in range(3))
        self.active = 0

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        x = torch.tanh(self.second(x)) if self.active else x
        return self.third(x) if self.active == 2 else x


def _unused(rank: int, wrapper: str) -> None:
    ddp = WRAPPERS[wrapper](Branches().to(DEVICE), bucket_cap_mb=1e-5)
    for step in range(8):
        ddp.module.active = (step + rank) % 3 if step else 2
        x = row_batch(rank, step).to(DEVICE)
        expected = expected_mean(copy.deepcopy(ddp.module), lambda module: module(x).square().sum())  # noqa: B023
        ddp.zero_grad(set_to_none=False)
        delayed(ddp(x)).square().sum().backward()
        for name, parameter in ddp.module.named_parameters():
            found = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            torch.testing.assert_close(found.double(), expected[name], rtol=1e-4, atol=1e-6, msg=f"step {step} {name}")


@pytest.mark.filterwarnings("ignore:gradients of")
@pytest.mark.parametrize("wrapper", ["EagerDDP", "aot_eager"])
def test_ranks_that_use_other_parameters(ranks2: RankPool, wrapper: str) -> None:
    ranks2.run(_unused, wrapper, timeout_seconds=300)


# ---- mixed precision, buffers, hooks ---------------------------------------------------------------------------------


def _autocast(rank: int, wrapper: str) -> None:
    torch.manual_seed(0)
    ddp, plain = WRAPPERS[wrapper](TokenModel().to(DEVICE)), None
    scaler = torch.amp.GradScaler(DEVICE, init_scale=1024.0)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in range(4):
        batch = tokens(rank, step)
        plain = copy.deepcopy(ddp.module)

        def loss(module: nn.Module) -> Tensor:
            with torch.autocast(DEVICE, torch.float16):
                return scaler.scale(module(*batch))  # noqa: B023

        expected = expected_mean(plain, loss)
        optimizer.zero_grad()
        loss(ddp).backward()
        check(ddp, expected, rtol=2e-2, atol=2e-1)  # fused kernels keep more digits; gradients are 1024 times as large
        scaler.step(optimizer)
        scaler.update()


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_float16_autocast_with_a_grad_scaler(ranks2: RankPool, wrapper: str) -> None:
    ranks2.run(_autocast, wrapper, timeout_seconds=300)


def _batch_norm(rank: int, wrapper: str) -> tuple[Tensor, ...]:
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.LazyLinear(4)).to(DEVICE)
    model(torch.randn(2, 3, 8, 8, device=DEVICE))
    ddp = WRAPPERS[wrapper](model)
    for step in range(3):
        x = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(10 * step + rank)).to(DEVICE)
        ddp.zero_grad()
        ddp(x).square().sum().backward()
    ddp(x)  # brings rank 0's buffers
    return tuple(tensor.cpu() for tensor in (*(p.grad for p in ddp.parameters()), model[0].weight))


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_convolutions_and_batch_norm(ranks2: RankPool, wrapper: str) -> None:
    first, second = ranks2.run(_batch_norm, wrapper, timeout_seconds=300)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def _hooked(rank: int, wrapper: str, hook: Any, tolerance: float) -> None:
    ddp = WRAPPERS[wrapper](TokenModel().to(DEVICE), comm_hook=hook)
    batch = tokens(rank, 0)
    expected = expected_mean(copy.deepcopy(ddp.module), lambda module: module(*batch))
    total = {name: torch.zeros_like(mean) for name, mean in expected.items()}
    for _ in range(16):  # what compression leaves out comes in later steps
        ddp.zero_grad()
        delayed(ddp(*batch)).backward()
        for name, parameter in ddp.module.named_parameters():
            assert parameter.grad is not None
            total[name] += parameter.grad
    found, wanted = (torch.cat([part.flatten() for part in parts.values()]) for parts in (total, expected))
    assert (found / 16 - wanted).norm() < tolerance * wanted.norm()


@pytest.mark.parametrize("wrapper", ["EagerDDP", "aot_eager", "inductor"])
@pytest.mark.parametrize(
    ("hook", "tolerance"),
    [(bf16_compress, 0.01), (PowerSGD(rank=2), 0.6), (TopK(0.5), 0.3)],
    ids=["bf16", "powersgd", "topk"],
)
def test_compression(ranks2: RankPool, wrapper: str, hook: Any, tolerance: float) -> None:
    ranks2.run(_hooked, wrapper, hook, tolerance, timeout_seconds=300)


# ---- streams ---------------------------------------------------------------------------------------------------------


class TwoStreams(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(64, 64), nn.Linear(64, 64)
        self.streams = [torch.cuda.Stream(), torch.cuda.Stream()]

    def forward(self, x: Tensor) -> Tensor:
        here, parts = torch.cuda.current_stream(), []
        for stream, layer in zip(self.streams, (self.left, self.right), strict=True):
            stream.wait_stream(here)
            with torch.cuda.stream(stream):
                parts.append(delayed(layer(x)))
            here.wait_stream(stream)
        return parts[0] + parts[1]


def _two_streams(rank: int) -> None:
    ddp = EagerDDP(TwoStreams().to(DEVICE))
    for step in range(10):
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(10 * step + rank)).to(DEVICE)
        expected = expected_mean(ddp.module, lambda module: module(x).square().sum())  # noqa: B023
        ddp.zero_grad()
        ddp(x).square().sum().backward()
        check(ddp, expected, atol=1e-4)


def test_parts_of_a_model_on_streams_of_their_own(ranks2: RankPool) -> None:
    ranks2.run(_two_streams)


def _backward_on_another_stream(rank: int, wrapper: str) -> None:
    ddp, stream = WRAPPERS[wrapper](TokenModel().to(DEVICE)), torch.cuda.Stream()
    for step in range(5):
        batch = tokens(rank, step)
        expected = expected_mean(copy.deepcopy(ddp.module), lambda module: module(*batch))  # noqa: B023
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            ddp.zero_grad()
            delayed(ddp(*batch)).backward()
        torch.cuda.current_stream().wait_stream(stream)
        check(ddp, expected)


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_step_on_a_stream_of_its_own(ranks2: RankPool, wrapper: str) -> None:
    ranks2.run(_backward_on_another_stream, wrapper, timeout_seconds=300)


# ---- collectives of the model's own ----------------------------------------------------------------------------------


def _meets_others(rank: int, wrapper: str) -> None:
    for model in (Between(), MeetsOthersWithTiedWeight()):
        ddp = wrappers(BOTH)[wrapper](model.to(DEVICE))
        for number in range(6):
            if isinstance(model, MeetsOthersWithTiedWeight):
                model.active = number % 2 == 0 or rank == number % 3 % 2
            x = row_batch(rank, number).to(DEVICE)
            expected = expected_mean(copy.deepcopy(ddp.module), lambda module: module(x))  # noqa: B023
            ddp.zero_grad()
            ddp(x).backward()
            check(ddp, expected)


@pytest.mark.filterwarnings("ignore:gradients of")
@pytest.mark.parametrize("wrapper", BOTH)
def test_models_that_communicate(ranks2: RankPool, wrapper: str) -> None:
    ranks2.run(_meets_others, wrapper, timeout_seconds=300)
