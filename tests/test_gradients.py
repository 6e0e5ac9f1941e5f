"""What hooks fill buckets with and leave in .grad, against the mean computed by hand, on two ranks in one process."""

import pytest
import torch
from in_process import end_all, plan_of
from torch import Tensor
from two_ranks import SIZES, assert_gradients, begin, bring, mean, two_ranks, values

from compiled_ddp.plan import Section
from compiled_ddp.step import gradients
from compiled_ddp.step.buffers import SequenceBuffers

BY_HOOKS = [Section(plan_of((1, 2), (0, 3)), "hooks")]


@pytest.mark.parametrize("as_view", [True, False])
def test_a_fresh_grad_becomes_the_mean_in_its_bucket_or_in_memory_of_its_own(as_view: bool) -> None:
    ranks, buffers = two_ranks(gradient_as_bucket_view=as_view), [SequenceBuffers(BY_HOOKS) for _ in range(2)]
    runs = [r.begin(BY_HOOKS, own) for r, own in zip(ranks, buffers, strict=True)]
    bring(*runs)
    assert end_all(*runs) == [{0, 1}] * 2
    assert_gradients(ranks, mean(0), mean(1))
    for rank, own in zip(ranks, buffers, strict=True):
        assert [own.contain(gradient) for gradient in rank.gradients if gradient is not None] == [as_view] * 2


@pytest.mark.parametrize("together", [0, 2, 3])
def test_large_gradients_are_put_into_their_bucket_at_once_and_small_ones_together(
    together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gradients, "MOST_ELEMENTS_TOGETHER", together)
    ranks, buffers = two_ranks(), [SequenceBuffers(BY_HOOKS) for _ in range(2)]
    runs = [rank.begin(BY_HOOKS, own) for rank, own in zip(ranks, buffers, strict=True)]
    for index, elements in enumerate(SIZES[:2]):
        bring(*runs, indices=[index])
        is_last = index == 1  # then the bucket is full
        for rank, own in zip(ranks, buffers, strict=True):
            gradient = rank.tensors[index].grad
            assert gradient is not None
            assert own.contain(gradient) == (elements > together or is_last)
    end_all(*runs)
    assert_gradients(ranks, mean(0), mean(1))


@pytest.mark.parametrize("gathered", [2, 3])
def test_small_gradients_do_not_wait_where_many_have_come(gathered: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their memory comes on top of the bucket's."""
    monkeypatch.setattr(gradients, "MOST_ELEMENTS_GATHERED", gathered)
    ranks, buffers = two_ranks(), [SequenceBuffers(BY_HOOKS) for _ in range(2)]
    runs = [rank.begin(BY_HOOKS, own) for rank, own in zip(ranks, buffers, strict=True)]
    bring(*runs, indices=[0])
    for rank, own in zip(ranks, buffers, strict=True):
        gradient = rank.tensors[0].grad
        assert gradient is not None
        assert own.contain(gradient) == (SIZES[0] > gathered)
    bring(*runs, indices=[1])
    end_all(*runs)
    assert_gradients(ranks, mean(0), mean(1))


@pytest.mark.parametrize("as_view", [True, False])
def test_a_grad_that_is_there_stays_the_same_tensor_and_is_added_to(as_view: bool) -> None:
    ranks, existing = two_ranks(gradient_as_bucket_view=as_view), [torch.full((3,), 10.0) for _ in range(2)]
    for rank, gradient in zip(ranks, existing, strict=True):
        rank.tensors[0].grad = gradient
    runs = begin(ranks, BY_HOOKS)
    bring(*runs)
    end_all(*runs)
    assert_gradients(ranks, 10.0 + mean(0), mean(1))
    assert all(rank.tensors[0].grad is gradient for rank, gradient in zip(ranks, existing, strict=True))


@pytest.mark.parametrize("as_view", [True, False])
def test_what_a_backward_has_left_is_added_to_by_the_next_one_in_the_same_tensor(as_view: bool) -> None:
    ranks, buffers = two_ranks(gradient_as_bucket_view=as_view), [SequenceBuffers(BY_HOOKS) for _ in range(2)]
    kept: list[list[Tensor | None]] = []
    for _ in range(3):
        runs = [rank.begin(BY_HOOKS, own) for rank, own in zip(ranks, buffers, strict=True)]
        bring(*runs)
        end_all(*runs)
        kept.append([gradient for rank in ranks for gradient in rank.gradients])
    assert_gradients(ranks, 3 * mean(0), 3 * mean(1))
    assert all(len({id(step[n]) for step in kept}) == 1 for n in range(4))


def test_a_grad_whose_gradient_begins_the_backward_stays_the_same_tensor() -> None:
    ranks, buffers = two_ranks(), [SequenceBuffers(BY_HOOKS) for _ in range(2)]
    kept: list[Tensor | None] = []
    for step in range(2):
        runs = [rank.begin(BY_HOOKS, own) for rank, own in zip(ranks, buffers, strict=True)]
        for run, rank in zip(runs, ranks, strict=True):
            if step:
                rank.tensors[0].grad += values(rank.rank)
                run.backward.existing.begun_by(0)
                run.backward.gradient_arrived(0)
        bring(*runs, indices=[1] if step else [0, 1])
        end_all(*runs)
        kept = kept or [rank.tensors[0].grad for rank in ranks]
        for rank in ranks:
            rank.tensors[1].grad = None
    assert all(rank.tensors[0].grad is gradient for rank, gradient in zip(ranks, kept, strict=True))
    assert all(torch.equal(gradient, 2 * mean(0)) for gradient in kept if gradient is not None)


def test_of_a_grad_in_another_ones_place_the_value_is_kept() -> None:
    ranks, buffers = two_ranks(), [SequenceBuffers(BY_HOOKS) for _ in range(2)]
    runs = [rank.begin(BY_HOOKS, own) for rank, own in zip(ranks, buffers, strict=True)]
    bring(*runs)
    end_all(*runs)
    for rank in ranks:
        first = rank.tensors[0].grad
        assert first is not None
        rank.tensors[0].grad, rank.tensors[1].grad = torch.ones(3), first[:2].data
    del first
    runs = [rank.begin(BY_HOOKS, own) for rank, own in zip(ranks, buffers, strict=True)]
    bring(*runs)
    end_all(*runs)
    assert_gradients(ranks, 1.0 + mean(0), mean(0)[:2] + mean(1))


def test_what_one_rank_has_not_used_it_gets_from_the_others() -> None:
    runs = begin(ranks := two_ranks(), BY_HOOKS)
    bring(runs[0])
    bring(runs[1], indices=[1])
    assert end_all(*runs) == [{0, 1}] * 2
    assert_gradients(ranks, values(0) / 2, mean(1))


def test_an_earlier_grad_of_a_rank_that_does_not_use_it_now_is_in_the_mean() -> None:
    ranks = two_ranks()
    ranks[1].tensors[0].grad = values(1)  # under no_sync
    runs = begin(ranks, BY_HOOKS, used_before={0})
    bring(runs[0])
    bring(runs[1], indices=[1])
    end_all(*runs)
    assert_gradients(ranks, mean(0), mean(1))


@pytest.mark.parametrize("as_view", [True, False])
@pytest.mark.parametrize("was", ["none", "apart", "in its bucket"])
def test_what_no_rank_has_used_keeps_its_grad(was: str, as_view: bool) -> None:
    ranks, buffers = two_ranks(gradient_as_bucket_view=as_view), [SequenceBuffers(BY_HOOKS) for _ in range(2)]
    if was == "in its bucket":
        runs = [rank.begin(BY_HOOKS, own) for rank, own in zip(ranks, buffers, strict=True)]
        bring(*runs, indices=[0])
        end_all(*runs)
    for rank in ranks:
        if was != "none":
            rank.tensors[0].grad = values(rank.rank) if rank.tensors[0].grad is None else rank.tensors[0].grad
            rank.tensors[0].grad.copy_(values(rank.rank))  # differs between ranks
    before = [rank.tensors[0].grad for rank in ranks]
    runs = [rank.begin(BY_HOOKS, own) for rank, own in zip(ranks, buffers, strict=True)]
    bring(*runs, indices=[1])
    assert end_all(*runs) == [{1}] * 2
    for rank, gradient in zip(ranks, before, strict=True):
        assert rank.tensors[0].grad is gradient
        assert gradient is None or torch.equal(gradient, values(rank.rank))


def test_in_a_weighted_mean_a_rank_of_weight_0_sends_zeros_whatever_its_gradients_are() -> None:
    ranks, weighted = two_ranks(), [Section(plan_of((1, 2), (0, 3), reduction="weighted"), "hooks")]
    runs = [rank.begin(weighted, weight=weight) for rank, weight in zip(ranks, (3.0, 0.0), strict=True)]
    bring(runs[0])
    for index in (0, 1):
        runs[1].accumulate(index, torch.full((SIZES[index],), torch.nan))  # a mean over no tokens
    end_all(*runs)
    assert_gradients(ranks, values(0), values(0, 1))


def test_a_second_gradient_in_one_backward_is_refused_by_name() -> None:
    run, _ = begin(two_ranks(), BY_HOOKS)
    bring(run)
    with pytest.raises(RuntimeError, match="parameter p0 got a second gradient in one backward"):
        bring(run, indices=[0])


def test_where_several_gradients_are_expected_the_last_one_fills_the_bucket() -> None:
    runs = begin(ranks := two_ranks(), BY_HOOKS, expected_gradients={0: 2, 1: 1})
    for _ in range(2):
        assert not ranks[0].communicator.progress.launches
        bring(*runs, indices=[0])
    bring(*runs, indices=[1])
    assert ranks[0].communicator.progress.launches == 1
    end_all(*runs)
    assert_gradients(ranks, 2 * mean(0), mean(1))
