"""The factors between a gradient and its mean, computed for all ranks in one process."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from compiled_ddp.plan import WEIGHT, BucketPlan, GradientSpec, ReductionKind
from compiled_ddp.planning.assignment import assign_buckets
from compiled_ddp.reducers.averaging import Averaging, Scaling

GRADIENTS = [torch.tensor([1.0, -2.0, 4.0]), torch.tensor([3.0, 8.0, 0.5])]  # of two ranks


def plan(reduction: ReductionKind = "mean", dtype: torch.dtype = torch.float32) -> BucketPlan:
    spec = GradientSpec.of(0, torch.empty(3, dtype=dtype))
    return assign_buckets([spec], capacities_bytes=(64,), world_size=2, reduction=reduction)


def riders_of(weights: Sequence[float]) -> Tensor:
    riders = torch.zeros(32)
    riders[WEIGHT] = sum(weights)
    return riders


def averaged(ranks: Sequence[Averaging], gradients: Sequence[Tensor], riders: Tensor) -> Tensor:
    """What each of these ranks leaves in .grad, which has to be the same."""
    filled = [gradient * rank.share(gradient.dtype) for rank, gradient in zip(ranks, gradients, strict=True)]
    outgoing = [rank.outgoing(flat) for rank, flat in zip(ranks, filled, strict=True)]
    total = torch.stack(outgoing).sum(0)
    results = []
    for rank, flat, sent in zip(ranks, filled, outgoing, strict=True):
        sent.copy_(total)
        rank.conclude(sent, flat, lambda: riders)
        rank.correct([None, flat])
        results.append(flat.clone())
    assert torch.equal(results[0], results[1])
    return results[0]


def test_a_mean_and_a_sum() -> None:
    for reduction, expected in (("mean", torch.tensor([2.0, 3.0, 2.25])), ("sum", torch.tensor([4.0, 6.0, 4.5]))):
        ranks = [Averaging(plan(reduction)) for _ in GRADIENTS]  # type: ignore[arg-type]
        assert torch.equal(averaged(ranks, GRADIENTS, riders_of([1, 1])), expected)


def test_a_weighted_mean_is_over_the_sum_of_the_weights_and_zero_without_any() -> None:
    ranks = [Averaging(plan("weighted"), weight=weight) for weight in (1.0, 3.0)]
    assert torch.equal(averaged(ranks, GRADIENTS, riders_of([1, 3])), torch.tensor([2.5, 5.5, 1.375]))
    assert ranks[1].share_of_all(lambda: riders_of([1, 3])) == 0.75
    without = [Averaging(plan("weighted"), weight=0.0) for _ in GRADIENTS]
    assert all(rank.has_no_weight for rank in without)
    assert torch.equal(averaged(without, GRADIENTS, riders_of([0, 0])), torch.zeros(3))
    assert without[0].share_of_all(lambda: riders_of([0, 0])) == 0.0


def test_scaling_before_and_after_the_sum_takes_the_place_of_the_mean() -> None:
    ranks = [Averaging(plan(), scaling=Scaling(before=0.25, after=2.0)) for _ in GRADIENTS]
    assert torch.equal(averaged(ranks, GRADIENTS, riders_of([1, 1])), torch.tensor([2.0, 3.0, 2.25]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision_is_summed_in_float32_where_scaling_says_so(dtype: torch.dtype) -> None:
    scaling = Scaling(before=0.5, in_float32=True)
    ranks = [Averaging(plan(dtype=dtype), scaling=scaling) for _ in GRADIENTS]
    largest = torch.finfo(dtype).max
    result = averaged(ranks, [torch.full((3,), largest, dtype=dtype)] * 2, riders_of([1, 1]))
    assert torch.equal(result, torch.full((3,), largest, dtype=dtype))  # a sum in this dtype would be infinite
    assert ranks[0].outgoing(result).dtype == torch.float32


def test_a_mean_is_corrected_to_one_over_the_ranks_that_still_have_data() -> None:
    ranks = [Averaging(plan(), correction=2.0) for _ in GRADIENTS]
    gradients = [GRADIENTS[0], torch.zeros(3)]  # the second has joined
    assert torch.equal(averaged(ranks, gradients, riders_of([1, 1])), GRADIENTS[0])


def test_of_what_has_been_summed_before_each_rank_brings_an_equal_share() -> None:
    reduced = torch.full((3,), 6.0)
    ranks = [Averaging(plan("sum")) for _ in GRADIENTS]
    brought = [rank.still_to_reduce(reduced + own, reduced) for rank, own in zip(ranks, GRADIENTS, strict=True)]
    assert torch.equal(sum(brought, torch.zeros(3)), reduced + GRADIENTS[0] + GRADIENTS[1])
    assert torch.equal(Averaging(plan()).still_to_reduce(reduced, reduced), reduced)  # a mean leaves it as it is
