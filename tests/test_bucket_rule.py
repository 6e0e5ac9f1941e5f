"""Buckets by elements, by triggers and at the end of backward, without ranks."""

from collections.abc import Sequence

import pytest
import torch

from compiled_ddp.plan import GradientSpec
from compiled_ddp.planning.bucket_rule import BucketRule

NAMES = ("a", "b", "c", "d", "e", "f")


def spec(index: int, numel: int, dtype: torch.dtype = torch.float32) -> GradientSpec:
    return GradientSpec(index, (numel,), (1,), dtype, torch.device("cpu"))


def filled(rule: BucketRule, gradients: Sequence[GradientSpec]) -> list[str]:
    return ["".join(NAMES[gradient.index] for gradient in bucket) for bucket in rule.fill(gradients, NAMES)]


@pytest.mark.parametrize(
    ("elements", "found"),
    [(1, ["f", "e", "d"]), (10, ["f", "e", "d"]), (11, ["fe", "d"]), (21, ["fed"]), (0, ["f", "e", "d"])],
)
def test_a_bucket_closes_when_it_has_at_least_that_many_elements(elements: int, found: list[str]) -> None:
    assert filled(BucketRule(elements), [spec(5, 10), spec(4, 10), spec(3, 10)]) == found


def test_each_dtype_has_buckets_of_its_own_and_the_rest_is_shipped_last_in_order_of_dtypes() -> None:
    half, double, brain = torch.float16, torch.float64, torch.bfloat16
    gradients = [spec(0, 4, brain), spec(1, 4, double), spec(2, 4), spec(3, 4, half), spec(4, 4), spec(5, 4, double)]
    assert filled(BucketRule(8), gradients) == ["ce", "bf", "d", "a"]


def test_a_trigger_ships_the_bucket_of_its_own_dtype_and_overrides_the_size() -> None:
    double = torch.float64
    gradients = [spec(0, 4), spec(1, 4, double), spec(2, 4), spec(3, 4, double), spec(4, 4), spec(5, 4, double)]
    assert filled(BucketRule(1, triggers=("c", "d")), gradients) == ["ac", "bd", "e", "f"]
    assert filled(BucketRule(1, triggers=()), gradients) == ["ace", "bdf"]


def test_delayed_buckets_are_one_for_each_dtype_in_registration_order() -> None:
    gradients = [spec(3, 4, torch.float64), spec(2, 4), spec(1, 4, torch.float64), spec(0, 4)]
    assert filled(BucketRule(1, delayed=True), gradients) == ["ac", "bd"]
