"""What one rank tells of work that takes long, such as compiling: while it goes on, and when it has ended."""

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from typing import Self

from compiled_ddp.telling import log

SECONDS = 5.0  # work that takes less is not told of

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
        """Tells "compiling backward of Net, first used in step 2", and when it has ended "compiled ..., 7.0 s".

        That is for a `verb` ("compiling", "compiled"), a `what`, and what it is `of`. `why` may be asked in another
        thread, and `is_told` too: whether this rank tells of it.
        """
        self._logger, self._verb, self._what, self._of, self._why, self._is_told = logger, verb, what, of, why, is_told
        self._result = ""
        self._seconds = 0.0  # of its own, without those since it went on
        self._is_being_told = self._has_ended = False
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
        if self._seconds >= SECONDS:
            self._tell_that_it_goes_on()
        with self._lock:
            self._has_ended = True
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
        self._since = clock()
        self._timer = threading.Timer(max(0.0, SECONDS - self._seconds), self._tell_that_it_goes_on)
        self._timer.daemon = True
        self._timer.start()

    def _pause(self) -> None:
        self._timer.cancel()
        self._seconds += clock() - self._since

    def _tell_that_it_goes_on(self) -> None:
        with self._lock:
            if not self._is_being_told and not self._has_ended and self._is_told():
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
