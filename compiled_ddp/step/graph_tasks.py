"""The tasks of autograd that one backward of a wrapper runs in: more than one where checkpoints are reentrant."""

import functools
import threading
import weakref
from collections.abc import Callable

from compiled_ddp import torch_private


class OpenTasks:
    """Tells a backward that autograd still runs, in whatever thread, from one that an exception has ended.

    For each task autograd holds what is to be called at its end, and drops it with the task. So that nothing else
    does, as a traceback would, it is made in a call that returns before anything can be raised.
    """

    def __init__(self) -> None:
        # By task; which have been noted is asked for every gradient, so it is read as it stands, by others too.
        self.noted: dict[int, weakref.ref[Callable[[], None]]] = {}
        self._threads: dict[int, int] = {}  # in which each was noted

    def is_last(self, task: int) -> bool:
        """Whether this task has been noted, has not been closed, and is the only one that runs."""
        return task in self.noted and (len(self.noted) == 1 or not self.are_running(but=task))

    def are_of_this_thread(self) -> bool:
        """Whether one that runs has been noted by this thread."""
        here = threading.get_ident()
        return any(self._threads[task] == here for task, end in list(self.noted.items()) if end() is not None)

    def note(self, at_end: Callable[[int], None]) -> None:
        """Note the task that this thread runs; `at_end` is called with it when it has ended without an exception."""
        if self.noted:
            for ended in [task for task, end in self.noted.items() if end() is None]:
                self.close(ended)  # an exception has ended it
        task = torch_private.autograd.current_graph_task()
        end = functools.partial(at_end, task)
        self.noted[task], self._threads[task] = weakref.ref(end), threading.get_ident()
        torch_private.autograd.call_at_end_of_backward(end)

    def are_running(self, *, but: int | None = None) -> bool:
        """Whether autograd still runs one of them, other than `but`."""
        others = {**self.noted}  # other threads note some meanwhile
        if but is not None:
            others.pop(but, None)
        return bool(others) and any(end() is not None for end in others.values())

    def are_of_other_threads(self) -> bool:
        """Whether some run, and all of these have been noted by other threads."""
        if not self.noted:
            return False
        threads = {self._threads[task] for task, end in self.noted.items() if end() is not None}
        return bool(threads) and threading.get_ident() not in threads

    def close(self, task: int) -> None:
        self.noted.pop(task, None)
        self._threads.pop(task, None)

    def forget(self) -> None:
        """Drop all: an exception has ended them."""
        self.noted.clear()
        self._threads.clear()
