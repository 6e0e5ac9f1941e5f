"""A functional reduction's buckets where the user gives no size: planned for the link, which is measured once."""

from typing import Any

import pytest
import torch
from calibrations import calibration
from test_grad import assert_same, by_hand, loss, parameters, rows

from compiled_ddp import Calibration
from compiled_ddp import functional as ddp
from compiled_ddp.functional import agreements
from compiled_ddp.passes.step_pipeline import StepPipeline
from compiled_ddp.plan import BucketPlan
from ranks import RankPool


def _planned(rank: int, way: str, bytes_per_second: float) -> tuple[int, list[int], list[str]]:
    """How often the link was measured, the buckets that were launched, and what the graph's key is made of."""
    plans: list[BucketPlan] = []
    keys: list[str] = []
    measured: list[torch.device] = []
    speeds = [bytes_per_second, 1.0]  # a second measurement would find another link

    def measure(communicator: Any, device: torch.device) -> Calibration:
        measured.append(device)
        communicator.all_reduce(torch.ones(1)).wait()
        return calibration(bytes_per_second=speeds[len(measured) - 1])

    run = StepPipeline.run

    def noting(self: StepPipeline, *args: Any, **kwargs: Any) -> None:
        keys.append(self.cache_identity)
        run(self, *args, **kwargs)

    def wide(params: Any, x: torch.Tensor) -> torch.Tensor:
        return loss(params, x) + sum((torch.ones(512, 256) @ params[f"wide {n}"]).sum() for n in range(6))

    params = parameters() | {f"wide {n}": torch.zeros(256, 256 + n) for n in range(6)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(agreements, "calibration_for", measure)
        patch.setattr(StepPipeline, "run", noting)
        given = ddp.grad(wide, bucket_cap_mb=3)
        given(params, rows(rank))
        assert not measured, "the size was given"
        for _ in range(2):  # two functions, of which the first one measures
            communicator = ddp.Communicator()
            gradient = ddp.grad(wide, process_group=communicator)
            step = gradient if way == "eager" else ddp.compile(gradient, backend="aot_eager")
            found = step(params, rows(rank))
            assert_same({name: found[name] for name in parameters()}, by_hand(loss, 2))
            plans += [one.plan for one in communicator.order.ahead(1)]
    assert plans[0].fingerprint == plans[1].fingerprint
    return len(measured), [len(bucket.gradients) for bucket in plans[0].buckets], keys[:1]


SPEEDS = (5e7, 2e9, 1e12)


@pytest.mark.parametrize("way", ["eager", "compiled"])
def test_every_rank_plans_for_the_link_which_is_measured_once(ranks2: RankPool, way: str) -> None:
    """As many buckets as the start-up of each is worth: of a slow link most where nobody knows the work."""
    found = {}
    for speed in SPEEDS:
        first, second = ranks2.run(_planned, way, speed)
        assert first == second
        number, found[speed], keys = first
        assert number == 1 and len(keys) == (way == "compiled")
    sizes = [len(buckets) for buckets in found.values()]
    assert sizes[2] == 1 < sizes[1], sizes
    assert sizes[0] > sizes[1] if way == "eager" else sizes[0] > 1, sizes


def test_another_plan_is_another_key_of_the_compile_cache(ranks2: RankPool) -> None:
    keys = {ranks2.run(_planned, "compiled", speed)[0][2][0] for speed in (SPEEDS[0], SPEEDS[2])}
    assert len(keys) == 2


def _really_measured(rank: int) -> str:
    communicator = ddp.Communicator()
    ddp.grad(loss, process_group=communicator)(parameters(), rows(rank))
    return str(communicator.order.ahead(1)[0].planner)


def test_ranks_agree_on_what_they_measure(ranks3: RankPool) -> None:
    planners = ranks3.run(_really_measured)
    assert planners[0] == planners[1] == planners[2] and "where an all-reduce takes" in planners[0]
