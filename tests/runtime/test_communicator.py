"""A wrapper's own process group: what torch makes of the arguments that a group of gloo is given, with more threads."""

from datetime import timedelta

import pytest
import torch.distributed as dist
from models import Mlp, assert_step, row_batch, wrappers

from compiled_ddp import torch_private
from ranks import RankPool

BOTH = ("compile_ddp", "EagerDDP")


def _gloo(rank: int, wrapper: str) -> tuple[int, int, timedelta, int]:
    ddp = wrappers([wrapper])[wrapper](Mlp())
    x = row_batch(rank)
    assert_step(ddp, lambda module: module(x).square().sum())
    default = torch_private.for_tests.gloo_options(dist.group.WORLD)
    own = torch_private.for_tests.gloo_options(ddp._runtime.communicator.group)
    assert own._timeout == default._timeout
    return own._threads, default._threads, own._timeout, len(own._devices)


@pytest.mark.parametrize("wrapper", BOTH)
def test_a_communicator_of_gloo_runs_several_collectives_at_once(ranks2: RankPool, wrapper: str) -> None:
    for threads, usual_threads, timeout, devices in ranks2.run(_gloo, wrapper, collective_timeout_seconds=17):
        assert usual_threads < threads == torch_private.groups.GLOO_COLLECTIVES_IN_FLIGHT
        assert timeout == timedelta(seconds=17)
        assert devices == 1
