"""What ways to compile steps make of a trap, in words: of `step_traps`, and of `step_traps_jax`, without torch."""

from collections.abc import Callable, Iterable
from typing import Any


def scores(
    ways: Iterable[type],
    trap: str,
    *,
    taken: Callable[[Any, str], tuple[list[Any], int]],
    ordinary: type,
    are_close: Callable[[Any, Any], bool],
) -> list[str]:
    """Of each way whether it is right in each step, and how often it has compiled.

    `taken(way, trap)` returns what there is behind each step, and that number; the `ordinary` way is right.
    """
    expected, _ = taken(ordinary, trap)

    def score(way: type) -> str:
        try:
            found, compilations = taken(way, trap)
        except Exception as error:
            return f"raises {type(error).__name__}"
        for number, (ours, theirs) in enumerate(zip(found, expected, strict=True), start=1):
            if not are_close(ours, theirs):
                return f"wrong from step {number} on"
        return f"right, {compilations}"

    return [*map(score, ways)]
