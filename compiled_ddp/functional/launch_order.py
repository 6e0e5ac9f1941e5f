"""What is launched next, as it follows from what has been launched: the same on all ranks.

Of what a communicator reduces it is what has most often followed; of all that some ranks launch, on whichever group,
what has last.
"""

from collections.abc import Hashable, Sequence
from typing import Generic, TypeVar

from compiled_ddp.functional.wanted import Agreed, Wanted

Item = TypeVar("Item", bound=Hashable)

_LONGEST = 8  # launches in a row that are looked up
_MOST_ROWS = 4096  # that are remembered
_SEEN = 32  # launches that a communicator's expectations come from
_REMEMBERED = 4096  # launches of a communicator


class LaunchOrder(Generic[Item]):
    """Of everything that some ranks launch."""

    def __init__(self) -> None:
        self._numbers: dict[Item, int] = {}  # by which the items are compared from then on
        self._latest: tuple[int, ...] = ()
        self._followers: dict[tuple[int, ...], int] = {}
        self._agreed_ahead: list[Item] = []

    def note_agreed(self, following: Sequence[Item]) -> None:
        """All ranks launch these next."""
        self._agreed_ahead = [*following]

    def note_launched(self, launched: Sequence[Item]) -> None:
        """As was expected, or agreed on."""
        if len(self._followers) + len(self._numbers) > _MOST_ROWS:
            self._numbers, self._latest, self._followers = {}, (), {}
        for item in launched:
            number = self._numbers.setdefault(item, len(self._numbers))
            for length in range(1, len(self._latest) + 1):
                self._followers[self._latest[-length:]] = number
            self._latest = (*self._latest, number)[-_LONGEST:]
        self._agreed_ahead = self._agreed_ahead[len(launched) :]

    def unexpected(self, following: Sequence[Item]) -> int:
        """How many of what a rank is about to launch, in this order, all must agree on; 0 if all expect it."""
        latest, last = self._latest, 0
        for place, item in enumerate(following):
            number = self._numbers.get(item, -1)
            is_agreed = last == 0 and place < len(self._agreed_ahead)
            if not (item == self._agreed_ahead[place] if is_agreed else number == self._next(latest)):
                last = place + 1
            latest = (*latest, number)[-_LONGEST:]
        return last

    def _next(self, latest: tuple[int, ...]) -> int | None:
        """What has followed the longest end of `latest` that is known."""
        for start in range(len(latest)):
            follower = self._followers.get(latest[start:])
            if follower is not None:
                return follower
        return None


class ReductionOrder:
    """Of the reductions of one communicator, and which of them are known."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._known: dict[Wanted, Agreed] = {}
        self._past: list[Agreed] = []
        self._agreed_ahead: list[Agreed] = []

    def known(self, wanted: Wanted) -> Agreed | None:
        """What ranks have once agreed on for it."""
        return self._known.get(wanted)

    def add(self, agreed: Agreed) -> None:
        """Know it from now on."""
        self._known[agreed.wanted] = agreed

    def note_next(self, agreed: Agreed) -> None:
        """Ranks have agreed that it comes behind what they have agreed on before."""
        self._agreed_ahead.append(agreed)

    def expect(self, wanted: Sequence[Wanted]) -> None:
        """These come next, as all ranks know, and each of them is known."""
        self._agreed_ahead = [self._known[each] for each in wanted]

    def ahead(self, number: int) -> list[Agreed]:
        """The next launches, as every rank expects them; none before the first agreement."""
        found = self._agreed_ahead[:number]
        past = [*self._past[-_SEEN:], *found]
        while len(found) < number and (follows := _likely_next(past)) is not None:
            found.append(follows)
            past.append(follows)
        return found

    def unexpected(self, wanted: Sequence[Wanted]) -> int:
        """How many of these, the next launches, ranks must agree on: up to the last one that none would expect."""
        past, ahead, last = self._past[-_SEEN:], [*self._agreed_ahead], 0
        for number, each in enumerate(wanted, start=1):
            expected = ahead.pop(0) if ahead else _likely_next(past)
            if expected is None or expected.wanted != each:
                last = number
                ahead.clear()
            past.append(self._known.get(each) or Agreed(each, (), self._world_size, 0.0))
        return last

    def note_launched(self) -> Agreed:
        """The next one is launched: this one."""
        (agreed,) = self.ahead(1)
        self._past.append(agreed)
        if len(self._past) > 2 * _REMEMBERED:
            del self._past[:_REMEMBERED]
        self._agreed_ahead = self._agreed_ahead[1:]
        return agreed

    def latest(self, number: int) -> list[Agreed]:
        """The last launches."""
        return self._past[-number:]

    def forget_latest(self, number: int) -> None:
        """So many of the last launches say nothing about what follows what. What was agreed to be next is not."""
        del self._past[len(self._past) - number :]
        self._agreed_ahead = []

    def forget_launches(self) -> None:
        """Nothing says any more what comes next. What is known stays so."""
        self.forget_latest(len(self._past))


def _likely_next(past: Sequence[Agreed]) -> Agreed | None:
    """What most often followed the latest launches, as many of them in a row as have been seen; of several the latest.

    None where nothing has been launched.
    """
    if len(set(past)) < 2:
        return past[-1] if past else None
    followers, longest = [past[-1]], 0
    for end in range(len(past) - 1, 0, -1):
        length = _alike(past, end)
        if length > longest:
            followers, longest = [], length
        if length == longest > 0:
            followers.append(past[end])
    return max(followers, key=followers.count)


def _alike(past: Sequence[Agreed], end: int) -> int:
    """How many of the launches before `end` are the latest ones."""
    length = 0
    while length < min(end, _LONGEST) and past[end - 1 - length] is past[-1 - length]:
        length += 1
    return length
