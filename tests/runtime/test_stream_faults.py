"""Faults in what orders streams, planted in both wrappers, are found by what comes out.

The stream that should be waited for is held until all else has run, so that no luck is needed.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import second_device
import torch
from models import row_batch
from stream_faults import FAULTS, backwards_end, expected_of, trained
from stream_steps import (
    BOTH,
    are_right,
    current_stream,
    gradients,
    loss_of,
    on_all_ranks,
    one,
)

from compiled_ddp.step.buffers import FlatBuffer
from ranks import RankPool


@contextlib.contextmanager
def _late_writes(wrapper: str) -> Iterator[None]:
    """The current stream is held from the moment on in which something is first put into a bucket, or at once."""
    here, put_all = current_stream(), FlatBuffer.put_all
    with contextlib.ExitStack() as late:

        def hold_and_put(*args: Any, **kwargs: Any) -> None:
            if here not in holds:
                holds.append(here)
                late.enter_context(second_device.held(here))
            put_all(*args, **kwargs)

        holds: list[torch.Stream] = []
        if wrapper == "compile_ddp":
            late.enter_context(second_device.held(here))
            yield
        else:
            with mock.patch.object(FlatBuffer, "put_all", hold_and_put):
                yield
            assert holds


def _launches_early(rank: int, library: Path, wrapper: str, fault: str) -> bool:
    """Whether gradients are right that are written late."""
    ddp = trained(rank, library, wrapper)
    expected, x = expected_of(rank, ddp, 0), row_batch(rank, 0).to("twins:0")
    with FAULTS[fault](wrapper):
        loss = loss_of(ddp, x)
        torch.accelerator.synchronize()
        with _late_writes(wrapper):
            loss.backward()
        return are_right(gradients(ddp), expected)


@pytest.mark.parametrize("wrapper", BOTH)
def test_a_launch_that_does_not_wait_for_all_writers_is_found(
    twin_ranks2: RankPool, twins_library: Path, wrapper: str
) -> None:
    assert all(twin_ranks2.run(_launches_early, twins_library, wrapper, "none"))
    assert not any(twin_ranks2.run(_launches_early, twins_library, wrapper, "no wait before a launch"))


def _reads_early(rank: int, library: Path, wrapper: str, fault: str) -> bool:
    """Whether gradients are right that are read while all collectives come late."""
    ddp = trained(rank, library, wrapper)
    expected = expected_of(rank, ddp, 0)
    with FAULTS[fault](wrapper):
        with second_device.held_collectives():
            one(rank, ddp, 0)
            read = {name: parameter.grad.clone() for name, parameter in ddp.module.named_parameters()}
        return are_right({name: gradient.cpu() for name, gradient in read.items()}, expected)


@pytest.mark.parametrize("wrapper", BOTH)
def test_a_gradient_that_is_read_before_its_wait_is_found(
    twin_ranks2: RankPool, twins_library: Path, wrapper: str
) -> None:
    assert all(twin_ranks2.run(_reads_early, twins_library, wrapper, "none"))
    assert not any(twin_ranks2.run(_reads_early, twins_library, wrapper, "no wait for a launch"))


def _late_collectives(rank: int, library: Path, wrapper: str, fault: str) -> bool:
    """Whether two backwards are right whose collectives run once both have launched theirs."""
    ddp = trained(rank, library, wrapper)
    expected = expected_of(rank, ddp, 1)
    with FAULTS[fault](wrapper):
        with second_device.held_collectives():
            ended = backwards_end(rank, ddp, 2)
        torch.accelerator.synchronize()
        return on_all_ranks(ended) and are_right(gradients(ddp), expected)


@pytest.mark.parametrize("wrapper", BOTH)
@pytest.mark.parametrize("fault", ["no wait for a launch", "no wait for riders"])
def test_a_buffer_refilled_too_early_and_riders_read_too_early_are_found(
    twin_ranks2: RankPool, twins_library: Path, wrapper: str, fault: str
) -> None:
    """Without a fault the host would wait here, for ever: test_streams.py has those steps, and other delays."""
    assert not any(twin_ranks2.run(_late_collectives, twins_library, wrapper, fault))
