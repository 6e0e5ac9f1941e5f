"""`make fuzz`: many random programs, and a table of what was in them.

    PYTHONPATH=tests python -m fuzz.long_run --models 2000 --seed 1
    PYTHONPATH=tests python -m fuzz.long_run --only 1.174 --shrink
    PYTHONPATH=tests python -m fuzz.long_run --what hooks --models 500 --seed 1

Each program is trained under EagerDDP and compile_ddp, one in `--inductor-every` with Inductor too (a small one, as
that compiles for seconds), on two ranks, every third one on three. `--what hooks` is another kind: programs under
one wrapper and a lossy communication hook.

A failure is printed with its label, SEED.NUMBER, by which `--only` runs it again, and the run goes on; a rank that
crashes or hangs is one too, and new ranks take over. The exit status is 1 if there was one.
"""

import argparse
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis.strategies import SearchStrategy

from fuzz.compressed import compressed_programs, conserve
from fuzz.drawing import drawn_with
from fuzz.legality import is_legal, tamed
from fuzz.shrink import shrink
from fuzz.strategy import disturbed, disturbed_programs, kinds_of, programs
from fuzz.watch import compare
from ranks import RankPool

EVERY_SO_MANY = 40  # models a line is printed
SHRINKING_TRIES = 150
BOTH = ("EagerDDP", "compile_ddp")


@dataclass(frozen=True)
class Drawn:
    """A program with its place in the run."""

    label: str  # SEED.NUMBER
    program: Any
    world_size: int
    wrappers: tuple[str, ...]  # empty where the program says it itself

    @property
    def kinds(self) -> Sequence[str]:
        kinds = kinds_of(self.program) if self.wrappers else [self.program.hook]
        return kinds or ["none of these"]


@dataclass
class Tally:
    models: Counter[str] = field(default_factory=Counter)  # by "2 ranks" and wrapper
    drawn: Counter[str] = field(default_factory=Counter)  # by kind
    failed: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)  # labels

    def add(self, drawn: Drawn, *, failed: bool) -> None:
        ranks = f"{drawn.world_size} ranks"
        self.models.update(["all", ranks, *(f"{wrapper}, {ranks}" for wrapper in drawn.wrappers)])
        self.drawn.update(drawn.kinds)
        if failed:
            self.failed.update(drawn.kinds)
            self.failures.append(drawn.label)

    def table(self) -> str:
        lines = [f"| {name} | {count} |" for name, count in sorted(self.models.items())]
        lines += ["", "| kind | models | with a failure |", "|---|---|---|"]
        lines += [f"| {kind} | {count} | {self.failed[kind] or 'none'} |" for kind, count in sorted(self.drawn.items())]
        return "\n".join(["| models | |", "|---|---|", *lines])


# ---- what is drawn ---------------------------------------------------------------------------------------------------


DISTURBED, SMALL = disturbed_programs(), disturbed(most_ops=2).filter(is_legal)
STRATEGIES: dict[str, SearchStrategy[Any]] = {
    "disturbed": DISTURBED,
    "models": programs(),
    "hooks": compressed_programs(),
}


def program_of(label: str, what: str, inductor_every: int) -> Drawn:
    number = int(label.split(".")[1])
    world_size = 3 if number % 3 == 2 else 2  # which takes longer
    if what == "hooks":
        return Drawn(label, drawn_with(STRATEGIES[what], label), world_size, ())
    with_inductor = bool(inductor_every) and number % inductor_every == inductor_every - 1
    strategy = SMALL if with_inductor else STRATEGIES[what]
    wrappers = (*BOTH, *(("inductor",) if with_inductor else ()))
    return Drawn(label, drawn_with(strategy, label), world_size, wrappers)


# ---- running it ------------------------------------------------------------------------------------------------------


class Runner:
    """Rank pools of both sizes, with new ranks after so many models: Dynamo never forgets all that it has compiled."""

    def __init__(self, models_per_pool: int) -> None:
        self._models_per_pool = models_per_pool
        self._pools = {2: RankPool(2), 3: RankPool(3)}
        self._models = Counter[int]()

    def error_of(self, drawn: Drawn) -> str:
        """What goes wrong, in words; empty where nothing does."""
        pool = self._pools[drawn.world_size]
        self._models[drawn.world_size] += 1
        if self._models[drawn.world_size] % self._models_per_pool == 0:
            pool.kill()
        try:
            if drawn.wrappers:
                compare(pool, drawn.program, drawn.wrappers)
            else:
                conserve(pool, drawn.program)
        except AssertionError as error:
            return str(error)
        return ""

    def smallest(self, drawn: Drawn) -> Drawn:
        def with_program(program: Any) -> Drawn:
            return Drawn(drawn.label, program, drawn.world_size, drawn.wrappers)

        def fails(program: Any) -> bool:
            legal = not drawn.wrappers or (tamed(program) == program and is_legal(program))
            return legal and bool(self.error_of(with_program(program)))

        return with_program(shrink(drawn.program, fails, tries=SHRINKING_TRIES))

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()


def report(runner: Runner, drawn: Drawn, error: str, *, shrinks: bool) -> None:
    print(f"---- model {drawn.label} fails ----\n{error}", flush=True)
    if shrinks:
        smallest = runner.smallest(drawn)
        print(f"---- model {drawn.label}, made small ----\n{runner.error_of(smallest)}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--what",
        choices=["disturbed", "models", "hooks"],
        default="disturbed",
        help="programs with what users do to them, plain ones, or under lossy hooks; default: %(default)s",
    )
    parser.add_argument("--models", type=int, default=2000, help="programs in all; default: %(default)s")
    parser.add_argument("--seed", type=int, default=1, help="others for every seed; default: %(default)s")
    parser.add_argument("--only", default="", metavar="LABEL", help="the program with this label alone")
    parser.add_argument("--inductor-every", type=int, default=10, metavar="N", help="one in N, 0: none; default: 10")
    parser.add_argument("--models-per-pool", type=int, default=200, metavar="N", help="then new ranks; default: 200")
    parser.add_argument("--shrink", action=argparse.BooleanOptionalAction, default=False, help="make failures small")
    parser.add_argument("--kind", default="", help="only programs with this row of the table in them; default: all")
    parser.add_argument("--first", type=int, default=0, metavar="N", help="number of the first program; default: 0")
    arguments = parser.parse_args()
    numbers = range(arguments.first, arguments.first + arguments.models)
    labels = [arguments.only] if arguments.only else [f"{arguments.seed}.{number}" for number in numbers]
    begun, tally, runner = time.monotonic(), Tally(), Runner(arguments.models_per_pool)
    command = " ".join(sys.argv[1:])
    try:
        for label in labels:
            drawn = program_of(label, arguments.what, arguments.inductor_every)
            if arguments.kind and arguments.kind not in drawn.kinds:
                continue
            error = runner.error_of(drawn)
            tally.add(drawn, failed=bool(error))
            if error:
                report(runner, drawn, error, shrinks=arguments.shrink)
            if tally.models["all"] % EVERY_SO_MANY == 0:
                seconds = time.monotonic() - begun
                print(f"{tally.models['all']} models, {len(tally.failures)} fail, {seconds:.0f} s", flush=True)
    finally:
        runner.close()
    print(tally.table())
    print(
        f"fuzz: {command or 'defaults'}: {tally.models['all']} models, failing: {tally.failures or 'none'}, "
        f"{time.monotonic() - begun:.0f} s, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}"
    )
    return 1 if tally.failures else 0


if __name__ == "__main__":
    sys.exit(main())
