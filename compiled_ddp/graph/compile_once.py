"""One process of a host compiles a graph, and the others load what it has compiled from Inductor's cache.

[Note: turns] The caches of torch are looked at before a graph is compiled and filled afterwards: ranks that begin at
the same time each compile everything. So whoever is to compile takes a lock in the folder of the cache, and others with
the same work wait for it. Nothing else depends on that: what a process finds in the cache when it has waited, or finds
missing, is for torch to say by its own key, and one that cannot wait compiles as if it were alone.

The lock is the kernel's (flock), which a process leaves when it dies, however that happens: the next one takes it over.
One that has been stopped holds it, and is given up when it has not told for `SILENT_SECONDS` that it lives. Where the
compiler fails, whoever waits goes on at once, each by itself: in turns the last of eight ranks would know of an error
only after eight compilations. No collective is called within a turn, so that no rank which waits for one is waited for.
"""

import contextlib
import functools
import json
import logging
import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.fx import GraphModule

from compiled_ddp import torch_private
from compiled_ddp.graph.other_hosts import (
    OtherHosts,
    Owner,
    Patience,
    Waiting,
    longest_wait,
    name_of,
    this_process,
)
from compiled_ddp.ranks.clock import again_and_again
from compiled_ddp.telling import log

_log = logging.getLogger(__name__)

SWITCH = "COMPILED_DDP_COMPILE_ONCE"
_POLL_SECONDS, _LONGEST_POLL_SECONDS, _BEAT_SECONDS = 0.01, 0.2, 1.0


def waiting_for(owner: Owner | None, what: str = "the same graph") -> str:
    """What a rank tells of that."""
    return f"for {owner or 'another process'}, which compiles {what}"


def is_on() -> bool:
    """`COMPILED_DDP_COMPILE_ONCE`: "1" (the default) or "0". Raises ValueError for anything else."""
    switch = os.environ.get(SWITCH, "1")
    if switch not in ("0", "1"):
        raise ValueError(f"{SWITCH} must be '1' or '0', found {switch!r}.")
    return switch == "1"


def work_on(
    graph_module: GraphModule, inputs: Sequence[Any], options: Mapping[str, Any], rewritten: str
) -> dict[str, str] | None:
    """All that has an influence on what becomes of this graph, by what it is called to users.

    `rewritten` is the identity of how it is rewritten, `options` are Inductor's. None where ranks are to compile at the
    same time: other ranks would not find in the cache what has come of it, or the compiler itself waits for them.
    """
    cache = torch_private.compiler_cache
    if not cache.keeps_graphs(options) or cache.asks_other_ranks(graph_module, options):
        return None
    return {**cache.identity_of(graph_module, inputs, options), "reduction": rewritten}


@contextlib.contextmanager
def in_turn(
    work: Mapping[str, str] | None, waiting: Waiting, other_hosts: OtherHosts | None = None
) -> Iterator[Owner | None]:
    """Compile in here what `work` describes: alone, or after whoever is compiling it. None is of nobody else's.

    What it gives is who has compiled it before, if somebody is known to have. [Note: turns]
    """
    if work is None:
        yield None
        return
    until = longest_wait()
    turn = _Turn(torch_private.compiler_cache.own_folder() / name_of(work), waiting, until)
    if not turn.take():
        yield turn.done_by()
        return
    after_others = contextlib.nullcontext() if other_hosts is None else other_hosts.in_turn(waiting, until)
    with turn.taken(), after_others as owner:
        yield owner


class _Lock:
    """The kernel's on a file, of this object alone: a process leaves it as it ends, however that is."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None

    @property
    def is_held(self) -> bool:
        return self._descriptor is not None

    def take(self) -> None:
        """If nobody has it. Raises OSError where the file system has no locks, ImportError where Python has none."""
        import fcntl

        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
        except OSError:
            os.close(descriptor)
            raise
        else:
            self._descriptor = descriptor

    def leave(self) -> None:
        import fcntl

        if self._descriptor is not None:
            # Closing is not enough: a child that was forked meanwhile has the descriptor, too.
            with contextlib.suppress(OSError):  # of a file system that is gone; there closing is what is left
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            os.close(self._descriptor)
            self._descriptor = None


class _Turn:
    def __init__(self, path: Path, waiting: Waiting, until: float) -> None:
        self._lock = _Lock(path.with_suffix(".lock"))
        self._owner_file, self._done = path.with_suffix(".owner"), path.with_suffix(".done")
        # Has another text after each failure: one that was there before, of whatever job, says nothing.
        self._failed = path.with_suffix(".failed")
        self._waiting, self._until = waiting, until

    def take(self) -> bool:
        """Whether this process is to compile for the others, and has the lock; else it goes on by itself.

        It does where the work has been done, by whoever it was, where its owner is silent, and where the folder cannot
        be written.
        """
        try:
            if self._done.exists():
                return False
            self._owner_file.parent.mkdir(parents=True, exist_ok=True)
            failure_before = self._last_failure()
            if not self._try():
                self._wait(failure_before)
            if self._done.exists():
                self._lock.leave()
        except (OSError, ImportError) as error:
            _tell_of(error)
        return self._lock.is_held

    def _try(self) -> bool:
        self._lock.take()
        return self._lock.is_held

    def _wait(self, failure_before: str) -> None:
        """Until the lock is this process's, or there is nothing to wait for any more."""
        with self._waiting(self._owner()):
            patience, pause = Patience(self._until), _POLL_SECONDS
            while not self._done.exists() and self._last_failure() == failure_before:
                patience.note(self._beat())
                if self._try() or patience.is_over or self._is_of_this_process():
                    return
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_POLL_SECONDS)

    def _is_of_this_process(self) -> bool:
        """Another thread of it has the lock, which may wait for what this one holds."""
        return self._owner() == this_process()

    def _owner(self) -> Owner | None:
        return _read(self._owner_file)  # None where it has just taken the lock, and not yet written who it is

    def _last_failure(self) -> str:
        try:
            return self._failed.read_text()
        except (OSError, ValueError):
            return ""

    def done_by(self) -> Owner | None:
        """Who has done the work, if it is done."""
        return _read(self._done)

    def _beat(self) -> int:
        try:
            return self._owner_file.stat().st_mtime_ns
        except OSError:
            return 0

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """Tell that this process compiles, while it does, and then that it has, or that the compiler has failed."""
        this, failure = json.dumps(this_process()._asdict()).encode(), uuid.uuid4().hex.encode()
        write_whole = torch_private.compiler_cache.write_whole
        try:
            self._write(lambda: write_whole(self._owner_file, this))
            self._write(lambda: _note_processor(self._owner_file.parent))
            with again_and_again(self._tell_that_it_lives, seconds=_BEAT_SECONDS, name="compiled_ddp compiling"):
                yield
            self._write(lambda: write_whole(self._done, this))
        except Exception:  # not what ends this process alone, such as KeyboardInterrupt: then the next one takes over
            self._write(lambda: write_whole(self._failed, failure))
            raise
        finally:
            self._lock.leave()

    def _write(self, write: Callable[[], object]) -> bool:
        """Whether that succeeded; where it does not (a full disk, a cleared cache) this compiles all the same."""
        try:
            write()
        except OSError as error:
            _tell_of(error)
            return False
        return True

    def _tell_that_it_lives(self) -> bool:
        return self._write(lambda: os.utime(self._owner_file))


def _read(file: Path) -> Owner | None:
    try:
        return Owner(**json.loads(file.read_text()))
    except (OSError, ValueError, TypeError):
        return None


@functools.cache
def _note_processor(folder: Path) -> None:
    """Note beside the cache for which kind of processor code is compiled there, and tell where it is several.

    What is compiled here has not its processor in the keys of torch's cache: `compiler_cache.processor`.
    """
    cache = torch_private.compiler_cache
    here = cache.processor()
    note = folder / f"processor_{cache.digest(here)[:8]}"
    if not note.exists():
        cache.write_whole(note, here.encode())
    others = sorted(each.read_text() for each in folder.glob("processor_????????") if each != note)
    if others:
        log.tell(
            _log,
            f"TORCHINDUCTOR_CACHE_DIR: {cache.folder()} has code for another kind of processor ({'; '.join(others)}; "
            f"here {here}), and torch does not tell in its cache for which one code was compiled: a rank may find code "
            "that its processor cannot run. Name a folder for each kind.",
        )


_told = set[tuple[type[Exception], int | None]]()  # by this process


def _tell_of(error: OSError | ImportError) -> None:
    """Once for each reason: it is that of all graphs, but for the name of the file in it."""
    reason = type(error), error.errno if isinstance(error, OSError) else None
    if reason not in _told:
        _told.add(reason)
        log.tell(_log, f"each rank compiles by itself what one might compile for all of its host: {error}")
