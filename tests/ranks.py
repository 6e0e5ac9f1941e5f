"""Rank processes that many tests share: `pool.run(function, *args)` calls `function(rank, *args)` on each rank.

A new process costs seconds, nearly all of them `import torch`, so a pool lives for the whole test session, and where
that is safe its ranks are forked from processes that have imported it and done nothing else: one for each rank number,
as what strings hash to, and so the order of a set, should differ between ranks. Every run gets a gloo process group of
its own, made before the function and destroyed after it. After a run that failed or took too long the ranks are in an
unknown state: they are killed, and the next run starts new ones.
"""

import contextlib
import faulthandler
import gc
import inspect
import multiprocessing
import os
import pickle
import reprlib
import signal
import sys
import tempfile
import threading
import time
import traceback
import types
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

RANK_ENVIRONMENT = {
    "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
    "OMP_NUM_THREADS": "1",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",  # in the rank itself: no helper processes that outlive a killed rank
}
START_METHOD = "forkserver" if sys.platform == "linux" else "spawn"  # macOS's frameworks do not outlive a fork
IMPORTED_BEFORE_FORK = "before_fork"
STARTUP_SECONDS = 180.0
GRACE_SECONDS = 3.0  # how long the other ranks may go on after the first one failed
CLEAN_UP_SECONDS = 60.0
LOOK_SECONDS = 0.2  # of the ranks' package, instead of a second: many tests wait until ranks have found each other out


class RankError(Exception):
    """A run failed on one rank or more; the message holds each rank's traceback or stacks."""


@dataclass(frozen=True)
class _Job:
    number: int
    import_from: str  # directory that the function's module is imported from
    call: bytes  # pickled (function, args), apart: a rank that cannot unpickle it reports that
    collective_timeout_seconds: float | None  # None: the function runs without a process group


@dataclass(frozen=True)
class _Reply:
    failed: bool
    content: bytes  # the pickled return value, or the traceback's text


@dataclass(frozen=True)
class _Rank:
    process: BaseProcess
    connection: Connection
    stacks_path: Path

    def stacks(self) -> str:
        """Python stacks of all threads of the rank, or what it left when it crashed."""
        if self.process.is_alive() and self.process.pid is not None:
            os.kill(self.process.pid, signal.SIGUSR1)
            size, deadline = -1, time.monotonic() + 3.0
            while time.monotonic() < deadline and (size <= 0 or self.stacks_path.stat().st_size != size):
                size = self.stacks_path.stat().st_size
                time.sleep(0.1)
        return self.stacks_path.read_text(errors="replace").strip() or "no stacks"


class RankPool:
    """`world_size` rank processes, started by the first run and used by all that follow."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._ranks: list[_Rank] = []
        self._store: dist.TCPStore | None = None
        self._stacks_directory = tempfile.TemporaryDirectory(prefix="rank-stacks-")
        self._runs = 0

    def run(
        self,
        function: Callable[..., Any],
        *args: object,
        timeout_seconds: float = 120.0,
        collective_timeout_seconds: float = 30.0,
        process_group: bool = True,
    ) -> list[Any]:
        """Call `function(rank, *args)` on every rank and return what the ranks returned, in rank order.

        `function` is a module-level function; it, `args` and the return values travel by pickle (tensors by value).
        The default process group is up while it runs, unless `process_group=False`. Ranks are seeded differently, so
        that a missing broadcast shows. Raises RankError, with every failing rank's traceback, when a rank raises,
        dies, or has not returned within `timeout_seconds`; then with the Python stacks of all ranks.
        """
        __tracebackhide__ = True
        if "<locals>" in function.__qualname__ or function.__name__ == "<lambda>":
            raise ValueError(f"{function.__qualname__} must be a module-level function: ranks import it by its name")
        self._runs += 1
        job = _Job(
            number=self._runs,
            import_from=str(Path(inspect.getfile(function)).resolve().parent),
            call=pickle.dumps((function, args)),
            collective_timeout_seconds=collective_timeout_seconds if process_group else None,
        )
        name = f"{function.__module__}.{function.__qualname__}"
        try:
            if not self._ranks:
                self._start()
            results = self._ask(pickle.dumps(job), name, timeout_seconds)
            # No rank takes its process group down before all have returned.
            self._ask(b"clean up", f"cleaning up after {name}", CLEAN_UP_SECONDS)
        except BaseException:
            self.kill()
            raise
        return [pickle.loads(result) for result in results]

    def kill(self) -> None:
        """End the rank processes at once. The next run starts new ones."""
        for rank in self._ranks:
            rank.process.kill()
        for rank in self._ranks:
            rank.process.join()
            rank.connection.close()
        self._ranks, self._store = [], None

    def close(self) -> None:
        """End the rank processes and remove their files."""
        self.kill()
        self._stacks_directory.cleanup()

    def __enter__(self) -> "RankPool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> None:
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        context = multiprocessing.get_context(START_METHOD)
        with environment_of_new_processes(RANK_ENVIRONMENT):
            import_before_fork(self.world_size)
            for rank in range(self.world_size):
                ours, theirs = context.Pipe()
                stacks_path = Path(self._stacks_directory.name) / f"run{self._runs}-rank{rank}"
                stacks_path.touch()
                process = context.Process(
                    target=_serve,
                    args=(rank, self.world_size, self._store.port, theirs, stacks_path, dict(os.environ)),
                    name=f"rank {rank} of {self.world_size}",
                    daemon=True,
                )
                with started_by_server_of(rank):
                    process.start()
                theirs.close()
                self._ranks.append(_Rank(process, ours, stacks_path))
        self._gather(f"starting {self.world_size} ranks", STARTUP_SECONDS)

    def _ask(self, message: bytes, name: str, timeout_seconds: float) -> list[bytes]:
        __tracebackhide__ = True
        for rank in self._ranks:
            with contextlib.suppress(BrokenPipeError):  # a dead rank: _gather says how it ended
                rank.connection.send_bytes(message)
        return self._gather(name, timeout_seconds)

    def _gather(self, name: str, timeout_seconds: float) -> list[bytes]:
        """One reply of every rank. The first failure leaves the others a short grace."""
        __tracebackhide__ = True
        replies: dict[int, _Reply] = {}
        pending = {rank.connection: index for index, rank in enumerate(self._ranks)}
        deadline = time.monotonic() + timeout_seconds
        while pending and (ready := wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))):
            for connection in ready:
                assert isinstance(connection, Connection)
                index = pending.pop(connection)
                try:
                    replies[index] = pickle.loads(connection.recv_bytes())
                except (EOFError, ConnectionResetError):
                    replies[index] = _Reply(failed=True, content=self._how_it_ended(index).encode())
                if replies[index].failed:
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        failed = sorted(index for index, reply in replies.items() if reply.failed)
        if not failed and not pending:
            return [replies[index].content for index in range(self.world_size)]
        sections = [f"---- rank {index} failed ----\n{replies[index].content.decode()}" for index in failed]
        # After a timeout the stacks of the ranks that did return are shown too: all that may be known about a hang.
        for index in sorted(pending.values()) if failed else range(self.world_size):
            state = "had not returned" if index in pending.values() else "had returned"
            sections.append(f"---- rank {index} {state}; its stacks ----\n{self._ranks[index].stacks()}")
        late = f"{sorted(pending.values())} had not returned after {timeout_seconds:g} s"
        what = f"failed on ranks {failed}" if failed else f"ranks {late}"
        raise RankError("\n\n".join([f"{name}: {what}", *sections]))

    def _how_it_ended(self, index: int) -> str:
        rank = self._ranks[index]
        rank.process.join(timeout=5.0)
        return f"the process ended with exit code {rank.process.exitcode}\n{rank.stacks()}"


_servers: dict[int, forkserver.ForkServer] = {}  # by rank; this process's, whatever pools it has


def import_before_fork(ranks: int) -> None:
    """Have the processes that the ranks of these numbers are forked from.

    They look for modules where PYTHONPATH says, not where this process does, and say nothing of one that is not found.
    """
    path = os.pathsep.join(filter(None, [str(Path(__file__).resolve().parent), os.environ.get("PYTHONPATH")]))
    with environment_of_new_processes({"PYTHONPATH": path}):
        for rank in range(ranks) if START_METHOD == "forkserver" else ():
            if rank not in _servers:
                _servers[rank] = forkserver.ForkServer()
                _servers[rank].set_forkserver_preload([IMPORTED_BEFORE_FORK])
            _servers[rank].ensure_running()  # does not wait for the imports


def started_by_server_of(rank: int) -> contextlib.AbstractContextManager[object]:
    """Let a process be forked from the one for `rank`; multiprocessing itself has one for all."""
    if START_METHOD != "forkserver":
        return contextlib.nullcontext()
    return mock.patch.object(forkserver, "connect_to_new_process", _servers[rank].connect_to_new_process)


@contextlib.contextmanager
def environment_of_new_processes(variables: dict[str, str]) -> Any:
    """The environment that new processes inherit; it must be there before they import torch."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _serve(
    rank: int,
    world_size: int,
    store_port: int,
    connection: Connection,
    stacks_path: Path,
    environment: dict[str, str],
) -> None:
    """A rank process's whole life: take a job, reply, clean up when told to, reply."""
    os.environ.clear()  # a forked process has what there was when its server was started
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then kills its ranks
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    with stacks_path.open("w") as stacks, contextlib.suppress(EOFError):
        faulthandler.enable(stacks)
        faulthandler.register(signal.SIGUSR1, stacks, all_threads=True)
        torch.set_num_threads(1)
        _look_often()
        store = dist.TCPStore("127.0.0.1", store_port, is_master=False)
        connection.send_bytes(pickle.dumps(_Reply(failed=False, content=b"")))
        while True:
            job = pickle.loads(connection.recv_bytes())
            connection.send_bytes(pickle.dumps(_attempt(_call, job, rank, world_size, store)))
            connection.recv_bytes()
            connection.send_bytes(pickle.dumps(_attempt(_clean_up)))


def _look_often() -> None:
    """Shorten the looks of this rank, which decide how long a refusal takes and not what is refused."""
    # Not at the top: the package is imported in rank processes, and where tests ask for it.
    from compiled_ddp.functional import agreements
    from compiled_ddp.ranks import hang_report

    hang_report._LOOK_SECONDS = agreements._PATIENCE_SECONDS = LOOK_SECONDS


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def _attempt(function: Callable[..., bytes], *args: Any) -> _Reply:
    try:
        return _Reply(failed=False, content=function(*args))
    except BaseException as error:  # SystemExit too: the parent reports it
        return _Reply(failed=True, content=_describe(error).encode())


def _describe(error: BaseException) -> str:
    """The traceback without the harness's own frames; for a bare assert also the local values it was about."""
    frames = error.__traceback__
    while frames is not None and frames.tb_next is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    text = "".join(traceback.format_exception(type(error), error, frames))
    if not isinstance(error, AssertionError) or frames is None:
        return text
    *_, (frame, _) = traceback.walk_tb(frames)
    shown = {name: value for name, value in frame.f_locals.items() if not isinstance(value, types.ModuleType)}
    return text + "".join(f"  {name} = {reprlib.repr(value)}\n" for name, value in shown.items())


def _call(job: _Job, rank: int, world_size: int, store: dist.Store) -> bytes:
    if job.import_from not in sys.path:
        sys.path.insert(0, job.import_from)
    function, args = pickle.loads(job.call)
    torch.manual_seed(1234 + rank)
    if job.collective_timeout_seconds is not None:
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore(f"run {job.number}", store),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=job.collective_timeout_seconds),
        )
    return pickle.dumps(function(rank, *args))


def _clean_up() -> bytes:
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()
    _freeze_new_modules()
    return b""


_frozen_modules = 0


def _freeze_new_modules() -> None:
    """Spare the collector what torch and Dynamo have imported, which costs a quarter of a second in each collection.

    Not after every run: what is frozen is never collected, process groups and their threads included.
    """
    global _frozen_modules
    if len(sys.modules) > _frozen_modules + 100:
        gc.collect()
        gc.freeze()
        _frozen_modules = len(sys.modules)
