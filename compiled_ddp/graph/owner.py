"""Who compiles what, and for how long others wait for that."""

import contextlib
import hashlib
import json
import os
import socket
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch.distributed as dist

SILENT_SECONDS = 15.0
# However alive: longer than all but few graphs take to compile, and less than the 10 minutes for which ranks wait for
# each other in a collective of NCCL's by default.
PATIENCE_SECONDS = 480.0


class Owner(NamedTuple):
    """The process that compiles."""

    rank: int  # 0 where torch.distributed is not initialised
    pid: int
    host: str

    def __str__(self) -> str:
        return f"rank {self.rank} (process {self.pid} on {self.host})"


# A context for the time in which this process waits for the one that compiles; that may not be known.
Waiting = Callable[[Owner | None], contextlib.AbstractContextManager[object]]


def this_process() -> Owner:
    """As others would know it."""
    rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
    return Owner(rank, os.getpid(), socket.gethostname())


def name_of(work: Mapping[str, str]) -> str:
    """A name for all that has an influence on what is compiled, the same wherever that is the same."""
    return hashlib.sha256(json.dumps(work, sort_keys=True).encode()).hexdigest()


class Patience:
    """With one that compiles, from now on: while what it lives by changes, and not for ever."""

    def __init__(self) -> None:
        self._began = self._heard = time.monotonic()
        self._beat: object = None

    def note(self, beat: object) -> None:
        """What it has left last as a sign of life."""
        if beat != self._beat:
            self._beat, self._heard = beat, time.monotonic()

    @property
    def is_over(self) -> bool:
        now = time.monotonic()
        return now - self._heard > SILENT_SECONDS or now - self._began > PATIENCE_SECONDS
