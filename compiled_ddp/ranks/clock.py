"""A clock of our own for calls that may block in C++ for ever."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from datetime import timedelta
from typing import TypeVar

Result = TypeVar("Result")

OUTLAST_SECONDS = 1.0  # how long a rank that knows why all of them fail stays for those that do not
_SHORTEST_GRACE_SECONDS, _LONGEST_GRACE_SECONDS, _GRACE_PER_TIMEOUT = 2.0, 10.0, 0.2


class NoAnswerError(RuntimeError):
    """A call has not returned in time. It may still be under way, in a thread that nobody waits for."""


# [Note: a stopped host] A client of TCPStore has a timeout for how long a key may stay away, and none for the answers
# of the process that hosts the store: one that is stopped keeps its connections open, and every question blocks (2.11
# to 2.15: `wait` too, whose cancellation is answered). Nothing ends such a call from outside.


def within(seconds: float, call: Callable[[], Result], *, name: str) -> Result:
    """What `call` returns or raises, in a thread of this `name`. Raises NoAnswerError if it takes longer.

    [Note: a stopped host] Costs about a tenth of a millisecond: not for a step that has nothing special.
    """
    returned: Future[Result] = Future()
    threading.Thread(target=_run, args=(call, returned), name=name, daemon=True).start()
    try:
        return returned.result(min(seconds, threading.TIMEOUT_MAX))
    except TimeoutError as error:
        if returned.done():
            return returned.result()  # of just now; or the error is the call's own
        raise NoAnswerError(f"no answer within {seconds:g} s.") from error
    finally:
        del returned  # an exception's traceback has this frame, and would keep itself alive


def _run(call: Callable[[], Result], returned: "Future[Result]") -> None:
    try:
        result = call()
    except BaseException as error:  # raised where the result is waited for
        returned.set_exception(error)
    else:
        returned.set_result(result)
    finally:
        del returned


@contextlib.contextmanager
def again_and_again(act: Callable[[], bool], *, seconds: float, name: str) -> Iterator[None]:
    """While in here, `act` every so many seconds in a thread of this `name`, until it returns False."""
    has_ended = threading.Event()

    def repeat() -> None:
        while not has_ended.wait(seconds) and act():
            pass

    threading.Thread(target=repeat, name=name, daemon=True).start()
    try:
        yield
    finally:
        has_ended.set()


def grace_seconds(timeout: timedelta) -> float:
    """How much longer than `timeout` to wait for the answer that there has been none."""
    share = timeout.total_seconds() * _GRACE_PER_TIMEOUT
    return min(max(share, _SHORTEST_GRACE_SECONDS), _LONGEST_GRACE_SECONDS)
