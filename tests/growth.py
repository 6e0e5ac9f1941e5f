"""How work grows with the size of what is worked on, without a clock."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from compiled_ddp import torch_private


@contextlib.contextmanager
def counting_lines() -> Iterator[Callable[[], int]]:
    """Yields what tells how many lines of Python have run so far; each turn of a loop, also within one line, counts."""
    count = 0

    def trace(_: FrameType, event: str, __: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield lambda: count
    finally:
        sys.settrace(before)


def lines_run(action: Callable[[], object]) -> int:
    """How many lines of Python run in `action`."""
    with counting_lines() as lines:
        action()
    return lines()


def files_of_calls(function: Callable[[], object], below: str = "") -> list[str]:
    """For each Python function that it calls, in order, the file, where this is below the folder `below`."""
    files: list[str] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(below):
            files.append(frame.f_code.co_filename)

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return files


def calls_in(function: Callable[[], object], below: str = "") -> int:
    """How many Python functions it calls, whose file is below the folder `below`."""
    return len(files_of_calls(function, below))


def lines_and_edits(action: Callable[[], object]) -> int:
    """`lines_run`, and what they do to the nodes of a graph: each changed one counts with all of its inputs."""
    with torch_private.for_tests.noting_edits() as edits:
        lines = lines_run(action)
    return lines + sum(edits)


def work_until_each_note(action: Callable[[Callable[[str], None]], object]) -> dict[str, int]:
    """`lines_and_edits` of `action` until it calls what it is given, by the names that it calls it with."""
    work: dict[str, int] = {}

    def note(name: str) -> None:
        work[name] = lines() + sum(edits)

    with torch_private.for_tests.noting_edits() as edits, counting_lines() as lines:
        action(note)
    return work


def assert_linear(
    prepare: Callable[[int], Callable[[], object]],
    *,
    small: int = 100,
    factor: int = 10,
    work: Callable[[Callable[[], object]], int] = lines_run,
) -> None:
    """Assert that `factor` times as much takes hardly more than `factor` times the work.

    `prepare(size)` returns what is to be counted. It runs once before, for what is done once in a process.
    """
    prepare(small)()
    assert_proportional(work(prepare(small)), work(prepare(small * factor)), small=small, factor=factor)


def assert_proportional(few: int, many: int, *, small: int = 100, factor: int = 10, name: str = "") -> None:
    """Assert that `many`, the work for `factor` times as much, is hardly more than `factor` times `few`."""
    assert few > small, f"{name} {few} for {small}: the work is not seen"
    assert many <= 1.15 * factor * few, f"{name} {few} for {small}, {many} for {small * factor}"
