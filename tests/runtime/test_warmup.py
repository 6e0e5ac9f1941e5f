"""ddp.warmup: everything is compiled before the first step, and nothing else has happened."""

import contextlib
import logging
import warnings
from typing import Any

import pytest
import torch
from models import (
    Mlp,
    TokenModel,
    assert_equal_on_all_ranks,
    assert_gradients,
    expected_mean,
    row_batch,
    token_batch,
    wrappers,
)
from torch import Tensor, nn

from compiled_ddp import EagerDDP, compile_ddp, torch_private
from ranks import RankPool

LIMITS = {"timeout_seconds": 400, "collective_timeout_seconds": 120}  # ranks wait for each other's compiler


class Several(nn.Module):
    """Graph breaks, a graph without parameters, running statistics, dropout and nested outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)

    def forward(self, x: Tensor, *, twice: bool = False) -> dict[str, Any]:
        hidden = nn.functional.dropout(self.norm(self.first(x)), 0.5, self.training)
        torch._dynamo.graph_break()
        hidden = torch.sin(hidden).exp()
        torch._dynamo.graph_break()
        return {"loss": [(self.second(hidden) * (2 if twice else 1)).square().sum()], "nothing": None}


class Two(nn.Module):
    """Two graphs, with as few kernels for a C++ compiler as that takes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor, *, twice: bool) -> dict[str, Any]:
        hidden = torch.tanh(self.first(x))
        torch._dynamo.graph_break()
        return {"loss": [(self.second(hidden) * (2 if twice else 1)).sum()], "nothing": None}


def _total(outputs: dict[str, Any]) -> Tensor:
    return outputs["loss"][0]


def _steps_after_warmup(rank: int, backend: str, dynamic: bool | None) -> list[int]:
    """Compilations after the warm-up, and after each of the steps: plain, local and folding."""
    sizes = {"bucket_cap_mb": 0.0001, "first_bucket_mb": 0.0001, "smallest_graph_mb": 0}
    model = Two() if backend == "inductor" else Several()
    ddp = compile_ddp(model, backend=backend, dynamic=dynamic, warmup_chooses=False, **sizes)
    ddp.warmup(row_batch(rank), twice=True)
    compilations = [torch_private.for_tests.compilations()]
    for step in range(2):
        for synchronised in (True, False, True):
            with contextlib.nullcontext() if synchronised else ddp.no_sync():
                _total(ddp(row_batch(rank, step), twice=True)).backward()
            compilations.append(torch_private.for_tests.compilations())
        ddp.zero_grad()
    assert {section.origin for section in ddp.plan.sections} == {"graph"}
    return compilations


@pytest.mark.parametrize(
    ("backend", "dynamic"),
    [("aot_eager", None), ("aot_eager", True), pytest.param("inductor", None, marks=pytest.mark.inductor)],
)
def test_the_steps_after_a_warmup_compile_nothing(ranks2: RankPool, backend: str, dynamic: bool | None) -> None:
    for compilations in ranks2.run(_steps_after_warmup, backend, dynamic, **LIMITS):
        assert len(set(compilations)) == 1, compilations


def _three_steps(rank: int) -> list[int]:
    ddp = wrappers(["compile_ddp"])["compile_ddp"](Several())
    compilations = []
    for step in range(8):
        _total(ddp(row_batch(rank, step))).backward()
        ddp.zero_grad()
        compilations.append(torch_private.for_tests.compilations())
    return compilations


def test_nothing_is_compiled_after_three_steps_without_warmup(ranks2: RankPool) -> None:
    for compilations in ranks2.run(_three_steps):
        assert len(set(compilations[2:])) == 1, compilations


def _state(module: nn.Module) -> dict[str, Any]:
    return {
        "tensors": {name: tensor.clone() for name, tensor in module.state_dict().items()},
        "gradients": {name: p.grad if p.grad is None else p.grad.clone() for name, p in module.named_parameters()},
        "objects": [id(tensor) for tensor in (*module.parameters(), *module.buffers())],
        "random": torch.get_rng_state(),
    }


def _assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    torch.testing.assert_close(found["tensors"], expected["tensors"], rtol=0, atol=0)
    for name, gradient in expected["gradients"].items():
        same = found["gradients"][name] is None if gradient is None else found["gradients"][name].equal(gradient)
        assert same, name
    assert found["objects"] == expected["objects"]
    assert found["random"].equal(expected["random"])


def _changes_nothing(rank: int, training: bool, existing_gradients: bool) -> None:
    ddp = wrappers(["compile_ddp"])["compile_ddp"](Several()).train(training)
    ddp.module.norm.running_mean += rank  # nothing may be broadcast
    if existing_gradients:
        for parameter in ddp.parameters():
            parameter.grad = torch.full_like(parameter, 1.0 + rank)
    before = _state(ddp.module)
    ddp.warmup(row_batch(rank))
    _assert_same(_state(ddp.module), before)
    assert ddp.plan is None


@pytest.mark.parametrize("existing_gradients", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_a_warmup_leaves_state_gradients_and_random_numbers_alone(
    ranks2: RankPool, training: bool, existing_gradients: bool
) -> None:
    ranks2.run(_changes_nothing, training, existing_gradients)


def _training_is_the_same(rank: int) -> None:
    """Warm-ups on one rank's other shapes, between steps, and between a forward and its backward."""
    ddp = wrappers(["compile_ddp"])["compile_ddp"](Mlp())
    for step in range(3):
        x = row_batch(rank, step)
        expected = expected_mean(ddp.module, lambda module: module(x).square().sum())  # noqa: B023
        ddp.warmup(torch.randn(3 + step + rank, 5))
        loss = ddp(x).square().sum()
        ddp.warmup(x)
        with torch.no_grad():
            ddp.warmup(x)
        loss.backward()
        assert_gradients(ddp.module, expected)
        ddp.zero_grad()
    assert {section.origin for section in ddp.plan.sections} == {"graph"}
    assert_equal_on_all_ranks(ddp.plan.fingerprint)


def test_steps_around_warmups_are_right_and_counted_once(ranks2: RankPool) -> None:
    ranks2.run(_training_is_the_same)


def _one_rank_needs_its_graph_twice(rank: int) -> None:
    ddp = wrappers(["compile_ddp"])["compile_ddp"](TokenModel())
    batch = token_batch(rank)
    expected = expected_mean(ddp.module, lambda module: module(*batch))
    ddp(*batch).backward(retain_graph=rank == 0)
    ddp.zero_grad()
    ddp.warmup(*batch)
    before = torch_private.for_tests.compilations()
    for retain_graph in (True, False):
        ddp(*batch).backward(retain_graph=retain_graph and rank == 0)
        assert_gradients(ddp.module, expected)
        ddp.zero_grad()
    assert torch_private.for_tests.compilations() == before


def test_a_warmup_compiles_what_a_rank_that_keeps_its_graphs_needs(ranks2: RankPool) -> None:
    ranks2.run(_one_rank_needs_its_graph_twice)


class Messages(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(record.getMessage())


def _messages(rank: int) -> list[str]:
    ddp = wrappers(["compile_ddp"])["compile_ddp"](Several())
    logger, handler = logging.getLogger("compiled_ddp.graph.warmup"), Messages()
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    for _ in range(2):
        ddp.warmup(row_batch(rank))
    logger.removeHandler(handler)
    return [message.rpartition(", ")[0] for message in handler.found]


def test_rank_zero_tells_what_it_compiles(ranks2: RankPool) -> None:
    first, second = ranks2.run(_messages)
    variants = ("local", "synchronised", "folding")
    assert first == [
        "warm-up: the forward",
        *(f"warm-up: graph 1 of 2 (4 gradients), {variant} backward" for variant in variants),
        *(f"warm-up: graph 2 of 2 (2 gradients), {variant} backward" for variant in variants),
        "warm-up: backward of a graph without trained parameters",
        "warm-up: the forward",
    ]
    assert second == []


# ---- errors ----------------------------------------------------------------------------------------------------------


def _one_rank_fails(rank: int) -> None:
    ddp = wrappers(["compile_ddp"])["compile_ddp"](Mlp())
    if rank == 1:
        with pytest.raises(TypeError, match="linear"):
            ddp.warmup("no tensor")
    else:
        with pytest.raises(RuntimeError, match=r"warmup\(\) failed on rank 1: TypeError: .*linear"):
            ddp.warmup(row_batch(rank))
    ddp.warmup(row_batch(rank))
    expected = expected_mean(ddp.module, lambda module: module(row_batch(rank)).square().sum())
    ddp(row_batch(rank)).square().sum().backward()
    assert_gradients(ddp.module, expected)


def test_a_warmup_that_fails_on_one_rank_is_an_error_on_all_and_can_be_repeated(ranks2: RankPool) -> None:
    ranks2.run(_one_rank_fails)


def _one_rank_stays_away(rank: int) -> None:
    ddp = wrappers(["compile_ddp"])["compile_ddp"](Mlp())
    if rank == 0:
        with pytest.raises(RuntimeError, match=r"waited 3 s for rank 1 \(to end its warm-up\)"):
            ddp.warmup(row_batch(rank))


def test_a_rank_that_stays_away_from_a_warmup_is_named(ranks2: RankPool) -> None:
    ranks2.run(_one_rank_stays_away, collective_timeout_seconds=3.0)


def _unwrapped(rank: int, wrapper: str) -> None:
    ddp = wrappers([wrapper])[wrapper](Mlp())
    ddp.unwrap()
    with pytest.raises(RuntimeError, match="has been unwrapped"):
        ddp.warmup(row_batch(rank))


@pytest.mark.parametrize("wrapper", ["compile_ddp", "EagerDDP"])
def test_a_warmup_of_an_unwrapped_wrapper_is_refused(ranks2: RankPool, wrapper: str) -> None:
    ranks2.run(_unwrapped, wrapper)


class Forbidden(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        raise AssertionError("EagerDDP has run a forward to warm up")


def _eager(rank: int) -> None:
    EagerDDP(Forbidden(2, 2)).warmup(torch.randn(2, 2))


def test_a_warmup_of_an_eager_wrapper_runs_nothing(ranks2: RankPool) -> None:
    ranks2.run(_eager)


def _in_hooks_mode(rank: int) -> None:
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setenv("COMPILED_DDP_MODE", "hooks")
        ddp = wrappers(["compile_ddp"])["compile_ddp"](Several())
        ddp.warmup(row_batch(rank))
        before = torch_private.for_tests.compilations()
        for step in range(2):
            _total(ddp(row_batch(rank, step))).backward()
        assert torch_private.for_tests.compilations() == before


def test_hooks_mode_is_warmed_up_too(ranks2: RankPool) -> None:
    ranks2.run(_in_hooks_mode)
