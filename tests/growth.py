"""How work grows with the size of what is worked on, without a clock."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from compiled_ddp import torch_private


def lines_run(action: Callable[[], object]) -> int:
    """How many lines of Python run in `action`; each turn of a loop, also within one line, counts."""
    count = 0

    def trace(_: FrameType, event: str, __: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        action()
    finally:
        sys.settrace(before)
    return count


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
    few, many = work(prepare(small)), work(prepare(small * factor))
    assert few > small, f"{few} for {small}: the work is not seen"
    assert many <= 1.15 * factor * few, f"{few} for {small}, {many} for {small * factor}"
