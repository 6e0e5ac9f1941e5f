"""Python's garbage collector, while there is nothing for it to find."""

import contextlib
import gc
import sys
import threading
from collections.abc import Iterator

# So many objects bring about a full collection soon, in a process of usual size; those of 5,000 parameters do.
_MANY = 50_000


@contextlib.contextmanager
def collector_paused(*, then_collect: bool = False) -> Iterator[None]:
    """No automatic collection in this context, in which many objects are made that stay.

    When their number has grown by a quarter, Python looks at all objects of the process, which takes 0.2 s where there
    are 400,000: at 10,000 parameters three times until the end of the first backward, half of what that took.

    With `then_collect` the one that is due where many have been made comes at the end of the context, and not in the
    midst of what follows. Not in Python 3.14, which looks at old objects bit by bit.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
    if was_enabled and then_collect and gc.get_count()[0] > _MANY and sys.version_info < (3, 14):
        gc.collect()


_NEVER = 2**31 - 1  # collections of the generation before


class _FullCollections:
    """The collections of all objects, and how many contexts of all threads put them off."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._contexts, self._threshold = 0, _NEVER

    def put_off(self) -> None:
        with self._lock:
            if self._contexts == 0:
                first, second, self._threshold = gc.get_threshold()
                gc.set_threshold(first, second, _NEVER)
            self._contexts += 1

    def resume(self) -> None:
        with self._lock:
            self._contexts -= 1
            first, second, now = gc.get_threshold()
            if self._contexts == 0 and now == _NEVER:  # else somebody has set another one
                gc.set_threshold(first, second, self._threshold)


_full_collections = _FullCollections()


@contextlib.contextmanager
def full_collections_put_off() -> Iterator[None]:
    """No automatic collection of all objects in this context, in which a compiler runs. Young objects are collected.

    A compiler makes hundreds of objects for each operator, and keeps them until it has ended; Python looks at all of
    them, and all others, whenever their number has grown by a quarter. That is a seventh of the time to compile. Not in
    Python 3.14, which looks at old objects bit by bit, and where this does nothing.
    """
    _full_collections.put_off()
    try:
        yield
    finally:
        _full_collections.resume()
