"""One host of a job compiles a graph, and sends what has come of it to the others through the store.

Within a host that is one process's turn: [Note: turns] in graph/compile_once.py. Whoever has it there asks here whether
another host is at the same work: the first one compiles, the others wait for as long as it tells that it lives, and put
what it sends into their own cache. What does not come, or cannot be used, is compiled as if this host were alone.
"""

import base64
import contextlib
import hashlib
import json
import logging
import os
import time
from collections.abc import Iterator, Mapping

import torch.distributed as dist

from compiled_ddp import torch_private
from compiled_ddp.graph.owner import Owner, Patience, Waiting, this_process
from compiled_ddp.ranks.agreement import publish_in_parts, read_parts
from compiled_ddp.ranks.rank_group import RankGroup
from compiled_ddp.telling import log

_log = logging.getLogger(__name__)

_SHORTEST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.02, 1.0
_FAILED = "failed"


class OtherHosts:
    """Those of a wrapper's ranks, for one piece of work."""

    def __init__(self, ranks: RankGroup, what: str, work: Mapping[str, str]) -> None:
        """`what` says what is compiled, equal on all ranks that do the same; `work` is all that has an influence."""
        self._ranks, self._what, self._work = ranks, what, work
        digest = hashlib.sha256(json.dumps(work, sort_keys=True).encode()).hexdigest()
        self._key = f"compiled/{digest}"

    @contextlib.contextmanager
    def in_turn(self, waiting: Waiting) -> Iterator[Owner | None]:
        """Compile in here, as the first one or after another host has; then that one's process is given."""
        try:
            owner = Owner(**json.loads(self._ranks.claim(self._key, json.dumps(this_process()._asdict()))))
        except RuntimeError:  # without the store this host is alone
            yield None
            return
        if owner == this_process():
            with self._compiling():
                yield None
        else:
            yield owner if self._take_over(owner, waiting) else None

    @contextlib.contextmanager
    def _compiling(self) -> Iterator[None]:
        self._tell_of_difference()
        made = torch_private.cache_artifacts.Made()
        try:
            yield
        except BaseException:
            self._publish(_FAILED)
            raise
        self._publish(base64.b64encode(made.packed()).decode() if self._is_wanted() else _FAILED)

    def _publish(self, text: str) -> None:
        with contextlib.suppress(RuntimeError):  # the others give this process up
            publish_in_parts(self._ranks, f"{self._key}/done", text)

    def _is_wanted(self) -> bool:
        """Whether there may be hosts that load it: any, unless torchrun has told of one alone and nobody waits."""
        on_this_host = int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
        return on_this_host < dist.get_world_size() or self._ranks.published(f"{self._key}/wanted") is not None

    def _take_over(self, owner: Owner, waiting: Waiting) -> bool:
        """Whether what `owner` has compiled is in this host's cache now."""
        with contextlib.suppress(RuntimeError):
            self._ranks.publish(f"{self._key}/wanted", "")
        with waiting(owner):
            sent = self._wait(owner)
        if sent is None or sent == _FAILED:
            return False
        try:
            torch_private.cache_artifacts.take_in(base64.b64decode(sent))
        except (ValueError, OSError) as error:
            log.tell(_log, f"what {owner} has sent is not used, and {self._what} is compiled anew: {error}")
            return False
        return True

    def _wait(self, owner: Owner) -> str | None:
        """What it sends; None where it does not live, or takes too long."""
        if owner.rank not in self._ranks.ranks:
            return None
        writer = self._ranks.ranks.index(owner.rank)
        patience, pause, key = Patience(), _SHORTEST_PAUSE_SECONDS, f"{self._key}/done"
        while self._ranks.published(key) is None:
            patience.note(self._ranks.beat_of(writer))
            if patience.is_over:
                return None
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
        try:
            return read_parts(self._ranks, key, writer=writer, purpose=f"for what it has compiled, {self._what}")
        except RuntimeError:
            return None

    def _tell_of_difference(self) -> None:
        """A line where another rank has begun this with another graph or other settings: each compiles its own."""
        mine = json.dumps([this_process().rank, self._work])
        with contextlib.suppress(RuntimeError):
            rank, work = json.loads(self._ranks.claim(f"compiled/of/{self._what}", mine))
            differing = [name for name, value in self._work.items() if work.get(name) != value]
            if differing and rank != this_process().rank:
                log.tell(
                    _log,
                    f"rank {this_process().rank} compiles {self._what} by itself, as its {', '.join(differing)} "
                    f"{'is' if len(differing) == 1 else 'are'} not rank {rank}'s",
                )
