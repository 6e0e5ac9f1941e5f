"""Models off the CPU and on several devices: autograd has a thread for each, and a bucket is of one device.

The devices are the test's own, of CPU memory (`second_device.py`): what is done asynchronously on a GPU, reading riders
one backward late among it, is done here too. Races of streams: test_streams.py.
"""

import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import second_device
import torch
import torch.distributed as dist
from models import assert_equal_on_all_ranks, expected_mean, row_batch, wrappers
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.utils.checkpoint import checkpoint

from compiled_ddp import comm_hooks
from compiled_ddp.compat import apex
from compiled_ddp.torch_private import versions
from ranks import RankPool

BOTH = ("compile_ddp", "EagerDDP")
TWO = ("twins:0", "twins:1")
MIXED = ("twins:1", "cpu")


class OnTwoDevices(nn.Module):
    """Two branches, one on each device, which meet on the first: autograd runs them at the same time."""

    def __init__(self, devices: tuple[str, str]) -> None:
        super().__init__()
        self.devices, self.reentrant = devices, False
        self.stem = nn.Linear(5, 5).to(devices[1])
        self.left = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh()).to(devices[0])
        self.right = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh()).to(devices[1])
        self.head = nn.Linear(8, 3).double().to(devices[0])
        self.register_buffer("seen", torch.zeros((), device=devices[1]))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x.to(self.devices[1]))
        return checkpoint(self._both, x, use_reentrant=True) if self.reentrant else self._both(x)

    def _both(self, x: Tensor) -> Tensor:
        here, there = self.devices
        left, right = self.left(x.to(here)), self.right(x.to(there))
        return self.head((left + right.to(here)).double())


def loss_of(module: nn.Module, x: Tensor) -> Tensor:
    return module(x).square().sum()


def _wrapped(rank: int, library: Path, wrapper: str, devices: tuple[str, str], **options: Any) -> Any:
    second_device.register(library)
    return wrappers([wrapper])[wrapper](OnTwoDevices(devices), process_group=second_device.group(), **options)


def _means(ddp: Any, x: Tensor, factor: float = 1.0) -> dict[str, Tensor]:
    """On the CPU, where one thread computes them."""
    bare = OnTwoDevices(("cpu", "cpu"))
    bare.load_state_dict(ddp.module.state_dict(), strict=False)
    return expected_mean(bare, lambda module: factor * loss_of(module, x))


def _assert_means(ddp: Any, expected: dict[str, Tensor], *, skip: Sequence[str] = (), rtol: float = 1e-5) -> None:
    for name, parameter in ddp.module.named_parameters():
        if name in skip:
            continue
        assert parameter.grad is not None and parameter.grad.device == parameter.device, name
        torch.testing.assert_close(parameter.grad.cpu().double(), expected[name], rtol=rtol, atol=rtol, msg=name)


def _assert_step(ddp: Any, x: Tensor, *, rtol: float = 1e-5) -> None:
    expected = _means(ddp, x)
    ddp.zero_grad()
    loss_of(ddp, x).backward()
    _assert_means(ddp, expected, rtol=rtol)


def _trains(rank: int, library: Path, wrapper: str, devices: tuple[str, str]) -> None:
    ddp = _wrapped(rank, library, wrapper, devices, bucket_cap_mb=0.0002)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in range(4):
        _assert_step(ddp, row_batch(rank, step))
        optimizer.step()
    sections = ddp.plan.sections
    assert {section.origin for section in sections} == {"hooks"}
    assert wrapper == "EagerDDP" or "autograd runs in threads of their own" in str(ddp.explain())
    devices_of_buckets = {bucket.device for section in sections for bucket in section.plan.buckets}
    assert devices_of_buckets == {torch.device(device) for device in devices}
    assert "Proven to be reduced: 12 of 12 parameters" in str(ddp.explain())


@pytest.mark.parametrize("devices", [TWO, MIXED])
@pytest.mark.parametrize("wrapper", BOTH)
def test_a_model_on_two_devices_is_averaged(
    twin_ranks2: RankPool, twins_library: Path, wrapper: str, devices: tuple[str, str]
) -> None:
    twin_ranks2.run(_trains, twins_library, wrapper, devices)


def _each_reduction(rank: int, library: Path, wrapper: str, devices: tuple[str, str]) -> None:
    for reduction, factor in (("sum", 2.0), ("weighted", 1.0)):
        ddp = _wrapped(rank, library, wrapper, devices, reduction=reduction, piggyback=("loss",))
        for step in range(3):
            x = row_batch(rank, step)
            weight = float(step + 3 * rank) if reduction == "weighted" else 1.0
            expected = _means(ddp, x, factor * weight * 2 / (2 * step + 3) if reduction == "weighted" else factor)
            ddp.zero_grad()
            with ddp.no_sync():
                loss_of(ddp, x).backward()
            if reduction == "weighted":
                ddp.set_weight(weight)
            ddp.piggyback(loss=float(rank + step))
            loss = loss_of(ddp, x) * 0.0
            loss.backward()
            _assert_means(ddp, expected)
            assert float(ddp.piggybacked["loss"]) == 2 * step + 1


@pytest.mark.parametrize("devices", [TWO, MIXED])
@pytest.mark.parametrize("wrapper", BOTH)
def test_sums_weights_and_passengers_of_a_model_on_two_devices(
    twin_ranks2: RankPool, twins_library: Path, wrapper: str, devices: tuple[str, str]
) -> None:
    twin_ranks2.run(_each_reduction, twins_library, wrapper, devices)


BOUND_TO_THE_CPU = """
import torch
import torch.distributed as dist
from compiled_ddp import EagerDDP
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, device_id=torch.device("cpu:0"))
EagerDDP(torch.nn.Linear(2, 2))(torch.ones(1, 2)).sum().backward()
"""


@pytest.mark.skipif(versions.minor_version() < (2, 15), reason="older ones bind a process to accelerators alone")
def test_a_process_that_is_bound_to_the_cpu_trains() -> None:
    ran = subprocess.run([sys.executable, "-c", BOUND_TO_THE_CPU], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr


def _autograd_threads(rank: int, library: Path) -> None:
    ddp = _wrapped(rank, library, "EagerDDP", TWO, bucket_cap_mb=0.0002)
    threads: dict[torch.device, set[int]] = {}
    for parameter in ddp.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: None)  # held back: runs in the thread of the end
        parameter.register_hook(
            lambda _, device=parameter.device: threads.setdefault(device, set()).add(threading.get_ident())
        )
    for step in range(20):
        _assert_step(ddp, row_batch(rank, step))
    assert len(threads) == 2 and len(set.union(*threads.values())) == 2, threads


def test_gradients_of_two_devices_come_in_two_threads(twin_ranks2: RankPool, twins_library: Path) -> None:
    twin_ranks2.run(_autograd_threads, twins_library)


def _steps_of_every_kind(rank: int, library: Path, wrapper: str, devices: tuple[str, str]) -> None:
    ddp = _wrapped(rank, library, wrapper, devices, check_steps="error", broadcast_buffers=False)
    idle = nn.Parameter(torch.ones(3, device=devices[0]))
    ddp.module.register_parameter("idle", idle)  # unused on every rank; taken up in the next forward
    for step in range(3):
        x = row_batch(rank, step)
        expected = _means(ddp, x, 1.5)
        ddp.zero_grad()
        with ddp.no_sync():
            loss_of(ddp, x).mul(0.5).backward()
        loss_of(ddp, x).backward()
        assert idle.grad is None
        _assert_means(ddp, {**expected, "idle": torch.zeros(3)}, skip=("idle",))
    x = row_batch(rank)
    expected = _means(ddp, x, float(rank))  # rank 0 skips the step
    ddp.zero_grad()
    if rank == 0:
        ddp.skip_step()
    else:
        loss_of(ddp, x).backward()
    _assert_means(ddp, expected, skip=("idle",))
    # Ranks that drop a step differ in the number of forwards, which riders tell one backward later here.
    loss = loss_of(ddp, x)
    if rank == 0:
        loss = loss_of(ddp, x)
    loss.backward()
    del loss
    with pytest.raises(RuntimeError, match="forward"):
        loss_of(ddp, x).backward()


@pytest.mark.parametrize("devices", [("twins:0", "twins:0"), TWO, MIXED])
@pytest.mark.parametrize("wrapper", BOTH)
def test_steps_of_every_kind_off_the_cpu(
    twin_ranks2: RankPool, twins_library: Path, wrapper: str, devices: tuple[str, str]
) -> None:
    twin_ranks2.run(_steps_of_every_kind, twins_library, wrapper, devices, timeout_seconds=60.0)


def _with_hooks(rank: int, library: Path, wrapper: str) -> None:
    graph = _wrapped(rank, library, wrapper, TWO, comm_hook=comm_hooks.bf16_compress)
    torchs = _wrapped(rank, library, wrapper, TWO)
    torchs.register_comm_hook(second_device.group(), default_hooks.allreduce_hook)
    for ddp in (graph, torchs):
        for step in range(3):
            _assert_step(ddp, row_batch(rank, step), rtol=1e-5 if ddp is torchs else 0.05)


@pytest.mark.parametrize("wrapper", BOTH)
def test_communication_hooks_get_buckets_of_one_device(
    twin_ranks2: RankPool, twins_library: Path, wrapper: str
) -> None:
    twin_ranks2.run(_with_hooks, twins_library, wrapper)


def _joined(rank: int, library: Path, wrapper: str) -> None:
    ddp = _wrapped(rank, library, wrapper, TWO)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    with ddp.join():
        for step in range(1 + 2 * rank):
            optimizer.zero_grad()
            loss_of(ddp, row_batch(rank, step)).backward()
            optimizer.step()
    assert_equal_on_all_ranks([parameter.tolist() for parameter in ddp.parameters()])


@pytest.mark.parametrize("wrapper", BOTH)
def test_uneven_inputs_of_a_model_on_two_devices(twin_ranks2: RankPool, twins_library: Path, wrapper: str) -> None:
    twin_ranks2.run(_joined, twins_library, wrapper)


def _different_places(rank: int, library: Path) -> str:
    second_device.register(library)
    devices = TWO if rank == 0 else ("twins:1", "twins:1")
    with pytest.raises(RuntimeError, match="not wrapped") as caught:
        _wrapped(rank, library, "EagerDDP", devices)
    return str(caught.value)


def test_ranks_with_parameters_in_different_places_are_refused(twin_ranks2: RankPool, twins_library: Path) -> None:
    for message in twin_ranks2.run(_different_places, twins_library):
        assert "parameter left.0.weight" in message and "device number 2 of the model" in message, message


def _device_ids(rank: int, library: Path) -> None:
    with pytest.raises(ValueError, match="this one is on 2: leave them out"):
        _wrapped(rank, library, "EagerDDP", TWO, device_ids=[0])


def test_device_ids_of_a_model_on_two_devices_are_refused(twin_ranks2: RankPool, twins_library: Path) -> None:
    twin_ranks2.run(_device_ids, twins_library)


def _strict(rank: int, library: Path) -> None:
    with pytest.raises(ValueError, match="strict=True wants graphs to reduce, and hooks do: the model is on several"):
        _wrapped(rank, library, "compile_ddp", TWO, strict=True)
    second_device.register(library)
    with pytest.raises(ValueError, match=r"parameters are on twins, .* \(cpu:gloo.*\) has no backend"):
        wrappers(["EagerDDP"])["EagerDDP"](OnTwoDevices(TWO), process_group=dist.new_group(backend="cpu:gloo"))


def test_what_cannot_serve_several_devices_is_refused(twin_ranks2: RankPool, twins_library: Path) -> None:
    twin_ranks2.run(_strict, twins_library)


def _reentrant(rank: int, library: Path, devices: tuple[str, str]) -> None:
    ddp = _wrapped(rank, library, "EagerDDP", devices, bucket_cap_mb=0.0002)
    ddp.module.reentrant = True
    for step in range(20):
        _assert_step(ddp, row_batch(rank, step).requires_grad_())


@pytest.mark.parametrize("devices", [TWO, MIXED])
def test_a_reentrant_checkpoint_across_devices(
    twin_ranks2: RankPool, twins_library: Path, devices: tuple[str, str]
) -> None:
    twin_ranks2.run(_reentrant, twins_library, devices, timeout_seconds=40.0)


def _broken_backward(rank: int, library: Path, devices: tuple[str, str]) -> None:
    ddp = _wrapped(rank, library, "EagerDDP", devices, broadcast_buffers=False)
    x = row_batch(rank)
    for _ in range(2):
        _assert_step(ddp, x)
    ddp.zero_grad()
    if rank == 0:
        handle = ddp.module.left[0].weight.register_hook(_raise)
        with pytest.raises(ValueError, match="on purpose"):
            loss_of(ddp, x).backward()
        handle.remove()
    else:
        loss_of(ddp, x).backward()  # off the CPU nothing tells yet that what it brings is no mean
    ddp.zero_grad()
    with pytest.raises(RuntimeError, match=r"the one before it broke off on 1 rank\(s\).*load a checkpoint"):
        loss_of(ddp, x).backward()
    for _ in range(2):
        _assert_step(ddp, x)


def _raise(_: Tensor) -> None:
    raise ValueError("on purpose")


@pytest.mark.parametrize("devices", [("twins:0", "twins:0"), TWO])
def test_a_broken_backward_is_told_one_step_late_off_the_cpu(
    twin_ranks2: RankPool, twins_library: Path, devices: tuple[str, str]
) -> None:
    twin_ranks2.run(_broken_backward, twins_library, devices, timeout_seconds=60.0)


def _apexs_streams(rank: int, library: Path) -> None:
    second_device.register(library)
    groups = [second_device.group() for _ in range(2)]
    ddp = apex.DistributedDataParallel(
        OnTwoDevices(("twins:0", "twins:0")),
        num_allreduce_streams=2,
        allreduce_communicators=(groups, [None, None]),
        process_group=groups[0],
    )
    for step in range(2):
        _assert_step(ddp, row_batch(rank, step))


def test_apexs_streams_are_taken_off_the_cpu(twin_ranks2: RankPool, twins_library: Path) -> None:
    twin_ranks2.run(_apexs_streams, twins_library)


def _copies_from_the_host(rank: int, library: Path, wrapper: str) -> list[bool]:
    """Of each copy of what ranks tell one another to the device, whether it blocks nobody."""
    ddp = _wrapped(rank, library, wrapper, ("twins:0", "twins:0"), piggyback=("tokens", "loss"), verify="off")
    ddp.module.register_parameter("idle", nn.Parameter(torch.ones(3, device="twins:0")))  # nobody uses it
    copy, move, found = Tensor.copy_, Tensor.to, []

    def copied(into: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        if source.is_cpu and not into.is_cpu:
            found.append(non_blocking and source.is_pinned())
        return copy(into, source, non_blocking=non_blocking)

    def moved(source: Tensor, *args: Any, non_blocking: bool = False, **kwargs: Any) -> Tensor:
        result = move(source, *args, non_blocking=non_blocking, **kwargs)
        if source.is_cpu and not result.is_cpu:
            found.append(non_blocking and source.is_pinned())
        return result

    for step in range(4):
        loss = loss_of(ddp, row_batch(rank, step))
        with mock.patch.object(Tensor, "copy_", copied), mock.patch.object(Tensor, "to", moved):
            ddp.piggyback(tokens=3, loss=loss.detach())
            loss.backward()
        assert ddp.piggybacked["tokens"].item() == 6
        ddp.zero_grad()
    return found


@pytest.mark.parametrize("wrapper", BOTH)
def test_what_ranks_tell_one_another_reaches_the_device_from_pinned_memory(
    twin_ranks2: RankPool, twins_library: Path, wrapper: str
) -> None:
    for found in twin_ranks2.run(_copies_from_the_host, twins_library, wrapper):
        assert len(found) >= 3 * 4, "the leading riders, which parameters are used, and a number"
        assert all(found)
