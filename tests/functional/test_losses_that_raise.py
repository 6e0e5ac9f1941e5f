"""Ranks that raise, or stay away, while others wait in a collective of their loss: told to all."""

import os
import time
from typing import Any

import pytest
import torch
from test_grad import assert_same, by_hand, loss, parameters, rows
from test_ranks_that_differ import TIMEOUT, assert_told, in_way, refused
from torch import Tensor

from compiled_ddp import functional as ddp
from ranks import RankError, RankPool

Tree = dict[str, Tensor]

WAYS = ("eager", "compiled")
# The way of each rank: the first calls are eager where they differ.
ALL_WAYS = [("eager",) * 3, ("compiled",) * 3, ("compiled", "eager", "compiled")]


class Normalised:
    """A loss with two collectives, in which one rank may be told to raise; with the gradients of one process."""

    def __init__(self) -> None:
        self.raises_at: int | None = None

    def __call__(self, params: Tree, x: Tensor) -> Tensor:
        self._raise(0)
        features = x @ params["first"] + params["bias"]
        mean = ddp.all_reduce(features.mean(0))
        self._raise(1)
        variance = ddp.all_reduce((features - mean).square().mean(0))
        self._raise(2)
        return (torch.tanh((features - mean) / (variance + 1).sqrt()) @ params["head"]).square().mean()

    def _raise(self, place: int) -> None:
        if self.raises_at == place:
            raise ValueError("no batch")


def of_one_process(world_size: int, number: int = 4) -> Tree:
    every = torch.cat([rows(r)[:number] for r in range(world_size)])

    def alone(params: Tree) -> Tensor:
        features = every @ params["first"] + params["bias"]
        mean = features.mean(0)
        variance = (features - mean).square().mean(0)
        return (torch.tanh((features - mean) / (variance + 1).sqrt()) @ params["head"]).square().mean()

    found: Tree = torch.func.grad(alone)(parameters())
    return found


# ---- ranks that raise ------------------------------------------------------------------------------------------------


def _raises(rank: int, ways: tuple[str, ...], place: int, calls_before: int) -> str:
    f = Normalised()
    gradient = ddp.grad(f, bucket_cap_mb=0)
    step, expected = in_way(ways[rank], gradient), of_one_process(3)

    def assert_right() -> None:
        if len(set(ways)) > 1:
            assert_same(gradient(parameters(), rows(rank)), expected)
        for _ in range(2):
            assert_same(step(parameters(), rows(rank)), expected)

    if calls_before:
        assert_right()
    if rank == 1:
        f.raises_at = place
        step = in_way(ways[rank], gradient)  # which is traced again
    message = refused(lambda: step(parameters(), rows(rank)))
    f.raises_at = None
    assert_right()
    return message


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize(("ways", "calls_before"), [*((ways, 1) for ways in ALL_WAYS), *((w, 0) for w in ALL_WAYS[:2])])
def test_a_rank_that_raises_reaches_those_that_wait_in_their_loss(
    ranks3: RankPool, ways: tuple[str, ...], place: int, calls_before: int
) -> None:
    assert_told(ranks3.run(_raises, ways, place, calls_before, **TIMEOUT))


class RaisesBackward(torch.autograd.Function):
    """The identity; its derivative raises where it is told to."""

    raises = False

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: object, output: object) -> None:
        """Keeps nothing."""

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Tensor:
        if RaisesBackward.raises:
            raise ValueError("no batch")
        return cotangent


def _raises_backward(rank: int) -> str:
    """The others have launched a bucket, which fails too, and wait for an adjoint."""

    def centred(params: Tree, x: Tensor) -> Tensor:
        features = x @ params["first"] + params["bias"]
        centred = torch.tanh(features - ddp.all_reduce(features.mean(0)))
        return (RaisesBackward.apply(centred) @ params["head"]).square().mean()

    gradient = ddp.grad(centred, bucket_cap_mb=0)
    step = gradient if rank == 1 else ddp.compile(gradient, backend="aot_eager")
    expected = gradient(parameters(), rows(rank))
    for _ in range(2):
        assert_same(step(parameters(), rows(rank)), expected)
    RaisesBackward.raises = rank == 1
    message = refused(lambda: step(parameters(), rows(rank)))
    RaisesBackward.raises = False
    assert_same(gradient(parameters(), rows(rank)), expected)
    for _ in range(2):
        assert_same(step(parameters(), rows(rank)), expected)
    return message


def test_what_a_graph_has_launched_when_it_fails_is_not_waited_for_later(ranks3: RankPool) -> None:
    assert_told(ranks3.run(_raises_backward, **TIMEOUT))


def _raises_around_a_gradient(rank: int, ways: tuple[str, ...], place: int, calls_before: int) -> str:
    """The others wait in a gradient function that the loss calls: an inner step on the mean of all ranks."""
    inner, raises_at = ddp.grad(loss), [-1]

    def outer(params: Tree, x: Tensor) -> Tensor:
        if raises_at[0] == 0:
            raise ValueError("no batch")
        gradients = inner(params, x)
        if raises_at[0] == 1:
            raise ValueError("no batch")
        return loss({name: value - 0.01 * gradients[name] for name, value in params.items()}, x)

    gradient = ddp.grad(outer)
    step = in_way(ways[rank], gradient)
    means = {name: value.float() for name, value in by_hand(loss, 3).items()}

    def of_rank(params: Tree, r: int) -> Tensor:
        mean = torch.func.grad(lambda p: (loss(p, rows(0)) + loss(p, rows(1)) + loss(p, rows(2))) / 3)(params)
        return loss({name: value - 0.01 * mean[name] for name, value in params.items()}, rows(r))

    expected = torch.func.grad(lambda p: (of_rank(p, 0) + of_rank(p, 1) + of_rank(p, 2)) / 3)(parameters())

    def assert_right() -> None:
        if len(set(ways)) > 1:
            for _ in range(2):
                assert_same(gradient(parameters(), rows(rank)), expected)
        for _ in range(2):
            assert_same(step(parameters(), rows(rank)), expected)

    if calls_before:
        assert_right()
    if rank == 1:
        raises_at[0] = place
        step = in_way(ways[rank], gradient)
    message = refused(lambda: step(parameters(), rows(rank)))
    raises_at[0] = -1
    assert_right()
    assert_same(inner(parameters(), rows(rank)), means)
    return message


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize(("ways", "calls_before"), [*((ways, 1) for ways in ALL_WAYS), (ALL_WAYS[0], 0)])
def test_a_rank_that_raises_reaches_those_that_wait_in_a_gradient_of_their_loss(
    ranks3: RankPool, ways: tuple[str, ...], place: int, calls_before: int
) -> None:
    assert_told(ranks3.run(_raises_around_a_gradient, ways, place, calls_before, **TIMEOUT))


def _raises_at_run_time(rank: int, way: str) -> str:
    """In the graph itself, which others have launched from."""

    def embedded(params: Tree, x: Tensor, indices: Tensor) -> Tensor:
        return loss(params | {"bias": params["first"][indices].mean(0)}, x)

    step = in_way(way, ddp.grad(embedded))
    fine, beyond = torch.tensor([0, 3]), torch.tensor([0, 77])
    expected = step(parameters(), rows(rank), fine)
    message = refused(lambda: step(parameters(), rows(rank), beyond if rank == 1 else fine))
    for _ in range(2):
        assert_same(step(parameters(), rows(rank), fine), expected)
    return message


@pytest.mark.parametrize("way", WAYS)
def test_a_graph_that_raises_as_it_runs_is_told_to_all_ranks(ranks3: RankPool, way: str) -> None:
    error = "IndexError: index 77 is out of bounds for dimension 0 with size 5"
    assert_told(ranks3.run(_raises_at_run_time, way, **TIMEOUT), error)


def _raises_elsewhere(rank: int) -> str:
    """The others are in a collective outside of all losses."""
    f = Normalised()
    gradient = ddp.grad(f)
    for _ in range(2):
        gradient(parameters(), rows(rank))
        torch.testing.assert_close(ddp.all_reduce(torch.ones(3) * rank), torch.ones(3))
    f.raises_at = 0
    message = refused(lambda: gradient(parameters(), rows(rank)) if rank == 1 else ddp.all_reduce(torch.ones(3)))
    f.raises_at = None
    assert_same(gradient(parameters(), rows(rank)), of_one_process(3))
    torch.testing.assert_close(ddp.all_reduce(torch.ones(3) * rank), torch.ones(3))
    return message


def test_a_rank_that_raises_reaches_those_that_wait_outside_of_losses(ranks3: RankPool) -> None:
    assert_told(ranks3.run(_raises_elsewhere, **TIMEOUT))


# ---- ranks that do not come ------------------------------------------------------------------------------------------


def _stays_away(rank: int, way: str) -> str:
    step = in_way(way, ddp.grad(Normalised()))
    for _ in range(2):
        step(parameters(), rows(rank))
    if rank == 1:
        time.sleep(5)
    message = refused(lambda: step(parameters(), rows(rank)))
    for _ in range(2):
        assert_same(step(parameters(), rows(rank)), of_one_process(2))
    return message


@pytest.mark.parametrize("way", WAYS)
def test_a_rank_that_stays_away_from_a_loss_is_named_after_the_timeout(ranks2: RankPool, way: str) -> None:
    message, late = ranks2.run(_stays_away, way, collective_timeout_seconds=3)
    # Which wait ran out depends on the machine's load: where a rank came late to an earlier step, the ranks compare
    # their calls again before they launch.
    launched = "Timed out" in message and "rank 1 is behind" in message
    compared = "rank 0 waited 3 s for rank 1 (" in message
    assert launched or compared, message
    found = "The first rank to give up found: rank 1 is behind" if launched else "rank 0 waited 3 s for rank 1"
    assert found in late, late


def _ends(rank: int) -> None:
    step = ddp.grad(Normalised())
    for _ in range(2):
        step(parameters(), rows(rank))
    if rank == 1:
        os._exit(7)
    message = refused(lambda: step(parameters(), rows(rank)))
    raise RuntimeError(message)


def test_a_rank_that_ends_is_reported_at_once(ranks2: RankPool) -> None:
    with pytest.raises(RankError) as error:
        ranks2.run(_ends, collective_timeout_seconds=20)
    assert "rank 1 did not answer: stopped, ended" in str(error.value) or "exit code 7" in str(error.value)
