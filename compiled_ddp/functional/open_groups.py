"""The groups that functional collectives of some ranks run on, which are closed all at once."""

import weakref
from collections.abc import Collection
from typing import Protocol

from compiled_ddp.ranks.rank_group import RankGroup


class Closable(Protocol):
    """What launches on a group of its own."""

    @property
    def is_open(self) -> bool:
        """Whether there is one that can be closed."""

    def close(self) -> None:
        """End it, and forget what was launched on it."""


class OpenGroups:
    """Those of some ranks."""

    def __init__(self, ranks: RankGroup) -> None:
        self._ranks = ranks
        self._users: weakref.WeakSet[Closable] = weakref.WeakSet()

    def add(self, user: Closable) -> None:
        """Of a group of these ranks, on which they may have to wait for each other."""
        self._users.add(user)

    @property
    def are_any(self) -> bool:
        """Whether there are any."""
        return any(user.is_open for user in [*self._users])

    def are_several(self, users: Collection[Closable]) -> bool:
        """Whether others may wait on another group than the only one of `users`, and closing would end that."""
        every = {user for user in [*self._users] if user.is_open}.union(users)
        return len(every) > 1 and self._ranks.is_gloo

    def close(self) -> None:
        """Close all; none of other backends than gloo, where ranks would wait for each other to close."""
        for user in [*self._users] if self._ranks.is_gloo else ():
            user.close()
