"""What `make test` runs of a product of parameters."""

import itertools

from covering import some


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
