"""The ranks' part of benchmarks/cpu_time.py: steps in turn, with each thread's CPU time before and after."""

import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.perf_samples import SAMPLES_PER_SECOND, Sample, consumer, sampled
from benchmarks.threads import OTHER, ThreadTime, read_threads, time_between
from benchmarks.workload import Workload
from compiled_ddp.tools.comparison.measure import Contender, warm_up
from compiled_ddp.tools.comparison.ranks import Rank
from compiled_ddp.tools.comparison.variants import Variant

TOP_SYMBOLS = 200


@dataclass(frozen=True)
class Step:
    """One step of a variant on one rank, on the clock of time.perf_counter()."""

    begin_s: float
    end_s: float
    threads: dict[str, ThreadTime]


@dataclass(frozen=True)
class CpuTime:
    """One variant on one rank. Seconds of each step, and seconds per step of the samples; None without perf."""

    variant: str
    rank: int
    step_s: list[float]
    threads_s: list[dict[str, ThreadTime]]  # of each step
    consumers_s: dict[str, float] | None
    symbols_s: dict[str, float] | None  # the largest, "thread group: symbol (binary)"

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> "CpuTime":
        threads = [{group: ThreadTime(**time) for group, time in step.items()} for step in data["threads_s"]]
        return CpuTime(**{**data, "threads_s": threads})


def measure(
    workload: Workload, variants: Sequence[Variant], *, warmup: int, rounds: int, with_perf: bool, rank: Rank
) -> list[dict[str, Any]]:
    """`CpuTime` of every variant on every rank, as JSON values; every rank returns all of them."""
    contenders, _ = warm_up(variants, workload, warmup, rank)
    with sampled() if with_perf else nullcontext() as samples:
        steps = _run_rounds(contenders, rounds, rank)
    groups = {thread: group for thread, (group, _) in read_threads().items()}
    found = []
    for variant, of_variant in zip(variants, steps, strict=True):
        consumers, symbols = (None, None) if samples is None else _sorted(samples, of_variant, groups)
        step_s = [step.end_s - step.begin_s for step in of_variant]
        threads = [step.threads for step in of_variant]
        found.append(asdict(CpuTime(variant.name, rank.index, step_s, threads, consumers, symbols)))
    return [of_variant for of_rank in rank.gather(found) for of_variant in of_rank]


def _run_rounds(contenders: Sequence[Contender], rounds: int, rank: Rank) -> list[list[Step]]:
    steps: list[list[Step]] = [[] for _ in contenders]
    for round_index in range(rounds):
        for offset in range(len(contenders)):
            slot = (round_index + offset) % len(contenders)
            steps[slot].append(_step(contenders[slot], rank))
    return steps


def _step(contender: Contender, rank: Rank) -> Step:
    batch = contender.next_batch()
    rank.barrier()
    before = read_threads()
    begin = time.perf_counter()
    contender.step(batch)
    end = time.perf_counter()
    return Step(begin, end, time_between(before, read_threads()))


def _sorted(
    samples: Sequence[Sample], steps: Sequence[Step], groups: Mapping[int, str]
) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds per step by consumer and by symbol, of the samples that fall into these steps."""
    begins = [step.begin_s for step in steps]
    by_consumer: Counter[str] = Counter()
    by_symbol: Counter[str] = Counter()
    for sample in samples:
        place = bisect_right(begins, sample.time_s) - 1
        if place >= 0 and sample.time_s <= steps[place].end_s:
            group = groups.get(sample.thread, OTHER)
            by_consumer[consumer(group, sample.symbol, sample.binary)] += 1
            by_symbol[f"{group}: {sample.symbol} ({sample.binary})"] += 1
    share = 1 / (SAMPLES_PER_SECOND * len(steps))
    return (
        {name: count * share for name, count in by_consumer.items()},
        {name: count * share for name, count in by_symbol.most_common(TOP_SYMBOLS)},
    )
