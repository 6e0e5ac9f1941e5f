"""Room for Python's frames: calls cost the same at every depth."""

import resource
import sys
from collections.abc import Callable

import pytest

from compiled_ddp.frames import with_room_for_frames

CALLS = 300
DEPTHS = range(150)  # frames of 130 bytes or so: more than a chunk of the interpreter's stack has room for


def _called(_: int) -> None:
    """Does nothing."""


def _page_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def _page_faults_of_calls() -> int:
    before = _page_faults()
    for number in range(CALLS):
        _called(number)
    return _page_faults() - before


def _at_depth(depth: int) -> int:
    return _page_faults_of_calls() if depth == 0 else _at_depth(depth - 1)


def _most(call: Callable[[int], int]) -> int:
    return max(map(call, DEPTHS))


def test_calls_cost_no_page_faults_at_any_depth() -> None:
    assert _most(with_room_for_frames(_at_depth)) < CALLS / 10


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="not tried")
def test_without_room_there_is_a_depth_at_which_each_call_costs_one() -> None:
    assert _most(_at_depth) > CALLS / 2


def _failing(name: str, *, times: int = 2) -> str:
    """Says so."""
    raise ValueError(name * times)


def test_a_function_with_room_is_called_as_before() -> None:
    failing = with_room_for_frames(_failing)
    with pytest.raises(ValueError, match="aaa"):
        failing("a", times=3)
    assert (failing.__name__, failing.__doc__) == ("_failing", "Says so.")
    assert with_room_for_frames(sorted)([2, 1], reverse=True) == [2, 1]
