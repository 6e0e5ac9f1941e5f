"""The groups that functional collectives of some ranks run on, which are closed all at once."""

import weakref
from collections.abc import Collection
from typing import Protocol

from compiled_ddp.ranks.rank_group import RankGroup


class Closable(Protocol):
    """What launches on a group of its own."""

    @property
    def name(self) -> str:
        """The same on every rank."""

    @property
    def is_open(self) -> bool:
        """Whether there is one that can be closed."""

    @property
    def waits_for_this_rank(self) -> bool:
        """Whether some rank has launched more on it, while there is one, than this rank has."""

    def close(self) -> None:
        """End it, and forget what was launched on it."""


class OpenGroups:
    """Those of some ranks.

    [Note: groups whose users are gone] What ranks do next depends on how many groups there are, and must not depend on
    when a rank collects garbage. So a group counts from the agreement at which ranks make it until they close all,
    whether or not the gradient function that launched on it is still there.
    """

    def __init__(self, ranks: RankGroup) -> None:
        self._ranks = ranks
        self._users: weakref.WeakSet[Closable] = weakref.WeakSet()
        self._open: set[str] = set()  # names, the same ones on all ranks: [Note: groups whose users are gone]

    def add(self, user: Closable) -> None:
        """Of a group of these ranks, on which they may have to wait for each other."""
        self._users.add(user)

    def note_open(self, name: str) -> None:
        """Ranks make a group of this name, that can be closed."""
        self._open.add(name)

    def note_kept(self, name: str) -> None:
        """The group of this name cannot be closed any more."""
        self._open.discard(name)

    @property
    def are_any(self) -> bool:
        """Whether there are any, on all ranks."""
        return bool(self._open)

    @property
    def wait_for_this_rank(self) -> bool:
        """Whether some rank waits on one of them for what this rank has not launched."""
        return any(user.waits_for_this_rank for user in [*self._users] if user.is_open)

    def are_several(self, users: Collection[Closable]) -> bool:
        """Whether others may wait on another group than the only one of `users`, and closing would end that."""
        every = self._open.union(user.name for user in users)
        return len(every) > min(len(users), 1) and self._ranks.is_gloo

    def close(self) -> None:
        """Close all; none of other backends than gloo, where ranks would wait for each other to close."""
        if self._ranks.is_gloo:
            for user in [*self._users]:
                user.close()
            self._open.clear()
