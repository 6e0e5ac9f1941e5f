"""The tests' own device: its streams run each in its own order, late, and its memory is handed out again at once.

What is missing here (a wait, a record) must show, or the tests on it would find no race.
"""

from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import second_device
import torch
import torch.distributed as dist
from models import TokenModel, row_batch, token_batch
from torch import Tensor

from compiled_ddp import torch_private
from compiled_ddp.graph.kept_state import random_state_kept
from ranks import RankPool

DEVICE = "twins:0"
LATE = {"share": 1.0, "longest_us": 5_000}  # every kernel


@pytest.fixture(scope="module")
def twin_rank(inductor_cache: Path) -> Iterator[RankPool]:
    """A process of these tests alone, as one that knows the device cannot be rid of it."""
    with RankPool(1) as pool:
        yield pool


def _call(_: int, library: Path, check: Callable[[], Any]) -> Any:
    second_device.register(library)
    return check()


def on_the_device(rank: RankPool, library: Path, check: Callable[[], Any]) -> Any:
    return rank.run(_call, library, check, process_group=False)[0]


def ones(numel: int = 1000) -> Tensor:
    return torch.ones(numel, device=DEVICE)


def here() -> torch.Stream:
    return torch.accelerator.current_stream(torch.device(DEVICE))


def late_sum(start: Tensor, times: int = 5) -> Tensor:
    for _ in range(times):
        start = start + 1
    return start


def _asynchronous() -> list[bool]:
    start, done = ones(), torch.Event(torch.device(DEVICE))
    with second_device.held(here()):
        total = late_sum(start)
        done.record(here())
        seen = [done.query(), here().query()]
    assert total.sum().item() == 6000
    here().synchronize()
    return [*seen, done.query(), here().query()]


def test_kernels_run_in_order_behind_the_hosts_back(twin_rank: RankPool, twins_library: Path) -> None:
    assert on_the_device(twin_rank, twins_library, _asynchronous) == [False, False, True, True]


def _waits_for_the_whole_device() -> list[bool]:
    stream, start = torch.Stream(torch.device(DEVICE)), ones()
    torch.accelerator.synchronize()
    with second_device.delays(0, **LATE):
        late_sum(start)
        with stream:
            late_sum(start)
        torch.accelerator.synchronize()
        return [here().query(), stream.query()]


def test_the_host_can_wait_for_all_streams_of_a_device(twin_rank: RankPool, twins_library: Path) -> None:
    assert on_the_device(twin_rank, twins_library, _waits_for_the_whole_device) == [True, True]


def _two_streams() -> None:
    for seed in range(3):
        stream, start = torch.Stream(torch.device(DEVICE)), ones()
        torch.accelerator.synchronize()
        with second_device.delays(seed, **LATE):
            with second_device.held(here()):
                total = late_sum(start)
                with stream:
                    assert here() == stream
                    early = total.cpu()
                stream.wait_stream(here())
                with stream:
                    copied = total.clone()
            with stream:
                assert torch.equal(copied.cpu(), torch.full((1000,), 6.0))
        assert not torch.equal(early, copied.cpu())


def test_a_stream_sees_what_another_one_made_if_it_waits(twin_rank: RankPool, twins_library: Path) -> None:
    on_the_device(twin_rank, twins_library, _two_streams)


def _freed(records: bool) -> bool:
    start, stream = ones(), torch.Stream(torch.device(DEVICE))
    torch.accelerator.synchronize()
    with second_device.held(stream):
        with stream:
            total = late_sum(start)
            if records:
                start.record_stream(stream)
        address = start.data_ptr()
        del start
        again = torch.full((1000,), 7.0, device=DEVICE)
        assert (again.data_ptr() == address) is not records
        here().synchronize()
    with stream:
        right = torch.equal(total.cpu(), torch.full((1000,), 6.0))
    del again
    assert not records or address in {memory.data_ptr() for memory in [ones() for _ in range(8)]}
    return right


def _frees_recorded_memory() -> bool:
    return _freed(records=True)


def _frees_unrecorded_memory() -> bool:
    return _freed(records=False)


def test_freed_memory_is_handed_out_at_once_unless_its_streams_were_recorded(
    twin_rank: RankPool, twins_library: Path
) -> None:
    assert on_the_device(twin_rank, twins_library, _frees_recorded_memory)
    assert not on_the_device(twin_rank, twins_library, _frees_unrecorded_memory)


def _to_the_host() -> tuple[bool, bool, bool]:
    start = ones()
    with second_device.held(here()):
        copied = late_sum(start).to("cpu", non_blocking=True)
        early = torch.equal(copied, torch.full((1000,), 6.0))
    here().synchronize()
    return copied.is_pinned(), early, torch.equal(copied, torch.full((1000,), 6.0))


def test_a_copy_to_pinned_memory_must_be_waited_for(twin_rank: RankPool, twins_library: Path) -> None:
    assert on_the_device(twin_rank, twins_library, _to_the_host) == (True, False, True)


def _from_the_host() -> None:
    pinned, pageable = torch.ones(1000, pin_memory=True), torch.ones(1000)
    with second_device.held(here()):
        ours, copied = pinned.to(DEVICE, non_blocking=True), pageable.to(DEVICE, non_blocking=True)
        pinned.fill_(2.0)
        pageable.fill_(2.0)
    assert ours.sum().item() == 2000.0 and copied.sum().item() == 1000.0


def test_a_copy_from_pinned_memory_reads_it_late(twin_rank: RankPool, twins_library: Path) -> None:
    on_the_device(twin_rank, twins_library, _from_the_host)


def _between_devices() -> None:
    with second_device.delays(1, **LATE):
        for _ in range(3):
            there = late_sum(late_sum(ones()).to("twins:1"))
            assert there.to(DEVICE).sum().item() == 11000.0


def test_copies_between_devices_are_ordered_behind_both(twin_rank: RankPool, twins_library: Path) -> None:
    on_the_device(twin_rank, twins_library, _between_devices)


def _backward() -> None:
    """Autograd lets streams wait for one another: each node runs on that of its forward."""
    for seed in range(3):
        weights = [torch.ones(100, device=DEVICE, requires_grad=True) for _ in range(2)]
        streams = [torch.Stream(torch.device(DEVICE)) for _ in range(2)]
        torch.accelerator.synchronize()
        with second_device.delays(seed, **LATE):
            parts = []
            for weight, stream in zip(weights, streams, strict=True):
                stream.wait_stream(here())
                with stream:
                    parts.append((weight * 3 + 1).square())
                here().wait_stream(stream)
            (parts[0] * parts[1]).sum().backward()
            for weight in weights:
                assert weight.grad is not None and weight.grad.cpu().tolist() == [384.0] * 100


def test_autograd_orders_the_streams_of_a_backward(twin_rank: RankPool, twins_library: Path) -> None:
    on_the_device(twin_rank, twins_library, _backward)


def _raises() -> str:
    table, row = torch.ones(3, 2, device=DEVICE), torch.tensor([5], device=DEVICE)
    torch.nn.functional.embedding(row, table)  # raises later
    with pytest.raises(RuntimeError, match="a kernel failed") as caught:
        torch.accelerator.synchronize()
    assert table.sum().item() == 6.0
    return str(caught.value)


def test_what_a_kernel_raises_is_told_at_the_next_wait(twin_rank: RankPool, twins_library: Path) -> None:
    assert "index out of range" in on_the_device(twin_rank, twins_library, _raises)


def _trains() -> list[str]:
    models = [TokenModel().to(DEVICE), TokenModel()]
    models[1].load_state_dict(models[0].state_dict())
    before = second_device.waited_for()
    with second_device.delays(1):
        for model in models:
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            for step in range(3):
                optimizer.zero_grad()
                model(*(part.to(model.token.weight.device) for part in token_batch(step))).backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
        for ours, theirs in zip(*(model.parameters() for model in models), strict=True):
            torch.testing.assert_close(ours.cpu(), theirs)
    return sorted(second_device.waited_for() - before)


def test_a_model_trains_as_on_the_cpu_and_the_host_never_waits(twin_rank: RankPool, twins_library: Path) -> None:
    assert on_the_device(twin_rank, twins_library, _trains) == []


def _collective(rank: int, library: Path) -> None:
    second_device.register(library)
    group = second_device.group()
    for seed in range(3):
        start = row_batch(rank, seed).to(DEVICE)
        expected = sum(row_batch(other, seed) for other in range(2))
        torch.accelerator.synchronize()
        with second_device.delays(seed, **LATE):
            ours = start * 1.0
            with second_device.held(here()):
                work = torch.distributed.all_reduce(ours, group=group, async_op=True)
                work.wait()
                assert not work.is_completed()
            torch.testing.assert_close(ours.cpu(), expected)
            assert work.is_completed()
            assert torch.equal(work.get_future().value()[0].cpu(), ours.cpu())
            gathered = torch.empty(2, *ours.shape, device=DEVICE)
            group._allgather_base(gathered, start).wait()
            torch.testing.assert_close(gathered.sum(0).cpu(), expected)


def test_a_collective_runs_on_a_stream_of_its_own(twin_ranks2: RankPool, twins_library: Path) -> None:
    twin_ranks2.run(_collective, twins_library)


def _timeouts(rank: int, library: Path) -> list[timedelta]:
    """Of a group for the device alone, whose backend tells; of one whose backend there does not; of its default."""
    second_device.register(library)

    def telling(store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> dist.Backend:
        return dist.ProcessGroupGloo(store, rank, world_size, timeout)

    if "TELLING" not in dir(dist.Backend):
        dist.Backend.register_backend("telling", telling, devices=["twins"])
    told = [
        dist.new_group(backend=backend, timeout=timedelta(seconds=seconds))
        for backend, seconds in (("twins:telling", 17), ("cpu:gloo,twins:twins", 18), ("twins:twins", 19))
    ]
    return [torch_private.groups.group_timeout(group) for group in told if group is not None]


def test_a_groups_timeout_is_that_of_its_backend_for_the_accelerator(
    twin_ranks2: RankPool, twins_library: Path
) -> None:
    for timeouts in twin_ranks2.run(_timeouts, twins_library):
        assert timeouts == [timedelta(seconds=17), timedelta(seconds=18), timedelta(minutes=30)]


def _random_state() -> list[int]:
    """Of which devices the random state is put back."""
    put_back: list[int] = []

    def note(state: Tensor, device: int) -> None:
        put_back.append(device)

    with mock.patch.object(torch.get_device_module("twins"), "set_rng_state", note), random_state_kept():
        torch.rand(5, device=DEVICE)
    return put_back


def test_the_random_state_of_the_accelerator_is_put_back(twin_rank: RankPool, twins_library: Path) -> None:
    assert on_the_device(twin_rank, twins_library, _random_state) == [0, 1]


def _race(waits: bool) -> list[tuple[str, str]]:
    start, stream = ones(), torch.Stream(torch.device(DEVICE))
    torch.accelerator.synchronize()
    with second_device.looking_for_races() as races:
        start[500:].mul_(2)
        if waits:
            stream.wait_stream(here())
        with stream:
            start.add_(1)
        start.record_stream(stream)
    return [race.operators for race in races]


def _race_without_wait() -> list[tuple[str, str]]:
    return _race(waits=False)


def _race_with_wait() -> list[tuple[str, str]]:
    return _race(waits=True)


def test_a_race_is_found_by_order_alone(twin_rank: RankPool, twins_library: Path) -> None:
    assert set(on_the_device(twin_rank, twins_library, _race_without_wait)) == {("aten::mul", "aten::add")}
    assert on_the_device(twin_rank, twins_library, _race_with_wait) == []


def _kept(rank: int, library: Path) -> list[bool]:
    second_device.register(library)
    group, right = second_device.group(), []
    for seed in range(6):
        start = ones()
        torch.accelerator.synchronize()
        with second_device.delays(seed, **LATE):
            if seed < 3:
                work = torch.distributed.all_reduce(start, group=group, async_op=True)
            else:
                with second_device.collectives_that_keep_nothing():
                    work = torch.distributed.all_reduce(start, group=group, async_op=True)
            address = start.data_ptr()
            del start
            again = ones()
            right.append(again.data_ptr() != address)
            work.wait()
            del work, again
            torch.accelerator.synchronize()
    return right


def test_a_collective_keeps_its_tensors_until_it_is_waited_for(twin_ranks2: RankPool, twins_library: Path) -> None:
    for right in twin_ranks2.run(_kept, twins_library):
        assert right[:3] == [True] * 3 and not any(right[3:]), right
