"""The plan for launches that were measured: hand-made sequences."""

from collections.abc import Callable, Sequence

import pytest
import torch

from compiled_ddp.plan import BucketPlan, GradientSpec, ReductionSequence, Section
from compiled_ddp.planning.assignment import place_buckets
from compiled_ddp.planning.cost_model import BackwardWork, Link, Work
from compiled_ddp.planning.measured_plan import plan_from_launches
from compiled_ddp.planning.saved_plan import SavedPlan

NAMES = ("a", "b", "c", "d", "e")
SPECS = [GradientSpec.of(index, torch.empty(100)) for index in range(len(NAMES))]  # of 400 bytes
LINK = Link(startup_seconds=0.01, bytes_per_second=1000.0)


def plan_of(*buckets: str) -> BucketPlan:
    """Of one-letter names."""
    return place_buckets([[SPECS[NAMES.index(name)] for name in bucket] for bucket in buckets], 2)


def planned(
    sections: Sequence[Section],
    launches: Sequence[float],
    computed: float,
    link: Link = LINK,
    work_of: Callable[[BucketPlan], BackwardWork | None] = lambda plan: None,
) -> SavedPlan:
    names = NAMES[: sum(len(section.plan.indices) for section in sections)]
    return plan_from_launches(ReductionSequence(tuple(sections), names), SPECS, launches, computed, link, work_of)


def buckets_of(plan: SavedPlan) -> list[str]:
    return ["".join(bucket) for bucket in plan.buckets]


def test_one_bucket_that_is_late_is_parted() -> None:
    """Ready by their bytes at 1, 2, 3 and 4 s, and 0.4 s each on the link: the last one alone ends at 4.41."""
    plan = planned([Section(plan_of("dcba"), "hooks")], [4.0], 4.0)
    assert buckets_of(plan)[-1] == "a" and len(plan.buckets) > 1
    assert plan.parameters == tuple((name, "float32 [100]") for name in "abcd")
    assert plan.world_size == 2


def test_where_computing_ends_late_few_buckets_are_as_good() -> None:
    """What is measured is a backward that goes on for long after its last gradient."""
    assert buckets_of(planned([Section(plan_of("d", "c", "b", "a"), "hooks")], [1.0, 2.0, 3.0, 4.0], 60.0)) != []
    one = planned([Section(plan_of("dcba"), "hooks")], [4.0], 60.0)
    assert buckets_of(one) == ["dcba"]


def test_a_plan_that_gains_nothing_is_kept() -> None:
    best = planned([Section(plan_of("dcba"), "hooks")], [4.0], 4.0)
    again = planned([Section(plan_of(*buckets_of(best)), "hooks")], [*range(1, len(best.buckets) + 1)], 4.0)
    assert len(buckets_of(again)) >= len(buckets_of(best))
    same = [Section(plan_of("dc", "ba"), "graph")]
    assert buckets_of(planned(same, [0.001, 0.002], 0.002)) == ["dc", "ba"]  # the link alone counts, and is busy


def test_inside_a_bucket_gradients_are_ready_as_counted() -> None:
    """The first three come late, the fourth right behind them: counted, and not by their bytes."""

    def counted(plan: BucketPlan) -> BackwardWork:
        return BackwardWork(tuple(Work(flops) for flops in (1.0, 97.0, 98.0, 100.0)), Work(100.0))

    section = [Section(plan_of("dcba"), "graph")]
    slow = Link(startup_seconds=0.3, bytes_per_second=1000.0)
    assert buckets_of(planned(section, [4.0], 4.0, slow, counted))[0] == "d"
    assert buckets_of(planned(section, [4.0], 4.0, slow))[0] != "d"


def test_what_no_rank_has_used_keeps_a_place_at_the_end() -> None:
    sections = [Section(plan_of("dcba"), "hooks"), Section(plan_of("e"), "unused")]
    plan = planned(sections, [4.0], 4.0)
    assert buckets_of(plan)[-1] == "e"
    plan.check({name: torch.empty(100) for name in NAMES})


def test_a_plan_is_written_as_a_wrapper_writes_its_own(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("plans")
    sequence = ReductionSequence((Section(plan_of("dc", "ba"), "hooks"),), NAMES[:4])
    sequence.save(folder / "own.json")
    plan = SavedPlan.load(folder / "own.json")
    plan.save(folder / "again.json")
    assert (folder / "own.json").read_text() == (folder / "again.json").read_text()
