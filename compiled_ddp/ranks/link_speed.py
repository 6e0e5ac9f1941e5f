"""The size of a bucket where the user gives none: by the speed of the link, measured when the model is wrapped."""

import logging
import math
import time

import torch

from compiled_ddp.planning.assignment import MEBIBYTE
from compiled_ddp.ranks import pretended
from compiled_ddp.ranks.communicator import Communicator
from compiled_ddp.telling.slow_work import SlowWork

# A slow link should start early, so its buckets are small. On a fast one the work that each bucket makes beside its
# transfer counts. Few and coarse steps, because the size is part of a compiled graph's cache key and should not change
# with the noise from one start to the next. Measured: docs/benchmarks.md, "Bucket size"; the last size is DDP's.
BUCKET_CAPS_MB = (
    (256 * MEBIBYTE, 2.0),  # up to so many bytes per second, this size
    (4096 * MEBIBYTE, 8.0),
    (math.inf, 25.0),
)

_log = logging.getLogger(__name__)

_PIECES, _PIECE_BYTES, _ROUNDS = 4, MEBIBYTE, 3
_WHAT = f"how fast ranks reduce {_ROUNDS} times {_PIECES} MiB (needless where bucket_cap_mb is given)"


def bucket_cap_for(bytes_per_second: float) -> float:
    """The default `bucket_cap_mb` for a link that reduces `bytes_per_second`."""
    return next(size for limit, size in BUCKET_CAPS_MB if bytes_per_second <= limit)


def measure_bytes_per_second(communicator: Communicator, device: torch.device) -> float:
    """How fast the communicator reduces tensors of `device`, the same number on every rank. A collective.

    The mean over ranks of the best of a few rounds, each of four all-reduces of 1 MiB under way at once.
    """
    if (world := pretended.current()) is not None:
        return world.measure_link()
    with SlowWork(_log, ("measuring", "measured"), what=_WHAT, is_told=lambda: communicator.rank == 0) as work:
        speed = _bytes_per_second(communicator, device)
        work.note_result(f"{speed / MEBIBYTE:.0f} MiB/s, so buckets of {bucket_cap_for(speed):.0f} MiB")
    return speed


def _bytes_per_second(communicator: Communicator, device: torch.device) -> float:
    pieces = [torch.zeros(_PIECE_BYTES // 4, dtype=torch.float32, device=device) for _ in range(_PIECES)]
    seconds = min(_seconds(communicator, pieces) for _ in range(_ROUNDS))
    shared = torch.tensor([seconds], dtype=torch.float64, device=device)
    communicator.all_reduce(shared).wait()
    return _PIECES * _PIECE_BYTES * communicator.world_size / shared.item()


def _seconds(communicator: Communicator, pieces: list[torch.Tensor]) -> float:
    begin = time.perf_counter()
    for work in [communicator.all_reduce(piece) for piece in pieces]:
        work.wait()
    pieces[-1][0].item()  # on a GPU a wait only orders streams
    return time.perf_counter() - begin
