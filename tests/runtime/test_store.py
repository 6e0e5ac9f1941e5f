"""The store of torch.distributed, through which ranks agree: whatever it raises is explained, wherever it is used."""

import concurrent.futures
import gc
import os
import re
import signal
import socket
import time
import unittest.mock
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch.distributed as dist
from models import Mlp, assert_step, row_batch, wrappers

from compiled_ddp import EagerDDP
from compiled_ddp.checks.same_step import StepCheck
from compiled_ddp.graph.warmup import Compiled, warm_up
from compiled_ddp.ranks.agreement import Description, agree_on_description
from compiled_ddp.ranks.communicator import Communicator
from compiled_ddp.ranks.rank_group import RankGroup
from compiled_ddp.ranks.store import Store, part_of_default
from compiled_ddp.step.conductor import SharedOrder
from ranks import RankPool


def _ended_store() -> dist.Store:
    """One whose host is gone."""
    soon = timedelta(seconds=15)  # on a loaded machine 3 were too few to connect
    host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=soon)
    return dist.TCPStore("127.0.0.1", host.port, is_master=False, timeout=soon)


def _publish(ranks: RankGroup) -> None:
    for _ in range(10):  # what is sent first may still find its way into the connection
        ranks.publish("key", "value")


USES: dict[str, Callable[[RankGroup], object]] = {
    "publish": _publish,
    "read": lambda ranks: ranks.read("key", writer=0, purpose="to answer"),
    "agreement": lambda ranks: agree_on_description(ranks, dict, failure="nothing was agreed on"),
    "warm-up": lambda ranks: warm_up(ranks, 1, (), measure=lambda: None),
}


def _explained(rank: int, use: str) -> str:
    ranks = RankGroup(None)
    ranks._store._shared = dist.PrefixStore("ended", _ended_store())
    with pytest.raises(RuntimeError) as caught:
        USES[use](ranks)
    assert type(caught.value) is RuntimeError
    return str(caught.value)


@pytest.mark.parametrize("use", USES)
def test_every_use_of_the_store_says_who_waited_for_what_and_what_to_do(ranks2: RankPool, use: str) -> None:
    for rank, message in enumerate(ranks2.run(_explained, use)):
        waited = r"to (publish '.*' for the other ranks|wait for rank \d \(to .*\))"
        assert re.match(f"rank {rank} could not reach the store of torch.distributed {waited}: ", message), message
        assert "Look there for the first error, and start all ranks again." in message


def _no_group(rank: int) -> str:
    ranks = RankGroup(None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("compiled_ddp.torch_private.groups.default_store", _ended_store)
        with pytest.raises(RuntimeError) as caught:
            Communicator(ranks)
    return str(caught.value)


def test_a_process_group_that_cannot_be_made_names_the_rank_and_the_others(ranks2: RankPool) -> None:
    for rank, message in enumerate(ranks2.run(_no_group)):
        assert message.startswith(f"rank {rank} could not make the process group of compiled_ddp/"), message
        assert "with ranks [0, 1]" in message and "start all ranks again" in message


def _in_training(rank: int) -> list[str]:
    """The first backward agrees on the sequence of buckets; wrapping compares the models."""
    ddp = wrappers(["EagerDDP"])["EagerDDP"](Mlp())
    ddp._runtime.communicator.ranks._store._shared = dist.PrefixStore("ended", _ended_store())
    messages = []
    with pytest.raises(RuntimeError) as caught:
        ddp(row_batch(rank)).sum().backward()
    messages.append(str(caught.value))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("compiled_ddp.torch_private.groups.default_store", _ended_store)
        with pytest.raises(RuntimeError) as caught:
            EagerDDP(Mlp())
        messages.append(str(caught.value))
    return messages


def test_training_and_wrapping_say_so_too(ranks2: RankPool) -> None:
    for rank, messages in enumerate(ranks2.run(_in_training)):
        for message in messages:
            assert message.startswith(f"rank {rank} could not reach the store of torch.distributed to "), message


def _agree_on_much(rank: int, last: tuple[str, str]) -> str:
    """20 MB, where the store takes 8 MiB at a time."""
    much: Description = {f"parameter {number}": ["x" * 2000] for number in range(10_000)}
    much["the last one"] = [last[rank]]
    try:
        agree_on_description(RankGroup(None), lambda: much, failure="nothing was agreed on")
    except RuntimeError as error:
        return str(error)
    return ""


def test_descriptions_of_any_length_are_compared(ranks2: RankPool) -> None:
    assert ranks2.run(_agree_on_much, ("same", "same")) == ["", ""]
    for message in ranks2.run(_agree_on_much, ("one", "other")):
        assert "rank 1: the last one is other here, one on rank 0." in message


# ---- a clock of our own ----------------------------------------------------------------------------------------------

SHORT = timedelta(seconds=2)


def _ask_a_stopped_host(rank: int, files: str) -> dict[str, tuple[float, str]]:
    """What becomes of every kind of question, all asked at once, and how long each takes."""
    port = Path(files, "port")
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        Path(files, "written").write_text(f"{store.port} {os.getpid()}")
        Path(files, "written").rename(port)
    else:
        while not port.exists():
            time.sleep(0.02)
        store = dist.TCPStore("127.0.0.1", int(port.read_text().split()[0]), is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("compiled_ddp.torch_private.groups.group_timeout", lambda group: SHORT)
        groups = [RankGroup(None) for _ in range(4)]
        order = SharedOrder(Store(part_of_default("order"), SHORT))
        dist.barrier()
        if rank == 0:
            os.kill(os.getpid(), signal.SIGSTOP)
            return {}
        host = int(port.read_text().split()[1])
        while "T (stopped)" not in Path(f"/proc/{host}/status").read_text():
            time.sleep(0.02)
        questions: dict[str, Callable[[], object]] = {
            "wrap": lambda: EagerDDP(Mlp()),
            "read": lambda: groups[0].read("key", writer=0, purpose="to answer"),
            "publish": lambda: groups[1].silent("key", seconds=1.0),
            "group": lambda: groups[2].new_process_group("", is_models=False),
            "order": lambda: order.precedes("event", set()),
            "published": lambda: groups[3].published("key"),
        }
        try:
            with concurrent.futures.ThreadPoolExecutor(len(questions)) as pool:
                return dict(zip(questions, pool.map(_timed, questions.values()), strict=True))
        finally:
            os.kill(host, signal.SIGCONT)


def _timed(question: Callable[[], object]) -> tuple[float, str]:
    began = time.monotonic()
    try:
        answer = str(question())
    except RuntimeError as error:
        answer = str(error)
    return time.monotonic() - began, answer


@pytest.mark.skipif(not Path("/proc").exists(), reason="tells there whether a process is stopped")
def test_a_stopped_host_of_the_store_keeps_nobody_longer_than_the_timeout(ranks2: RankPool, tmp_path: Path) -> None:
    """It keeps its connections open, so that every call of the store's client blocks."""
    _, found = ranks2.run(_ask_a_stopped_host, str(tmp_path), process_group=False, timeout_seconds=60.0)
    for question, (seconds, answer) in found.items():
        assert seconds < 20.0, (question, seconds)
        if question == "published":
            assert answer == "None"
        else:
            assert "no answer within" in answer, (question, answer)


def _warm_up_beside_a_stopped_rank(rank: int) -> tuple[str, float]:
    ranks = RankGroup(None)
    ranks.timeout = SHORT
    process_ids: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(process_ids, os.getpid())

    def compiles_for_long() -> Iterator[Compiled]:
        if rank == 1:
            time.sleep(3 * SHORT.total_seconds())
        yield Compiled("it", 0.0)

    def stops() -> Iterator[Compiled]:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        yield Compiled("it", 0.0)

    warm_up(ranks, 1, compiles_for_long(), measure=lambda: None)
    began = time.monotonic()
    try:
        warm_up(ranks, 2, stops(), measure=lambda: None)
    except RuntimeError as error:
        return str(error), time.monotonic() - began
    finally:
        if rank == 0:
            os.kill(process_ids[1], signal.SIGCONT)
    return "", 0.0


def test_a_warm_up_waits_for_a_rank_that_compiles_and_gives_up_one_that_is_stopped(ranks2: RankPool) -> None:
    (message, seconds), _ = ranks2.run(_warm_up_beside_a_stopped_rank)
    assert "for rank 1 (to end its warm-up), which stayed silent" in message, message
    assert SHORT.total_seconds() <= seconds < 15.0


# ---- who knows a reason stays until all know it ----------------------------------------------------------------------

LATE_SECONDS = 0.5


def _raise_together(rank: int, kind: str) -> float:
    """When this rank raises; rank 1 is late to read what rank 0 has found."""
    ranks = RankGroup(None)
    read = ranks.read

    def late_read(key: str, **keywords: Any) -> str:
        if rank == 1:
            time.sleep(LATE_SECONDS)
        return read(key, **keywords)

    def fails() -> Iterator[Compiled]:
        if rank == 0:
            raise ValueError("no compiler")
        yield Compiled("it", 0.0)

    uses: dict[str, Callable[[], object]] = {
        "agreement": lambda: agree_on_description(ranks, lambda: {"it": [rank]}, failure="nothing was agreed on"),
        "warm-up": lambda: warm_up(ranks, 1, fails(), measure=lambda: None),
        "steps": lambda: _raise(StepCheck(cast(Communicator, SimpleNamespace(ranks=ranks)), "error").report(rank)),
    }
    dist.barrier()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks, "read", late_read)
        with pytest.raises((RuntimeError, ValueError)):
            uses[kind]()
    return time.monotonic()


def _raise(error: Exception | None) -> None:
    assert error is not None
    raise error


@pytest.mark.parametrize("kind", ["agreement", "warm-up", "steps"])
def test_no_rank_leaves_with_the_store_before_the_others_have_read_why(ranks2: RankPool, kind: str) -> None:
    first, late = ranks2.run(_raise_together, kind)
    assert first > late - LATE_SECONDS / 2, "the first one has ended, perhaps with the store, before the other one knew"


def test_who_knows_a_reason_does_not_wait_for_a_rank_that_never_comes(ranks2: RankPool) -> None:
    seconds, _ = ranks2.run(_outlast_alone)
    assert 1.0 <= seconds < 5.0


def _outlast_alone(rank: int) -> float:
    began = time.monotonic()
    if rank == 0:
        RankGroup(None).outlast("an error")
    return time.monotonic() - began


def _one_process_group_after_another(rank: int, folder: Path, port: int) -> None:
    """At one address, with wrappers that nobody has any more and the collector has not found."""
    outside = dist.FileStore(str(folder / "store"), 2)
    gc.disable()
    try:
        for number in range(3):
            dist.init_process_group(
                "gloo",
                init_method=f"tcp://127.0.0.1:{port}",
                rank=rank,
                world_size=2,
                timeout=timedelta(seconds=20),
            )
            assert_step(EagerDDP(Mlp()), lambda module: module(row_batch(rank)).square().sum())
            dist.destroy_process_group()
            outside.add(f"ended {number}", 1)
            while outside.add(f"ended {number}", 0) < 2:
                time.sleep(0.01)
    finally:
        gc.enable()


def test_a_process_group_that_is_made_anew_at_the_same_address_finds_nothing_of_the_one_before(
    ranks2: RankPool, tmp_path: Path
) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks2.run(_one_process_group_after_another, tmp_path, port, process_group=False)


def _words_of_all(rank: int, late: int) -> tuple[list[str], int] | None:
    ranks = RankGroup(None)
    dist.barrier()
    time.sleep(0.5 * (rank == late))
    if rank:
        ranks.publish(f"word/{rank}", f"of {rank}")
    if not late:
        dist.barrier()
    if rank:
        return None
    with unittest.mock.patch.object(Store, "ask", autospec=True, side_effect=Store.ask) as ask:
        return ranks.read_all("word", purpose="for a test"), ask.call_count


def test_what_all_ranks_have_published_comes_in_one_request(ranks3: RankPool) -> None:
    assert ranks3.run(_words_of_all, 0)[0] == (["of 1", "of 2"], 1)
    words, _ = ranks3.run(_words_of_all, 2)[0]
    assert words == ["of 1", "of 2"]
