"""The environment variables that this package reads, and those that someone may have meant to set."""

import difflib
import os

from compiled_ddp.telling import log
from compiled_ddp.users_code import warn_user

_PREFIX = "COMPILED_DDP_"
_NAMES = ("LOG", "MODE")  # behind the prefix, which would make any two of them alike


def check_environment() -> None:
    """Raise ValueError for a value of `COMPILED_DDP_LOG` that is none, and warn of variables that look misspelt.

    Those with other names are left alone, such as an application's own.
    """
    log.check_switch()
    for variable in os.environ:
        before, _, name = variable.rpartition("DDP_")
        if "COMPILE" in before and (before + "DDP_" != _PREFIX or name not in _NAMES):
            for meant in difflib.get_close_matches(name, _NAMES, n=1):
                warn_user(f"the environment variable {variable} is not read. Did you mean {_PREFIX}{meant}?")
