"""For tests of what is told: a clock that stands, and the lines of the package's logger."""

import contextlib
import logging
import threading
from collections.abc import Iterator


class Clock:
    """In seconds, in the place of `compiled_ddp.telling.slow_work.clock`."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Lines(logging.Handler):
    """Keeps every line."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.found: list[str] = []
        self._changed = threading.Condition()

    def emit(self, record: logging.LogRecord) -> None:
        with self._changed:
            self.found.append(record.getMessage())
            self._changed.notify_all()

    def wait_for(self, beginning: str) -> None:
        """Wait for a line that begins so, which another thread tells."""

        def is_there() -> bool:
            return any(line.startswith(beginning) for line in self.found)

        with self._changed:
            assert self._changed.wait_for(is_there, timeout=60.0), self.found


@contextlib.contextmanager
def told_lines(logger: str = "compiled_ddp") -> Iterator[Lines]:
    """What is told in this context."""
    package, lines = logging.getLogger(logger), Lines()
    level = package.level
    package.addHandler(lines)
    package.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        package.removeHandler(lines)
        package.setLevel(level)
