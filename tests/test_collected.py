"""[Note: collected]: gradients that are noted in C as they come, on two ranks in one process."""

import itertools
import random
from collections.abc import Iterator

import pytest
import torch
from growth import calls_in
from run_times import ALL, RunTime, Two, assert_steps_well, forget_gradients, makes_two_ranks, mean, refined, together
from torch import Tensor

from compiled_ddp.step import hooks
from compiled_ddp.step.hooks import Collected


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> Iterator[Two]:
    monkeypatch.setattr(hooks, "_FEWEST_NOTED", 1)
    with makes_two_ranks() as make:
        yield make


def collected(rank: RunTime) -> Collected:
    """Of the only bucket."""
    (of_bucket,) = rank.reduction.hooks._collected.values()
    return of_bucket


def in_order(rank: RunTime, order: tuple[int, ...]) -> Tensor:
    """A loss whose gradients come in this order: the latest part of a forward comes first in its backward."""
    return rank.forward(*reversed(order))


def test_one_gradient_of_a_bucket_is_told_of_and_the_others_noted(two: Two) -> None:
    ranks = refined(two)
    assert_steps_well(*ranks)
    for rank in ranks:
        assert len(collected(rank)._indices) == 2
        assert not collected(rank)._come, "what was noted is still held"


def test_a_noted_gradient_costs_no_python_call(two: Two) -> None:
    (rank, other), told = refined(two), []
    assert_steps_well(rank, other)

    def step(rank: RunTime) -> None:
        loss = rank.forward(0, 1, 2)
        told.append(calls_in(loss.backward, below=hooks.__file__))

    forget_gradients(rank, other)
    together((rank, other), step)
    collected(rank).give_up()
    collected(other).give_up()
    forget_gradients(rank, other)
    together((rank, other), step)
    assert max(told[:2]) + 1 <= min(told[2:]), told


@pytest.mark.parametrize("order", [*itertools.permutations(range(3))])
def test_every_order_leaves_the_mean_and_the_next_backward_is_told_of_what_came_last(
    two: Two, order: tuple[int, ...]
) -> None:
    ranks = refined(two)
    for _ in range(2):
        forget_gradients(*ranks)
        assert together(ranks, lambda rank: in_order(rank, order).backward()) == [None, None]
        for rank in ranks:
            assert all(torch.equal(tensor.grad, mean(index)) for index, tensor in enumerate(rank.tensors))  # type: ignore[arg-type]
            assert collected(rank)._last == order[-1]


def test_orders_that_change_in_every_step_end_in_each_gradient_being_told_of(two: Two) -> None:
    ranks, draw = refined(two), random.Random(0)
    for _ in range(12):
        order = tuple(draw.sample(range(3), 3))
        forget_gradients(*ranks)
        assert together(ranks, lambda rank, order=order: in_order(rank, order).backward()) == [None, None]  # type: ignore[misc]
        for rank in ranks:
            assert all(torch.equal(tensor.grad, mean(index)) for index, tensor in enumerate(rank.tensors))  # type: ignore[arg-type]
    assert all(not collected(rank)._indices for rank in ranks)


@pytest.mark.parametrize("used", [(0,), (1,), (2,), (0, 1), (1, 2), (0, 2), ()])
def test_what_a_rank_does_not_use_is_sent_as_zeros(two: Two, used: tuple[int, ...]) -> None:
    one, other = ranks = refined(two)
    assert_steps_well(*ranks)
    forget_gradients(*ranks)
    assert together(ranks, lambda rank: rank.step(*used), ALL) == [None, None]
    for index in range(3):
        expected = ((one.values(index) if index in used else 0.0) + other.values(index)) / 2
        for rank in ranks:
            assert torch.equal(rank.tensors[index].grad, expected)  # type: ignore[arg-type]
    assert_steps_well(*ranks)


@pytest.mark.parametrize("twice", range(3))
def test_a_second_gradient_is_an_error_whether_the_first_one_was_noted_or_told_of(two: Two, twice: int) -> None:
    ranks = refined(two)
    assert_steps_well(*ranks)
    forget_gradients(*ranks)

    def step(rank: RunTime) -> None:
        loss = rank.forward(0, 1, 2)
        again = _Again.apply(rank.tensors[twice], torch.zeros((), requires_grad=True))
        try:
            (loss + again).backward()
        except BaseException:
            rank.runtime.finish_broken_backward()
            raise

    errors = together(ranks, step)
    assert all("second gradient" in str(error) for error in errors), errors
    assert_steps_well(*ranks)


class _Again(torch.autograd.Function):
    """Brings a parameter a gradient in a reentrant backward, and then lets the outer one bring it another."""

    @staticmethod
    def forward(context: torch.autograd.function.FunctionCtx, parameter: Tensor, tensor: Tensor) -> Tensor:
        context.parameter = parameter  # type: ignore[attr-defined]
        return tensor.clone()

    @staticmethod
    def backward(context: torch.autograd.function.FunctionCtx, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        parameter = context.parameter  # type: ignore[attr-defined]
        with torch.enable_grad():
            (parameter * 1.0).sum().backward()
        return None, gradient


@pytest.mark.parametrize("breaks", ["breaks_before", "breaks_after"])
def test_an_exception_leaves_nothing_noted(two: Two, breaks: str) -> None:
    ranks = refined(two)
    assert_steps_well(*ranks)
    forget_gradients(*ranks)
    errors = together(ranks, lambda rank: rank.step(0, 1, 2, **{breaks: True}))
    assert all(error is not None for error in errors)
    for rank in ranks:
        assert not collected(rank)._come
    assert_steps_well(*ranks)


def test_between_backwards_every_gradient_is_told_of(two: Two) -> None:
    """A local backward, without a forward of the wrapper: what it accumulates is reduced with the next step."""
    ranks = refined(two)
    assert_steps_well(*ranks)
    forget_gradients(*ranks)

    def local(rank: RunTime) -> None:
        sum((tensor * rank.values(index)).sum() for index, tensor in enumerate(rank.tensors)).backward()  # type: ignore[union-attr]

    assert together(ranks, local) == [None, None]
    assert all(rank.carried.used == {0, 1, 2} for rank in ranks)
    assert together(ranks, ALL) == [None, None]
    for rank in ranks:
        assert all(torch.equal(tensor.grad, 2 * mean(index)) for index, tensor in enumerate(rank.tensors))  # type: ignore[arg-type]
