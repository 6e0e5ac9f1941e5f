"""Compiling before the first step, with all ranks, so that no collective waits on a compiler."""

import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from compiled_ddp.graph.choice import PassTimes
from compiled_ddp.ranks.rank_group import RankGroup
from compiled_ddp.telling import log

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Compiled:
    """One thing that a warm-up has compiled, or run for the first time."""

    what: str
    seconds: float


def timed(what: str, run: Callable[[], bool]) -> Iterator[Compiled]:
    """Run a step of a warm-up; yields nothing when it returns that there was nothing to compile."""
    started = time.perf_counter()
    if run():
        yield Compiled(what, time.perf_counter() - started)


def warm_up(
    ranks: RankGroup, ordinal: int, steps: Iterable[Compiled], *, measure: Callable[[], PassTimes | None]
) -> Sequence[PassTimes | None]:
    """Take the `steps` of this rank's warm-up number `ordinal`, then wait for all other ranks.

    Returns what every rank has had from `measure`, called after the steps.
    Raises what a step raises, and RuntimeError, with its message, if that happened on another rank.
    """
    occasion = f"warmup/{ordinal}"
    here = f"{occasion}/{ranks.rank}"
    with ranks.living():
        try:
            for step in steps:
                tell(ranks, f"warm-up: {step.what}, {step.seconds:.1f} s")
            measured = measure()
        except BaseException as error:
            ranks.publish(here, json.dumps({"failure": f"{type(error).__name__}: {error}"}))
            ranks.outlast(occasion)
            raise
    ranks.publish(here, json.dumps({"measured": measured}))
    of_ranks: list[PassTimes | None] = []
    for writer, rank in enumerate(ranks.ranks):
        found = json.loads(ranks.read(f"{occasion}/{writer}", writer=writer, purpose="to end its warm-up"))
        if "failure" in found:
            ranks.outlast(occasion)
            raise RuntimeError(
                f"warmup() failed on rank {rank}: {found['failure']}. Nothing was reduced and no parameter "
                "changed; mend it there and call warmup() again on every rank, or go without."
            )
        of_ranks.append(found["measured"] and PassTimes(*found["measured"]))
    return of_ranks


def tell(ranks: RankGroup, what: str) -> None:
    """Log a line of a warm-up's progress, on rank 0."""
    if ranks.rank == 0:
        log.tell(_log, what)
