"""Which tests of a product of parameters `make test` runs; `make long` runs the rest."""

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import pytest

_EXPENSIVE = {"ranks2", "ranks3", "twin_ranks2"}  # fixtures; what needs none of them takes milliseconds


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
    is_expensive = not _EXPENSIVE.isdisjoint(item.fixturenames) or item.get_closest_marker("inductor") is not None
    return several and is_expensive and item.get_closest_marker("slow") is None


def _values(item: pytest.Function) -> Mapping[str, int]:
    """The places of its values, by the name of a parameter of each axis."""
    axes = (
        str(mark.args[0]).split(",")[0] if isinstance(mark.args[0], str) else mark.args[0][0]
        for mark in item.iter_markers("parametrize")
    )
    return {axis: item.callspec.indices[axis] for axis in axes}


def some(combinations: Sequence[Mapping[str, int]]) -> set[int]:
    """The numbers of those that together have all values of two axes, or all pairs of values of more.

    Those come first that add most, and of them those whose values have come least often.
    """
    groups = [
        {*itertools.combinations(sorted(combination.items()), min(2, len(combination) - 1))}
        for combination in combinations
    ]
    left, chosen, used = set().union(*groups), set[int](), Counter[tuple[str, int]]()
    while left:
        best = max(
            range(len(groups)),
            key=lambda number: (len(groups[number] & left), -sum(map(used.__getitem__, combinations[number].items()))),
        )
        chosen.add(best)
        left -= groups[best]
        used.update(combinations[best].items())
    return chosen
