"""What a first step takes where nothing is compiled yet: seconds of CPU, summed over the ranks, and of the clock.

    python -m benchmarks.first_steps --ranks 2 4 8 --models gpt convolutions

Each job is of fresh processes. "cold" is where no rank finds anything in the cache, "warm" a second start with the same
one. A step is the first forward and backward, with all that is imported for it.
"""

import argparse
import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.launch import REPOSITORY
from benchmarks.models import GPT, DigitsNet
from compiled_ddp import compile_ddp
from compiled_ddp.tools.command_line.own_ranks import run_on_own_ranks
from compiled_ddp.tools.comparison.record import recipe
from compiled_ddp.tools.comparison.table import tabulate_rows

Batch = tuple[Tensor, ...]

MODELS: Mapping[str, tuple[Callable[[], nn.Module], Callable[[], Batch]]] = {
    "gpt": (
        lambda: GPT(layers=6, width=256, heads=4),
        lambda: (torch.randint(0, 255, (4, 128)), torch.randint(0, 255, (4, 128))),
    ),
    "convolutions": (DigitsNet, lambda: (torch.randn(8, 1, 8, 8), torch.randint(0, 10, (8,)))),
}
WAYS: Mapping[str, Callable[[nn.Module], Callable[..., Any]]] = {
    "torch.compile(DDP)": lambda model: torch.compile(nn.parallel.DistributedDataParallel(model)),
    "compile_ddp, each rank": lambda model: compile_ddp(model, compile_once=False),
    "compile_ddp": compile_ddp,
}
COLUMNS = {
    "model": ("model", "s"),
    "ranks": ("ranks", "d"),
    "way": ("", "s"),
    "cold_cpu_s": ("cold, CPU s\nof all ranks", ".1f"),
    "cold_s": ("cold s", ".1f"),
    "warm_cpu_s": ("warm, CPU s\nof all ranks", ".1f"),
    "warm_s": ("warm s", ".1f"),
}


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.first_steps",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--models", choices=MODELS, nargs="+", default=[*MODELS])
    return parser.parse_args(arguments)


def first_step(model: str, way: str) -> tuple[float, float]:
    """On one rank: the CPU's seconds, and the clock's."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    make, batch = MODELS[model]
    torch.manual_seed(0)
    wrapped, arguments = WAYS[way](make()), batch()
    dist.barrier()
    begun, cpu = time.perf_counter(), _cpu_seconds()
    wrapped(*arguments).backward()
    found = _cpu_seconds() - cpu, time.perf_counter() - begun
    dist.barrier()
    dist.destroy_process_group()
    return found


def _cpu_seconds() -> float:
    """Of this process and of the compilers that it has started and that have ended."""
    return sum(os.times()[:4])


def measure(model: str, way: str, ranks: int, cache: str) -> tuple[float, float]:
    """The CPU's seconds, summed over ranks, and those of the clock on the slowest one."""
    environment = {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": cache}
    of_ranks = run_on_own_ranks(ranks, first_step, model, way, environment=environment).values()
    return sum(cpu for cpu, _ in of_ranks), max(clock for _, clock in of_ranks)


@dataclass(frozen=True)
class Row:
    model: str
    ranks: int
    way: str
    cold_cpu_s: float
    cold_s: float
    warm_cpu_s: float
    warm_s: float


def row(model: str, way: str, ranks: int) -> Row:
    with tempfile.TemporaryDirectory() as cache:
        cold, warm = (measure(model, way, ranks, cache) for _ in range(2))
    return Row(model, ranks, way, *cold, *warm)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    print(json.dumps(recipe(REPOSITORY)))
    rows = []
    for model, ranks, way in itertools.product(options.models, options.ranks, WAYS):
        rows.append(row(model, way, ranks))
        print(rows[-1], file=sys.stderr, flush=True)
    print(tabulate_rows(rows, COLUMNS, tablefmt="github", missing="-"))


if __name__ == "__main__":
    main()
