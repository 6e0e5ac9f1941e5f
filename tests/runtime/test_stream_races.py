"""Faults in what orders streams, planted in both wrappers, are races by order alone: nothing need come late.

happens_before.py looks at what was put behind what.
"""

import contextlib
import gc
from pathlib import Path

import pytest
import second_device
import torch
from happens_before import HOST, Race
from stream_faults import FAULTS, backwards_end, no_use_recorded, trained
from stream_steps import (
    BOTH,
    gradients,
    one,
)

from compiled_ddp.step.buffers import FlatBuffer
from ranks import RankPool


def _races(rank: int, library: Path, wrapper: str, fault: str, backwards: int) -> list[Race]:
    ddp = trained(rank, library, wrapper)
    with FAULTS[fault](wrapper), second_device.looking_for_races() as races:
        backwards_end(rank, ddp, backwards)
        gradients(ddp)
    torch.accelerator.synchronize()
    return races


def _found(ranks: RankPool, library: Path, wrapper: str, fault: str, backwards: int) -> list[list[Race]]:
    return ranks.run(_races, library, wrapper, fault, backwards)


@pytest.mark.parametrize("wrapper", BOTH)
def test_without_a_fault_there_is_no_race(twin_ranks2: RankPool, twins_library: Path, wrapper: str) -> None:
    assert _found(twin_ranks2, twins_library, wrapper, "none", 4) == [[], []]


@pytest.mark.parametrize("wrapper", BOTH)
def test_a_launch_that_does_not_wait_for_all_writers_is_a_race(
    twin_ranks2: RankPool, twins_library: Path, wrapper: str
) -> None:
    for races in _found(twin_ranks2, twins_library, wrapper, "no wait before a launch", 1):
        assert any(race.second.operator == "allreduce" and race.first.writes for race in races), races


@pytest.mark.parametrize("wrapper", BOTH)
def test_a_gradient_that_is_read_before_its_wait_is_a_race(
    twin_ranks2: RankPool, twins_library: Path, wrapper: str
) -> None:
    for races in _found(twin_ranks2, twins_library, wrapper, "no wait for a launch", 1):
        read = [race for race in races if race.operators == ("allreduce", "copy_ to the host")]
        assert len({(race.block, race.begin) for race in read}) >= 12, races  # every parameter's


@pytest.mark.parametrize("wrapper", BOTH)
def test_a_buffer_that_is_refilled_while_it_is_reduced_is_a_race(
    twin_ranks2: RankPool, twins_library: Path, wrapper: str
) -> None:
    for races in _found(twin_ranks2, twins_library, wrapper, "no wait for a launch", 2):
        refilled = {race.block for race in races if race.first.operator == "allreduce" and race.second.writes}
        assert refilled, races


@pytest.mark.parametrize("wrapper", BOTH)
def test_riders_that_are_read_before_they_have_come_are_a_race(
    twin_ranks2: RankPool, twins_library: Path, wrapper: str
) -> None:
    for races in _found(twin_ranks2, twins_library, wrapper, "no wait for riders", 2):
        assert any(race.first.operator == "copy_ to the host" and race.second.actor == HOST for race in races), races


def _dropped(rank: int, library: Path, wrapper: str, fault: str, records: bool, keeps: bool) -> list[Race]:
    """All gradients and flat buffers are dropped right behind a backward."""
    with contextlib.nullcontext() if records else no_use_recorded():
        ddp = trained(rank, library, wrapper)
        keeping = contextlib.nullcontext() if keeps else second_device.collectives_that_keep_nothing()
        with FAULTS[fault](wrapper), keeping, second_device.looking_for_races() as races:
            one(rank, ddp, 0)
            ddp.zero_grad()
            for buffer in [each for each in gc.get_objects() if type(each) is FlatBuffer]:
                buffer.leave_memory()
            del ddp
            gc.collect()
    torch.accelerator.synchronize()
    return races


def _goes_on_while_reduced(races: list[Race]) -> bool:
    return any(race.operators == ("allreduce", "memory is handed out again") for race in races)


@pytest.mark.parametrize("keeps", [True, False], ids=["kept by the collective", "kept by none"])
@pytest.mark.parametrize("wrapper", BOTH)
def test_a_bucket_that_is_dropped_goes_on_when_all_streams_are_done_with_it(
    twin_ranks2: RankPool, twins_library: Path, wrapper: str, keeps: bool
) -> None:
    assert twin_ranks2.run(_dropped, twins_library, wrapper, "none", True, keeps) == [[], []]


@pytest.mark.parametrize("wrapper", BOTH)
def test_a_bucket_whose_memory_goes_on_while_it_is_reduced_is_a_race(
    twin_ranks2: RankPool, twins_library: Path, wrapper: str
) -> None:
    """The collective's stream was not recorded, and who frees the bucket has not waited for it."""
    for races in twin_ranks2.run(_dropped, twins_library, wrapper, "no wait for a launch", True, False):
        assert _goes_on_while_reduced(races), races


def test_a_bucket_of_hooks_that_records_no_other_stream_than_its_makers_is_a_race(
    twin_ranks2: RankPool, twins_library: Path
) -> None:
    """Made on a stream of the model's, where its memory goes back to, it is waited for on another one."""
    for races in twin_ranks2.run(_dropped, twins_library, "EagerDDP", "none", False, False):
        assert _goes_on_while_reduced(races), races
