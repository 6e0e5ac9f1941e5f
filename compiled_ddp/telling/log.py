"""The package's one logger, `compiled_ddp`, and who sees its lines.

Each module that tells something has a child of it, such as `compiled_ddp.graph.warmup`. Where the application has set
up logging, that decides what becomes of a line; where nothing has, lines of level INFO go to stderr. `COMPILED_DDP_LOG`
in the environment overrules both: see `check_switch`.
"""

import contextlib
import logging
import os
import sys

_SWITCH = "COMPILED_DDP_LOG"


def check_switch() -> None:
    """Raise ValueError for a value of `COMPILED_DDP_LOG` that is none.

    "auto" (the default) is as above, "stderr" writes every line there and none to the logger, "quiet" none anywhere.
    """
    if _switch() not in ("auto", "stderr", "quiet"):
        raise ValueError(f"{_SWITCH} must be 'auto', 'stderr' or 'quiet', found {_switch()!r}.")


def _switch() -> str:
    switch = os.environ.get(_SWITCH, "auto")
    return "quiet" if switch == "off" else switch  # as it was called before


def is_quiet() -> bool:
    """Whether nothing is to be told anywhere."""
    return _switch() == "quiet"


def tell(logger: logging.Logger, message: str) -> None:
    """Log a line of level INFO, or write it to stderr; what cannot be told there fails nobody, as with handlers."""
    if _switch() == "stderr" or (_switch() == "auto" and _is_left_alone(logger)):
        # There may be no stderr (None, as under pythonw and some daemons), it may be closed, or its reader be gone.
        with contextlib.suppress(OSError, ValueError, AttributeError):
            sys.stderr.write(f"compiled_ddp: {message}\n")
            sys.stderr.flush()
    elif not is_quiet():
        logger.info("%s", message)


def _is_left_alone(logger: logging.Logger) -> bool:
    """Whether nobody has given a handler or a level to the logger, or to one above it."""
    if logger.hasHandlers() or logging.root.level != logging.WARNING:
        return False
    above: logging.Logger | None = logger
    while above is not None and above.parent is not None:  # which only the root has not
        if above.level != logging.NOTSET:
            return False
        above = above.parent
    return True
