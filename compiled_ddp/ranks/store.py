"""The store of torch.distributed, for several threads at a time, and with a clock of our own."""

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from compiled_ddp import torch_private
from compiled_ddp.ranks.clock import NoAnswerError, grace_seconds, within

Answer = TypeVar("Answer")

LONGEST_VALUE = 2**20  # characters of one; the store breaks the connection above 8 MiB, as of 60,000 parameters

_used_by_a_thread = threading.Lock()
_BUSY_SECONDS = 0.1  # longer than any question that does not wait for another rank; making a connection takes as long


# [Note: threads and the store] A process has one connection to the default store, which a thread that waits for a key
# keeps from all others: two wrappers that are trained in two threads would wait for each other's ranks in a circle.
# So a question that finds it in use gets a connection of its own.


def part_of_default(prefix: str) -> dist.Store:
    """The keys below `prefix` in the default store. Raises ValueError if torch.distributed is not initialised."""
    return dist.PrefixStore(prefix, torch_private.groups.default_store())


class Store:
    """[Note: threads and the store]"""

    def __init__(self, shared: dist.Store, timeout: timedelta) -> None:
        """`shared` has the connection of the process; an answer may take `timeout`."""
        self._shared: dist.Store | None = shared
        self._timeout_seconds, self._grace_seconds = timeout.total_seconds(), grace_seconds(timeout)
        self._spare: list[dist.Store] = []  # further connections that nobody uses now
        self._overdue: list[threading.Event] = []  # set when a question has ended that nobody waits for any more

    @property
    def shared(self) -> dist.Store:
        """With the connection of the process. Raises RuntimeError once torch.distributed has been shut down."""
        if self._shared is None:
            raise RuntimeError("torch.distributed has been shut down by destroy_process_group(): wrap the model anew.")
        return self._shared

    def forget(self) -> None:
        """Let go of it: torch.distributed has been shut down.

        Rank 0 hosts its store for as long as anybody has it, and the next one of that address would find its keys.
        """
        self._shared = None
        self._spare.clear()

    def ask(self, question: Callable[[dist.Store], Answer]) -> Answer:
        """What `question` makes of the store. Raises NoAnswerError if that takes longer than the timeout.

        And what the store raises. While another question has had no answer, none is waited for that long again.
        """
        has_ended = threading.Event()

        def answer() -> Answer:
            try:
                return self._ask_over_a_connection(question)
            finally:
                has_ended.set()

        self._overdue = [ended for ended in self._overdue if not ended.is_set()]
        seconds = self._grace_seconds + (0.0 if self._overdue else self._timeout_seconds)
        try:
            return within(seconds, answer, name="compiled_ddp store")
        except NoAnswerError:
            self._overdue.append(has_ended)
            raise

    def _ask_over_a_connection(self, question: Callable[[dist.Store], Answer]) -> Answer:
        if _used_by_a_thread.acquire(timeout=_BUSY_SECONDS):
            try:
                return question(self.shared)
            finally:
                _used_by_a_thread.release()
        try:
            connection = self._spare.pop()
        except IndexError:  # asked first, it may be another thread's by then
            connection = torch_private.groups.with_own_connection(self.shared)
        answer = question(connection)
        self._spare.append(connection)  # not where it has raised: half of an answer may be on its way
        return answer
