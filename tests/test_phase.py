"""The phases of a wrapper: every phase with every event, and random lives of what is under way."""

import random
from collections.abc import Callable
from itertools import product
from typing import Any, cast

import pytest

from compiled_ddp.step.runtime import TRANSITIONS, WITHOUT_EFFECT, Event, Phase, UnderWay, after
from compiled_ddp.step.synchronised import SynchronisedBackward

EVERY_PAIR = list(product(Phase, Event))
WITH_BACKWARD = {Phase.REDUCING, Phase.SKIPPING, Phase.BROKEN}


@pytest.mark.parametrize(("phase", "event"), EVERY_PAIR, ids=lambda value: value.name)
def test_every_event_in_every_phase_leads_on_or_changes_nothing_or_is_a_mistake_by_name(
    phase: Phase, event: Event
) -> None:
    if (phase, event) in TRANSITIONS:
        assert after(phase, event) is TRANSITIONS[phase, event]
    elif (phase, event) in WITHOUT_EFFECT:
        assert after(phase, event) is phase
    else:
        with pytest.raises(AssertionError, match=rf"{phase.name}.*{event.name}"):
            after(phase, event)


def test_no_event_both_leads_on_and_changes_nothing() -> None:
    assert TRANSITIONS.keys().isdisjoint(WITHOUT_EFFECT)
    assert TRANSITIONS.keys() | WITHOUT_EFFECT <= set(EVERY_PAIR)


def test_every_event_leads_on_from_some_phase() -> None:
    assert {event for _, event in TRANSITIONS} == set(Event)


def reachable(start: Phase) -> set[Phase]:
    found = {start}
    while True:
        following = {target for (phase, _), target in TRANSITIONS.items() if phase in found} - found
        if not following:
            return found
        found |= following


def test_every_phase_is_reached_from_idle_and_leads_back() -> None:
    assert reachable(Phase.IDLE) == set(Phase)
    assert all(Phase.IDLE in reachable(phase) for phase in Phase)


def test_from_every_phase_an_exception_leads_to_sending_the_rest() -> None:
    assert {after(phase, Event.BREAK) for phase in Phase} == {Phase.BROKEN}


# ---- random lives ----------------------------------------------------------------------------------------------------


def a_backward() -> SynchronisedBackward:
    return cast(SynchronisedBackward, object())


def tell(under_way: UnderWay, event: Event) -> None:
    methods: dict[Event, Callable[[], None]] = {
        Event.OTHER_REACHED: under_way.expect,
        Event.EXPECTATION_OVER: under_way.expect_no_more,
        Event.POSTPONE: under_way.postpone,
        Event.BEGIN: lambda: under_way.begin(a_backward()),
        Event.SKIP: lambda: under_way.skip(a_backward()),
        Event.BREAK: lambda: under_way.break_off(under_way.backward or a_backward()),
        Event.END: under_way.end,
    }
    methods[event]()


@pytest.mark.parametrize("seed", range(20))
def test_random_events_never_leave_the_table(seed: int) -> None:
    chance, events = random.Random(seed), list(Event)
    under_way, met = UnderWay(), set()
    for _ in range(2000):
        before, event = under_way.phase, chance.choice(events)
        backward, ran_locally = under_way.backward, under_way.ran_locally
        met.add((before, event))
        if (before, event) in TRANSITIONS or (before, event) in WITHOUT_EFFECT:
            tell(under_way, event)
            assert under_way.phase is after(before, event)
        else:
            with pytest.raises(AssertionError, match=event.name):
                tell(under_way, event)
            # A mistake changes nothing.
            assert (under_way.phase, under_way.backward, under_way.ran_locally) == (before, backward, ran_locally)
        assert (under_way.backward is not None) == (under_way.phase in WITH_BACKWARD)
        assert under_way.has_begun() == (under_way.phase not in (Phase.IDLE, Phase.EXPECTED))
        if under_way.phase is Phase.POSTPONED and chance.random() < 0.5:
            under_way.run_locally(cast(Any, object()))
        assert not under_way.ran_locally or under_way.phase is Phase.POSTPONED
    assert met == set(EVERY_PAIR)


def test_what_is_broken_is_that_of_this_thread_that_nothing_runs_any_more() -> None:
    under_way = UnderWay()
    assert not under_way.is_broken_off()
    under_way.skip(a_backward())
    assert under_way.is_of_this_thread() and under_way.is_broken_off()  # an exception has ended the skipping
    under_way.forget_threads()
    assert not under_way.is_of_this_thread() and under_way.is_broken_off()
    under_way.end()
    assert not under_way.is_broken_off()
