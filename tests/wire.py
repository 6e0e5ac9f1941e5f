"""A wire between ranks in one process, in place of a process group.

What is launched meets by its number, as on a process group, and has to be alike: an order that differs between ranks
is an AssertionError here. Nothing waits longer than a few seconds.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from compiled_ddp.comm_hooks import Ranks
from compiled_ddp.ranks.communicator import Communicator
from compiled_ddp.ranks.progress import RankProgress
from compiled_ddp.ranks.rank_group import RankGroup

PATIENCE_S = 5.0


@dataclass(frozen=True)
class Sent:
    """One rank's part in a collective."""

    kind: str
    values: Tensor  # as they were when it was launched

    @property
    def form(self) -> tuple[str, int, torch.dtype]:
        return self.kind, self.values.numel(), self.values.dtype


class Wire:
    """What all ranks have launched and published."""

    def __init__(self, world_size: int) -> None:
        self.sent: list[list[Sent]] = [[] for _ in range(world_size)]
        self._published: dict[str, str] = {}
        self._changed = threading.Condition()

    def send(self, rank: int, sent: Sent) -> int:
        """Launch a collective; returns its number."""
        with self._changed:
            self.sent[rank].append(sent)
            self._changed.notify_all()
            return len(self.sent[rank]) - 1

    def result(self, number: int) -> Tensor:
        """Of a collective, once all ranks have launched it."""
        self._await(lambda: all(len(sent) > number for sent in self.sent), f"collective {number}")
        parts = [sent[number] for sent in self.sent]
        assert len({part.form for part in parts}) == 1, f"collective {number} differs: {[part.form for part in parts]}"
        stacked = torch.stack([part.values for part in parts])
        return stacked.sum(0) if parts[0].kind == "sum" else stacked.amax(0)

    def publish(self, key: str, value: str) -> None:
        with self._changed:
            self._published[key] = value
            self._changed.notify_all()

    def read(self, key: str) -> str:
        self._await(lambda: key in self._published, key)
        return self._published[key]

    def _await(self, has_come: Callable[[], bool], what: str) -> None:
        with self._changed:
            assert self._changed.wait_for(has_come, PATIENCE_S), f"{what} was waited for in vain"


class Work:
    def __init__(self, wire: Wire, number: int, values: Tensor) -> None:
        self._wire, self._number, self._values = wire, number, values
        self._is_done = False

    @torch.no_grad()
    def wait(self) -> None:
        if not self._is_done:
            self._values.copy_(self._wire.result(self._number).view_as(self._values))
            self._is_done = True


class Port:
    """One rank's end of the wire, which counts what it launches as a process group does."""

    _device_types = ("cpu",)

    def __init__(self, wire: Wire, rank: int) -> None:
        self._wire, self._rank = wire, rank

    def _get_backend(self, _: str) -> "Port":
        return self

    def _get_sequence_number_for_group(self) -> int:
        return len(self.sent)

    @property
    def sent(self) -> list[Sent]:
        return self._wire.sent[self._rank]

    def launch(self, kind: str, values: Tensor) -> Work:
        return Work(self._wire, self._wire.send(self._rank, Sent(kind, values.detach().flatten().clone())), values)


class WiredRanks(RankGroup):
    def __init__(self, wire: Wire, rank: int) -> None:
        self._wire, self.rank, self.world_size = wire, rank, len(wire.sent)
        self.ranks, self.name = tuple(range(self.world_size)), "in one process"
        self.timeout = timedelta(seconds=PATIENCE_S)

    def publish(self, key: str, value: str) -> None:
        self._wire.publish(key, value)

    def read(self, key: str, *, writer: int, purpose: str, patience: float = 1.0) -> str:
        return self._wire.read(key)

    def ask_quietly(self, question: Any) -> Any:
        """There is no store: each value is read by itself."""
        return None

    def outlast(self, occasion: str) -> None:
        """No process leaves here."""


class NoHangReport:
    failed_before = ""

    def report(self, _: object) -> str:
        return "(no report)"

    def note_failure(self, why: str) -> None:
        self.failed_before = f"{why}."


class WiredCommunicator(Communicator):
    """All but the process group is the real one's."""

    def __init__(self, wire: Wire, rank: int) -> None:
        self.ranks = WiredRanks(wire, rank)
        self.rank, self.world_size, self.group_name, self.closed = rank, len(wire.sent), f"wire {rank}", False
        self._remedy = "start again"
        self.port = Port(wire, rank)
        self.progress = RankProgress(self.port)  # type: ignore[arg-type]
        self._hangs = NoHangReport()  # type: ignore[assignment]

    def for_hooks(self) -> Ranks:
        return Ranks(self.world_size, self.group_name, self.rank)

    def all_reduce(self, flat_buffer: Tensor, row: int | None = None) -> Any:
        assert row is None, "nothing here has rows"
        return self.port.launch("sum", flat_buffer)

    def maximum(self, values: Tensor) -> None:
        self.refuse_if_failed()
        self.port.launch("maximum", values).wait()

    def close(self) -> None:
        self.closed = True
