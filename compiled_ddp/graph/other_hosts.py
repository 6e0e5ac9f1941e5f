"""One host of a job compiles a graph, and sends what has come of it to the others through the store.

Within a host that is one process's turn: [Note: turns] in graph/compile_once.py. Whoever has it there asks here whether
another host is at the same work: the first one compiles, the others wait for as long as it tells that it lives, and put
what it sends into their own cache. What does not come, or cannot be used, is compiled as if this host were alone.

Nothing here is a failure of the ranks': without the store, or with one that cannot do this, each host compiles.
"""

import base64
import contextlib
import hashlib
import json
import logging
import os
import socket
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch.distributed as dist

from compiled_ddp import torch_private
from compiled_ddp.ranks.rank_group import RankGroup
from compiled_ddp.ranks.store import LONGEST_VALUE
from compiled_ddp.telling import log

# ---- who compiles what, and for how long others wait for that --------------------------------------------------------

SILENT_SECONDS = 15.0
# However alive: longer than all but few graphs take to compile, and less than the 10 minutes for which ranks wait for
# each other in a collective of NCCL's by default.
PATIENCE_SECONDS = 480.0


class Owner(NamedTuple):
    """The process that compiles."""

    rank: int  # 0 where torch.distributed is not initialised
    pid: int
    host: str
    unique: str = ""  # pods may have equal numbers and names

    def __str__(self) -> str:
        return f"rank {self.rank} (process {self.pid} on {self.host})"


# A context for the time in which this process waits for the one that compiles; that may not be known.
Waiting = Callable[[Owner | None], contextlib.AbstractContextManager[object]]


_UNIQUE = uuid.uuid4().hex  # a forked process has it too, and another number


def this_process() -> Owner:
    """As others would know it."""
    rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
    return Owner(rank, os.getpid(), socket.gethostname(), _UNIQUE)


def name_of(work: Mapping[str, str]) -> str:
    """A name for all that has an influence on what is compiled, the same wherever that is the same."""
    return hashlib.sha256(json.dumps(work, sort_keys=True).encode()).hexdigest()


def longest_wait() -> float:
    """Until when, by `time.monotonic`, whoever comes to a piece of work now waits for others that compile it."""
    return time.monotonic() + PATIENCE_SECONDS


class Patience:
    """With one that compiles, from now on: while what it lives by changes, and up to a time."""

    def __init__(self, until: float) -> None:
        """`until` is `longest_wait()` of when this process came to the work, whoever it has waited for since."""
        self._until, self._heard = until, time.monotonic()
        self._beat: object = None

    def note(self, beat: object) -> None:
        """What it has left last as a sign of life."""
        if beat != self._beat:
            self._beat, self._heard = beat, time.monotonic()

    @property
    def is_over(self) -> bool:
        now = time.monotonic()
        return now - self._heard > SILENT_SECONDS or now > self._until


# ---- one host compiles, the others load ------------------------------------------------------------------------------

_log = logging.getLogger(__name__)

_SHORTEST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.02, 1.0


class OtherHosts:
    """The other hosts of a wrapper's ranks, for one piece of work."""

    def __init__(
        self, ranks: RankGroup, what: str, work: Mapping[str, str], tell_of_difference: Callable[[str], None]
    ) -> None:
        """`what` says what is compiled, equal on all ranks that do the same; `work` is all that has an influence.

        `tell_of_difference` is called with a line where another rank has begun the same with another work.
        """
        self._ranks, self._what, self._work, self._tell_of_difference = ranks, what, work, tell_of_difference
        self._key = f"compiled/{name_of(work)}"

    @contextlib.contextmanager
    def in_turn(self, waiting: Waiting, until: float) -> Iterator[Owner | None]:
        """Compile in here, as the first one or after another host has; then that one's process is given.

        `until` is as `Patience` has it.
        """
        claimed = self._claim(self._key, json.dumps(this_process()._asdict()))
        owner = None if claimed is None else Owner(**json.loads(claimed))
        if owner == this_process():
            with self._compiling():
                yield None
        else:
            yield owner if owner is not None and self._take_over(owner, waiting, until) else None

    def _claim(self, key: str, value: str) -> str | None:
        """The value of the rank that has called this first; None without the store."""
        found = self._ranks.ask_quietly(lambda store: store.compare_set(key, "", value))
        return None if found is None else found.decode()

    @contextlib.contextmanager
    def _compiling(self) -> Iterator[None]:
        is_same, parts = self._is_same_elsewhere(), list[str]()
        try:
            made = torch_private.cache_artifacts.Made()
            yield
            if self._is_wanted(is_same):
                parts = self._packed(made)
        finally:  # where compiling has failed, others try it themselves
            self._send(parts)

    def _packed(self, made: torch_private.cache_artifacts.Made) -> list[str]:
        try:
            text = base64.b64encode(made.packed()).decode()
        except Exception as error:  # the graph is compiled all the same
            log.tell(_log, f"{self._what} could not be packed for other hosts: {error}")
            return []
        return [text[start : start + LONGEST_VALUE] for start in range(0, len(text), LONGEST_VALUE)]

    def _send(self, parts: list[str]) -> None:
        values = {f"{self._key}/part/{number}": part for number, part in enumerate(parts)}
        for key, value in [*values.items(), (f"{self._key}/parts", str(len(parts)))]:
            self._ranks.publish_quietly(key, value)

    def _is_wanted(self, is_same: bool) -> bool:
        """Whether somebody waits for it, or others may still come to it on hosts that the launcher has told of."""
        on_this_host = os.environ.get("LOCAL_WORLD_SIZE", "")  # anybody may have set it, to anything
        comes = is_same and on_this_host.isdecimal() and int(on_this_host) < dist.get_world_size()
        return comes or self._ranks.published(f"{self._key}/wanted") is not None

    def _take_over(self, owner: Owner, waiting: Waiting, until: float) -> bool:
        """Whether what `owner` has compiled is in this host's cache now."""
        if owner.rank not in self._ranks.ranks or owner.rank == this_process().rank:
            return False  # it is of a process that this one has taken the place of
        self._ranks.publish_quietly(f"{self._key}/wanted", "")
        with waiting(owner):
            sent = self._wait(self._ranks.ranks.index(owner.rank), until)
        if not sent:
            return False
        try:
            torch_private.cache_artifacts.take_in(base64.b64decode(sent))
        except (ValueError, OSError) as error:
            log.tell(_log, f"what {owner} has sent is not used, and {self._what} is compiled anew: {error}")
            return False
        return True

    def _wait(self, owner: int, until: float) -> str:
        """What the group's rank `owner` sends; empty where nothing comes."""
        patience, pause, key = Patience(until), _SHORTEST_PAUSE_SECONDS, f"{self._key}/parts"
        while (number := self._ranks.published(key)) is None:
            patience.note(self._ranks.beat_of(owner))
            if patience.is_over:
                return ""
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
        parts = [self._ranks.published(f"{self._key}/part/{part}") for part in range(int(number))]
        return "".join(part for part in parts if part is not None)  # one that is missing is noticed when it is unpacked

    def _is_same_elsewhere(self) -> bool:
        """Whether the first rank to compile this has had the same work; else each compiles its own, and says so."""
        here = this_process().rank
        first = self._claim(f"compiled/of/{self._what}", json.dumps([here, self._work]))
        if first is None:
            return False
        rank, work = json.loads(first)
        differing = [name for name, value in self._work.items() if work.get(name) != value]
        if differing and rank != here:
            verb = "is" if len(differing) == 1 else "are"
            self._tell_of_difference(
                f"rank {here} compiles {self._what} by itself, as its {', '.join(differing)} {verb} not rank {rank}'s"
            )
        return not differing
