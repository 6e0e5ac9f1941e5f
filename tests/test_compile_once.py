"""One process of a host compiles, and the others wait for it, but for no one that is dead, silent or done."""

import contextlib
import errno
import importlib.util
import itertools
import json
import os
import signal
import threading
import time
import unittest.mock
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import forked
import pytest
import torch
from calibrations import calibration

from compiled_ddp import torch_private
from compiled_ddp.graph import compile_once, other_hosts, telling
from compiled_ddp.graph.other_hosts import OtherHosts, Owner
from compiled_ddp.ranks import pretended
from compiled_ddp.ranks.rank_group import RankGroup
from ranks import RankPool

A_GRAPH = {"graph": "a graph"}

OWNER = """
import contextlib, sys, time
from compiled_ddp import torch_private
from compiled_ddp.graph import compile_once
with compile_once.in_turn({"graph": sys.argv[1]}, lambda owner: contextlib.nullcontext()):
    print("compiling", flush=True)
    time.sleep(1000)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    return tmp_path / "compiled_ddp"


@pytest.fixture(autouse=True)
def nothing_told_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_once, "_told", set())


class Waits:
    """Whom a process has waited for."""

    def __init__(self) -> None:
        self.owners: list[Owner | None] = []
        self.has_begun = threading.Event()

    @contextlib.contextmanager
    def __call__(self, owner: Owner | None) -> Iterator[None]:
        self.owners.append(owner)
        self.has_begun.set()
        yield


@contextlib.contextmanager
def owner_elsewhere(work: str = "a graph") -> Iterator[forked.Script]:
    with forked.script(OWNER, work) as owner:
        owner.wait_until_it_says("compiling\n")
        yield owner


def _each_compiles(rank: int, folder: str) -> tuple[float, float, bool, int]:
    """When this began and ended, whether it has found the work done, and for how many it has waited."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
    waits = Waits()
    with compile_once.in_turn(A_GRAPH, waits):
        began, is_done = time.time(), bool([*Path(folder, "compiled_ddp").glob("*.done")])
        if not is_done:
            time.sleep(1.0)
        ended = time.time()
    return began, ended, is_done, len(waits.owners)


def test_the_second_process_waits_for_the_first_and_then_goes_on(ranks2: RankPool, tmp_path: Path) -> None:
    first, second = sorted(ranks2.run(_each_compiles, str(tmp_path), process_group=False))
    assert second[0] >= first[1]
    assert (first[2:], second[2:]) == ((False, 0), (True, 1))


def test_what_has_been_done_is_waited_for_by_nobody(folder: Path) -> None:
    waits = Waits()
    for _ in range(2):
        with compile_once.in_turn(A_GRAPH, waits):
            pass
    (done,) = folder.glob("*.done")
    with owner_elsewhere("another graph"), compile_once.in_turn(A_GRAPH, waits):
        pass
    assert waits.owners == []
    assert done.exists()


def test_work_that_fails_is_not_done(folder: Path) -> None:
    def fail() -> None:
        with compile_once.in_turn(A_GRAPH, Waits()):
            assert [*folder.glob("*.owner")]
            raise ZeroDivisionError

    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            fail()
    assert not [*folder.glob("*.done")]


def test_where_the_compiler_fails_all_that_wait_try_it_at_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In turns the last of eight ranks would know of an error after eight compilations. The ranks are threads here."""
    monkeypatch.setattr(compile_once, "this_process", lambda: Owner(0, threading.get_ident(), "host"))
    attempts, first_has_failed, others_try = list[bool](), threading.Event(), threading.Barrier(3)

    def fail(waits: Waits) -> None:
        with contextlib.suppress(MemoryError), compile_once.in_turn(A_GRAPH, waits):
            if not waits.owners:
                assert all(each.has_begun.wait(60.0) for each in waiting)
                first_has_failed.set()
            else:
                attempts.append(first_has_failed.is_set())
                others_try.wait(60.0)  # for each other: in turns none would get beyond
            raise MemoryError

    waiting = [Waits(), Waits(), Waits()]
    first = threading.Thread(target=fail, args=(Waits(),))
    first.start()
    while not [*folder.glob("*.owner")]:
        time.sleep(0.01)
    threads = [threading.Thread(target=fail, args=(waits,)) for waits in waiting]
    for thread in threads:
        thread.start()
    for thread in [first, *threads]:
        thread.join(120.0)
    assert attempts == [True] * 3 and not others_try.broken
    assert not [*folder.glob("*.done")]


def test_a_failure_of_an_earlier_job_lets_nobody_go_on(folder: Path) -> None:
    waits = Waits()
    with contextlib.suppress(ZeroDivisionError), compile_once.in_turn(A_GRAPH, waits):
        raise ZeroDivisionError
    assert [*folder.glob("*.failed")]
    with owner_elsewhere() as owner:
        threading.Thread(target=lambda: (waits.has_begun.wait(), time.sleep(1.0), owner.kill()), daemon=True).start()
        with compile_once.in_turn(A_GRAPH, waits):
            owner.wait(10.0)
    assert len(waits.owners) == 1
    assert [*folder.glob("*.done")], "this process has done it, in its turn"


def test_one_that_is_interrupted_has_not_failed(folder: Path) -> None:
    with contextlib.suppress(KeyboardInterrupt), compile_once.in_turn(A_GRAPH, Waits()):
        raise KeyboardInterrupt
    assert not [*folder.glob("*.failed")]


def test_there_is_one_limit_for_the_host_and_for_others(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not one for each: a rank that has waited for its host does not wait as long for another one."""
    limits = list[float]()

    class Noted(other_hosts.Patience):
        def __init__(self, until: float) -> None:
            super().__init__(until)
            limits.append(until)

    monkeypatch.setattr(compile_once, "Patience", Noted)
    monkeypatch.setattr(other_hosts, "Patience", Noted)
    waits, ranks = Waits(), cast(RankGroup, _OtherRank({"parts": "0"}, itertools.repeat("7")))
    others = OtherHosts(ranks, "forward of Net (graph 1)", A_GRAPH, lambda line: None)
    with owner_elsewhere() as owner:
        threading.Thread(target=lambda: (waits.has_begun.wait(), owner.kill()), daemon=True).start()
        with compile_once.in_turn(A_GRAPH, waits, others):
            pass
    assert [each.host == "elsewhere" for each in waits.owners if each] == [False, True]
    assert len(limits) == 2 and limits[0] == limits[1] <= time.monotonic() + other_hosts.PATIENCE_SECONDS


def test_a_forked_child_does_not_keep_the_turn(folder: Path) -> None:
    """A data loader's worker, say, which outlives the compilation."""
    with contextlib.suppress(ZeroDivisionError), compile_once.in_turn(A_GRAPH, Waits()):
        child = os.fork()
        if child == 0:
            time.sleep(1000.0)
            os._exit(0)
        raise ZeroDivisionError
    waits = Waits()
    try:
        with compile_once.in_turn(A_GRAPH, waits):
            assert waits.owners == []
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_on_a_full_disk_nothing_counts_as_done(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write_nothing(path: Path, content: bytes) -> int:
        path.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(Path, "write_bytes", write_nothing)
        with compile_once.in_turn(A_GRAPH, Waits()):
            pass
    assert [path.suffix for path in folder.iterdir()] == [".lock"]


def test_processes_of_equal_number_in_pods_of_equal_name_are_told_apart() -> None:
    """And write no file of each other's on a file system that they share. The module made anew is what they have."""
    specification = importlib.util.find_spec(other_hosts.__name__)
    assert specification is not None and specification.loader is not None
    elsewhere = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(elsewhere)
    here = other_hosts.this_process()
    assert here == other_hosts.this_process() and here != here._replace(unique=elsewhere.this_process().unique)


def test_two_that_write_the_same_file_write_two_new_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written, write = list[Path](), Path.write_bytes
    monkeypatch.setattr(Path, "write_bytes", lambda path, content: (written.append(path), write(path, content))[1])
    for content in (b"first", b"second"):
        torch_private.compiler_cache.write_whole(tmp_path / "ab.main.so", content, mode=0o755)
    assert len(set(written)) == 2
    (file,) = tmp_path.iterdir()
    assert (file.read_bytes(), file.stat().st_mode & 0o777) == (b"second", 0o755)


def test_a_cache_for_several_kinds_of_processors_is_told_of_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COMPILED_DDP_LOG", "stderr")
    for processor in ("a VAX", "a PDP-11"):
        monkeypatch.setattr(torch_private.compiler_cache, "processor", lambda processor=processor: processor)
        compile_once._note_processor.cache_clear()
        for graph in ("first", "second"):
            with compile_once.in_turn({"graph": graph, "processor": processor}, Waits()):
                pass
    told = capsys.readouterr().err
    assert told.count(f"{folder.parent} has code for another kind of processor (a VAX; here a PDP-11)") == 1
    assert told.count("kind of processor") == 1
    compile_once._note_processor.cache_clear()


def test_what_a_killed_process_was_compiling_is_taken_over(folder: Path) -> None:
    waits = Waits()
    with owner_elsewhere() as owner:
        threading.Thread(target=lambda: (waits.has_begun.wait(), owner.kill()), daemon=True).start()
        with compile_once.in_turn(A_GRAPH, waits):
            assert not [*folder.glob("*.done")]
    assert [found.pid for found in waits.owners if found] == [owner.pid]
    assert [*folder.glob("*.done")], "this process has done it"


def test_a_stopped_process_is_given_up(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(other_hosts, "SILENT_SECONDS", 2.0)
    waits = Waits()
    with owner_elsewhere() as owner:
        os.kill(owner.pid, signal.SIGSTOP)
        began = time.monotonic()
        with compile_once.in_turn(A_GRAPH, waits):
            waited = time.monotonic() - began
        os.kill(owner.pid, signal.SIGCONT)
    assert len(waits.owners) == 1
    assert 2.0 <= waited < 20.0
    assert not [*folder.glob("*.done")], "it was compiled, but not in a turn"


def test_one_that_lives_is_waited_for_up_to_a_limit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(other_hosts, "SILENT_SECONDS", 2.5)
    monkeypatch.setattr(other_hosts, "PATIENCE_SECONDS", 5.0)
    with owner_elsewhere():
        began = time.monotonic()
        with compile_once.in_turn(A_GRAPH, Waits()):
            assert time.monotonic() - began >= 5.0, "it tells each second that it lives"


def test_another_thread_of_this_process_is_not_waited_for(folder: Path) -> None:
    waits, has_begun, may_end = Waits(), threading.Event(), threading.Event()

    def hold() -> None:
        with compile_once.in_turn(A_GRAPH, Waits()):
            has_begun.set()
            may_end.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    has_begun.wait()
    with compile_once.in_turn(A_GRAPH, waits):
        assert not may_end.is_set()
    may_end.set()
    thread.join()


def test_where_nothing_can_be_written_each_process_compiles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("COMPILED_DDP_LOG", "stderr")
    (tmp_path / "compiled_ddp").write_text("a file in the place of the folder")
    for graph in ("first", "second", "third"):
        with compile_once.in_turn({"graph": graph}, Waits()):
            pass
    told = capsys.readouterr().err
    assert told.count("each rank compiles by itself what one might compile for all of its host: ") == 1, "not for each"


def test_a_cache_that_is_cleared_meanwhile_is_told_of(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COMPILED_DDP_LOG", "stderr")
    with compile_once.in_turn(A_GRAPH, Waits()):
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()
    assert "each rank compiles by itself" in capsys.readouterr().err


def test_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    assert compile_once.is_on()
    monkeypatch.setenv(compile_once.SWITCH, "0")
    assert not compile_once.is_on()
    monkeypatch.setenv(compile_once.SWITCH, "no")
    with pytest.raises(ValueError, match="COMPILED_DDP_COMPILE_ONCE must be '1' or '0', found 'no'"):
        compile_once.is_on()


# ---- other hosts -----------------------------------------------------------------------------------------------------


class _OtherRank:
    """The ranks as one of two hosts sees them: what rank 1 on the other one has published, and its signs of life."""

    ranks = (0, 1)

    def __init__(self, published: dict[str, str] | None, beats: Iterator[str]) -> None:
        self._published, self._beats = published, beats
        self.said = dict[str, str]()

    def ask_quietly(self, question: Callable[[Any], Any]) -> Any:
        return None if self._published is None else question(self)

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        return json.dumps({"rank": 1, "pid": 1, "host": "elsewhere"}).encode()

    def publish_quietly(self, key: str, value: str) -> None:
        self.said[key] = value

    def published(self, key: str) -> str | None:
        assert self._published is not None
        return self._published.get(key.rpartition("/")[2])

    def beat_of(self, rank: int) -> str:
        return next(self._beats)


def _in_turn_with(other: _OtherRank) -> tuple[Owner | None, Waits]:
    waits, ranks = Waits(), cast(RankGroup, other)
    with OtherHosts(ranks, "forward of Net (graph 1)", A_GRAPH, lambda line: None).in_turn(
        waits, other_hosts.longest_wait()
    ) as owner:
        return owner, waits


def test_a_host_that_dies_in_the_middle_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(other_hosts, "SILENT_SECONDS", 0.3)
    other = _OtherRank({}, itertools.repeat("7"))
    owner, waits = _in_turn_with(other)
    assert owner is None and [each.host for each in waits.owners if each] == ["elsewhere"]
    assert [key.rpartition("/")[2] for key in other.said] == ["wanted"]


def test_a_host_that_lives_is_waited_for_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(other_hosts, "SILENT_SECONDS", 0.5)
    monkeypatch.setattr(other_hosts, "PATIENCE_SECONDS", 2.0)
    began = time.monotonic()
    owner, _ = _in_turn_with(_OtherRank({}, map(str, itertools.count())))
    assert owner is None and time.monotonic() - began >= 2.0


def test_what_fails_on_another_host_is_tried_here() -> None:
    owner, _ = _in_turn_with(_OtherRank({"parts": "0"}, itertools.repeat("7")))
    assert owner is None


def test_without_the_store_each_host_compiles() -> None:
    owner, waits = _in_turn_with(_OtherRank(None, itertools.repeat("7")))
    assert owner is None and not waits.owners


class _ThisRank(_OtherRank):
    """As the first one to come sees them."""

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        return value.encode()


@pytest.mark.parametrize("where", ["elsewhere too", "here alone", "here alone, somebody waits"])
def test_what_cannot_be_packed_fails_nobody_and_leaves_nobody_waiting(
    where: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What was compiled is there all the same; the others are told that nothing comes, if they are to wait."""
    monkeypatch.setenv("COMPILED_DDP_LOG", "stderr")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1" if where == "elsewhere too" else "2")
    published = {"wanted": ""} if "waits" in where else {}
    other, packed = _ThisRank(published, itertools.repeat("7")), unittest.mock.Mock(side_effect=OSError("disk"))
    with (
        pretended.world(2, backend="gloo", calibration=calibration()),
        unittest.mock.patch.object(torch_private.cache_artifacts.Made, "packed", packed),
    ):
        owner, waits = _in_turn_with(other)
    assert owner is None and not waits.owners
    assert [value for key, value in other.said.items() if key.endswith("/parts")] == ["0"]
    told = "forward of Net (graph 1) could not be packed for other hosts: disk" in capsys.readouterr().err
    assert told == packed.called == (where != "here alone")


@pytest.mark.parametrize("published", [{}, {"wanted": ""}])
@pytest.mark.parametrize("of_this_host", [None, "", "all of them"])
def test_without_a_launcher_that_tells_of_hosts_only_what_somebody_waits_for_is_packed(
    published: dict[str, str], of_this_host: str | None, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if of_this_host is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", of_this_host)
    packed = unittest.mock.Mock(return_value=b"compiled")
    with (
        pretended.world(2, backend="gloo", calibration=calibration()),
        unittest.mock.patch.object(torch_private.cache_artifacts.Made, "packed", packed),
    ):
        _in_turn_with(_ThisRank(published, itertools.repeat("7")))
    assert packed.called == bool(published)


def test_what_fails_to_compile_leaves_nobody_waiting() -> None:
    other = _ThisRank({}, itertools.repeat("7"))
    with pytest.raises(ZeroDivisionError):
        _fails(OtherHosts(cast(RankGroup, other), "forward of Net (graph 1)", A_GRAPH, lambda line: None))
    assert [value for key, value in other.said.items() if key.endswith("/parts")] == ["0"]


def _fails(others: OtherHosts) -> None:
    with others.in_turn(Waits(), other_hosts.longest_wait()):
        raise ZeroDivisionError


def test_a_file_system_without_locks_is_told_of(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COMPILED_DDP_LOG", "stderr")
    monkeypatch.setattr("fcntl.flock", unittest.mock.Mock(side_effect=OSError(38, "Function not implemented")))
    waits = Waits()
    with compile_once.in_turn(A_GRAPH, waits):
        assert not waits.owners
    assert "each rank compiles by itself" in capsys.readouterr().err


def test_compilers_that_ask_other_ranks_take_no_turns() -> None:
    plain, reducing = torch.fx.Graph(), torch.fx.Graph()
    plain.output(plain.placeholder("x"))
    x = reducing.placeholder("x")
    reducing.output(reducing.call_function(torch.ops._c10d_functional.all_reduce.default, (x, "sum", "0")))
    asks = torch_private.compiler_cache.asks_other_ranks
    modules = [torch.fx.GraphModule(torch.nn.Module(), graph) for graph in (plain, reducing)]
    assert [asks(module, {}) for module in modules] == [False, False]
    assert [asks(module, {"distributed_max_autotune_gemm": True}) for module in modules] == [True, True]
    if torch.__version__ >= (2, 12):  # 2.11 compares no graphs
        checked = {"aten_distributed_optimizations.spmd_check": True}
        assert [asks(module, checked) for module in modules] == [False, True]


@pytest.mark.parametrize("text", ["", "[]", '{"a": "long"}'])
def test_a_broken_note_of_how_long_it_took_is_none(text: str, folder: Path) -> None:
    folder.mkdir()
    (folder / "seconds.json").write_text(text)
    assert telling.seconds_of_last_time("a") is None
    telling.note_seconds("a", 7.04)
    assert telling.seconds_of_last_time("a") == 7.0
