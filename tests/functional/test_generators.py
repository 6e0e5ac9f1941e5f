"""Explicit generators in a compiled step: the numbers and states of the eager one, in whatever way it gets them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_grad import assert_same, loss, parameters, rows
from torch import Tensor
from torch.func import vmap

from compiled_ddp import functional as ddp
from compiled_ddp.functional.random_state import operator_of_state
from ranks import RankPool

LIMITS = {"timeout_seconds": 400, "collective_timeout_seconds": 120}
BACKENDS = ["aot_eager", pytest.param("inductor", marks=pytest.mark.inductor)]

Tree = dict[str, Tensor]


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def noisy(params: Tree, x: Tensor, *generators: torch.Generator) -> Tensor:
    """Draws of several kinds, one of which nobody reads, and two equal ones in a row."""
    for generator in generators:
        x = x + torch.randn(x.shape, generator=generator) * torch.empty_like(x).bernoulli_(0.5, generator=generator)
        torch.rand(7, generator=generator)
        x = x[torch.randperm(len(x), generator=generator)] * torch.rand(x.shape, generator=generator)
        x = x + torch.rand(x.shape, generator=generator) + torch.normal(x.detach(), 1.0, generator=generator)
    return loss(params, x)


def assert_draws_alike(make: Callable[[], Callable[..., Any]], rank: int, backend: Any, *seeds: int) -> None:
    """Three steps, compiled and eager, each on generators of its own: the same results and states."""
    states = []
    results = []
    for compiles in (False, True):
        step = make()
        step = ddp.compile(step, backend=backend) if compiles else step
        generators = [seeded(seed) for seed in seeds]
        results.append([step(parameters(), rows(rank), *generators) for _ in range(3)])
        states.append([generator.get_state() for generator in generators])
    for eager, compiled in zip(*results, strict=True):
        assert_same(compiled, eager)
    assert not torch.equal(results[0][0]["bias"], results[0][1]["bias"])
    for eager, compiled in zip(*states, strict=True):
        assert torch.equal(eager, compiled)


def _arguments(rank: int, backend: Any) -> None:
    assert_draws_alike(lambda: ddp.grad(noisy), rank, backend, 3 + rank, 5)


def _closed_over(rank: int, backend: Any) -> None:
    def make() -> Callable[..., Any]:
        generator, gradient = seeded(rank), ddp.grad(noisy)
        return lambda params, x, given: gradient(params, x, generator, given)

    assert_draws_alike(make, rank, backend, 1)


def _made_within(rank: int, backend: Any) -> None:
    def make() -> Callable[..., Any]:
        gradient = ddp.grad(noisy)
        return lambda params, x, given: gradient(params, x, seeded(7), given)

    assert_draws_alike(make, rank, backend, 1)


def _of_each_rank(rank: int, backend: Any) -> None:
    def private(params: Tree, x: Tensor, generator: torch.Generator) -> Tensor:
        return noisy(params, x, ddp.fold_in_rank(generator), ddp.fold_in_rank(generator), generator)

    assert_draws_alike(lambda: ddp.grad(private), rank, backend, 1)


def _below_transforms(rank: int, backend: Any) -> None:
    def each(params: Tree, x: Tensor, generator: torch.Generator) -> Tensor:
        own = ddp.fold_in_rank(generator)
        drawn = vmap(lambda row: row + torch.randn(row.shape, generator=own), randomness="different")(x)
        return loss(params, vmap(lambda row: row + torch.randn(5, generator=own), randomness="same")(drawn))

    assert_draws_alike(lambda: ddp.grad(each), rank, backend, 1)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", [_arguments, _closed_over, _made_within, _of_each_rank, _below_transforms])
def test_a_compiled_step_draws_as_the_eager_one(ranks2: RankPool, case: Any, backend: str) -> None:
    ranks2.run(case, backend, **LIMITS)


# ---- the default generator -------------------------------------------------------------------------------------------


def with_draws(params: Tree, x: Tensor) -> Tensor:
    first = torch.rand_like(x)
    x = torch.rand_like(x) * x + first
    return loss(params, torch.nn.functional.dropout(x, 0.3))


def _by_the_default_generator(rank: int, backend: str) -> None:
    gradient = ddp.grad(with_draws)
    run = ddp.compile(lambda params, x: gradient(params, x), backend=backend)
    for step in range(3):  # the first ones are verified
        torch.manual_seed(10 * step + rank)
        found = run(parameters(), rows(rank, step))
        torch.manual_seed(10 * step + rank)
        expected = gradient(parameters(), rows(rank, step))
        if backend == "aot_eager":
            assert_same(found, expected)
        assert all(bool(value.isfinite().all()) for value in found.values())


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_compiled_step_may_draw_from_the_default_generator(ranks2: RankPool, backend: str) -> None:
    """Under aot_eager the numbers of the eager step; other ones under Inductor, as with torch.compile."""
    ranks2.run(_by_the_default_generator, backend, **LIMITS)


# ---- which generator it is -------------------------------------------------------------------------------------------


def drawing(generator: torch.Generator, x: Tensor) -> Tensor:
    return x + torch.rand(3, generator=generator)


def test_a_step_is_traced_once_for_all_generators_that_it_is_given() -> None:
    traces = []

    def step(generator: torch.Generator, x: Tensor) -> Any:
        traces.append(1)
        return drawing(generator, x), generator

    compiled = ddp.compile(step, backend="aot_eager")
    for seed in range(3):
        generator = seeded(seed)
        found, same = compiled(generator, torch.zeros(3))
        assert same is generator
        assert torch.equal(found, torch.rand(3, generator=seeded(seed)))
    assert len(traces) == 1


def test_one_generator_that_is_given_twice_advances_twice() -> None:
    step = ddp.compile(lambda one, other, x: drawing(one, x) - drawing(other, x), backend="aot_eager")
    zeros = torch.zeros(3)
    assert torch.equal(step(seeded(0), seeded(0), zeros), zeros)
    both = seeded(0)
    assert not torch.equal(step(both, both, zeros), zeros)


def test_a_generator_that_is_closed_over_may_be_an_argument_too() -> None:
    kept = seeded(0)
    step = ddp.compile(lambda given, x: drawing(given, x) - drawing(kept, x), backend="aot_eager")
    zeros = torch.zeros(3)
    assert torch.equal(step(seeded(0), zeros), zeros)
    kept.manual_seed(0)
    assert not torch.equal(step(kept, zeros), zeros)
    kept.manual_seed(0)
    assert torch.equal(step(seeded(0), zeros), zeros)


def test_generators_that_a_graph_could_not_follow_are_refused() -> None:
    def seeds(generator: torch.Generator, x: Tensor) -> Tensor:
        return drawing(generator, x) + drawing(generator.manual_seed(3), x)

    with pytest.raises(RuntimeError, match="given another state within a compiled step"):
        ddp.compile(seeds, backend="aot_eager")(seeded(0), torch.zeros(3))
    with pytest.raises(TypeError, match="returns a generator that is none of its arguments"):
        ddp.compile(lambda x: (x, seeded(0)), backend="aot_eager")(torch.zeros(3))
    with pytest.raises(RuntimeError, match="draw without out="):
        operator_of_state(torch.ops.aten.rand.generator_out)
