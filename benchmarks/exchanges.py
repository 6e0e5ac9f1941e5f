"""What ranks send each other by exchanges, and in other ways: `python -m benchmarks.exchanges --link 1gbit`.

First alone, one buffer at a time, of which each of two ranks sends one half; then what a small one takes of the thread
that computes meanwhile; then within the steps of a GPT with `pipeline_updates`. All in turns of all ways.
"""

import argparse
import statistics
import time
import unittest.mock
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tabulate import tabulate

from benchmarks import tasks
from benchmarks.launch import run_job
from benchmarks.link import link_or_loopback
from compiled_ddp import compile_step
from compiled_ddp.tools.comparison.ranks import Rank

RANKS, IN_A_ROW, PROVEN = 2, 4, 3
SIZES_MIB = (3, 12, 73)  # a planned bucket, several, the embedding of 50,000 tokens of a width of 384
SMALL_KIB, PRODUCTS, BESIDE = 64, 12, 20  # products of 256 x 256 take longer than a small exchange; so often in a turn


def ways() -> Mapping[str, Mapping[str, Any]]:
    """By name: what stands in place of the parts of `exchanges`."""
    from compiled_ddp.torch_private import exchanges

    return {
        "all-to-all": {"_goes_both_ways": lambda *_: False},
        "receipts and sends": {"_start_parts": _receipts_and_sends, "_start_rows": _rows_by_receipts_and_sends},
        "both ways on one group": {"_back": lambda group: None},
        "both ways, in one slice": {"SLICE_BYTES": 2**40},
        "both ways": {"SLICE_BYTES": exchanges.SLICE_BYTES},
    }


def _receipts_and_sends(group: Any, sent: Any, come: Any, begin: int, end: int) -> list[Any]:
    """As `exchanges` had it before: launched by the thread that computes, receipts first. Of two ranks."""
    other = 1 - group.rank()
    of_other = slice(other * len(sent) // RANKS + begin, other * len(sent) // RANKS + end)
    return [group.recv([come[of_other]], other, 1), group.send([sent[of_other]], other, 1)]


def _rows_by_receipts_and_sends(group: Any, rows: Sequence[Any]) -> list[Any]:
    rank, other = group.rank(), 1 - group.rank()
    return [group.recv([rows[other]], other, 1), group.send([rows[rank]], other, 1)]


def measure(turns: int, rank: Rank) -> dict[str, dict[str, float]]:
    """On each rank: for each way the median milliseconds of each size, added up, of computing, and of a step."""
    import torch.distributed as dist

    from compiled_ddp.torch_private import exchanges

    group = dist.group.WORLD
    assert group is not None
    exchanges.let_send_back(group, by=dist.new_group())
    found: dict[str, dict[str, list[float]]] = {way: {} for way in ways()}
    times = [*(_alone(mib, rank) for mib in SIZES_MIB), _beside(rank), _steps(rank)]
    for turn in range(turns):
        for way, instead in [*ways().items()][:: -1 if turn % 2 else 1]:
            with unittest.mock.patch.multiple(exchanges, **instead):
                for timed in times:
                    what, seconds = timed()
                    found[way].setdefault(what, []).append(seconds * 1e3)
    return {way: {what: statistics.median(every) for what, every in own.items()} for way, own in found.items()}


def _exchange(nbytes: int) -> tuple[Callable[[], object], Callable[[], object]]:
    """What launches one, and what awaits it."""
    import torch
    import torch.distributed as dist

    from compiled_ddp.passes.ops import exchange_of_sums_into, wait_tensor

    sent = torch.ones(nbytes // 4, dtype=torch.float32)
    received, summed = torch.empty_like(sent), sent.new_empty(nbytes // 4 // RANKS)
    group = dist.group.WORLD
    assert group is not None
    return lambda: exchange_of_sums_into(sent, received, summed, (), group.group_name), lambda: wait_tensor(summed)


def _alone(mib: int, rank: Rank) -> Callable[[], tuple[str, float]]:
    launch, await_it = _exchange(mib * 2**20)

    def timed() -> tuple[str, float]:
        rank.barrier()
        begin = time.perf_counter()
        launch()
        await_it()
        rank.barrier()
        return f"{mib} MiB", time.perf_counter() - begin

    return timed


def _beside(rank: Rank) -> Callable[[], tuple[str, float]]:
    """How much longer computing takes with a small exchange meanwhile."""
    import torch

    launch, await_it = _exchange(SMALL_KIB * 2**10)
    matrix = torch.ones(256, 256, dtype=torch.float32)
    product = torch.empty_like(matrix)

    def compute() -> None:
        for _ in range(PRODUCTS):
            torch.mm(matrix, matrix, out=product)

    def seconds(before: Callable[[], object], behind: Callable[[], object]) -> float:
        rank.barrier()
        begin = time.perf_counter()
        for _ in range(BESIDE):
            before()
            compute()
            behind()
        return (time.perf_counter() - begin) / BESIDE

    def timed() -> tuple[str, float]:
        alone = seconds(lambda: None, lambda: None)
        return f"computing, beside {SMALL_KIB} KiB", seconds(launch, await_it) - alone

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
    print(tabulate(rows, ["ms", *next(iter(found.values()))], floatfmt=".2f"))


if __name__ == "__main__":
    main()
