"""The plan's nouns: what a gradient's view looks like, what the constructors assert, what identifies a plan."""

from dataclasses import FrozenInstanceError, replace

import pytest
import torch
from torch import Tensor

from compiled_ddp.plan import (
    FIRST_USED,
    Bucket,
    BucketPlan,
    Gradient,
    GradientSpec,
    ReductionSequence,
    Riders,
    Section,
)
from ranks import RankPool

CPU = torch.device("cpu")


def two_buckets(world_size: int = 2) -> BucketPlan:
    """Gradients 4 and 1 in the first bucket; gradient 2 and the riders in the second."""
    first = Bucket((Gradient(4, (2, 3), (3, 1), 0, 6), Gradient(1, (3,), (1,), 6, 3)), torch.float32, CPU, 9)
    riders = Riders(4, (4, 1, 2))
    second = Bucket((Gradient(2, (2, 2), (1, 2), 0, 4),), torch.float32, CPU, 4 + riders.numel, riders)
    return BucketPlan((first, second), world_size)


def with_bucket(position: int, **changes: object) -> BucketPlan:
    """`two_buckets` with one bucket changed."""
    plan = two_buckets()
    buckets = list(plan.buckets)
    buckets[position] = replace(buckets[position], **changes)  # type: ignore[arg-type]
    return replace(plan, buckets=tuple(buckets))


# ---- a gradient's shape ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parameter", "stride"),
    [
        pytest.param(torch.empty(2, 3), (3, 1), id="contiguous"),
        pytest.param(torch.empty(()), (), id="scalar"),
        pytest.param(torch.empty(2, 3).t(), (1, 3), id="transposed"),
        pytest.param(torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last), (60, 1, 15, 3), id="channels_last"),
        pytest.param(torch.empty(1, 3).as_strided((1, 3), (99, 1)), (99, 1), id="any stride where the size is 1"),
        pytest.param(torch.empty(0, 3), (3, 1), id="no elements"),
        pytest.param(torch.empty(3, 0), (1, 1), id="no elements, strides as torch clamps them"),
        pytest.param(torch.empty(10)[2:8], (1,), id="dense part of a larger tensor"),
    ],
)
def test_gradient_of_a_dense_parameter_is_strided_like_it(parameter: Tensor, stride: tuple[int, ...]) -> None:
    assert GradientSpec.of(7, parameter) == GradientSpec(7, tuple(parameter.shape), stride, torch.float32, CPU)


@pytest.mark.parametrize(
    "parameter",
    [
        pytest.param(torch.empty(1, 3).expand(2, 3), id="expanded"),
        pytest.param(torch.empty(2, 6)[:, ::2], id="gaps between elements"),
        pytest.param(torch.empty(2, 6)[:, :3], id="gaps between rows"),
        pytest.param(torch.empty(8).as_strided((2, 3), (2, 1)), id="overlapping rows"),
    ],
)
def test_gradient_of_a_parameter_with_gaps_or_overlaps_is_contiguous(parameter: Tensor) -> None:
    assert GradientSpec.of(0, parameter).stride == (3, 1)


def test_gradient_spec_counts_elements_and_bytes() -> None:
    spec = GradientSpec.of(0, torch.empty(2, 3, dtype=torch.float64))
    assert (spec.numel, spec.nbytes) == (6, 48)
    assert GradientSpec.of(0, torch.empty(())).numel == 1


def test_gradient_view_shares_memory_at_its_offset_with_its_strides() -> None:
    flat = torch.arange(20.0)[5:]
    view = Gradient(0, (2, 3), (1, 2), 4, 6).view(flat)
    assert view.tolist() == [[9.0, 11.0, 13.0], [10.0, 12.0, 14.0]]
    assert view.data_ptr() == flat[4:].data_ptr()


def test_riders_view_is_the_end_of_the_flat_buffer() -> None:
    riders = two_buckets().riders
    flat = torch.arange(float(two_buckets().buckets[-1].numel))
    assert riders.numel == FIRST_USED + 3
    assert riders.view(flat).tolist() == flat[4:].tolist()


# ---- what a plan tells -----------------------------------------------------------------------------------------------


def test_plan_lists_its_gradients_in_launch_order() -> None:
    plan = two_buckets()
    assert plan.indices == (4, 1, 2)
    assert [(plan.buckets.index(bucket), gradient.index) for bucket, gradient in plan.gradients] == [
        (0, 4),
        (0, 1),
        (1, 2),
    ]
    assert plan.riders is plan.buckets[1].riders


def test_plan_counts_the_bytes_of_its_flat_buffers_riders_included() -> None:
    plan = two_buckets()
    assert [bucket.nbytes for bucket in plan.buckets] == [9 * 4, (4 + FIRST_USED + 3) * 4]
    assert plan.nbytes == sum(bucket.nbytes for bucket in plan.buckets)


def test_empty_plan_has_no_gradients() -> None:
    plan = BucketPlan((), 2)
    assert (plan.indices, list(plan.gradients), plan.nbytes) == ((), [], 0)


def test_equal_plans_are_equal_and_hash_alike() -> None:
    assert two_buckets() == two_buckets()
    assert len({two_buckets(), two_buckets(), two_buckets(world_size=3)}) == 2


def test_plan_is_frozen_down_to_its_gradients() -> None:
    plan = two_buckets()
    for noun in (plan, plan.buckets[0], plan.buckets[0].gradients[0], plan.riders, GradientSpec.of(0, torch.empty(1))):
        with pytest.raises(FrozenInstanceError):
            noun.index = 0  # type: ignore[union-attr]


# ---- what the constructor asserts ------------------------------------------------------------------------------------


def test_plan_refuses_a_world_without_ranks() -> None:
    with pytest.raises(AssertionError, match="world_size must be positive, got 0"):
        two_buckets(world_size=0)


def test_plan_refuses_a_gradient_in_two_buckets() -> None:
    with pytest.raises(AssertionError, match="stands in two buckets"):
        with_bucket(0, gradients=(Gradient(2, (9,), (1,), 0, 9),))


def test_plan_refuses_a_gradient_twice_in_one_bucket() -> None:
    with pytest.raises(AssertionError, match="stands in two buckets"):
        with_bucket(0, gradients=(Gradient(4, (6,), (1,), 0, 6), Gradient(4, (3,), (1,), 6, 3)))


@pytest.mark.parametrize("offset", [pytest.param(7, id="gap"), pytest.param(5, id="overlap")])
def test_plan_refuses_a_gap_or_an_overlap_between_gradients(offset: int) -> None:
    with pytest.raises(AssertionError, match="gradient 1 leaves a gap or overlaps"):
        with_bucket(0, gradients=(Gradient(4, (2, 3), (3, 1), 0, 6), Gradient(1, (3,), (1,), offset, 3)))


def test_plan_refuses_a_flat_buffer_larger_than_its_contents() -> None:
    with pytest.raises(AssertionError, match="has 10 elements, its contents 9"):
        with_bucket(0, numel=10)


def test_plan_refuses_riders_away_from_the_last_gradient() -> None:
    with pytest.raises(AssertionError, match="riders do not follow the last gradient"):
        with_bucket(1, riders=Riders(5, (4, 1, 2)), numel=5 + FIRST_USED + 3)


def test_plan_refuses_a_last_bucket_without_riders() -> None:
    with pytest.raises(AssertionError, match=r"riders belong to bucket 1, found in \[\]"):
        with_bucket(1, riders=None, numel=4)


def test_plan_refuses_riders_before_the_last_bucket() -> None:
    riders = Riders(9, (4, 1, 2))
    with pytest.raises(AssertionError, match=r"riders belong to bucket 1, found in \[0, 1\]"):
        with_bucket(0, riders=riders, numel=9 + riders.numel)


def test_plan_refuses_riders_that_are_not_float32() -> None:
    with pytest.raises(AssertionError, match=r"riders are float32, their bucket is torch\.float64"):
        with_bucket(1, dtype=torch.float64)


@pytest.mark.parametrize("indices", [(4, 1, 3), (4, 2, 1)], ids=["another gradient", "another order"])
def test_plan_refuses_riders_that_name_its_gradients_otherwise(indices: tuple[int, ...]) -> None:
    with pytest.raises(AssertionError, match="riders do not name every gradient"):
        with_bucket(1, riders=Riders(4, indices))


def test_plan_refuses_riders_that_leave_a_gradient_out() -> None:
    riders = Riders(4, (4, 1))
    with pytest.raises(AssertionError, match="riders do not name every gradient"):
        with_bucket(1, riders=riders, numel=4 + riders.numel)


# ---- fingerprint -----------------------------------------------------------------------------------------------------


def test_fingerprint_of_equal_plans_is_equal() -> None:
    assert two_buckets().fingerprint == two_buckets().fingerprint


def _fingerprint(rank: int) -> str:
    return two_buckets().fingerprint


def test_fingerprint_is_the_same_in_other_processes(ranks2: RankPool) -> None:
    assert ranks2.run(_fingerprint, process_group=False) == [two_buckets().fingerprint] * 2


def test_fingerprint_changes_with_everything_in_the_plan() -> None:
    plan = two_buckets()
    same_bytes = Bucket((Gradient(4, (3, 2), (2, 1), 0, 6), plan.buckets[0].gradients[1]), torch.float32, CPU, 9)
    merged_riders = Riders(13, (4, 1, 2))
    merged = Bucket(
        (*plan.buckets[0].gradients, replace(plan.buckets[1].gradients[0], offset_elements=9)),
        torch.float32,
        CPU,
        13 + merged_riders.numel,
        merged_riders,
    )
    others = [
        plan,
        two_buckets(world_size=3),
        replace(plan, buckets=(merged,)),
        replace(plan, buckets=(same_bytes, plan.buckets[1])),
        with_bucket(0, dtype=torch.float64),
        with_bucket(0, device=torch.device("meta")),
        plan.renumbered({4: 4, 1: 0, 2: 2}),
    ]
    assert len({other.fingerprint for other in others}) == len(others)


# ---- renumbered ------------------------------------------------------------------------------------------------------


def test_renumbered_changes_indices_and_riders_and_nothing_else() -> None:
    renumbered = two_buckets().renumbered({4: 0, 1: 10, 2: 20})
    assert renumbered.indices == renumbered.riders.indices == (0, 10, 20)
    assert renumbered.renumbered({0: 4, 10: 1, 20: 2}) == two_buckets()


def test_renumbered_refuses_two_inputs_that_are_one_parameter() -> None:
    with pytest.raises(AssertionError, match="stands in two buckets"):
        two_buckets().renumbered({4: 0, 1: 0, 2: 1})


# ---- sequence --------------------------------------------------------------------------------------------------------


def test_sequence_refuses_a_parameter_without_a_bucket() -> None:
    plan = two_buckets().renumbered({4: 0, 1: 1, 2: 2})
    with pytest.raises(AssertionError, match=r"parameters without a bucket or unknown: \[3\]"):
        ReductionSequence((Section(plan, "graph"),), ("a", "b", "c", "d"))


def test_sequence_refuses_an_unknown_parameter() -> None:
    plan = two_buckets().renumbered({4: 0, 1: 1, 2: 9})
    with pytest.raises(AssertionError, match=r"parameters without a bucket or unknown: \[2, 9\]"):
        ReductionSequence((Section(plan, "graph"),), ("a", "b", "c"))


def test_sequence_lists_the_buckets_of_its_sections_in_launch_order() -> None:
    plan = two_buckets().renumbered({4: 0, 1: 1, 2: 2})
    again = plan.renumbered({0: 2, 1: 0, 2: 1})
    sequence = ReductionSequence((Section(plan, "graph"), Section(again, "hooks", "why")), ("a", "b", "c"))
    assert sequence.buckets == plan.buckets + again.buckets
    assert sequence.nbytes == 2 * plan.nbytes


def test_sequence_fingerprint_changes_with_order_origin_and_reason() -> None:
    plan = two_buckets().renumbered({4: 0, 1: 1, 2: 2})
    again = plan.renumbered({0: 2, 1: 0, 2: 1})
    names = ("a", "b", "c")
    sequences = [
        ReductionSequence((Section(plan, "graph"), Section(again, "graph")), names),
        ReductionSequence((Section(again, "graph"), Section(plan, "graph")), names),
        ReductionSequence((Section(plan, "graph"), Section(again, "hooks")), names),
        ReductionSequence((Section(plan, "graph"), Section(again, "hooks", "why")), names),
    ]
    assert len({sequence.fingerprint for sequence in sequences}) == len(sequences)
