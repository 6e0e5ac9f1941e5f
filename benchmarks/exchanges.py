"""What ranks send each other by an exchange, and by gloo's all-to-all: `python -m benchmarks.exchanges --link 1gbit`.

First alone, one buffer at a time, of which each of two ranks sends one half. Then within the steps of a GPT with
`pipeline_updates`, in turns of all ways.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tabulate import tabulate

from benchmarks import tasks
from benchmarks.launch import run_job
from benchmarks.link import link_or_loopback
from compiled_ddp import compile_step
from compiled_ddp.tools.comparison.ranks import Rank

RANKS, IN_A_ROW, PROVEN = 2, 4, 3
SIZES_MIB = (3, 12, 73)  # a planned bucket, several, the embedding of 50,000 tokens of a width of 384


def measure(turns: int, rank: Rank) -> dict[str, dict[str, float]]:
    """On each rank: for each way the median milliseconds of each size, which is added up, and of a step."""
    from compiled_ddp.torch_private import exchanges

    one_slice, exchange = 2**40, exchanges.start_exchange
    ways: dict[str, tuple[Any, int]] = {
        "all-to-all": (exchanges.start_all_to_all, one_slice),
        "exchange, in one slice": (exchange, one_slice),
        "exchange": (exchange, exchanges.SLICE_BYTES),
    }
    found: dict[str, dict[str, list[float]]] = {way: {} for way in ways}
    times = [*(_alone(mib, rank) for mib in SIZES_MIB), _steps(rank)]
    for turn in range(turns):
        for way in [*ways][:: -1 if turn % 2 else 1]:
            exchanges.start_exchange, exchanges.SLICE_BYTES = ways[way]
            for timed in times:
                what, seconds = timed()
                found[way].setdefault(what, []).append(seconds * 1e3)
    return {way: {what: statistics.median(every) for what, every in own.items()} for way, own in found.items()}


def _alone(mib: int, rank: Rank) -> Callable[[], tuple[str, float]]:
    import torch
    import torch.distributed as dist

    from compiled_ddp.passes.ops import exchange_of_sums_into, wait_tensor

    sent = torch.ones(mib * 2**18)
    received, summed = torch.empty_like(sent), torch.empty(mib * 2**18 // RANKS)

    def timed() -> tuple[str, float]:
        rank.barrier()
        begin = time.perf_counter()
        exchange_of_sums_into(sent, received, summed, 0, (), dist.group.WORLD.group_name)
        wait_tensor(summed)
        rank.barrier()
        return f"{mib} MiB", time.perf_counter() - begin

    return timed


def _steps(rank: Rank) -> Callable[[], tuple[str, float]]:
    import torch

    from benchmarks.data import byte_batches
    from benchmarks.models import GPT

    torch.manual_seed(0)
    model = GPT()
    batches: Iterator[Any] = byte_batches(rank.index, rank.world_size, batch=4, context=128)
    step = compile_step(model, tasks.GPT.optimizer(model.parameters()), pipeline_updates=True)
    for _ in range(PROVEN):
        step(*next(batches))

    def timed() -> tuple[str, float]:
        step(*next(batches))
        begin = time.perf_counter()
        for _ in range(IN_A_ROW):
            step(*next(batches))
        seconds = (time.perf_counter() - begin) / IN_A_ROW
        step.flush()
        return "a step", seconds

    return timed


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.exchanges", description=__doc__)
    parser.add_argument("--link", default="1gbit", help="'loopback', or a rate such as 1gbit")
    parser.add_argument("--turns", type=int, default=8, help="of all ways")
    options = parser.parse_args(arguments)
    with link_or_loopback(options.link) as link:
        found = run_job("exchanges", {"turns": options.turns, "device": "cpu"}, ranks=RANKS, link=link)
    rows = [[way, *own.values()] for way, own in found.items()]
    print(tabulate(rows, ["ms", *next(iter(found.values()))], floatfmt=".1f"))


if __name__ == "__main__":
    main()
