"""What ranks expect next: one launch out of the ordinary makes no other one unexpected."""

from collections.abc import Sequence

import pytest

from compiled_ddp.functional.agreements import LaunchOrder


def unexpected(launches: Sequence[str], *, together: int = 1) -> list[int]:
    """Where ranks have had to agree, if they launch these, some together."""
    order, found = LaunchOrder[str](), list[int]()
    for place in range(0, len(launches), together):
        following = launches[place : place + together]
        number = order.unexpected(following)
        found += [place] * bool(number)
        order.note_agreed(following[:number])
        order.note_launched(following)
    return found


@pytest.mark.parametrize("ordinary", ["f", "fg", "ffg", "fgfh"])
def test_one_odd_launch_leaves_nothing_unexpected_but_itself_and_what_follows_at_once(ordinary: str) -> None:
    before = ordinary * 20
    found = unexpected(before + "x" + ordinary * 20)
    behind = [place - len(before) for place in found if place >= len(before)]
    assert behind[:2] == [0, 1] and behind[2:] in ([], [2])  # 2: where f alone does not tell what follows f


def test_what_comes_every_so_often_is_agreed_on_each_time_and_nothing_else_is() -> None:
    epoch = "fg" * 10 + "x"
    found = unexpected(epoch * 6)
    assert [place for place in found if place >= 2 * len(epoch)] == [len(epoch) * n - 1 for n in range(3, 7)]


def test_another_order_is_learned() -> None:
    found = unexpected("fg" * 50 + "gh" * 50)
    assert found[-1] < 100 + 20


def test_a_graphs_launches_are_agreed_on_up_to_the_last_one_that_is_new() -> None:
    order = LaunchOrder[str]()
    order.note_agreed("fgh")
    order.note_launched("fgh")
    order.note_agreed("fgh")
    order.note_launched("fgh")
    assert order.unexpected("fgh") == 0
    assert order.unexpected("fgxh") == 4  # what follows x is not known either
    assert order.unexpected("xgh") == 2
