"""How backwards end, on two ranks in one process: each has a thread, in which its hooks see real backwards."""

import functools
import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from run_times import (
    ALL,
    Broken,
    RunTime,
    Two,
    assert_steps_well,
    makes_two_ranks,
    mean,
    refined,
    together,
    uses,
)
from torch import Tensor
from torch.futures import Future

from compiled_ddp.plan import ADMITTED
from compiled_ddp.reducers.ddp_hook import TorchCommHook
from compiled_ddp.step.runtime import Phase

pytestmark = pytest.mark.filterwarnings("ignore:gradients of")  # there are no graphs


@pytest.fixture
def two() -> Iterator[Two]:
    with makes_two_ranks() as make:
        yield make


def assert_idle(*ranks: RunTime) -> None:
    assert all(rank.runtime.under_way.phase is Phase.IDLE for rank in ranks)


# ---- well ------------------------------------------------------------------------------------------------------------


def test_a_backward_leaves_the_mean_and_nothing_under_way(two: Two) -> None:
    ranks = two()
    assert_steps_well(*ranks)
    assert_steps_well(*ranks)


def test_the_first_backward_fixes_the_order_in_which_rank_0_has_seen_gradients_come(two: Two) -> None:
    one, other = two()
    assert together([one, other], uses(1, 2, 0), uses(0, 1, 2)) == [None, None]
    for rank in (one, other):
        assert rank.agreed.refined and not rank.agreed.must_agree
        assert [section.plan.indices for section in rank.agreed.by_hooks] == [(0, 2, 1)]
    assert_steps_well(one, other)


def test_what_no_rank_uses_in_the_first_backward_is_not_launched(two: Two) -> None:
    ranks = two()
    assert together(ranks, uses(0, 1)) == [None, None]
    assert all(rank.agreed.unused == {2} and rank.tensors[2].grad is None for rank in ranks)


def test_a_parameter_that_is_newly_used_on_one_rank_is_reduced_and_launched_from_then_on(two: Two) -> None:
    ranks = two()
    together(ranks, uses(0, 1))
    launched = ranks[0].communicator.progress.launches
    assert together(ranks, uses(0), uses(0, 2)) == [None, None]
    for rank in ranks:
        assert not rank.agreed.unused
        assert [s.plan.indices for s in rank.agreed.by_hooks if s.reason == ADMITTED] == [(2,)]
        assert torch.equal(rank.tensors[2].grad, ranks[1].values(2) / 2)  # type: ignore[arg-type]
    assert ranks[0].communicator.progress.launches >= launched + 2
    assert_steps_well(*ranks)


def test_a_first_backward_that_all_ranks_skip_decides_no_sequence(two: Two) -> None:
    ranks = two()
    assert together(ranks, lambda rank: rank.skip()) == [None, None]
    assert all(rank.agreed.must_agree and not rank.agreed.refined and rank.agreed.beginnings == 1 for rank in ranks)
    assert_steps_well(*ranks)


def test_a_first_backward_that_one_rank_skips_decides_it(two: Two) -> None:
    ranks = two()
    assert together(ranks, ALL, lambda rank: rank.skip()) == [None, None]
    assert all(rank.agreed.refined for rank in ranks)
    assert all(torch.equal(rank.tensors[0].grad, ranks[0].values(0) / 2) for rank in ranks)  # type: ignore[arg-type]


def test_the_ends_collectives_follow_the_buckets_in_one_order(two: Two) -> None:
    ranks = two(verify="always")
    assert_steps_well(*ranks)
    assert_steps_well(*ranks)
    for rank in ranks:
        assert [sent.kind for sent in rank.communicator.port.sent] == ["sum", "sum", "maximum"] * 2


def test_users_hooks_see_the_mean_when_everything_else_has_ended(two: Two) -> None:
    ranks, seen = two(), []

    def see(rank: RunTime, tensor: Tensor) -> None:
        assert tensor.grad is not None
        seen.append((tensor.grad.tolist(), rank.agreed.refined, rank.runtime.under_way.phase))

    for rank in ranks:
        rank.tensors[0].register_post_accumulate_grad_hook(functools.partial(see, rank))
    assert together(ranks, ALL) == [None, None]
    assert seen == [(mean(0).tolist(), True, Phase.IDLE)] * 2


def test_a_backward_that_has_ended_is_kept_by_nothing(two: Two) -> None:
    ranks = refined(two)
    kept: list[weakref.ref[Any]] = []

    def step(rank: RunTime) -> None:
        loss = rank.forward(0, 1, 2)
        rank.tensors[0].register_hook(
            lambda _: kept.append(weakref.ref(rank.runtime.under_way.backward))  # type: ignore[arg-type]
        )
        loss.backward()

    gc.collect()
    gc.disable()
    try:
        assert together(ranks, step) == [None, None]
        assert [backward() for backward in kept] == [None, None]
    finally:
        gc.enable()


# ---- errors that all ranks raise -------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_first", [True, False])
def test_a_backward_that_breaks_off_on_one_rank_is_an_error_on_the_other(two: Two, is_first: bool) -> None:
    ranks = two() if is_first else refined(two)
    here, there = together(ranks, ALL, uses(0, 1, 2, breaks_before=True))
    assert isinstance(there, Broken)
    assert "rank 0: the backward of forward" in str(here)
    assert "broke off on 1 other rank(s) and was not reduced" in str(here)
    assert_idle(*ranks)
    assert_steps_well(*ranks)


def test_what_follows_after_an_exception_brings_no_grad_back_that_has_been_cleared(two: Two) -> None:
    def breaks_and_clears(rank: RunTime) -> None:
        with pytest.raises(Broken):
            rank.forward(0, breaks_after=True).backward()
        for tensor in rank.tensors:
            tensor.grad = None
        rank.runtime.finish_broken_backward()
        assert [tensor.grad for tensor in rank.tensors] == [None] * 3

    ranks = refined(two)
    assert together(ranks, breaks_and_clears) == [None, None]
    assert_idle(*ranks)
    assert_steps_well(*ranks)


def test_a_grad_that_was_there_is_the_same_tensor_after_an_error(two: Two) -> None:
    ranks = refined(two)
    existing = [torch.full((3,), 10.0) for _ in ranks]
    for rank, gradient in zip(ranks, existing, strict=True):
        rank.tensors[0].grad = gradient
    together(ranks, uses(1, 2), uses(1, 2, breaks_before=True))
    assert all(rank.tensors[0].grad is gradient for rank, gradient in zip(ranks, existing, strict=True))
    assert [gradient.tolist() for gradient in existing] == [[10.0] * 3] * 2


@pytest.mark.parametrize("is_first", [True, False])
def test_an_exception_after_all_was_sent_is_told_in_the_next_backward_and_once(two: Two, is_first: bool) -> None:
    ranks = two() if is_first else refined(two)
    here, there = together(ranks, ALL, uses(0, 1, 2, breaks_after=True))
    assert isinstance(there, Broken)
    assert here is None
    assert torch.equal(ranks[0].tensors[0].grad, mean(0))  # type: ignore[arg-type]
    for error in together(ranks, ALL):
        assert "an exception ended the one before it on 1 rank(s) when all of it had been sent" in str(error)
        assert "communication hook" not in str(error)
    assert_steps_well(*ranks)


def test_what_all_ranks_know_is_not_told(two: Two) -> None:
    ranks = refined(two)
    assert [type(error) for error in together(ranks, uses(0, 1, 2, breaks_after=True))] == [Broken, Broken]
    assert_steps_well(*ranks)


def test_a_rank_whose_end_is_known_through_another_wrapper_does_not_tell_it(two: Two) -> None:
    ranks = refined(two)

    def breaks(rank: RunTime) -> None:
        with pytest.raises(Broken):
            rank.forward(0, 1, 2, breaks_after=True).backward()
        rank.runtime.send_rest_of_broken()
        assert not rank.runtime.told_ranks()
        rank.runtime.end_broken(told={0, 1})

    assert together(ranks, ALL, breaks) == [None, None]
    assert_steps_well(*ranks)


def test_a_hooks_state_that_is_lost_is_told_once(two: Two) -> None:
    ranks = refined(two)
    ranks[1].carried.note_lost(state=True)
    for error in together(ranks, ALL):
        assert "What the communication hook kept begins anew on every rank" in str(error)
    assert_steps_well(*ranks)


def test_a_communication_hook_that_fails_on_one_rank_ends_the_backward_on_all(two: Two) -> None:
    ranks = two()

    def reduce(rank: RunTime, bucket: Any) -> Future[Tensor]:
        if rank.rank == 1:
            raise ValueError("the hook's mistake")
        future: Future[Tensor] = Future()
        future.set_result(bucket.buffer())
        return future

    for rank in ranks:
        timeout = rank.communicator.ranks.timeout
        rank.reduction.register_comm_hook(TorchCommHook(rank, reduce, name="reduce", timeout=timeout))
    here, there = together(ranks, ALL)
    assert isinstance(there, ValueError)
    assert "the communication hook reduce raised on 1 rank(s)" in str(here)
    for error in together(ranks, ALL):
        assert "failed in an earlier backward" in str(error)


@pytest.mark.parametrize("check_steps", ["error", "warn", "off"])
def test_different_numbers_of_forwards_are_an_error_or_a_warning_with_each_ranks_count(
    two: Two, check_steps: str, recwarn: pytest.WarningsRecorder
) -> None:
    ranks = refined(two, check_steps=check_steps)
    loss = ranks[1].forward(0)
    errors = together(ranks, ALL)
    told = [str(error) for error in errors] + [str(warning.message) for warning in recwarn]
    different = [text for text in told if "averaged gradients of different steps" in text]
    assert len(different) == (0 if check_steps == "off" else 2)
    assert all("rank 0: 2, rank 1: 3" in text for text in different)
    assert all((error is None) == (check_steps != "error") for error in errors)
    del loss
