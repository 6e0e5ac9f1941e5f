"""What ranks agree on through the store before they launch it, wherever each of them stands.

What is launched next follows from what has been launched, the same on all ranks: it is what has most often followed,
of what a communicator reduces and of all that some ranks launch on whichever group. Where that does not hold, ranks
compare, and those that wait elsewhere are called.

[Note: closing ends the waits of others] From outside nothing ends a wait of gloo's. But a collective fails at once
where one of its ranks has closed its connections. So a rank that cannot launch what others may wait for says so in the
store, and closes its end of all groups of these ranks. The others fail wherever they wait, find it said, close their
ends too, and take part in the comparison that follows. All groups are made anew when they are next agreed on.
"""

import contextlib
import json
import time
import weakref
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Generic, Protocol, TypeVar

import torch
import torch.distributed as dist

from compiled_ddp import torch_private
from compiled_ddp.functional.in_flight import wait_for_all
from compiled_ddp.functional.wanted import UNPLANNED, Agreed, Arrival, Wanted
from compiled_ddp.planning.calibration import Calibration
from compiled_ddp.planning.planners import OptimalBuckets
from compiled_ddp.ranks import communicator as ranks
from compiled_ddp.ranks.agreement import Description, Differing, agree_on_description
from compiled_ddp.ranks.kept_calibration import calibration_for
from compiled_ddp.ranks.rank_group import RankGroup

# ---- the groups that functional collectives of some ranks run on, which are closed all at once -----------------------


class Closable(Protocol):
    """Something that launches on a process group of its own."""

    @property
    def name(self) -> str:
        """A name that is the same on every rank."""

    @property
    def is_open(self) -> bool:
        """Whether there is one that can be closed."""

    @property
    def waits_for_this_rank(self) -> bool:
        """Whether some rank has launched more on it, while there is one, than this rank has."""

    def close(self) -> None:
        """End it, and forget what was launched on it."""


class OpenGroups:
    """The groups that some ranks may wait on.

    [Note: groups whose users are gone] What ranks do next depends on how many groups there are, and must not depend on
    when a rank collects garbage. So a group counts from the agreement at which ranks make it until they close all,
    whether or not the gradient function that launched on it is still there.
    """

    def __init__(self, ranks: RankGroup) -> None:
        self._ranks = ranks
        self._users: weakref.WeakSet[Closable] = weakref.WeakSet()
        self._open: set[str] = set()  # names, the same ones on all ranks: [Note: groups whose users are gone]

    def add(self, user: Closable) -> None:
        """Add a user of a group of these ranks, on which they may have to wait for each other."""
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
            wait_for_all()
            for user in [*self._users]:
                user.close()
            self._open.clear()


# ---- what is launched next -------------------------------------------------------------------------------------------

Item = TypeVar("Item", bound=Hashable)

_LONGEST = 8  # launches in a row that are looked up
_MOST_ROWS = 4096  # that are remembered
_MOST_FOLLOWERS = 8  # of a row: several, as one odd launch must not make each ordinary one behind it unexpected
_SEEN = 32  # launches that a communicator's expectations come from
_REMEMBERED = 4096  # launches of a communicator


class LaunchOrder(Generic[Item]):
    """Predicts, alike on all ranks, what some ranks launch next.

    It is asked by ranks that know what they launch. ReductionOrder tells a rank that departs what the others launch.
    """

    def __init__(self) -> None:
        self._numbers: dict[Item, int] = {}  # by which the items are compared from then on
        self._latest: tuple[int, ...] = ()
        self._followers: dict[tuple[int, ...], tuple[int, ...]] = {}  # the latest ones of each row
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
                row = self._latest[-length:]
                self._followers[row] = (*self._followers.get(row, ()), number)[-_MOST_FOLLOWERS:]
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
        """What has most often followed the longest end of `latest` that is known; of several the latest."""
        for start in range(len(latest)):
            followers = self._followers.get(latest[start:])
            if followers is not None:
                return max(reversed(followers), key=followers.count)
        return None


class ReductionOrder:
    """Predicts the next reductions of one communicator, and remembers which of them ranks have agreed on."""

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
            past.append(self._known.get(each) or Agreed(each, Arrival(()), self._world_size, UNPLANNED))
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


# ---- comparing, and calling those that wait elsewhere: [Note: closing ends the waits of others] ----------------------

_PATIENCE_SECONDS = 1.0  # until it is asked where those stand that have not come to compare

_FOR_AN_ERROR = "for an error"  # what a rank calls others for that has nothing to compare

_Key = tuple[tuple[int, ...], str]  # ranks, backends

# [Note: agreements are counted for each set of ranks] A rank that raises may not have come as far as the function that
# the others wait for, nor know which that is. So the name of an agreement does not depend on it: the rank takes part in
# the next one with its error, which is raised everywhere then.
_made: "weakref.WeakKeyDictionary[dist.ProcessGroup, dict[_Key, Agreements]]" = weakref.WeakKeyDictionary()


class Agreements:
    """The agreements among one set of ranks, in order. [Note: agreements are counted for each set of ranks]"""

    def __init__(self, process_group: dist.ProcessGroup | None) -> None:
        self.ranks = RankGroup(process_group)
        self._number = 0
        self.failures = 0  # how many times something has failed that other ranks need not be told of
        self.groups = OpenGroups(self.ranks)
        self._calibrations: dict[torch.device, Calibration] = {}
        self.forget_order()

    @classmethod
    def of(cls, process_group: dist.ProcessGroup | None) -> "Agreements":
        """The agreements among this group's ranks. Raises as `RankGroup`."""
        world = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
        if world is None or not isinstance(process_group, dist.ProcessGroup | None):
            return cls(process_group)  # which says why not
        group = process_group or world
        key = tuple(dist.get_process_group_ranks(group)), dist.get_backend_config(group)
        made = _made.setdefault(world, {})
        if key not in made:
            made[key] = cls(process_group)
        return made[key]

    def forget_order(self) -> None:
        """What was launched says nothing any more about what comes next, on any rank."""
        self.order = LaunchOrder[Hashable]()  # of what these ranks launch, on whichever group

    @property
    def occasion(self) -> str:
        """Another one for each group that ranks make behind an agreement."""
        return f"agreement {self._number}"

    # ---- comparing ---------------------------------------------------------------------------------------------------

    def compare(
        self,
        describe: Callable[[], Description],
        what: str,
        explained_by: "ranks.Communicator | None" = None,
        *,
        checksums: Callable[[], Mapping[str, int]] = dict,
    ) -> Differing:
        """Raise the same error on every rank unless `describe()` is the same everywhere; see `agree_on_description`.

        A wait that fails is explained by the communicator, where there is one. Closes the groups if a rank has.
        """
        self._number += 1
        if explained_by is not None:
            explained_by.explain_waits_of(self.ranks)
        else:
            self.ranks.leave_waits_unexplained()
        try:
            return agree_on_description(
                self.ranks,
                describe,
                occasion=f"functional/{self._number}",
                purpose=f"to compare what {what} is called with",
                failure=f"{what} has reduced nothing",
                checksums=checksums,
            )
        except BaseException:
            self.failures += 1
            raise
        finally:
            if self.ranks.published(self._closed_before(self._number)) is not None:
                self._close_all()

    def tell(self, error: BaseException, what: str, explained_by: "ranks.Communicator | None" = None) -> None:
        """Let the next comparison, which others take part in or are called to, raise `error` on every rank but here."""
        told = error if isinstance(error, Exception) else RuntimeError(f"{type(error).__name__}: {error}")

        def describe() -> Description:
            raise told

        with contextlib.suppress(type(told)):
            self.compare(describe, what, explained_by)

    def arrivals_of_first(self, arrivals: list[Arrival], what: str) -> list[Arrival]:
        """Rank 0's arrivals of gradients; everybody else's are ignored."""
        key = f"functional/{self._number}/arrivals"
        if self.ranks.rank == 0:
            self.ranks.publish(key, json.dumps([each.to_json() for each in arrivals]))
            return arrivals
        text = self.ranks.read(key, writer=0, purpose=f"for the order of the gradients of {what}")
        return [*map(Arrival.from_json, json.loads(text))]

    def planner(self, communicator: ranks.Communicator, device: torch.device) -> OptimalBuckets:
        """What suits the link, the same on every rank. A collective, once for each device."""
        if device not in self._calibrations:
            explained = communicator.explaining("the link could not be measured")
            with explained, torch_private.tracing.outside_of_traces():
                self._calibrations[device] = calibration_for(communicator, device)
        return OptimalBuckets.of(self._calibrations[device])

    def calibration(self, device: torch.device) -> Calibration | None:
        """What the link was measured to be; None where no plan has needed it."""
        return self._calibrations.get(device)

    # ---- those that wait elsewhere -----------------------------------------------------------------------------------

    def call(self) -> None:
        """This rank is about to compare. The others are called if some of them wait elsewhere, in vain.

        One that has launched no more than this rank is only late, and its waits will end: closing the groups would
        break them. A no-op while there is no group.
        """
        if not self.groups.are_any:
            return
        self._publish_coming()
        deadline = time.monotonic() + self.ranks.timeout.total_seconds()
        while self.ranks.silent(self._coming(), seconds=_PATIENCE_SECONDS) and time.monotonic() < deadline:
            if self.is_called:
                return
            if self.groups.wait_for_this_rank:
                self.call_at_once()
                return

    def call_at_once(self, *, is_error: bool = False) -> None:
        """End the waits of all others. [Note: closing ends the waits of others]"""
        self.ranks.publish(self._closed_before(self._number + 1), _FOR_AN_ERROR if is_error else "to compare")
        self.heed_call()

    @property
    def is_called(self) -> bool:
        """Whether another rank has ended the waits of this one."""
        return self.ranks.published(self._closed_before(self._number + 1)) is not None

    def heed_call(self) -> None:
        """Close the groups, and let the others know that this rank is about to compare."""
        self._publish_coming()
        self._close_all()

    def come(self, describe: Callable[[], Description], what: str) -> RuntimeError:
        """Having been called, compare with the others what they wanted; returns the error, which is one everywhere."""
        is_error = self.ranks.published(self._closed_before(self._number + 1)) == _FOR_AN_ERROR
        self.heed_call()
        try:
            self.compare(dict if is_error else describe, what)
        except RuntimeError as error:
            return error
        return RuntimeError(f"{what} has reduced nothing, as other ranks did not take part in it.")

    def give_up(self) -> None:
        """A wait has failed, and nobody called: the waits of other ranks fail too."""
        self.failures += 1
        self._close_all()

    def _coming(self) -> str:
        return f"functional/{self._number + 1}/coming"

    def _publish_coming(self) -> None:
        self.ranks.publish(f"{self._coming()}/{self.ranks.rank}", "")

    def _closed_before(self, number: int) -> str:
        return f"functional/{number}/closed"

    def _close_all(self) -> None:
        self.groups.close()
        self.forget_order()
