"""What stands around steps, on the device whose streams run late: compression, checkpoints, hooks, joins, errors.

Each is right whatever comes late, and has no race by order alone.
"""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import second_device
import torch
from models import assert_equal_on_all_ranks, expected_mean, row_batch
from stream_steps import (
    BOTH,
    DEVICE,
    LATE,
    Branches,
    accumulating,
    are_right,
    current_stream,
    gradients,
    loss_of,
    on_cpu,
    one,
    wrapped,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from compiled_ddp.comm_hooks import PowerSGD, bf16_compress, fp16_compress
from ranks import RankPool

SGD = torch.optim.SGD


@contextlib.contextmanager
def late(seed: int) -> Iterator[None]:
    """Kernels in here start late, and must have no race."""
    with second_device.delays(seed, **LATE), second_device.looking_for_races() as races:
        yield
    assert not races, (len(races), [str(race) for race in races[:6]])


def _steps(
    rank: int, ddp: Any, number: int, step_of: Callable[..., Any] = one, *, model: Any = Branches, rtol: float = 1e-4
) -> None:
    optimizer = SGD(ddp.parameters(), lr=0.05)
    for step in range(number):
        bare = on_cpu(ddp, model)
        with late(step):
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            expected = expected_mean(bare, step_of(rank, ddp, step))
            assert are_right(gradients(ddp), expected, rtol=rtol, atol=rtol / 10), step
            optimizer.step()


# ---- compression -----------------------------------------------------------------------------------------------------


def _compressed(rank: int, library: Path, wrapper: str, hook: str) -> None:
    hooks = {"bf16": bf16_compress, "fp16": fp16_compress}
    ddp = wrapped(library, wrapper, comm_hook=hooks[hook])
    _steps(rank, ddp, 3, rtol=0.1 if hook == "bf16" else 0.01)
    _steps(rank, ddp, 2, accumulating, rtol=0.1 if hook == "bf16" else 0.01)


@pytest.mark.parametrize("hook", ["bf16", "fp16"])
@pytest.mark.parametrize("wrapper", BOTH)
def test_gradients_are_compressed(twin_ranks2: RankPool, twins_library: Path, wrapper: str, hook: str) -> None:
    twin_ranks2.run(_compressed, twins_library, wrapper, hook)


def _power_sgd(rank: int, library: Path, wrapper: str) -> None:
    """Two collectives for a bucket, with state from step to step: as the same steps without delays."""
    results = []
    for delayed in (False, True):
        ddp = wrapped(library, wrapper, comm_hook=PowerSGD())
        optimizer = SGD(ddp.parameters(), lr=0.05)
        for step in range(3):
            with late(step) if delayed else contextlib.nullcontext():
                optimizer.zero_grad()
                one(rank, ddp, step)
                results.append(gradients(ddp))
                optimizer.step()
    for quiet, delayed in zip(results[:3], results[3:], strict=True):
        assert are_right(delayed, {name: gradient.double() for name, gradient in quiet.items()})


@pytest.mark.parametrize("wrapper", BOTH)
def test_power_sgd_is_what_it_is_without_delays(twin_ranks2: RankPool, twins_library: Path, wrapper: str) -> None:
    twin_ranks2.run(_power_sgd, twins_library, wrapper)


# ---- models ----------------------------------------------------------------------------------------------------------


class Checkpointed(Branches):
    """Computes its left branch again in backward."""

    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.stem(x))
        left = checkpoint(self.left, x, use_reentrant=self.reentrant)
        return self.head(left + self.right(x))


class ReentrantlyCheckpointed(Checkpointed):
    reentrant = True


CHECKPOINTED = {"not reentrant": Checkpointed, "reentrant": ReentrantlyCheckpointed}


def _checkpointed(rank: int, library: Path, wrapper: str, kind: str) -> None:
    model = CHECKPOINTED[kind]
    _steps(rank, wrapped(library, wrapper, model), 3, model=model)


@pytest.mark.parametrize("kind", CHECKPOINTED)
@pytest.mark.parametrize("wrapper", BOTH)
def test_models_with_checkpoints_inside(twin_ranks2: RankPool, twins_library: Path, wrapper: str, kind: str) -> None:
    twin_ranks2.run(_checkpointed, twins_library, wrapper, kind)


def _hooked(rank: int, library: Path, wrapper: str) -> None:
    """A hook of the user's doubles the local gradient, another one sees .grad when it has been accumulated."""
    ddp, seen = wrapped(library, wrapper), []
    ddp.module.head.weight.register_hook(lambda gradient: gradient * 2)
    ddp.module.head.bias.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad.cpu()))
    for step in range(3):
        bare = on_cpu(ddp)
        with late(step):
            ddp.zero_grad()
            expected = expected_mean(bare, one(rank, ddp, step))
            expected["head.weight"] *= 2
            assert are_right(gradients(ddp), expected), step
        assert torch.equal(seen[-1], gradients(ddp)["head.bias"])
    assert len(seen) == 3


@pytest.mark.parametrize("wrapper", BOTH)
def test_hooks_of_the_users_see_what_they_see_elsewhere(
    twin_ranks2: RankPool, twins_library: Path, wrapper: str
) -> None:
    twin_ranks2.run(_hooked, twins_library, wrapper)


# ---- loops -----------------------------------------------------------------------------------------------------------


def _joined(rank: int, library: Path, wrapper: str) -> None:
    """Rank 1 has two batches more: rank 0 counts as zeros meanwhile."""
    ddp = wrapped(library, wrapper, verify="always")
    optimizer, bare = SGD(ddp.parameters(), lr=0.05), on_cpu(ddp)
    with late(1), ddp.join():
        for step in range(2 + 2 * rank):
            optimizer.zero_grad()
            one(rank, ddp, step)
            optimizer.step()
    by_hand = SGD(bare.parameters(), lr=0.05)
    for step in range(4):
        trains = step < 2 + 2 * rank

        def loss(module: nn.Module, step: int = step, trains: bool = trains) -> Tensor:
            return loss_of(module, row_batch(rank, step)) * float(trains)

        for name, mean in expected_mean(bare, loss).items():
            bare.get_parameter(name).grad = mean.float()
        by_hand.step()
    found = {name: value.cpu() for name, value in ddp.module.named_parameters()}
    assert are_right(found, {name: value.detach().double() for name, value in bare.named_parameters()})
    assert_equal_on_all_ranks({name: value.tolist() for name, value in found.items()})


@pytest.mark.parametrize("wrapper", BOTH)
def test_ranks_with_fewer_batches_count_as_zeros(twin_ranks2: RankPool, twins_library: Path, wrapper: str) -> None:
    twin_ranks2.run(_joined, twins_library, wrapper)


ARMED: list[int] = []


@torch.library.custom_op("compiled_ddp_stream_tests::pass_on", mutates_args=())
def pass_on(x: Tensor) -> Tensor:
    return x.clone()


@torch.library.custom_op("compiled_ddp_stream_tests::pass_back", mutates_args=())
def pass_back(gradient: Tensor) -> Tensor:
    if ARMED:
        ARMED.pop()
        raise ArithmeticError("planted")
    return gradient.clone()


pass_on.register_fake(torch.empty_like)
pass_back.register_fake(torch.empty_like)
pass_on.register_autograd(lambda ctx, gradient: pass_back(gradient))


class Breaking(Branches):
    """Its backward may raise half-way."""

    def forward(self, x: Tensor) -> Tensor:
        x = pass_on(torch.tanh(self.stem(x)))
        return self.head(self.left(x) + self.right(x))


def _broken(rank: int, library: Path, wrapper: str) -> None:
    """On rank 1 a backward raises; the error is told there, and the steps after it are right on both ranks."""
    ddp = wrapped(library, wrapper, Breaking)
    _steps(rank, ddp, 2, model=Breaking)
    with late(7):
        ddp.zero_grad()
        if rank == 1:
            ARMED.append(1)
            with pytest.raises(ArithmeticError, match="planted"):
                one(rank, ddp, 7)
            ddp.abandon_backward()  # lets the other rank go on
        else:
            with contextlib.suppress(RuntimeError):  # told of it now or one backward later
                one(rank, ddp, 7)
        assert not ARMED
        ddp.zero_grad()
        with contextlib.suppress(RuntimeError):
            one(rank, ddp, 8)
    _steps(rank, ddp, 3, model=Breaking)


@pytest.mark.parametrize("wrapper", BOTH)
def test_a_backward_that_raises_on_one_rank(twin_ranks2: RankPool, twins_library: Path, wrapper: str) -> None:
    twin_ranks2.run(_broken, twins_library, wrapper)


def _verified(rank: int, library: Path, wrapper: str) -> str:
    ddp = wrapped(library, wrapper, verify="always")
    _steps(rank, ddp, 3)
    return str(ddp.explain())


@pytest.mark.parametrize("wrapper", BOTH)
def test_every_step_is_verified(twin_ranks2: RankPool, twins_library: Path, wrapper: str) -> None:
    for explanation in twin_ranks2.run(_verified, twins_library, wrapper):
        assert "Proven to be reduced: 12 of 12 parameters" in explanation


def _optimizer_elsewhere(rank: int, library: Path, wrapper: str) -> None:
    """On a stream of its own, for which the next forward waits."""
    ddp, stream = wrapped(library, wrapper), torch.Stream(torch.device(DEVICE))
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01)
    bare = on_cpu(ddp)
    by_hand = torch.optim.AdamW(bare.parameters(), lr=0.01)
    for step in range(3):
        with late(step):
            optimizer.zero_grad(set_to_none=False)
            expected = expected_mean(bare, one(rank, ddp, step))
            stream.wait_stream(current_stream())
            with stream:
                optimizer.step()
            current_stream().wait_stream(stream)
        for name, mean in expected.items():
            bare.get_parameter(name).grad = mean.float()
        by_hand.step()
    found = {name: value.cpu() for name, value in ddp.module.named_parameters()}
    assert are_right(found, {name: value.detach().double() for name, value in bare.named_parameters()}, atol=1e-4)


@pytest.mark.parametrize("wrapper", BOTH)
def test_an_optimizer_on_another_stream(twin_ranks2: RankPool, twins_library: Path, wrapper: str) -> None:
    twin_ranks2.run(_optimizer_elsewhere, twins_library, wrapper)
