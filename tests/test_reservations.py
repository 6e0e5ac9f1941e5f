"""Which sections graphs may reserve, decided without ranks."""

import pytest
import torch

from compiled_ddp.plan import BucketPlan, GradientSpec, Section
from compiled_ddp.planning.assignment import assign_buckets
from compiled_ddp.step.launches import Reservations


def plan_of(*indices: int) -> BucketPlan:
    specs = [GradientSpec.of(index, torch.empty(3)) for index in indices]
    return assign_buckets(specs, capacities_bytes=(1024,), world_size=2)


def reservations(*graphs: tuple[int, ...], by_hooks: tuple[int, ...] = ()) -> Reservations:
    """A section for each of these graphs' parameters, and one that hooks reduce."""
    sections = [Section(plan_of(*indices), "graph") for indices in graphs]
    return Reservations([*sections, Section(plan_of(*by_hooks), "hooks", "eager code")] if by_hooks else sections)


def test_a_section_is_free_until_a_graph_reserves_it_and_never_after_its_release() -> None:
    sections = reservations((0, 1), (2,))
    assert sections.is_free(0)
    sections.reserve(0)
    assert not sections.is_free(0)
    assert 0 in sections.reserved
    assert sections.incomplete() == [0]
    sections.release(0)
    assert not sections.is_free(0)
    assert 0 not in sections.reserved
    assert not sections.waits_for_graph(0)
    assert sections.waits_for_graph(1)


def test_what_is_complete_hands_out_its_riders() -> None:
    sections = reservations((0,), (1,))
    for section in (0, 1):
        sections.reserve(section)
    sections.complete(1, torch.ones(2))
    assert sections.incomplete() == [0]
    assert [riders.tolist() for riders in sections.reserved.values() if riders is not None] == [[1.0, 1.0]]


def test_hooks_wait_for_no_graph_in_a_section_of_their_own() -> None:
    sections = reservations((0,), by_hooks=(1,))
    assert [sections.waits_for_graph(section) for section in (0, 1)] == [True, False]


@pytest.mark.parametrize(
    ("left", "concerned", "free"),
    [
        ({9}, {9}, [0, 1, 2, 3]),
        ({5}, {5}, [0, 1, 2]),
        ({2}, {2, 3, 4}, [0, 3]),  # 3 stands in two sections
        ({0}, {0, 1, 2, 3, 4}, [3]),  # behind what hooks wait for, no graph may have a part of 3
    ],
)
def test_what_is_left_to_hooks_takes_along_what_shares_with_it(
    left: set[int], concerned: set[int], free: list[int]
) -> None:
    sections = reservations((0, 1), (2, 3), (3, 4), (5,))
    assert sections.leave_to_hooks(left) == concerned
    assert [section for section in range(4) if sections.is_free(section)] == free


def test_graphs_that_share_a_parameter_run_together_or_not_at_all() -> None:
    sections = reservations((0,), (1, 2), (2, 3))
    assert list(sections.graphs_to_run_with(0)) == [0]
    assert list(sections.graphs_to_run_with(2)) == [1, 2]
    sections.reserve(1)
    assert sections.shares_with_reserved({0, 2, 3}) == {2}


def test_all_may_be_left_to_hooks() -> None:
    sections = reservations((0,), (1,))
    sections.leave_all_to_hooks()
    assert not any(map(sections.is_free, (0, 1)))
