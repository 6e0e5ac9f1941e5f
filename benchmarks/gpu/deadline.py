"""When a section's processes will be ended: a moment before that each writes where its threads stand."""

import faulthandler
import os
import time

VARIABLE = "BENCHMARKS_DEADLINE"  # seconds since the epoch
MARGIN_SECONDS = 2.0


def environment(timeout_s: float) -> dict[str, str]:
    """What a process of a section that may take so many seconds from now on, and its ranks, have in the environment."""
    return {VARIABLE: str(time.time() + timeout_s)}


def write_stacks_before_it() -> None:
    """In such a process: write all threads' Python stacks to stderr if it has not ended shortly before the deadline."""
    if VARIABLE in os.environ:
        left = float(os.environ[VARIABLE]) - time.time()
        faulthandler.dump_traceback_later(max(left - MARGIN_SECONDS, 0.1))
