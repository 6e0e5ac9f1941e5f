"""`make fuzz`: many random programs, and a summary line.

    PYTHONPATH=tests python -m fuzz.long_run --models 2000 --seed 1
    PYTHONPATH=tests python -m fuzz.long_run --what hooks --models 500 --seed 1

Each program is trained under both wrappers (with `--what hooks` under one, and a lossy communication hook), on two
ranks, in every third chunk on three. The first failure ends its chunk: hypothesis shrinks it and the smallest program
is printed, to become a test in tests/fuzz/test_found.py. The exit status is 1 if there was one.
"""

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.strategies import SearchStrategy

from fuzz.compressed import compressed_programs, conserve
from fuzz.description import Program
from fuzz.strategy import programs
from fuzz.watch import compare
from ranks import RankPool

CHUNK = 40  # programs drawn with one seed


class Count:
    models = 0


def compare_both(pool: RankPool, program: Program) -> None:
    compare(pool, program, ("EagerDDP", "compile_ddp"))


# What is drawn, and what must hold.
WHAT: dict[str, tuple[SearchStrategy[Any], Callable[[RankPool, Any], None]]] = {
    "models": (programs(), compare_both),
    "hooks": (compressed_programs(), conserve),
}


def chunk(pool: RankPool, what: str, number: int, models: int, count: Count, *, shrink: bool) -> Callable[[], None]:
    """A hypothesis test of `models` programs on the pool's ranks."""
    strategy, holds = WHAT[what]

    @seed(number)
    @settings(
        max_examples=models,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink] if shrink else [Phase.generate],
        report_multiple_bugs=False,
    )
    @given(strategy)
    def run(program: Any) -> None:
        count.models += 1
        try:
            holds(pool, program)
        except AssertionError as error:
            print(f"---- model {count.models} fails ----\n{error}", flush=True)
            raise

    return run  # type: ignore[no-any-return]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--what", choices=WHAT, default="models", help="programs of which kind; default: %(default)s")
    parser.add_argument("--models", type=int, default=2000, help="programs in all; default: %(default)s")
    parser.add_argument("--seed", type=int, default=1, help="others for every seed; default: %(default)s")
    parser.add_argument("--shrink", action=argparse.BooleanOptionalAction, default=True, help="make failures minimal")
    arguments = parser.parse_args()
    begun, failures = time.monotonic(), 0
    counts = {2: Count(), 3: Count()}
    with RankPool(2) as two, RankPool(3) as three:
        for number, first in enumerate(range(0, arguments.models, CHUNK)):
            pool = three if number % 3 == 2 else two  # which takes longer
            models = min(CHUNK, arguments.models - first)
            try:
                seed_of_chunk = 1_000_000 * arguments.seed + number
                chunk(pool, arguments.what, seed_of_chunk, models, counts[pool.world_size], shrink=arguments.shrink)()
            except AssertionError as error:
                failures += 1
                print(f"---- chunk {number}, the smallest failure ----\n{error}", flush=True)
            done = f"{counts[2].models} models on 2 ranks, {counts[3].models} on 3"
            print(f"chunk {number}: {done}, {failures} failing chunks, {time.monotonic() - begun:.0f} s", flush=True)
    print(
        f"fuzz: {arguments.what}, seed {arguments.seed}, {done}: {failures} chunks with a failure, "
        f"{time.monotonic() - begun:.0f} s, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}"
    )
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
