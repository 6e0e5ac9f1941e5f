"""Compiling before the first step, with all ranks, so that no collective waits on a compiler."""

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from compiled_ddp.ranks.rank_group import RankGroup

# How long ranks wait for each other's compilers, whatever the group's timeout is.
PATIENCE_SECONDS = 2 * 3600.0

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


def warm_up(ranks: RankGroup, ordinal: int, steps: Iterable[Compiled]) -> None:
    """Take the `steps` of this rank's warm-up number `ordinal`, then wait for all other ranks.

    Raises what a step raises, and RuntimeError, with its message, if that happened on another rank.
    """
    here = f"warmup/{ordinal}/{ranks.rank}"
    try:
        with _progress_on_stderr():
            for step in steps:
                if ranks.rank == 0:
                    _log.info("warm-up: %s, %.1f s", step.what, step.seconds)
    except BaseException as error:
        ranks.publish(here, f"{type(error).__name__}: {error}")
        raise
    ranks.publish(here, "")
    patience = PATIENCE_SECONDS / ranks.timeout.total_seconds()
    for writer, rank in enumerate(ranks.ranks):
        failure = ranks.read(
            f"warmup/{ordinal}/{writer}", writer=writer, purpose="to end its warm-up", patience=patience
        )
        if failure:
            raise RuntimeError(
                f"warmup() failed on rank {rank}: {failure}. Nothing was reduced and no parameter changed; mend it "
                "there and call warmup() again on every rank, or go without."
            )


@contextlib.contextmanager
def _progress_on_stderr() -> Iterator[None]:
    """Show progress, unless the application has set up logging and so decides itself."""
    if _log.hasHandlers():
        yield
        return
    handler, level = logging.StreamHandler(), _log.level
    _log.addHandler(handler)
    _log.setLevel(logging.INFO)
    try:
        yield
    finally:
        _log.removeHandler(handler)
        _log.setLevel(level)


@contextlib.contextmanager
def state_kept(module: nn.Module) -> Iterator[None]:
    """Put `module`'s buffers and the random state of the CPU and of every CUDA device back at the end."""
    saved = [
        (owner._buffers, name, buffer, buffer.clone())
        for owner in module.modules()
        for name, buffer in owner._buffers.items()
        if buffer is not None
    ]
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(devices):
        try:
            yield
        finally:
            for siblings, name, buffer, before in saved:
                if siblings.get(name) is not buffer:
                    siblings[name] = buffer
                # Of .data, which has a version counter of its own: an open graph may have saved the buffer.
                buffer.data.copy_(before)
