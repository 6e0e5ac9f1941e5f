"""Several wrappers in one backward: who may wait for other ranks, and when.

[Note: waiting in one order] Autograd runs the parts of two wrappers in the order of this rank's forwards, which another
rank may have called the other way round. Each then waits for what the other has not sent yet, for ever. So all ranks
keep one order of what is waited for: in the middle of a backward a rank waits for something (in a graph, or
to agree on a sequence of buckets) only if it has sent all that comes before; otherwise hooks send it, which wait for
nothing. When the backward has ended, everything of all its wrappers is sent before any result is awaited, and results
are awaited in that order. The order is that of the rank that came first, kept in the store.
"""

import functools
import operator
import weakref
from collections.abc import Callable, Iterable, Sequence, Set
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from compiled_ddp import torch_private
from compiled_ddp.ranks.store import Store, part_of_default

if TYPE_CHECKING:
    from compiled_ddp.step.runtime import Runtime

_communicates = operator.attrgetter("communicates")


class Conductor:
    """Knows the wrappers of this process."""

    def __init__(self) -> None:
        # To them. Where there is one, as in most processes, nobody need be asked.
        self.references: list[weakref.ref[Runtime]] = []
        self._orders: weakref.WeakKeyDictionary[dist.ProcessGroup, SharedOrder] = weakref.WeakKeyDictionary()
        self._is_told = False  # of backwards that fail

    def add(self, wrapper: "Runtime") -> None:
        if not self._is_told:
            self._is_told = True
            torch_private.autograd.tell_of_failed_backwards(self.backward_failed)
        self.references.append(weakref.ref(wrapper, self.references.remove))

    def leave(self, wrapper: "Runtime") -> None:
        """It is in use no longer."""
        for reference in [one for one in self.references if one() is wrapper]:
            self.references.remove(reference)

    def _wrappers(self) -> "list[Runtime]":
        """All that are in use. A WeakSet would take six calls."""
        return [*filter(None, map(operator.call, tuple(self.references)))]

    def backward_reached(self, wrapper: "Runtime") -> None:
        """A backward has reached `wrapper`. Should it break off, it tells the others that it would have reached."""
        for other in self._wrappers():
            if other is not wrapper:
                other.expect_in_task()

    def backward_failed(self, failed: torch_private.autograd.FailedBackward) -> None:
        """An exception has ended a backward, maybe before it reached the wrappers in which other ranks wait for it."""
        for wrapper in self._wrappers():
            wrapper.backward_failed(failed)

    def forget_unbegun(self) -> None:
        """Let a backward that has failed before it reached any wrapper be none: nothing of it has been sent."""
        wrappers = self._wrappers()
        if not any(wrapper.has_begun() for wrapper in wrappers):
            for wrapper in wrappers:
                wrapper.expect_no_more()

    def broken_off(self) -> "Sequence[Runtime]":
        """The wrappers with a backward that an exception has ended in this thread."""
        wrappers = self._wrappers()
        for wrapper in wrappers:
            wrapper.outlast_threads()
        return [wrapper for wrapper in wrappers if wrapper.is_broken_off()]

    def any_communicates(self) -> bool:
        """Whether any wrapped model has collectives of its own: backwards may run through several."""
        return any(map(_communicates, self._wrappers()))

    def may_wait(self, wrapper: "Runtime", events: Iterable[str]) -> bool:
        """Whether `wrapper` may wait for other ranks at all these events now, in the middle of a backward."""
        others = [other for other in self._wrappers() if other is not wrapper and other.may_take_part()]
        if not others:
            return True
        unsent = {event for other in others for event in other.unsent()}
        return all(self._order().precedes(event, unsent) for event in events)

    def end(self, task: int) -> None:
        """All wrappers whose backward ends with `task` send what is left, then wait for their results."""
        ending = [*filter(operator.methodcaller("ends_with", task), self._wrappers())]
        if len(ending) == 1:
            ending[0].end()
            return
        self._together(ending, lambda wrapper: wrapper.send_rest(), lambda wrapper: wrapper.end())

    @torch.no_grad()  # as in a backward: users' hooks run in here
    def finish_broken(self, also: "Sequence[Runtime]" = ()) -> "Sequence[Runtime]":
        """Take part in what is left of all backwards that an exception ended in this thread; returns whose they were.

        And of those that the wrappers in `also` were to have.
        """
        broken_off = self.broken_off()
        # One whose wait has failed says so in its own calls, and keeps no other from its part.
        wanted = [wrapper for wrapper in broken_off if not wrapper.communicator.has_failed]
        broken = [wrapper for wrapper in self._wrappers() if wrapper in also or wrapper in wanted]
        told: set[int] = set()

        def send(wrapper: "Runtime") -> None:
            wrapper.send_rest_of_broken()
            told.update(wrapper.told_ranks())

        self._together(broken, send, lambda wrapper: wrapper.end_broken(told))
        return broken

    def finish_broken_of(self, wrappers: "Sequence[Runtime]") -> "Sequence[Runtime]":
        """As `finish_broken`, and of these wrappers in whatever thread the exception was."""
        return self.finish_broken(also=[wrapper for wrapper in wrappers if wrapper.under_way.is_broken_off()])

    @torch.no_grad()  # as in a backward: users' hooks run in here
    def skip(self, skipping: "Sequence[Runtime]") -> None:
        """Take part with zeros in a backward of all these."""
        self._together(skipping, lambda wrapper: wrapper.begin_skipping(), lambda wrapper: wrapper.end())

    def _together(
        self, wrappers: "Sequence[Runtime]", send: "Callable[[Runtime], None]", end: "Callable[[Runtime], None]"
    ) -> None:
        """[Note: waiting in one order] An error of one wrapper keeps no other from its part."""
        if len(wrappers) == 1:
            send(wrappers[0])
            end(wrappers[0])
            return
        errors: dict[Runtime, BaseException] = {}
        at_once = [wrapper for wrapper in wrappers if wrapper.waits_to_send() is None]
        waiting = [wrapper for wrapper in wrappers if wrapper not in at_once]
        sent_in_order = [*at_once, *self._in_order(waiting, lambda wrapper: wrapper.waits_to_send() or "")]
        for part, in_order in ((send, sent_in_order), (end, self._in_order(wrappers, _end_of))):
            for wrapper in in_order:
                if wrapper in errors:
                    continue
                try:
                    part(wrapper)
                except BaseException as error:  # raised below
                    errors[wrapper] = error
        _raise_first([*errors.values()])

    def _in_order(self, wrappers: "Sequence[Runtime]", event_of: "Callable[[Runtime], str]") -> "Sequence[Runtime]":
        """By the order that all ranks share."""
        if len(wrappers) < 2:
            return wrappers
        order = self._order()
        places = {wrapper: len(order.events_before(event_of(wrapper))) for wrapper in wrappers}
        return sorted(wrappers, key=places.__getitem__)

    def _order(self) -> "SharedOrder":
        world = dist.group.WORLD
        assert world is not None
        if world not in self._orders:
            timeout = torch_private.groups.group_timeout(world)
            self._orders[world] = SharedOrder(Store(part_of_default("compiled_ddp/order"), timeout))
        return self._orders[world]


class SharedOrder:
    """A list of events in the store, to which any rank appends what it comes to first."""

    _KEY = "events"

    def __init__(self, store: Store) -> None:
        self._store = store
        self._places: dict[str, int] = {}  # as far as this rank has read them
        self._text = ""

    def events_before(self, event: str) -> set[str]:
        """What comes before `event`, which comes last if no rank has come to it so far."""
        if event not in self._places:
            self._append(event)
        place = self._places[event]
        return {other for other, place_of_other in self._places.items() if place_of_other < place}

    def precedes(self, event: str, others: Set[str]) -> bool:
        """Whether `event` comes before all of these.

        If no rank has come to it so far, it comes after those of them that have a place, and gets none itself: a rank
        that may not wait for it must not take the place of what the others come to while this one makes them wait.
        """
        if event not in self._places:
            self._read(self._store.ask(lambda store: store.get(self._KEY) if store.check([self._KEY]) else b""))
        if event not in self._places and not others.isdisjoint(self._places):
            return False
        return others.isdisjoint(self.events_before(event))

    def _append(self, event: str) -> None:
        while event not in self._places:
            known, wanted = self._text, f"{self._text}{event}\n"
            self._read(self._store.ask(functools.partial(_compare_set, self._KEY, known, wanted)))

    def _read(self, events: bytes) -> None:
        self._text = events.decode()
        self._places = {event: place for place, event in enumerate(self._text.splitlines())}


def _compare_set(key: str, expected: str, wanted: str, store: dist.Store) -> bytes:
    return store.compare_set(key, expected, wanted)


def _end_of(wrapper: "Runtime") -> str:
    return f"{wrapper.name} end"


def _raise_first(errors: Sequence[BaseException]) -> None:
    """Raise what must not be held up, or else the first one, with a note of the others."""
    if not errors:
        return
    first = next((error for error in errors if not isinstance(error, Exception)), errors[0])
    for other in errors:
        if other is not first:
            first.add_note(f"And of another wrapper in the same backward: {type(other).__name__}: {other}")
    raise first


conductor = Conductor()
