"""What has been compiled for a wrapper, what was found in the cache, and how long compiling took the last time."""

import contextlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from compiled_ddp import torch_private

# A graph's forward, and its three backwards: [Note: backward variants] in graph/program.py.
MOST_OF_A_GRAPH = 4


class Compilation(NamedTuple):
    """A forward or a backward that is there now. `by` is who has compiled it, if known."""

    what: str
    graph: int
    seconds: float
    was_found: bool
    by: str = ""

    def __str__(self) -> str:
        return f"{self.what} of graph {self.graph} ({self.by or f'{self.seconds:.1f} s'})"


def describe(compilations: Sequence[Compilation]) -> str:
    """A line for those that were compiled here, and one for those that were not; empty where there are none."""
    here = ", ".join(str(each) for each in compilations if not each.was_found)
    found = ", ".join(str(each) for each in compilations if each.was_found)
    lines = [f"Compiled here: {here}."] if here else []
    if found:
        lines.append(f"Loaded from {torch_private.compiler_cache.folder()}: {found}.")
    return "\n".join(lines)


def seconds_of_last_time(name: str) -> float | None:
    """How long it took to compile what has this name, in whatever process filled the same cache; None if unknown."""
    return _seconds().get(name)


def note_seconds(name: str, seconds: float) -> None:
    """For the next process. Of two that note at the same time one may be lost."""
    file = _file()
    with contextlib.suppress(OSError):  # it is only an estimate for somebody else
        file.parent.mkdir(parents=True, exist_ok=True)
        new = file.with_suffix(f".{os.getpid()}")
        new.write_text(json.dumps(_seconds() | {name: round(seconds, 1)}))
        new.replace(file)


def _file() -> Path:
    return torch_private.compiler_cache.own_folder() / "seconds.json"


def _seconds() -> dict[str, float]:
    try:
        found = json.loads(_file().read_text())
    except (OSError, ValueError):
        return {}
    items = found.items() if isinstance(found, dict) else ()
    return {name: seconds for name, seconds in items if isinstance(seconds, int | float)}
