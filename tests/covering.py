"""Which tests of a product of parameters `make test` runs; `make long` runs the rest."""

import itertools
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence

import pytest

# What has none of these fixtures, and none of these marks, takes milliseconds.
_EXPENSIVE_FIXTURES, _EXPENSIVE_MARKS = {"ranks2", "ranks3", "twin_ranks2"}, ("inductor", "product")


def mark_the_rest_of_products(items: Iterable[pytest.Item]) -> None:
    """Of tests with several `parametrize` marks, give most combinations the mark `slow`.

    Without it remain as many as have each value of two axes, and of more axes each pair of values of any two.
    """
    of_function: dict[object, list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and _is_of_product(item):
            of_function.setdefault(item.function, []).append(item)
    for product in of_function.values():
        ordinary = some([_values(item) for item in product])
        for number, item in enumerate(product):
            if number not in ordinary:
                item.add_marker(pytest.mark.slow)


def _is_of_product(item: pytest.Function) -> bool:
    several = len([*item.iter_markers("parametrize")]) > 1
    is_marked = any(item.get_closest_marker(mark) is not None for mark in _EXPENSIVE_MARKS)
    is_expensive = is_marked or not _EXPENSIVE_FIXTURES.isdisjoint(item.fixturenames)
    return several and is_expensive and item.get_closest_marker("slow") is None


def _values(item: pytest.Function) -> Mapping[str, tuple[int, ...]]:
    """What tells its values of each axis from others, by the axis's parameters.

    Not `callspec.indices`: for what is no fixture, pytest 8 and later count there the combinations.
    """
    axes = (
        mark.args[0].split(",") if isinstance(mark.args[0], str) else mark.args[0]
        for mark in item.iter_markers("parametrize")
    )
    params = item.callspec.params
    return {",".join(names): tuple(id(params[name.strip()]) for name in names) for names in axes}


def some(combinations: Sequence[Mapping[str, Hashable]]) -> set[int]:
    """The numbers of those that together have all values of two axes, or all pairs of values of more.

    Those come first that add most, and of them those whose values have come least often.
    """
    groups = [
        {*itertools.combinations(sorted(combination.items()), min(2, len(combination) - 1))}
        for combination in combinations
    ]
    left, chosen, used = set().union(*groups), set[int](), Counter[tuple[str, Hashable]]()
    while left:
        best = max(
            range(len(groups)),
            key=lambda number: (len(groups[number] & left), -sum(map(used.__getitem__, combinations[number].items()))),
        )
        chosen.add(best)
        left -= groups[best]
        used.update(combinations[best].items())
    return chosen
