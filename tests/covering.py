"""Products of parameters of which the ordinary round runs a few, and `make long` all."""

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from _pytest.mark.structures import ParameterSet


def covering(*axes: Iterable[Any]) -> list[ParameterSet]:
    """Every combination of one value of each axis, for `pytest.mark.parametrize`; most of them are marked `slow`.

    Those that are not have each value of two axes, and of three axes or more each pair of values of any two. An axis
    may contain `pytest.param`s.
    """
    combinations = [*itertools.product(*(map(_parameter, axis) for axis in axes))]
    ordinary = _some(combinations, strength=min(2, len(axes) - 1))
    return [
        _joined(combination, () if number in ordinary else (pytest.mark.slow,))
        for number, combination in enumerate(combinations)
    ]


def _parameter(value: Any) -> ParameterSet:
    return value if isinstance(value, ParameterSet) else pytest.param(value)


def _some(combinations: Sequence[tuple[ParameterSet, ...]], strength: int) -> set[int]:
    """Which ones together have every combination of values that any `strength` axes have.

    Those come first that add most, and of them those whose values have come least often.
    """
    groups = [
        {
            tuple((axis, id(combination[axis])) for axis in axes)
            for axes in itertools.combinations(range(len(combination)), strength)
        }
        for combination in combinations
    ]
    left, chosen, used = set().union(*groups), set[int](), Counter[int]()
    while left:
        best = max(
            range(len(groups)),
            key=lambda number: (len(groups[number] & left), -sum(used[id(value)] for value in combinations[number])),
        )
        chosen.add(best)
        left -= groups[best]
        used.update(map(id, combinations[best]))
    return chosen


def _joined(combination: Sequence[ParameterSet], marks: Sequence[pytest.MarkDecorator]) -> ParameterSet:
    values = [value for parameter in combination for value in parameter.values]
    ids = [str(parameter.id) for parameter in combination]
    named = {"id": "-".join(ids)} if all(parameter.id is not None for parameter in combination) else {}
    return pytest.param(*values, marks=[*marks, *(m for each in combination for m in each.marks)], **named)
