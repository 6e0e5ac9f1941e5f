"""In which phase a wrapper is: the only state that tells what has become of its backward.

    IDLE <--> EXPECTED, until the backward arrives
    IDLE ---> REDUCING ---> IDLE, maybe POSTPONED in between
    IDLE ---> SKIPPING ---> IDLE
    any of them ---> BROKEN ---> IDLE

Whether a forward waits for its backward is no phase: a forward may begin in one thread while another runs the backward
of an earlier one, and a torch.autograd.grad leaves it waiting.
"""

import enum


class Phase(enum.StrEnum):
    """What a wrapper is doing for the other ranks."""

    IDLE = "no backward is under way"
    EXPECTED = "a backward that has reached another wrapper, or has failed before it did, would reach this one"
    POSTPONED = "a backward has reached it, which begins for the other ranks when it has ended here"
    REDUCING = "a backward is under way"
    SKIPPING = "zeros are sent in place of a backward"
    BROKEN = "an exception has ended a backward, and the rest of it is sent as zeros"


class Event(enum.StrEnum):
    """What changes the phase."""

    OTHER_REACHED = "a backward has reached another wrapper first, or none before an exception ended it"
    EXPECTATION_OVER = "that backward, or another, has reached this one, too, or has ended"
    POSTPONE = "a backward has reached it that must not wait for other ranks now"
    BEGIN = "a synchronised backward begins"
    SKIP = "zeros are to be sent in place of a backward"
    BREAK = "what is left of a backward is to be sent, as an exception has ended it"
    END = "its results have been read, or nobody can read them"


TRANSITIONS = {
    (Phase.IDLE, Event.OTHER_REACHED): Phase.EXPECTED,
    (Phase.IDLE, Event.POSTPONE): Phase.POSTPONED,
    (Phase.IDLE, Event.BEGIN): Phase.REDUCING,
    (Phase.IDLE, Event.SKIP): Phase.SKIPPING,
    (Phase.IDLE, Event.BREAK): Phase.BROKEN,  # the exception came before the backward had reached the wrapper
    (Phase.EXPECTED, Event.EXPECTATION_OVER): Phase.IDLE,
    (Phase.EXPECTED, Event.SKIP): Phase.SKIPPING,  # in another thread than the one that expected it
    (Phase.EXPECTED, Event.BREAK): Phase.BROKEN,
    (Phase.POSTPONED, Event.BEGIN): Phase.REDUCING,
    (Phase.POSTPONED, Event.BREAK): Phase.BROKEN,
    (Phase.REDUCING, Event.BREAK): Phase.BROKEN,
    (Phase.REDUCING, Event.END): Phase.IDLE,
    (Phase.SKIPPING, Event.BREAK): Phase.BROKEN,
    (Phase.SKIPPING, Event.END): Phase.IDLE,
    (Phase.BROKEN, Event.BREAK): Phase.BROKEN,  # sending the rest had failed, and is tried once more
    (Phase.BROKEN, Event.END): Phase.IDLE,
}

# What happens in other phases as well, and changes nothing there.
WITHOUT_EFFECT = {
    *((phase, Event.OTHER_REACHED) for phase in Phase if phase is not Phase.IDLE),
    *((phase, Event.EXPECTATION_OVER) for phase in Phase if phase is not Phase.EXPECTED),
}


def after(phase: Phase, event: Event) -> Phase:
    """The phase that follows; what the table does not have is a mistake of this package."""
    if (phase, event) in WITHOUT_EFFECT:
        return phase
    following = TRANSITIONS.get((phase, event))
    assert following is not None, f"a wrapper that is {phase.name} cannot {event.name}"
    return following
