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
        self.lock = threading.Lock()
        self.group: weakref.ref[dist.ProcessGroup] | None = None
        self.running = 0


_holder = _Holder()


def forget(group: dist.ProcessGroup) -> None:
    """No graph will call `group` any more: torch.distributed would hold it under the name."""
    with _holder.lock:
        if _holder.group is not None and _holder.group() is group:
            torch_private.groups.forget_group_name(SHARED_NAME)
            _holder.group = None


class NameInGraphs(contextlib.AbstractContextManager[str]):
    """Entered, the name of `group` in a graph that runs in this context."""

    def __init__(self, group: dist.ProcessGroup, own_name: str, *, shared: bool) -> None:
        """It is the one of all graphs if it is to be `shared`, and no graph of another group has it now."""
        self._group, self._own_name, self._shared = group, own_name, shared
        self._holds = False

    def __enter__(self) -> str:
        if not self._shared:
            return self._own_name
        with _holder.lock:
            if _holder.group is None or _holder.group() is not self._group:
                if _holder.running:
                    return self._own_name
                torch_private.groups.name_group(self._group, SHARED_NAME)
                _holder.group = weakref.ref(self._group)
            _holder.running += 1
        self._holds = True
        return SHARED_NAME

    def __exit__(self, *_: object) -> None:
        if self._holds:
            with _holder.lock:
                _holder.running -= 1
