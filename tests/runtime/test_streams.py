"""Races of streams, on a CPU: the device of `second_device.py` runs each stream's kernels late, in a thread of its own.

Steps must be those of plain autograd averaged by hand whatever comes late, and each fault that is planted in what
orders the streams must be found. A run prints the seeds of its delays.
"""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import second_device
import torch
import torch.distributed as dist
from models import expected_mean, row_batch, wrappers
from torch import Tensor, nn

from compiled_ddp.backward.launch import Launch
from compiled_ddp.backward.riders import Findings, RiderReader
from compiled_ddp.backward.streams import Writers
from ranks import RankPool

BOTH = ("compile_ddp", "EagerDDP")
LATE = {"share": 0.2, "longest_us": 4000}
SLOW_LINK = {"share": 0.5, "longest_us": 500, "collectives_us": 100_000}
PROVEN_AFTER = 2  # steps, in which the host reads checksums


class Branches(nn.Module):
    """Two branches, each on a stream of its own where there are any and `own_streams` says so."""

    def __init__(self, own_streams: bool) -> None:
        super().__init__()
        self.own_streams = own_streams
        self.stem = nn.Linear(5, 8)
        self.left, self.right = (nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(2))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.stem(x))
        if x.is_cpu or not self.own_streams:
            return self.head(self.left(x) + self.right(x))
        here, parts = current_stream(), []
        for stream, branch in zip(streams(2), (self.left, self.right), strict=True):
            stream.wait_stream(here)
            x.record_stream(stream)
            with stream:
                parts.append(branch(x))
            here.wait_stream(stream)
            parts[-1].record_stream(here)
        return self.head(parts[0] + parts[1])


def current_stream() -> torch.Stream:
    return torch.accelerator.current_stream(torch.device("twins:0"))


_streams: list[torch.Stream] = []


def streams(number: int) -> list[torch.Stream]:
    while len(_streams) < number:
        _streams.append(torch.Stream(torch.device("twins:0")))
    return _streams[:number]


def loss_of(module: nn.Module, x: Tensor) -> Tensor:
    return module(x).square().sum()


def _wrapped(library: Path, wrapper: str, *, own_streams: bool = False, **options: Any) -> Any:
    second_device.register(library)
    torch.manual_seed(0)
    model = Branches(own_streams).to("twins:0")
    return wrappers([wrapper])[wrapper](model, process_group=second_device.group(), bucket_cap_mb=0.0002, **options)


def _on_cpu(ddp: Any) -> nn.Module:
    bare = Branches(False)
    bare.load_state_dict({name: value.cpu() for name, value in ddp.module.state_dict().items()})
    return bare


def _is_right(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    """On all ranks; a rank that differs does not leave the other one in a collective."""
    right = all(torch.allclose(found[name].double(), expected[name], rtol=1e-4, atol=1e-5) for name in expected)
    return _on_all_ranks(right)


def _on_all_ranks(right: bool) -> bool:
    number = torch.tensor(float(right))
    dist.all_reduce(number)
    return number.item() == dist.get_world_size()


def _gradients(ddp: Any) -> dict[str, Tensor]:
    """Read on the current stream, as a user would."""
    return {name: parameter.grad.cpu() for name, parameter in ddp.module.named_parameters()}


# ---- steps -----------------------------------------------------------------------------------------------------------


def _one(rank: int, ddp: Any, step: int) -> Callable[[nn.Module], Tensor]:
    x = row_batch(rank, step)
    loss_of(ddp, x.to("twins:0", non_blocking=True)).backward()
    return lambda module: loss_of(module, x)


def _accumulating(rank: int, ddp: Any, step: int) -> Callable[[nn.Module], Tensor]:
    first, second = row_batch(rank, 2 * step), row_batch(rank, 2 * step + 1)
    with ddp.no_sync():
        loss_of(ddp, first.to("twins:0")).backward()
    loss_of(ddp, second.to("twins:0")).backward()
    return lambda module: loss_of(module, first) + loss_of(module, second)


def _on_a_stream(rank: int, ddp: Any, step: int) -> Callable[[nn.Module], Tensor]:
    here, stream = current_stream(), streams(3)[2]
    stream.wait_stream(here)
    with stream:
        loss = _one(rank, ddp, step)
    here.wait_stream(stream)
    return loss


def _skipping(rank: int, ddp: Any, step: int) -> Callable[[nn.Module], Tensor]:
    if rank == step % 2:
        ddp.skip_step()
        return lambda module: 0.0 * loss_of(module, row_batch(rank, step))
    return _one(rank, ddp, step)


KINDS = {"one": _one, "accumulating": _accumulating, "on a stream": _on_a_stream, "skipping": _skipping}


def _steps(rank: int, library: Path, wrapper: str, own_streams: bool, kind: str, options: dict[str, Any]) -> str:
    ddp = _wrapped(library, wrapper, own_streams=own_streams, **options)
    optimizer, stream = torch.optim.SGD(ddp.parameters(), lr=0.05), streams(4)[3]
    for step in range(5):
        bare = _on_cpu(ddp)
        with second_device.delays(step, **LATE):
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            expected = expected_mean(bare, KINDS[kind](rank, ddp, step))
            assert _is_right(_gradients(ddp), expected), step
            stream.wait_stream(current_stream())
            with stream:
                optimizer.step()
            current_stream().wait_stream(stream)
    return str(ddp.explain())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("own_streams", [False, True], ids=["one stream", "streams"])
@pytest.mark.parametrize("wrapper", BOTH)
def test_steps_are_those_of_autograd_averaged_by_hand(
    twin_ranks2: RankPool, twins_library: Path, wrapper: str, own_streams: bool, kind: str
) -> None:
    for explanation in twin_ranks2.run(_steps, twins_library, wrapper, own_streams, kind, {}):
        assert "Proven to be reduced: 12 of 12 parameters" in explanation
        assert own_streams or wrapper == "EagerDDP" or " graph " in explanation, explanation


# ---- faults ----------------------------------------------------------------------------------------------------------


class _NotWaitedFor:
    """A work for which no stream waits."""

    def __init__(self, work: Any) -> None:
        self._work = work

    def wait(self) -> None:
        """Does nothing: the fault."""

    def wait_for_collectives(self) -> None:
        """The same."""


def _no_wait_before_a_launch() -> contextlib.AbstractContextManager[object]:
    return mock.patch.object(Writers, "before_read", lambda writers: writers._writing.clear())


@contextlib.contextmanager
def _no_wait_for_a_launch() -> Iterator[None]:
    """Riders say nothing meanwhile: ranks that read others of them would not do the same."""

    def started(launch: Launch, work: Any) -> None:
        launch.work = _NotWaitedFor(work)

    def read(reader: RiderReader, riders: Any, *, at_once: bool = False) -> Findings:
        return Findings()

    with mock.patch.object(Launch, "started", started), mock.patch.object(RiderReader, "read", read):
        yield


def _no_wait_for_riders() -> contextlib.AbstractContextManager[object]:
    def earlier(reader: Any) -> list[list[float]]:
        copied, reader._copied = reader._copied, None
        return copied.tolist()

    return mock.patch.object(RiderReader, "_earlier", earlier)


FAULTS: dict[str, Callable[[], contextlib.AbstractContextManager[object]]] = {
    "none": contextlib.nullcontext,
    "no wait before a launch": _no_wait_before_a_launch,
    "no wait for a launch": _no_wait_for_a_launch,
    "no wait for riders": _no_wait_for_riders,
}
SEEDS = 30  # the first that shows a fault is enough; on a busy machine not every one does


def _with_fault(rank: int, library: Path, fault: str, backwards: int, delays: dict[str, Any], ends: bool) -> list[bool]:
    """Whether all is right, by seed, up to the first one that is not.

    Of several `backwards` in a row the last one's gradients are read, after all streams have ended if `ends`.
    """
    ddp = _wrapped(library, "EagerDDP", own_streams=True, broadcast_buffers=False)
    for step in range(PROVEN_AFTER + 2):
        ddp.zero_grad()
        _one(rank, ddp, step)
    torch.accelerator.synchronize()
    expected = expected_mean(_on_cpu(ddp), lambda module: loss_of(module, row_batch(rank, backwards - 1)))
    right: list[bool] = []
    while len(right) < SEEDS and all(right):
        with second_device.delays(len(right), **delays), FAULTS[fault]():
            ended = all(_ends(rank, ddp, step) for step in range(backwards))
            if ends or not ended:
                torch.accelerator.synchronize()
            right.append(ended and _is_right(_gradients(ddp), expected))
        torch.accelerator.synchronize()
    return right


def _ends(rank: int, ddp: Any, step: int) -> bool:
    """Whether no rank's backward raises."""
    ddp.zero_grad()
    try:
        _one(rank, ddp, step)
    except (RuntimeError, ValueError):  # of riders that say what no rank has sent
        return _on_all_ranks(False)
    return _on_all_ranks(True)


def _is_found(
    ranks: RankPool, library: Path, fault: str, backwards: int, delays: dict[str, Any], *, ends: bool = False
) -> bool:
    assert all(ranks.run(_with_fault, library, "none", backwards, delays, ends)[0]), "wrong without any fault"
    return not all(ranks.run(_with_fault, library, fault, backwards, delays, ends)[0])


def test_a_launch_that_does_not_wait_for_all_writers_is_found(twin_ranks2: RankPool, twins_library: Path) -> None:
    assert _is_found(twin_ranks2, twins_library, "no wait before a launch", 1, LATE)


def test_a_gradient_that_is_read_before_its_wait_is_found(twin_ranks2: RankPool, twins_library: Path) -> None:
    assert _is_found(twin_ranks2, twins_library, "no wait for a launch", 1, SLOW_LINK)


def test_a_buffer_that_is_refilled_while_it_is_reduced_is_found(twin_ranks2: RankPool, twins_library: Path) -> None:
    assert _is_found(twin_ranks2, twins_library, "no wait for a launch", 4, SLOW_LINK, ends=True)


def test_riders_that_are_read_before_they_have_come_are_found(twin_ranks2: RankPool, twins_library: Path) -> None:
    assert _is_found(twin_ranks2, twins_library, "no wait for riders", 4, SLOW_LINK)
