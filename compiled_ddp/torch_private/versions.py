"""The versions of torch that this package runs on."""

from collections.abc import Sequence

import torch

from compiled_ddp.torch_private import names

OLDEST, NEWEST = (2, 11), (2, 15)  # on which the tests ran

_OLDEST, _NEWEST, _BEYOND = (f"{major}.{minor}" for major, minor in (OLDEST, NEWEST, (NEWEST[0], NEWEST[1] + 1)))
_REMEDY = f"pip install 'torch>={_OLDEST},<{_BEYOND}'"


def check_torch_version(version: str = torch.__version__) -> str:
    """Returns what to warn of: that `version` is newer than those the tests ran on; empty where it is not.

    Raises RuntimeError for one that is older, or newer and lacks private names that are used: it says which.
    """
    found = minor_version(version)
    if found < OLDEST:
        raise RuntimeError(
            f"compiled_ddp needs torch >= {_OLDEST}, found {version}. It uses private parts of torch, which older "
            f"versions do not have. Install a torch that was tested, {_REMEDY}."
        )
    if found <= NEWEST:
        return ""
    moved = names.moved()
    if moved:
        raise RuntimeError(where_names_have_moved(moved, version))
    return (
        f"{_tested(version)}. All private parts of torch that it uses are there, and it goes on. If something fails "
        f"that works after {_REMEDY}, please report it."
    )


def where_names_have_moved(moved: Sequence[str], version: str = torch.__version__) -> str:
    """An error's words; `moved` are names of torch's, or what its import said."""
    return (
        f"{_tested(version)}, where private parts of torch that it uses have moved: {', '.join(moved)}. Look for a "
        f"newer compiled_ddp, or {_REMEDY}."
    )


def _tested(version: str) -> str:
    return f"compiled_ddp was tested on torch {_OLDEST} to {_NEWEST}, found {version}"


def minor_version(version: str = torch.__version__) -> tuple[int, int]:
    major, minor = (int(part) for part in version.split(".")[:2])
    return major, minor
