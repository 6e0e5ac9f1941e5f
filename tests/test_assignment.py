"""How gradients are put into buckets: when a bucket closes, in which order buckets launch, where the riders go."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compiled_ddp.plan import FIRST_USED, BucketPlan, GradientSpec
from compiled_ddp.planning.assignment import assign_buckets, place_buckets


def gradients(*numels: int, dtype: torch.dtype = torch.float32) -> list[GradientSpec]:
    """One-dimensional gradients of these sizes, numbered from 0; float32, so four bytes an element."""
    return [GradientSpec.of(index, torch.empty(numel, dtype=dtype)) for index, numel in enumerate(numels)]


def assign(specs: list[GradientSpec], *, first: float, cap: float) -> BucketPlan:
    return assign_buckets(specs, capacities_bytes=(first, cap), world_size=2)


def indices(plan: BucketPlan) -> list[tuple[int, ...]]:
    return [bucket.indices for bucket in plan.buckets]


# ---- closing ---------------------------------------------------------------------------------------------------------


def test_bucket_closes_with_the_gradient_that_reaches_its_capacity() -> None:
    assert indices(assign(gradients(2, 2, 2, 2), first=16, cap=16)) == [(0, 1), (2, 3)]


def test_bucket_closes_with_the_gradient_that_exceeds_its_capacity() -> None:
    assert indices(assign(gradients(3, 3, 3, 3, 3), first=16, cap=16)) == [(0, 1), (2, 3), (4,)]


def test_large_gradient_joins_the_open_bucket_and_closes_it() -> None:
    assert indices(assign(gradients(1, 1000, 1), first=16, cap=16)) == [(0, 1), (2,)]


def test_first_bucket_has_a_capacity_of_its_own() -> None:
    assert indices(assign(gradients(*[1] * 8), first=4, cap=12)) == [(0,), (1, 2, 3), (4, 5, 6), (7,)]


def test_riders_do_not_count_towards_the_capacity() -> None:
    (bucket,) = assign(gradients(4), first=16, cap=16).buckets
    assert bucket.nbytes > 16


# ---- dtypes ----------------------------------------------------------------------------------------------------------


def mixed(*kinds: tuple[int, torch.dtype]) -> list[GradientSpec]:
    return [GradientSpec.of(index, torch.empty(numel, dtype=dtype)) for index, (numel, dtype) in enumerate(kinds)]


def test_each_dtype_has_buckets_and_a_first_bucket_of_its_own() -> None:
    specs = mixed(*[(1, torch.float32), (1, torch.float64)] * 4)
    plan = assign(specs, first=8, cap=16)
    assert indices(plan) == [(1,), (0, 2), (3, 5), (4, 6), (7,), ()]
    assert [bucket.dtype for bucket in plan.buckets[:5]] == [
        torch.float64,
        torch.float32,
        torch.float64,
        torch.float32,
        torch.float64,
    ]


def test_each_device_has_buckets_of_its_own() -> None:
    specs = [GradientSpec.of(index, torch.empty(1, device=("cpu", "meta")[index % 2])) for index in range(4)]
    assert indices(assign(specs, first=8, cap=8)) == [(0, 2), (1, 3)]


def test_buckets_launch_in_the_order_of_their_last_gradients() -> None:
    specs = mixed((1, torch.float64), (1, torch.float32), (1, torch.float32), (1, torch.float64))
    assert indices(assign(specs, first=1000, cap=1000)) == [(1, 2), (0, 3), ()]


# ---- riders ----------------------------------------------------------------------------------------------------------


def test_riders_follow_the_gradients_of_a_float32_last_bucket() -> None:
    plan = assign(gradients(2, 2, 3), first=16, cap=16)
    assert plan.buckets[-1].indices == (2,)
    assert plan.riders.offset_elements == 3
    assert plan.buckets[-1].numel == 3 + FIRST_USED + 3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_riders_have_a_float32_bucket_of_their_own_behind_one_that_is_not(dtype: torch.dtype) -> None:
    plan = assign(gradients(2, 2, dtype=dtype), first=1000, cap=1000)
    assert indices(plan) == [(0, 1), ()]
    assert plan.buckets[0].dtype == dtype
    assert (plan.buckets[1].dtype, plan.riders.offset_elements, plan.riders.indices) == (torch.float32, 0, (0, 1))


def test_riders_stand_on_the_device_of_the_last_bucket() -> None:
    specs = [GradientSpec.of(0, torch.empty(1, dtype=torch.float16, device="meta"))]
    assert assign(specs, first=8, cap=8).buckets[-1].device == torch.device("meta")


def test_naive_plan_has_a_bucket_per_gradient_and_one_for_the_riders() -> None:
    plan = assign(gradients(1, 100, 1), first=0, cap=0)
    assert indices(plan) == [(0,), (1,), (2,), ()]
    assert plan.riders.offset_elements == 0


def test_no_gradients_give_an_empty_plan() -> None:
    assert assign([], first=16, cap=16) == BucketPlan((), 2)


# ---- any input -------------------------------------------------------------------------------------------------------


@given(
    kinds=st.lists(
        st.tuples(st.integers(0, 6), st.sampled_from([torch.float16, torch.float32, torch.float64])), max_size=20
    ),
    first=st.integers(1, 40),
    cap=st.integers(1, 40),
)
def test_buckets_partition_any_gradients_and_close_as_soon_as_they_are_full(
    kinds: list[tuple[int, torch.dtype]], first: int, cap: int
) -> None:
    specs = mixed(*kinds)
    plan = assign(specs, first=first, cap=cap)
    assert sorted(plan.indices) == list(range(len(specs)))

    filled = [bucket for bucket in plan.buckets if bucket.gradients]
    last = [max(bucket.indices) for bucket in filled]
    assert last == sorted(last), "buckets launch by their last gradient"

    for dtype in {spec.dtype for spec in specs}:
        buckets = [bucket for bucket in filled if bucket.dtype == dtype]
        order = [index for bucket in buckets for index in bucket.indices]
        assert order == [spec.index for spec in specs if spec.dtype == dtype]
        for bucket, capacity in zip(buckets, itertools.chain([first], itertools.repeat(cap)), strict=False):
            sizes = list(itertools.accumulate(specs[index].nbytes for index in bucket.indices))
            assert all(size < capacity for size in sizes[:-1])
            assert sizes[-1] >= capacity or bucket is buckets[-1]


# ---- place_buckets ---------------------------------------------------------------------------------------------------


def test_placing_the_buckets_of_a_plan_again_gives_the_same_plan() -> None:
    specs = gradients(2, 3, 4)
    plan = assign(specs, first=16, cap=16)
    assert place_buckets([[specs[index] for index in bucket.indices] for bucket in plan.buckets], 2) == plan


def test_placed_gradients_lie_back_to_back_with_their_own_strides() -> None:
    specs = [GradientSpec.of(3, torch.empty(2, 3).t()), GradientSpec.of(1, torch.empty(4))]
    (bucket,) = place_buckets([specs], 2).buckets
    assert [(g.index, g.size, g.stride, g.offset_elements, g.numel) for g in bucket.gradients] == [
        (3, (3, 2), (1, 3), 0, 6),
        (1, (4,), (1,), 6, 4),
    ]


def test_riders_apart_have_a_bucket_of_their_own_behind_a_float32_one_too() -> None:
    plan = place_buckets([gradients(2)], 2, riders_apart=True)
    assert indices(plan) == [(0,), ()]
    assert plan.buckets[0].riders is None
