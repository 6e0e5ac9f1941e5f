"""Steps on streams, on a CPU: the device of `second_device.py` runs each stream's kernels late, in a thread of its own.

Steps must be those of plain autograd averaged by hand whatever comes late, and must have no race by order alone. A run
prints the seeds of its delays.
"""

from pathlib import Path
from typing import Any

import pytest
import second_device
import torch
from models import expected_mean
from stream_steps import (
    BOTH,
    KINDS,
    LATE,
    Branches,
    are_right,
    current_stream,
    gradients,
    on_cpu,
    streams,
    with_streams,
    wrapped,
)

from ranks import RankPool


def _steps(rank: int, library: Path, wrapper: str, own_streams: bool, kind: str, options: dict[str, Any]) -> str:
    ddp = wrapped(library, wrapper, with_streams if own_streams else Branches, **options)
    optimizer, stream = torch.optim.SGD(ddp.parameters(), lr=0.05), streams(4)[3]
    for step in range(5):
        bare = on_cpu(ddp)
        with second_device.delays(step, **LATE), second_device.looking_for_races() as races:
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            expected = expected_mean(bare, KINDS[kind](rank, ddp, step))
            assert are_right(gradients(ddp), expected), step
            stream.wait_stream(current_stream())
            with stream:
                optimizer.step()
            current_stream().wait_stream(stream)
        assert not races, (step, len(races), [str(race) for race in races[:6]])
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
