"""What this package finds around it: torch, and the environment variables that it reads or that were meant to be."""

import difflib
import functools
import os

from compiled_ddp import torch_private
from compiled_ddp.telling import log
from compiled_ddp.users_code import warn_user

_PREFIX = "COMPILED_DDP_"
_NAMES = ("LOG", "MODE", "COMPILE_ONCE")  # behind the prefix, which would make any two of them alike


def check_environment() -> None:
    """Raise an error where this cannot run, and warn of what may be another thing than was meant.

    RuntimeError for a torch that is too old, or newer than tested and lacks what is used; ValueError for a value of
    `COMPILED_DDP_LOG` that is none. Warnings are of a torch that was not tested, and of variables that look misspelt.
    Those with other names are left alone, such as an application's own.
    """
    _warn_once_of_torch(torch_private.versions.check_torch_version())
    log.check_switch()
    for variable in os.environ:
        before, _, name = variable.rpartition("DDP_")
        if "COMPILE" in before and (before + "DDP_" != _PREFIX or name not in _NAMES):
            for meant in difflib.get_close_matches(name, _NAMES, n=1):
                warn_user(f"the environment variable {variable} is not read. Did you mean {_PREFIX}{meant}?")


@functools.cache
def _warn_once_of_torch(warning: str) -> None:
    if warning:
        warn_user(warning)
