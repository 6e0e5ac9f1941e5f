"""Several backwards of one forward through captured graphs: retain_graph=True."""

import pytest
import torch
from models import Mlp, assert_gradients, expected_mean, local_gradients, mean_over_ranks, row_batch
from torch import Tensor, nn

from compiled_ddp import compile_ddp, torch_private
from ranks import RankPool

LIMITS = {"timeout_seconds": 400, "collective_timeout_seconds": 120}  # ranks wait for each other's compiler

BACKENDS = ["aot_eager", pytest.param("inductor", marks=pytest.mark.inductor)]
LONG = ["aot_eager", pytest.param("inductor", marks=[pytest.mark.inductor, pytest.mark.slow])]


def loss_of(module: nn.Module, x: Tensor) -> Tensor:
    return module(x).square().sum()


def _wrap(model: nn.Module, backend: str) -> nn.Module:
    return compile_ddp(model, backend=backend, bucket_cap_mb=0.0001, first_bucket_mb=0.0001, smallest_graph_mb=0)


def _times(mean: dict[str, Tensor], factor: float) -> dict[str, Tensor]:
    return {name: factor * value for name, value in mean.items()}


def _assert_close(ddp: nn.Module, expected: dict[str, Tensor]) -> None:
    assert_gradients(ddp.module, expected, rtol=1e-4, atol=1e-6)


def _every_variant(rank: int, backend: str) -> list[int]:
    """Compilations before and after each use of a graph that is kept."""
    ddp = _wrap(Mlp(), backend)
    x, other = row_batch(rank), row_batch(rank, step=1)
    mean = expected_mean(ddp.module, lambda module: loss_of(module, x))
    loss_of(ddp, x).backward()  # compiled as usual
    ddp.zero_grad()
    compilations = [torch_private.for_tests.compilations()]
    for _ in range(2):
        loss = loss_of(ddp, x)
        loss.backward(retain_graph=True)
        _assert_close(ddp, mean)
        loss.backward(retain_graph=True)  # folds the first one's mean in
        _assert_close(ddp, _times(mean, 2))
        loss.backward()
        _assert_close(ddp, _times(mean, 3))
        ddp.zero_grad()
        compilations.append(torch_private.for_tests.compilations())
    for _ in range(2):
        gradients = local_gradients(ddp.module, lambda module: loss_of(module, other))
        local = {name: gradient.double() for name, gradient in gradients.items()}
        with ddp.no_sync():
            loss = loss_of(ddp, other)
        loss.backward(retain_graph=True)
        _assert_close(ddp, local)
        loss.backward()
        _assert_close(ddp, _times(local, 2))
        total = {name: 2 * value for name, value in mean_over_ranks(local, ddp.module).items()}
        loss = loss_of(ddp, x)
        loss.backward(retain_graph=True)
        _assert_close(ddp, {name: total[name] + mean[name] for name in mean})
        loss.backward()
        _assert_close(ddp, {name: total[name] + 2 * mean[name] for name in mean})
        ddp.zero_grad()
        compilations.append(torch_private.for_tests.compilations())
    assert {section.origin for section in ddp.plan.sections} == {"graph"}
    return compilations


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_variant_is_compiled_again_once_and_right(ranks2: RankPool, backend: str) -> None:
    counts = ranks2.run(_every_variant, backend, **LIMITS)
    if backend == "inductor":
        return  # whose caches, shared by the ranks, decide how much there is to compile
    for before, first, second, with_local, again in counts:
        assert first == before + 2, "the backwards synchronised and folding"
        assert second == first
        assert with_local == second + 1, "the local one"
        assert again == with_local


def _rank_one_keeps_its_graph(rank: int, backend: str) -> list[int]:
    ddp = _wrap(Mlp(), backend)
    compilations = []
    for step in range(3):
        x = row_batch(rank, step)
        mean = expected_mean(ddp.module, lambda module: loss_of(module, x))  # noqa: B023
        loss_of(ddp, x).backward(retain_graph=step > 0 and rank == 1)
        _assert_close(ddp, mean)
        ddp.zero_grad()
        compilations.append(torch_private.for_tests.compilations())
    return compilations


def test_only_the_rank_that_keeps_its_graph_compiles_again(ranks2: RankPool) -> None:
    (first, *others), (first_of_one, *others_of_one) = ranks2.run(_rank_one_keeps_its_graph, "aot_eager")
    assert others == [first, first]
    assert others_of_one == [first_of_one + 1] * 2


class WithoutParametersAtItsEnd(nn.Module):
    """Its second graph has no parameter, and saves tensors of its own for backward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.linear(x))
        torch._dynamo.graph_break()
        return torch.sigmoid(torch.sin(x).exp()).square().sum()


@pytest.mark.inductor
def test_one_rank_may_keep_its_graph_under_inductor(ranks2: RankPool) -> None:
    ranks2.run(_rank_one_keeps_its_graph, "inductor", **LIMITS)


def _graph_without_parameters(rank: int, backend: str) -> list[int]:
    ddp = _wrap(WithoutParametersAtItsEnd(), backend)
    x = row_batch(rank)
    mean = expected_mean(ddp.module, lambda module: module(x))
    ddp(x).backward()
    compilations = []
    for _ in range(2):
        ddp.zero_grad()
        loss = ddp(x)
        loss.backward(retain_graph=True)
        loss.backward()
        _assert_close(ddp, _times(mean, 2))
        compilations.append(torch_private.for_tests.compilations())
    return compilations


@pytest.mark.parametrize("backend", LONG)
def test_a_graph_without_parameters_is_compiled_again_too(ranks2: RankPool, backend: str) -> None:
    for first, second in ranks2.run(_graph_without_parameters, backend, **LIMITS):
        assert first == second


def _in_the_first_backward(rank: int) -> None:
    ddp = _wrap(Mlp(), "aot_eager")
    x = row_batch(rank)
    mean = expected_mean(ddp.module, lambda module: loss_of(module, x))
    loss = loss_of(ddp, x)
    loss.backward(retain_graph=True)
    _assert_close(ddp, mean)
    loss.backward()
    _assert_close(ddp, _times(mean, 2))
    assert {section.origin for section in ddp.plan.sections} == {"graph"}


def test_the_first_backward_may_keep_its_graph(ranks2: RankPool) -> None:
    ranks2.run(_in_the_first_backward)
