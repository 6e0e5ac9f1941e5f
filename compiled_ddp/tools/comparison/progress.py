"""What is under way, on stderr: a line that is rewritten on a terminal, a line now and then elsewhere."""

import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TextIO, TypeVar

from compiled_ddp.telling import log

T = TypeVar("T")

REWRITTEN_EVERY_S, LINE_EVERY_S = 1.0, 30.0
_START_OF_LINE = "\r\x1b[K"  # which it clears


class Progress:
    """Shows one rank's progress. Says nothing where `COMPILED_DDP_LOG` is quiet."""

    def __init__(self, *, shown: bool, stream: TextIO | None = None) -> None:
        """`stream` is stderr unless it is given; nothing is written where `shown` is not set, as on other ranks."""
        self._stream = sys.stderr if stream is None else stream
        self._is_shown = shown and not log.is_quiet()
        self._rewrites = self._stream.isatty()
        self._lock = threading.Lock()

    def say(self, what: str) -> None:
        """A line that stays."""
        self._write(f"compare: {what}\n")

    @contextmanager
    def under_way(self, what: Callable[[float], str]) -> Iterator[None]:
        """Says what is done in here: at once, and again as time goes by. `what` is given the seconds since."""
        if not self._is_shown:
            yield
            return
        began, has_ended = time.monotonic(), threading.Event()

        def repeat() -> None:
            while not has_ended.wait(REWRITTEN_EVERY_S if self._rewrites else LINE_EVERY_S):
                self._show(what(time.monotonic() - began))

        self._show(what(0.0))
        thread = threading.Thread(target=repeat, daemon=True)
        thread.start()
        try:
            yield
        finally:
            has_ended.set()
            thread.join()
            self._write("")

    def each(self, items: Sequence[T], label: str) -> Iterator[T]:
        """`items`, one by one: "`label` 3 of 30, about 40 s left"."""
        done = 0

        def say(seconds: float) -> str:
            left = "" if done == 0 else f", {in_words(seconds / done * (len(items) - done))} left"
            return f"{label} {min(done + 1, len(items))} of {len(items)}{left}"

        with self.under_way(say):
            for item in items:
                yield item
                done += 1

    def _show(self, what: str) -> None:
        if self._rewrites:
            width = shutil.get_terminal_size().columns - 1
            self._write(f"compare: {what}"[:width])
        else:
            self.say(what)

    def _write(self, text: str) -> None:
        """In place of what stands in the terminal's last line."""
        if self._is_shown:
            with self._lock:
                self._stream.write(_START_OF_LINE + text if self._rewrites else text)
                self._stream.flush()


def in_words(seconds: float) -> str:
    """For example "about 40 s", "about 3 min", "about 1.5 h"."""
    if seconds < 90:
        return f"about {max(1, round(seconds / 5)) * 5} s"
    return f"about {seconds / 60:.0f} min" if seconds < 5400 else f"about {seconds / 3600:.1f} h"
