"""What a rank says when it waited in vain: who is behind, and where every rank stands."""

import functools
import gc
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import forked
import pytest
import torch
import torch.distributed as dist
from models import Mlp, TokenModel, row_batch, token_batch, wrappers
from torch import Tensor, nn

import ranks
from compiled_ddp import compile_ddp, torch_private
from ranks import RankError, RankPool

BOTH = ("compile_ddp", "EagerDDP")
TIMEOUT_SECONDS = 3.0  # of the collectives that are to fail
LAUNCHES_OF_A_STEP = 6  # the buckets of TokenModel


def message_of(call: Callable[[], object]) -> str:
    with pytest.raises(RuntimeError) as failure:
        call()
    return str(failure.value)


def give_up(rank: int, call: Callable[[], object]) -> str:
    """The message of `call`'s failure, when it has become known that this rank has it."""
    message = message_of(call)
    torch_private.groups.default_store().set(f"gave up {rank}", "")
    return message


def sit_until_others_give_up(rank: int) -> None:
    others = [f"gave up {other}" for other in range(dist.get_world_size()) if other != rank]
    while not torch_private.groups.default_store().check(others):
        time.sleep(0.05)


def share_process_ids(rank: int) -> list[int]:
    process_ids: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(process_ids, os.getpid())
    return process_ids


def wrap(wrapper: str, model: nn.Module, *batch: Tensor) -> nn.Module:
    """`model`, wrapped on a group of short patience, and compiled, which takes some ranks longer than others."""
    group = dist.new_group(timeout=timedelta(seconds=TIMEOUT_SECONDS))
    dist.barrier()
    ddp = wrappers([wrapper])[wrapper](model, process_group=group)
    ddp(*batch)
    dist.barrier()
    return ddp


def train_two_steps(rank: int, wrapper: str) -> tuple[nn.Module, Callable[[], None]]:
    """A wrapper after two steps, and its next step."""
    ddp = wrap(wrapper, TokenModel(), *token_batch(rank))
    with ddp.no_sync():  # the backward is compiled without the others, who might give up on a rank that is slow
        ddp(*token_batch(rank)).backward()
    dist.barrier()

    def step() -> None:
        ddp.zero_grad()
        ddp(*token_batch(rank)).backward()

    step()
    step()
    assert len(ddp.plan.buckets) == LAUNCHES_OF_A_STEP
    return ddp, step


# ---- one rank is stopped, and goes on when the others have given up --------------------------------------------------


def _stop_last_rank(rank: int, wrapper: str) -> str:
    process_ids, last = share_process_ids(rank), dist.get_world_size() - 1
    _, step = train_two_steps(rank, wrapper)
    if rank == last:
        os.kill(os.getpid(), signal.SIGSTOP)
        return message_of(step)
    try:
        message = give_up(rank, step)
        while not torch_private.groups.default_store().check([f"gave up {other}" for other in range(last)]):
            time.sleep(0.05)
        return message
    finally:
        os.kill(process_ids[last], signal.SIGCONT)


@pytest.mark.parametrize(("wrapper", "world_size"), [("compile_ddp", 3), ("EagerDDP", 2)])
def test_a_stopped_rank_is_named_with_the_place_of_all_others(
    ranks2: RankPool, ranks3: RankPool, wrapper: str, world_size: int
) -> None:
    pool = ranks2 if world_size == 2 else ranks3
    *waited, stopped = pool.run(_stop_last_rank, wrapper)
    for message in waited:
        _, verdict, positions, python = message.split("\n")
        assert verdict.startswith(f"rank {world_size - 1} did not answer: stopped"), message
        assert positions.startswith("  rank 0:" if world_size == 2 else "  ranks 0, 1:"), message
        assert "step 3, in its backward" in positions, message
        launcher = "of graph 1 of 1" if wrapper == "compile_ddp" else "by hooks"
        assert re.search(rf"last bucket launched: bucket 5 \(.*token.weight; \d+ bytes\), {launcher}", positions)
        assert re.search(r"first awaited: bucket 0 \(head.*; 2176 bytes\)", positions), message
        assert re.match(rf"    Python: {__file__}:\d+ in train_two_steps.<locals>.step", python), message
    # When it goes on, the others have closed their connections.
    assert f"The first rank to give up found: rank {world_size - 1} did not answer" in stopped, stopped


# ---- one rank is killed ----------------------------------------------------------------------------------------------


def _kill_rank_1(rank: int, wrapper: str) -> None:
    _, step = train_two_steps(rank, wrapper)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    step()


@pytest.fixture
def long_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time for the report, on a busy machine too, after the pool has seen that a rank is dead."""
    monkeypatch.setattr(ranks, "GRACE_SECONDS", 40.0)


@pytest.mark.usefixtures("long_grace")
@pytest.mark.parametrize("wrapper", BOTH)
def test_a_killed_rank_is_named(ranks2: RankPool, wrapper: str) -> None:
    with pytest.raises(RankError) as failure:
        ranks2.run(_kill_rank_1, wrapper)
    rank_0, rank_1 = str(failure.value).split("---- rank 1 failed")
    assert "exit code -9" in rank_1
    assert "rank 1 did not answer: stopped, ended, cut off" in rank_0
    assert "rank 0: step 3, in its backward; last bucket launched: bucket " in rank_0
    assert "first awaited: bucket 0 (head.bias" in rank_0


def _leave(rank: int) -> str:
    group = dist.new_group(timeout=timedelta(seconds=TIMEOUT_SECONDS))
    options = {"bucket_cap_mb": 0.0001, "first_bucket_mb": 0.0001, "warmup_chooses": False}
    ddp = compile_ddp(Mlp(), process_group=group, **options)
    batch = row_batch(rank)
    ddp.warmup(batch)  # which waits longer than that for the slowest compiler
    ddp(batch).square().sum().backward()
    assert ddp.plan is not None and len({bucket.numel for bucket in ddp.plan.buckets}) > 1
    ddp.zero_grad()
    loss = ddp(batch).square().sum()
    dist.barrier()
    if rank == 1:
        dist.destroy_process_group(ddp._runtime.communicator.group)
        sit_until_others_give_up(rank)
        return ""
    return give_up(rank, loss.backward)


@pytest.mark.inductor
def test_the_generated_code_waits_for_one_bucket_whose_memory_tells_it_from_others(ranks2: RankPool) -> None:
    message, _ = ranks2.run(_leave, timeout_seconds=400, collective_timeout_seconds=120)
    assert message.startswith("rank 0: a collective in the backward graph failed: "), message
    assert re.search(r"first awaited: bucket \d \([^)]*; \d+ bytes\); collectives launched: \d+\n", message), message
    assert re.search(rf"  rank 1: .*\n    Python: .*{__file__}:\d+ in _leave", message), message


# ---- two wrappers in one backward ------------------------------------------------------------------------------------


class Fails(torch.autograd.Function):
    """Passes on; its backward raises where it is told to."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, fails: bool) -> Tensor:
        ctx.fails = fails
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        if ctx.fails:
            raise ValueError("between the wrappers")
        return gradient, None


def _fails_between(rank: int, wrapper: str) -> list[str]:
    """Rank 0 fails where rank 1 does not; both try to go on."""
    first = wrap(wrapper, nn.Linear(5, 5), row_batch(rank))
    second = wrap(wrapper, nn.Linear(5, 3), row_batch(rank))
    messages = []
    for number in range(4):
        try:
            second(Fails.apply(first(row_batch(rank)), number == 1 and rank == 0)).square().sum().backward()
            messages.append("")
        except (RuntimeError, ValueError) as error:
            messages.append(str(error))
    return messages


@pytest.mark.parametrize("wrapper", BOTH)
def test_after_an_exception_between_two_wrappers_no_rank_waits(ranks2: RankPool, wrapper: str) -> None:
    """One wrapper's backward had ended on both ranks and the other's on one: they waited for each other."""
    rank_0, rank_1 = ranks2.run(_fails_between, wrapper)
    assert rank_0 == ["", "between the wrappers", "", ""]
    assert [bool(message) for message in rank_1] == [False, True, False, False]
    assert "broke off on 1 other rank" in rank_1[1]


# ---- one rank is late ------------------------------------------------------------------------------------------------


class SlowModel(TokenModel):
    sit = staticmethod(lambda: None)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.sit()
        return super().forward(x, y)


def _late_before_backward(rank: int, wrapper: str) -> str:
    ddp, _ = train_two_steps(rank, wrapper)
    loss = ddp(*token_batch(rank))
    if rank == 1:
        sit_until_others_give_up(rank)
    return give_up(rank, loss.backward)


@pytest.mark.parametrize("wrapper", BOTH)
def test_a_late_rank_is_named_with_the_line_where_it_is(ranks3: RankPool, wrapper: str) -> None:
    first, late, last = ranks3.run(_late_before_backward, wrapper)
    for message in (first, last):
        _, verdict, *positions = message.split("\n")
        found = re.fullmatch(r"rank 1 is behind \(collectives launched: (\d+), by others (\d+)\)\.", verdict)
        assert found, message
        assert int(found[2]) - int(found[1]) == LAUNCHES_OF_A_STEP
        rank_1 = next(n for n, line in enumerate(positions) if line.startswith("  rank 1:"))
        assert "step 3, before its backward; last bucket launched: bucket 5 (" in positions[rank_1], message
        assert "first awaited" not in positions[rank_1], message
        assert re.search(rf"{__file__}:\d+ in _late_before_backward", positions[rank_1 + 1]), message
    assert "The first rank to give up found: rank 1 is behind" in late


def _late_in_forward(rank: int) -> str:
    ddp = wrap("EagerDDP", SlowModel(), *token_batch(rank))
    ddp(*token_batch(rank)).backward()
    if rank == 1:
        ddp.module.sit = functools.partial(sit_until_others_give_up, rank)
    return give_up(rank, lambda: ddp(*token_batch(rank)).backward())


def test_a_rank_that_sits_in_the_models_forward_is_named_with_its_line(ranks2: RankPool) -> None:
    message, _ = ranks2.run(_late_in_forward)
    line = Path(__file__).read_text().splitlines().index("        self.sit()") + 1
    assert re.search(rf"  rank 1: step 2, before .*\n    Python: .* < {__file__}:{line} in SlowModel.forward", message)


def _late_for_the_first_backward(rank: int) -> str:
    ddp = wrap("compile_ddp", Mlp(), row_batch(rank))
    loss = ddp(row_batch(rank)).sum()
    if rank == 0:
        sit_until_others_give_up(rank)
    return give_up(rank, loss.backward)


def test_a_wait_for_the_first_sequence_is_explained(ranks2: RankPool) -> None:
    _, message = ranks2.run(_late_for_the_first_backward)
    assert "waited 3 s for rank 0 (for the sequence of the first backward)" in message
    assert "\nrank 0 is behind (at an earlier point).\n" in message
    assert "first awaited: rank 0, through the store, for the sequence of the first backward" in message
    assert re.search(rf"  rank 0: step 1, .*\n    Python: .* < {__file__}:\d+ in _late_for_the_first_backward", message)


def _late_for_a_refresh(rank: int) -> str:
    model = Mlp()
    model.first.requires_grad_(False)
    ddp = wrap("EagerDDP", model, row_batch(rank))
    if rank == 0:
        sit_until_others_give_up(rank)
        return ""
    model.first.requires_grad_(True)
    return give_up(rank, lambda: ddp(row_batch(rank)))


def test_a_wait_for_the_changed_model_of_a_rank_is_explained(ranks2: RankPool) -> None:
    _, message = ranks2.run(_late_for_a_refresh)
    assert "waited 3 s for rank 0 (to compare the models of all ranks, as this rank's has changed" in message
    assert re.search(r"  rank 1: step 1, .*first awaited: rank 0, through the store, to compare the models", message)
    assert re.search(rf"  rank 0: step 1, .*\n    Python: .* < {__file__}:\d+ in _late_for_a_refresh", message)


class WithBuffer(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(8))


def _late_for_the_broadcast(rank: int, wrapper: str) -> str:
    ddp = wrap(wrapper, WithBuffer(), row_batch(rank))
    ddp(row_batch(rank)).sum().backward()
    if rank == 0:
        sit_until_others_give_up(rank)
    return give_up(rank, lambda: ddp(row_batch(rank)).sum().backward())


@pytest.mark.parametrize("wrapper", BOTH)
def test_a_wait_for_buffers_is_explained(ranks2: RankPool, wrapper: str) -> None:
    _, message = ranks2.run(_late_for_the_broadcast, wrapper)
    assert message.startswith("rank 1: the broadcast of parameters and buffers failed: "), message
    assert "first awaited: the parameters and buffers of the group's first rank" in message
    assert re.search(
        rf"  rank 0: step 1, after .*\n    Python: .* < {__file__}:\d+ in _late_for_the_broadcast", message
    )


def _fail_twice(rank: int) -> list[str]:
    _, step = train_two_steps(rank, "EagerDDP")
    if rank == 1:
        sit_until_others_give_up(rank)
    return [give_up(rank, step), message_of(step)]


def test_the_wrapper_says_from_then_on_that_it_has_failed_before(ranks2: RankPool) -> None:
    for first, second in ranks2.run(_fail_twice):
        assert "failed before" not in first
        assert "failed before, at step 3, in its backward" in second


# ---- the store is gone with the rank ---------------------------------------------------------------------------------


def _stop_the_stores_host(rank: int, files: str, ending: int) -> str:
    port, stopped = Path(files, "port"), Path(files, "process id")
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        stopped.write_text(str(os.getpid()))
        Path(files, "written").write_text(str(store.port))
        Path(files, "written").rename(port)
    else:
        while not port.exists():
            time.sleep(0.02)
        store = dist.TCPStore("127.0.0.1", int(port.read_text()), is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=30))
    _, step = train_two_steps(rank, "EagerDDP")
    if rank == 0:
        os.kill(os.getpid(), ending)
        return ""
    try:
        message = message_of(step)
        if ending == signal.SIGKILL:
            raise RuntimeError(message)
        return message
    finally:
        if ending == signal.SIGSTOP:
            os.kill(int(stopped.read_text()), signal.SIGCONT)


@pytest.mark.usefixtures("long_grace")
@pytest.mark.parametrize("ending", [signal.SIGSTOP, signal.SIGKILL])
def test_a_rank_that_hosts_the_store_takes_only_the_others_answers_with_it(
    ranks2: RankPool, tmp_path: Path, ending: int
) -> None:
    call: dict[str, Any] = {"process_group": False, "timeout_seconds": 40.0}
    if ending == signal.SIGSTOP:
        _, report = ranks2.run(_stop_the_stores_host, str(tmp_path), ending, **call)
    else:
        with pytest.raises(RankError) as failure:
            ranks2.run(_stop_the_stores_host, str(tmp_path), ending, **call)
        report = str(failure.value)
    assert "The store does not answer, so nothing is known of other ranks." in report
    assert "rank 1: step 3, in its backward; last bucket launched: bucket 5 (" in report


# ---- the thread that answers -----------------------------------------------------------------------------------------


def _reporting_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "compiled_ddp hang report"]


def _end_of_the_thread(rank: int, wrapper: str) -> list[int]:
    ddp = wrappers([wrapper])[wrapper](Mlp())
    ddp(row_batch(rank)).sum().backward()
    counts = [len(_reporting_threads())]
    ddp.unwrap()
    counts.append(len(_reporting_threads()))
    ddp = wrappers([wrapper])[wrapper](Mlp())
    ddp(row_batch(rank)).sum().backward()
    counts.append(len(_reporting_threads()))
    del ddp
    torch.compiler.reset()
    gc.collect()
    counts.append(len(_reporting_threads()))
    return counts


@pytest.mark.parametrize("wrapper", BOTH)
def test_the_thread_that_answers_ends_with_its_wrapper(ranks2: RankPool, wrapper: str) -> None:
    assert ranks2.run(_end_of_the_thread, wrapper) == [[1, 0, 1, 0]] * 2


SCRIPT = """
import gc, multiprocessing, sys, threading
from datetime import timedelta
import torch, torch.distributed as dist
from compiled_ddp import EagerDDP

rank, store = int(sys.argv[1]), dist.FileStore(sys.argv[2], 2)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=20))
kept = [EagerDDP(torch.nn.Linear(2, 2)) for _ in range(4)]
for ddp in kept:
    ddp(torch.ones(1, 2)).sum().backward()
dist.barrier()
child = multiprocessing.get_context("fork").Process(target=gc.collect)  # as a DataLoader's worker
child.start()
child.join()
assert child.exitcode == 0
dist.barrier()
print("threads", sum(thread.name == "compiled_ddp hang report" for thread in threading.enumerate()))
"""


def test_a_process_ends_and_forks_while_threads_answer(tmp_path: Path) -> None:
    """Rank 0 is an interpreter of its own, with an end."""
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    store = str(tmp_path / "store")
    with forked.script(SCRIPT, "1", store, environment=environment) as other:
        command = [sys.executable, "-c", SCRIPT, "0", store]
        ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
        assert (ran.returncode, other.wait(60.0)) == (0, 0), (ran.stderr, other.stderr)
        outputs = [ran.stdout + ran.stderr, other.stdout + other.stderr]
    for output in outputs:
        assert "threads 4" in output
        assert "Traceback" not in output
        assert "terminate called" not in output
