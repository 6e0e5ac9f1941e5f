"""What one rank tells of work that takes long, such as compiling: while it goes on, and when it has ended."""

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from typing import Self

from compiled_ddp.telling import log

SECONDS = 5.0  # work that takes less is not told of
HEARTBEAT_SECONDS = 30.0  # how often it is told that it still goes on

clock = time.perf_counter


class SlowWork:
    """A context in which this thread works on something.

    Work inside of other work is told of by itself, and its time is not the other's. Where nothing takes long, it costs
    a timer.
    """

    def __init__(
        self,
        logger: logging.Logger,
        verb: tuple[str, str],
        *,
        what: str,
        of: str = "",
        why: Callable[[], str] = str,
        is_told: Callable[[], bool] = lambda: True,
    ) -> None:
        """Tells "compiling backward of Net, first used in step 2", and when it has ended "compiled ..., 37.0 s".

        Between the two, "still compiling backward of Net, 35 s".

        That is for a `verb` ("compiling", "compiled"), a `what`, and what it is `of`. `why` may be asked in another
        thread, and `is_told` too: whether this rank tells of it.
        """
        self._logger, self._verb, self._what, self._of, self._why, self._is_told = logger, verb, what, of, why, is_told
        self._result = ""
        self._seconds = 0.0  # of its own, without those since it went on
        self._due = SECONDS  # of its own: when it is told of next
        self._is_being_told = self._is_paused = False
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        self._outer = _current()
        if self._outer is not None:
            self._outer._pause()
        _of_this_thread.innermost = self
        self._go_on()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._pause()
        _of_this_thread.innermost = self._outer
        if self._outer is not None:
            self._outer._go_on()
        with self._lock:
            if self._seconds >= SECONDS and not self._is_being_told:
                self._begin_to_tell()
            if self._is_being_told:
                ended = self._verb[1] if kind is None else f"gave up {self._verb[0]}"
                self._tell(f"{ended} {self._named}, {self._seconds:.1f} s{self._result}")

    def note_result(self, result: str) -> None:
        """What its last line says besides."""
        self._result = f": {result}"

    def part(self, what: str) -> contextlib.AbstractContextManager[object]:
        """Work inside of this that is told of by itself, unless it is all of it."""
        if what == self._what:
            return contextlib.nullcontext()
        return SlowWork(self._logger, self._verb, what=what, of=self._of, why=self._why, is_told=self._is_told)

    @property
    def _named(self) -> str:
        return self._what + (f" of {self._of}" if self._of else "")

    def _go_on(self) -> None:
        with self._lock:
            self._since = clock()
            self._set_timer()

    def _pause(self) -> None:
        with self._lock:
            self._timer.cancel()
            self._is_paused = True
            self._seconds = self._own_seconds()

    def _own_seconds(self) -> float:
        """So far, while it goes on."""
        return self._seconds + clock() - self._since

    def _set_timer(self) -> None:
        self._is_paused = False
        self._timer = threading.Timer(max(0.0, self._due - self._own_seconds()), self._tell_that_it_goes_on)
        self._timer.daemon = True
        self._timer.start()

    def _tell_that_it_goes_on(self) -> None:
        with self._lock:
            if self._is_paused:
                return
            if self._is_being_told:
                self._tell(f"still {self._verb[0]} {self._named}, {self._own_seconds():.0f} s")
            else:
                self._begin_to_tell()
            self._due += HEARTBEAT_SECONDS
            self._set_timer()

    def _begin_to_tell(self) -> None:
        if self._is_told():
            self._is_being_told = True
            why = self._why()
            self._tell(f"{self._verb[0]} {self._named}" + (f", {why}" if why else ""))

    def _tell(self, message: str) -> None:
        log.tell(self._logger, message)


_of_this_thread = threading.local()


def part_of_slow_work(what: str) -> contextlib.AbstractContextManager[object]:
    """A part, of this name, of the work that this thread has begun; nothing is told where it has begun none."""
    work = _current()
    return contextlib.nullcontext() if work is None else work.part(what)


def _current() -> SlowWork | None:
    return getattr(_of_this_thread, "innermost", None)
