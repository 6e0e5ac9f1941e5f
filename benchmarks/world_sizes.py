"""What the number of ranks costs rank 0 where nothing is communicated: to wrap a model, to plan and to compile it.

    python -m benchmarks.world_sizes --ranks 8 4096

Each in fresh processes with an empty compile cache, in a world that `compiled-ddp precompile` pretends: torch's fake
process group, in which every rank has published what rank 0 has. The numbers of ranks take turns; of their processes
the table has medians. The constructor and the end of a warm-up read what each rank has published; what real ranks wait
for each other is not in it.
"""

import argparse
import json
import multiprocessing
import resource
import statistics
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import torch
from torch import nn

from benchmarks.launch import REPOSITORY
from compiled_ddp import compile_ddp
from compiled_ddp.ranks import pretended
from compiled_ddp.tools.command_line.own_ranks import environment_with
from compiled_ddp.tools.comparison.record import recipe
from compiled_ddp.tools.comparison.table import tabulate_rows

LAYERS, WIDTH, BATCH = 12, 64, 8
COLUMNS = {
    "ranks": ("ranks", ",d"),
    "constructor_cpu_s": ("constructor\nCPU s", ".2f"),
    "warmup_cpu_s": ("warm-up\nCPU s", ".2f"),
    "programs": ("programs\ncompiled", "d"),
    "peak_mib": ("peak\nMiB", ".0f"),
}


@dataclass(frozen=True)
class Wrapped:
    """One process: a model wrapped and warmed up among so many ranks."""

    ranks: int
    constructor_cpu_s: float
    warmup_cpu_s: float
    programs: int  # that the warm-up compiled
    peak_mib: float  # the most memory that the process ever had


def measure(ranks: int, backend: Literal["inductor", "aot_eager"]) -> Wrapped:
    """In this process, which must be a fresh one."""
    torch.manual_seed(0)
    layers = [part for _ in range(LAYERS) for part in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
    with pretended.world(ranks, backend="gloo"):
        began = time.process_time()
        ddp = compile_ddp(nn.Sequential(*layers), backend=backend, bucket_cap_mb=0.05)
        wrapped = time.process_time()
        ddp.warmup(torch.zeros(BATCH, WIDTH))
        warm = time.process_time()
        programs = len(ddp.teller.compilations)
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return Wrapped(ranks, wrapped - began, warm - wrapped, programs, peak_mib)


def in_a_process(ranks: int, backend: Literal["inductor", "aot_eager"]) -> Wrapped:
    """Measured in a process of its own, which finds nothing compiled."""
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="cddp-cache-") as cache:
        settings = {"TORCHINDUCTOR_CACHE_DIR": cache, "OMP_NUM_THREADS": "1"}
        with environment_with(settings), ProcessPoolExecutor(1, mp_context=spawn) as process:
            return process.submit(measure, ranks, backend).result()


def table(found: Sequence[Wrapped]) -> str:
    """A row for each number of ranks, of medians."""
    rows = []
    for ranks in dict.fromkeys(wrapped.ranks for wrapped in found):
        of_these = [wrapped for wrapped in found if wrapped.ranks == ranks]
        medians = {
            field.name: type(getattr(of_these[0], field.name))(
                statistics.median(getattr(wrapped, field.name) for wrapped in of_these)
            )
            for field in fields(Wrapped)
        }
        rows.append(SimpleNamespace(**medians))
    return tabulate_rows(rows, COLUMNS, tablefmt="simple", missing="-")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.world_sizes", description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 4096])
    parser.add_argument("--repetitions", type=int, default=3, help="processes of each, in turn (default 3)")
    parser.add_argument("--backend", choices=("inductor", "aot_eager"), default="inductor")
    parser.add_argument("--json", type=Path, default=Path("benchmarks/out/world_sizes.json"))
    options = parser.parse_args(arguments)
    found = [in_a_process(ranks, options.backend) for _ in range(options.repetitions) for ranks in options.ranks]
    print(table(found))
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps({"recipe": recipe(REPOSITORY), "processes": [asdict(each) for each in found]}))
    print(f"\nRaw samples and recipe: {options.json}")


if __name__ == "__main__":
    main()
