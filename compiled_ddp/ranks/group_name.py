"""The name by which graphs call their wrapper's communicator.

[Note: one name in all graphs] A compiled graph calls its process group by a name. With the communicator's own, wrappers
of equal models could not share their backwards. So all graphs have one name, and torch.distributed is told whose it is
before one runs. A graph that runs while another wrapper's does, in another thread or inside of it, has its
communicator's own name: it is compiled once more. So has one that CUDA graphs replay, which call nothing by name.
"""

import contextlib
import threading
import weakref

import torch.distributed as dist

from compiled_ddp import torch_private

SHARED_NAME = "compiled_ddp/graph"


class _Holder:
    """Whose name it is, and how many of its graphs run."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._group: weakref.ref[dist.ProcessGroup] | None = None
        self._running = 0

    def hand_over(self, group: dist.ProcessGroup) -> str | None:
        """The shared name, which is the group's until `release`; None while graphs of another one run."""
        with self._lock:
            if self._group is None or self._group() is not group:
                if self._running:
                    return None
                torch_private.groups.name_group(group, SHARED_NAME)
                self._group = weakref.ref(group)
            self._running += 1
            return SHARED_NAME

    def release(self) -> None:
        with self._lock:
            self._running -= 1

    def forget(self, group: dist.ProcessGroup) -> None:
        with self._lock:
            if self._group is not None and self._group() is group:
                torch_private.groups.forget_group_name(SHARED_NAME)
                self._group = None


_holder = _Holder()


def forget(group: dist.ProcessGroup) -> None:
    """No graph will call `group` any more: torch.distributed would hold it under the name."""
    _holder.forget(group)


class NameInGraphs(contextlib.AbstractContextManager[str]):
    """Entered, the name of `group` in a graph that runs in this context."""

    def __init__(self, group: dist.ProcessGroup, own_name: str, *, shared: bool) -> None:
        """It is the one of all graphs if it is to be `shared`, and no other group has it now."""
        self._group, self._own_name, self._shared = group, own_name, shared
        self._name: str | None = None

    def __enter__(self) -> str:
        self._name = _holder.hand_over(self._group) if self._shared else None
        return self._name or self._own_name

    def __exit__(self, *_: object) -> None:
        if self._name is not None:
            _holder.release()
