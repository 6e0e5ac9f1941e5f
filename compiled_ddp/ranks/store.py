"""The store of torch.distributed, for several threads at a time."""

import contextlib
import threading
from collections.abc import Iterator

import torch.distributed as dist

from compiled_ddp import torch_private

_used_by_a_thread = threading.Lock()


# [Note: threads and the store] A process has one connection to the default store, which a thread that waits for a key
# keeps from all others: two wrappers that are trained in two threads would wait for each other's ranks in a circle.
# So a thread that finds it in use makes a connection of its own.


class Store:
    """A part of the default store: [Note: threads and the store]"""

    def __init__(self, prefix: str) -> None:
        """Raises ValueError if torch.distributed is not initialised."""
        self.shared = dist.PrefixStore(prefix, torch_private.groups.default_store())
        self._of_threads = threading.local()

    @contextlib.contextmanager
    def connection(self) -> Iterator[dist.Store]:
        """The store, for whatever the calling thread asks of it in here."""
        if _used_by_a_thread.acquire(blocking=False):
            try:
                yield self.shared
            finally:
                _used_by_a_thread.release()
            return
        if not hasattr(self._of_threads, "own"):
            self._of_threads.own = torch_private.groups.with_own_connection(self.shared)
        yield self._of_threads.own
