"""Faults in what orders streams, planted in both wrappers: each must be found, by order alone and by what comes out.

By order alone, nothing need come late: happens_before.py looks at what was put behind what. By what comes out, the
stream that should be waited for is held until all else has run, so that no luck is needed either.
"""

import contextlib
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import second_device
import torch
from happens_before import HOST, Race
from models import expected_mean, row_batch
from stream_steps import (
    BOTH,
    PROVEN_AFTER,
    Branches,
    are_right,
    current_stream,
    gradients,
    loss_of,
    on_all_ranks,
    on_cpu,
    one,
    streams,
    with_streams,
    wrapped,
)
from torch import Tensor

from compiled_ddp.backward.flat_buffers import FlatBuffer
from compiled_ddp.backward.launch import Launch
from compiled_ddp.backward.riders import Findings, RiderReader
from compiled_ddp.backward.streams import Writers
from compiled_ddp.ranks.launch_observer import LaunchObserver
from compiled_ddp.step import reserved_section
from ranks import RankPool

Fault = contextlib.AbstractContextManager[object]


# ---- the faults ------------------------------------------------------------------------------------------------------


class _NotWaitedFor:
    """A work for which no stream waits."""

    def __init__(self, work: Any) -> None:
        self._work = work

    def wait(self) -> None:
        """Does nothing: the fault."""

    def wait_for_collectives(self) -> None:
        """The same."""


def _elsewhere(*_: object) -> torch.Stream:
    """A stream that waits for none, and for which none waits."""
    return streams(5)[4]


def _graphs_with(**contexts: Any) -> Fault:
    """Graphs launch, or wait, in these contexts."""
    run_graph = reserved_section.run_graph

    def run(graph: Any, communicator: Any, group_name: str, watching: Any) -> Any:
        with LaunchObserver(group_name, **{"launch": lambda *_: contextlib.nullcontext(), **contexts}):
            return run_graph(graph, communicator, group_name, watching)

    return mock.patch.object(reserved_section, "run_graph", run)


def _no_wait_before_a_launch(wrapper: str) -> Fault:
    if wrapper == "compile_ddp":
        return _graphs_with(launch=_elsewhere)
    return mock.patch.object(Writers, "before_read", lambda writers: writers._writing.clear())


@contextlib.contextmanager
def _no_wait_for_a_launch(wrapper: str) -> Iterator[None]:
    """Riders say nothing meanwhile: ranks that read others of them would not do the same."""

    def started(launch: Launch, work: Any) -> None:
        launch.work = _NotWaitedFor(work)

    def read(reader: RiderReader, riders: Any, *, at_once: bool = False) -> Findings:
        return Findings()

    hooks = mock.patch.object(Launch, "started", started)
    quiet = mock.patch.object(RiderReader, "read", read)
    with quiet, _graphs_with(wait=_elsewhere) if wrapper == "compile_ddp" else hooks:
        yield


def _no_wait_for_riders(_: str) -> Fault:
    def earlier(reader: Any) -> list[list[float]]:
        if reader._copied is None:
            return []
        copied, reader._copied = reader._copied, None
        return copied.tolist()

    return mock.patch.object(RiderReader, "_earlier", earlier)


def _none(_: str) -> Fault:
    return contextlib.nullcontext()


FAULTS: dict[str, Callable[[str], Fault]] = {
    "none": _none,
    "no wait before a launch": _no_wait_before_a_launch,
    "no wait for a launch": _no_wait_for_a_launch,
    "no wait for riders": _no_wait_for_riders,
}


# ---- a wrapper whose steps are proven --------------------------------------------------------------------------------


def _trained(rank: int, library: Path, wrapper: str, **options: Any) -> Any:
    """Graphs are on the one stream of their forward, so that streams of a model's own are hooks' matter."""
    model = with_streams if wrapper == "EagerDDP" else Branches
    ddp = wrapped(library, wrapper, model, broadcast_buffers=False, **options)
    for step in range(PROVEN_AFTER + 2):
        ddp.zero_grad()
        one(rank, ddp, step)
    ddp.zero_grad()
    assert wrapper == "EagerDDP" or " graph " in str(ddp.explain())
    torch.accelerator.synchronize()
    return ddp


def _expected(rank: int, ddp: Any, step: int) -> dict[str, Tensor]:
    return expected_mean(on_cpu(ddp), lambda module: loss_of(module, row_batch(rank, step)))


def _backwards(rank: int, ddp: Any, number: int) -> bool:
    """Whether no rank's raises."""
    for step in range(number):
        ddp.zero_grad()
        try:
            one(rank, ddp, step)
        except (RuntimeError, ValueError):  # of riders that say what no rank has sent
            return on_all_ranks(False)
        if not on_all_ranks(True):
            return False
    return True


# ---- by order alone --------------------------------------------------------------------------------------------------


def _races(rank: int, library: Path, wrapper: str, fault: str, backwards: int) -> list[Race]:
    ddp = _trained(rank, library, wrapper)
    with FAULTS[fault](wrapper), second_device.looking_for_races() as races:
        _backwards(rank, ddp, backwards)
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


@contextlib.contextmanager
def _no_use_recorded() -> Iterator[None]:
    with mock.patch.object(Writers, "_record", lambda writers, stream: writers._behind_maker.add(stream)):
        yield


def _dropped(rank: int, library: Path, wrapper: str, fault: str, records: bool, keeps: bool) -> list[Race]:
    """All gradients and flat buffers are dropped right behind a backward."""
    with contextlib.nullcontext() if records else _no_use_recorded():
        ddp = _trained(rank, library, wrapper)
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


# ---- by what comes out -----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _late_writes(wrapper: str) -> Iterator[None]:
    """The current stream is held from the moment on in which something is first put into a bucket, or at once."""
    here, put_all = current_stream(), FlatBuffer.put_all
    with contextlib.ExitStack() as late:

        def hold_and_put(*args: Any, **kwargs: Any) -> None:
            if here not in holds:
                holds.append(here)
                late.enter_context(second_device.held(here))
            put_all(*args, **kwargs)

        holds: list[torch.Stream] = []
        if wrapper == "compile_ddp":
            late.enter_context(second_device.held(here))
            yield
        else:
            with mock.patch.object(FlatBuffer, "put_all", hold_and_put):
                yield
            assert holds


def _launches_early(rank: int, library: Path, wrapper: str, fault: str) -> bool:
    """Whether gradients are right that are written late."""
    ddp = _trained(rank, library, wrapper)
    expected, x = _expected(rank, ddp, 0), row_batch(rank, 0).to("twins:0")
    with FAULTS[fault](wrapper):
        loss = loss_of(ddp, x)
        torch.accelerator.synchronize()
        with _late_writes(wrapper):
            loss.backward()
        return are_right(gradients(ddp), expected)


@pytest.mark.parametrize("wrapper", BOTH)
def test_a_launch_that_does_not_wait_for_all_writers_is_found(
    twin_ranks2: RankPool, twins_library: Path, wrapper: str
) -> None:
    assert all(twin_ranks2.run(_launches_early, twins_library, wrapper, "none"))
    assert not any(twin_ranks2.run(_launches_early, twins_library, wrapper, "no wait before a launch"))


def _reads_early(rank: int, library: Path, wrapper: str, fault: str) -> bool:
    """Whether gradients are right that are read while all collectives come late."""
    ddp = _trained(rank, library, wrapper)
    expected = _expected(rank, ddp, 0)
    with FAULTS[fault](wrapper):
        with second_device.held_collectives():
            one(rank, ddp, 0)
            read = {name: parameter.grad.clone() for name, parameter in ddp.module.named_parameters()}
        return are_right({name: gradient.cpu() for name, gradient in read.items()}, expected)


@pytest.mark.parametrize("wrapper", BOTH)
def test_a_gradient_that_is_read_before_its_wait_is_found(
    twin_ranks2: RankPool, twins_library: Path, wrapper: str
) -> None:
    assert all(twin_ranks2.run(_reads_early, twins_library, wrapper, "none"))
    assert not any(twin_ranks2.run(_reads_early, twins_library, wrapper, "no wait for a launch"))


def _late_collectives(rank: int, library: Path, wrapper: str, fault: str) -> bool:
    """Whether two backwards are right whose collectives run once both have launched theirs."""
    ddp = _trained(rank, library, wrapper)
    expected = _expected(rank, ddp, 1)
    with FAULTS[fault](wrapper):
        with second_device.held_collectives():
            ended = _backwards(rank, ddp, 2)
        torch.accelerator.synchronize()
        return on_all_ranks(ended) and are_right(gradients(ddp), expected)


@pytest.mark.parametrize("wrapper", BOTH)
@pytest.mark.parametrize("fault", ["no wait for a launch", "no wait for riders"])
def test_a_buffer_refilled_too_early_and_riders_read_too_early_are_found(
    twin_ranks2: RankPool, twins_library: Path, wrapper: str, fault: str
) -> None:
    """Without a fault the host would wait here, for ever: test_streams.py has those steps, and other delays."""
    assert not any(twin_ranks2.run(_late_collectives, twins_library, wrapper, fault))
