"""Collectives per step, counted where every wrapper passes, and communication with nothing else running."""

from collections import Counter
from collections.abc import Callable, Sequence
from time import perf_counter

import torch
import torch.distributed as dist

from compiled_ddp.tools.comparison.ranks import Rank

DEFAULT_BUCKET_BYTES = 4 << 20


def count_collectives(step: Callable[[], object]) -> dict[str, int]:
    """Calls per operation during `step`, for example {"allreduce": 13, "broadcast": 2}.

    DDP's reducer, functional collectives in compiled code and direct calls all end in an operator `c10d::<name>_`,
    which torch's profiler records by name. Barriers are not counted.
    """
    with torch.autograd.profiler.profile(use_kineto=False) as profile:
        step()
    names = (str(event.name) for event in profile.function_events or ())
    calls = Counter(name.removeprefix("c10d::").strip("_") for name in names if name.startswith("c10d::"))
    calls.pop("barrier", None)
    return dict(calls)


def even_buckets(total_bytes: int) -> list[int]:
    """`total_bytes` cut into 4 MiB pieces: what to reduce when no wrapper tells its bucket sizes."""
    full, rest = divmod(total_bytes, DEFAULT_BUCKET_BYTES)
    return [DEFAULT_BUCKET_BYTES] * full + [rest] * (rest > 0)


class CommunicationAlone:
    """All-reduces of the given sizes, launched at once and then waited for, on a group of their own."""

    def __init__(self, bucket_bytes: Sequence[int], rank: Rank) -> None:
        self.rank = rank
        self.group = dist.new_group()
        self.buffers = [
            torch.zeros(max(1, nbytes // 4), dtype=torch.float32, device=rank.device) for nbytes in bucket_bytes
        ]

    def step(self) -> float:
        """Seconds until this rank holds every sum."""
        self.rank.synchronize()
        begin = perf_counter()
        works = [dist.all_reduce(buffer, group=self.group, async_op=True) for buffer in self.buffers]
        for work in works:
            work.wait()
        self.rank.synchronize()
        return perf_counter() - begin

    def timed_step(self) -> float:
        """As `step`, from where all ranks have come to it."""
        self.rank.barrier()
        return self.step()
