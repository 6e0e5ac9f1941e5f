"""What `make test` runs of a product of parameters."""

import itertools
import textwrap
from pathlib import Path

import pytest
from covering import mark_the_rest_of_products, some


def _product(**sizes: int) -> list[dict[str, int]]:
    return [dict(zip(sizes, values, strict=True)) for values in itertools.product(*map(range, sizes.values()))]


def test_of_two_axes_each_value_is_left_and_the_values_of_the_shorter_one_come_equally_often() -> None:
    combinations = _product(wrapper=2, case=6)
    chosen = [combinations[number] for number in sorted(some(combinations))]
    assert sorted(one["case"] for one in chosen) == [*range(6)]
    assert sorted(one["wrapper"] for one in chosen) == [0, 0, 0, 1, 1, 1]


def test_of_three_axes_each_pair_is_left() -> None:
    combinations = _product(wrapper=2, model=3, uses=4)
    chosen = [combinations[number] for number in some(combinations)]
    for one, other in itertools.combinations(combinations[0], 2):
        pairs = {(each[one], each[other]) for each in combinations}
        assert {(each[one], each[other]) for each in chosen} == pairs
    assert len(chosen) <= 14 < len(combinations)


def test_every_pair_that_is_there_is_left_where_not_all_are() -> None:
    combinations = [{"a": 0, "b": 0, "c": 0}, {"a": 1, "b": 0, "c": 1}, {"a": 1, "b": 1, "c": 1}]
    assert some(combinations) == {0, 1, 2}


class Marking:
    """A plugin that notes which tests are left without the mark."""

    def __init__(self) -> None:
        self.ordinary: list[str] = []

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        mark_the_rest_of_products(items)
        self.ordinary = [item.name for item in items if item.get_closest_marker("slow") is None]


def test_most_tests_of_an_expensive_product_are_marked_and_none_of_a_cheap_one(tmp_path: Path) -> None:
    """As pytest numbers the combinations of a product, and gives one axis two parameters."""
    file = tmp_path / "test_products.py"
    file.write_text(
        textwrap.dedent("""
        import pytest

        @pytest.mark.inductor
        @pytest.mark.parametrize(("one", "other"), [(1, 1), (1, 2), (2, 2)])
        @pytest.mark.parametrize("letter", "abc")
        def test_expensive(letter, one, other): ...

        @pytest.mark.parametrize("number", [1, 2])
        @pytest.mark.parametrize("letter", "ab")
        def test_cheap(letter, number): ...
        """)
    )
    marking = Marking()
    alone = ["-p", "no:cacheprovider", "--noconftest", "-c", "/dev/null", "-o", "markers=inductor\nslow"]
    pytest.main(["--collect-only", "-q", *alone, str(file)], plugins=[marking])
    expensive = [name for name in marking.ordinary if "expensive" in name]
    assert len(expensive) == 3 and len(marking.ordinary) == 3 + 4
    for values in (("1-1", "1-2", "2-2"), "abc"):
        assert all(sum(value in name.partition("[")[2] for name in expensive) == 1 for value in values), expensive
