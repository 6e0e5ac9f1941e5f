"""Compiling before the first step, with all ranks, and whether the model runs faster compiled or as it is."""

import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

import torch

from compiled_ddp.graph.kept_state import random_state_kept
from compiled_ddp.model.nested_tensors import tensors_in
from compiled_ddp.ranks.rank_group import RankGroup
from compiled_ddp.telling import log

# ---- compiled, or as it is: warm-ups time both, and all ranks draw the same conclusion -------------------------------

# How much slower than the model as it is a compiled one may be, before it is given up. Of two equal ones the compiled
# one is kept; not more, as one that loses here loses more in steps, whose graphs communicate (docs/real-models.md).
MARGIN = 1.02
_TIMED_PASSES = 5  # of each kind, after one that is not timed; as many on every rank, as the model may communicate


class PassTimes(NamedTuple):
    """Seconds of one forward and backward on one rank, without communication."""

    compiled: float
    eager: float


@dataclass(frozen=True)
class Pass:
    """One forward and backward of a batch, whose gradients nobody sees: no .grad and no hook on it."""

    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    parameters: Sequence[torch.Tensor]

    def seconds(self, run: Callable[..., Any]) -> float:
        """Time a call of `run` and its backward from every output that has one."""
        torch.clear_autocast_cache()  # as a step finds it, whose weights have changed
        self._wait_for_devices()
        started = time.perf_counter()
        ends = [output for output in tensors_in(run(*self.arguments, **self.keywords)) if output.requires_grad]
        if ends:
            ones = [torch.ones_like(end) for end in ends]
            torch.autograd.grad(ends, self.parameters, ones, allow_unused=True)
        self._wait_for_devices()
        return time.perf_counter() - started

    def _wait_for_devices(self) -> None:
        for device in {parameter.device for parameter in self.parameters}:
            if device.type != "cpu":
                torch.accelerator.synchronize(device)


def time_both(one_pass: Pass, *, compiled: Callable[..., Any], eager: Callable[..., Any]) -> PassTimes:
    """The medians of some passes, turn by turn, with the same random numbers in each two.

    Compiling counts where more than half of the passes do it: not what a batch costs once, but code that changes with
    the random numbers.
    """
    found: list[PassTimes] = []
    for _ in range(1 + _TIMED_PASSES):
        with random_state_kept():
            of_compiled = one_pass.seconds(compiled)
        found.append(PassTimes(of_compiled, one_pass.seconds(eager)))
    _, *timed = found
    return PassTimes(median(times.compiled for times in timed), median(times.eager for times in timed))


class Choice:
    """What all ranks have measured of a model, and whether it runs as it is for that."""

    def __init__(self) -> None:
        self._slowest: list[PassTimes] = []  # in each warm-up that has timed both
        self._steps = 0  # before the latest of them
        self.runs_eagerly = False

    def note(self, of_ranks: Sequence[PassTimes | None], *, steps: int) -> None:
        """Decide anew by what each rank has measured, after `steps` of training.

        A no-op where some rank has measured nothing.
        """
        known = [times for times in of_ranks if times is not None]
        if len(known) < len(of_ranks):
            return
        slowest = PassTimes(max(times.compiled for times in known), max(times.eager for times in known))
        self._slowest.append(slowest)
        self._steps = steps
        total = self._total()
        self.runs_eagerly = total.compiled > MARGIN * total.eager

    def _total(self) -> PassTimes:
        return PassTimes(sum(t.compiled for t in self._slowest), sum(t.eager for t in self._slowest))

    @property
    def why_not_graph(self) -> str | None:
        """Why hooks reduce everything; None where that has not been chosen."""
        return "warmup() measured that the model is faster without being compiled" if self.runs_eagerly else None

    def __str__(self) -> str:
        """What was chosen and by which numbers; empty where nothing was measured."""
        if not self._slowest:
            return ""
        count, total = len(self._slowest), self._total()
        chosen = "the model as it is, reduced by hooks" if self.runs_eagerly else "the compiled model"
        batches = "a batch" if count == 1 else f"{count} batches"
        compiled, eager = (1000 * seconds / count for seconds in total)
        when = f"after {self._steps} synchronised backwards" if self._steps else "before the first step"
        return (
            f"warmup() chose {chosen}, {when}: on the slowest rank a forward and backward of {batches} took "
            f"{compiled:.1f} ms compiled and {eager:.1f} ms as it is, without communication."
        )


# ---- compiling, with all ranks, so that no collective waits on a compiler --------------------------------------------

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
    for rank, text in zip(ranks.ranks, ranks.read_each(occasion, first=0, purpose="to end its warm-up"), strict=True):
        found = json.loads(text)
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
