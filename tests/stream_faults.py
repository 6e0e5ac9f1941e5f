"""Faults in what orders streams, to be planted in both wrappers, and wrappers to plant them in."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from models import expected_mean, row_batch
from stream_steps import (
    PROVEN_AFTER,
    Branches,
    loss_of,
    on_all_ranks,
    on_cpu,
    one,
    streams,
    with_streams,
    wrapped,
)
from torch import Tensor

from compiled_ddp.ranks.communicator import Communicator
from compiled_ddp.ranks.host_numbers import LateRows
from compiled_ddp.ranks.launch_observer import LaunchObserver
from compiled_ddp.step.buffers import Writers
from compiled_ddp.step.channel import Findings, RiderReader
from compiled_ddp.step.launches import Launch

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
    run_graph = Communicator.run_graph

    def run(communicator: Communicator, graph: Any, group_name: str, watching: Any) -> Any:
        with LaunchObserver(group_name, **{"launch": lambda *_: contextlib.nullcontext(), **contexts}):
            return run_graph(communicator, graph, group_name, watching)

    return mock.patch.object(Communicator, "run_graph", run)


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
    def take(late: LateRows) -> list[list[float]]:
        copied, late.copied = late.copied, None
        return [] if copied is None else copied.tolist()

    return mock.patch.object(LateRows, "take", take)


@contextlib.contextmanager
def no_use_recorded() -> Iterator[None]:
    with mock.patch.object(Writers, "_record", lambda writers, stream: writers._behind_maker.add(stream)):
        yield


def _none(_: str) -> Fault:
    return contextlib.nullcontext()


FAULTS: dict[str, Callable[[str], Fault]] = {
    "none": _none,
    "no wait before a launch": _no_wait_before_a_launch,
    "no wait for a launch": _no_wait_for_a_launch,
    "no wait for riders": _no_wait_for_riders,
}


# ---- a wrapper whose steps are proven --------------------------------------------------------------------------------


def trained(rank: int, library: Path, wrapper: str, **options: Any) -> Any:
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


def expected_of(rank: int, ddp: Any, step: int) -> dict[str, Tensor]:
    return expected_mean(on_cpu(ddp), lambda module: loss_of(module, row_batch(rank, step)))


def backwards_end(rank: int, ddp: Any, number: int) -> bool:
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
