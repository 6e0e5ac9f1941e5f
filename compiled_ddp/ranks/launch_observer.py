"""Looking at the collectives of a graph while it runs, and the names that buckets have in a profile."""

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.profiler import record_function

from compiled_ddp import torch_private
from compiled_ddp.passes.ops import GATHERS, LAUNCHES, awaited_of
from compiled_ddp.plan import is_called

_WAIT = torch.ops._c10d_functional.wait_tensor.default
_WITHOUT_DERIVATIVES = ("aten::", "prims::", "_c10d_functional::", "compiled_ddp::")  # in the kernels of operators


class LaunchObserver(torch_private.autograd.DispatchMode):
    """While entered, calls `launch` and `wait` around the collectives that this thread issues on one group.

    `launch(bucket, flat_buffer)` is called before a bucket is launched and `wait(bucket)` before its wait; the
    collective runs inside of the context that they return. Buckets are numbered from `first_bucket` on in the order of
    their launches. On a GPU a wait only orders streams. Observers may be nested. What C++ launches (Inductor's
    `cpp_wrapper`) is not seen; `launched` tells how many launches were. `start(bucket, operator, args)` launches, and
    returns what is to be awaited, as `launch` does. What gathers is seen with `sees_gathers` alone.
    """

    supports_higher_order_operators = True  # passes them on like all others

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __init__(
        self,
        group_name: str,
        first_bucket: int = 0,
        *,
        launch: Callable[[int, torch.Tensor], AbstractContextManager[object]],
        wait: Callable[[int], AbstractContextManager[object]] = lambda bucket: contextlib.nullcontext(),
        start: Callable[[int, Any, tuple[Any, ...]], torch.Tensor] = lambda _, operator, args: start_collective(
            operator, args
        ),
        sees_gathers: bool = False,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._group_name = group_name
        self._first_bucket = first_bucket
        self.launched = 0
        self._sees_gathers = sees_gathers
        self._around_launch, self._around_wait, self._start = launch, wait, start
        self._bucket_at: dict[int, int] = {}  # address of a launched flat buffer -> bucket

    def __enter__(self) -> "LaunchObserver":
        self._keys_outside = torch_private.autograd.dispatch_keys()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # AOTAutograd may compile a backward when it first runs, on fake tensors.
        if type(next(iter(args), None)) is not torch.Tensor:
            return func(*args, **kwargs)
        if func in LAUNCHES and is_called(args[-1], self._group_name) and self._is_seen(func):
            bucket = self._first_bucket + self.launched
            self.launched += 1
            with self._around_launch(bucket, args[0]):
                awaited = self._start(bucket, func, args)
            self._bucket_at[awaited.data_ptr()] = bucket
            return awaited if func._schema.returns else None
        if func is _WAIT and args[0].data_ptr() in self._bucket_at:
            with self._around_wait(self._bucket_at.pop(args[0].data_ptr())):
                return func(*args, **kwargs)
        schema = getattr(func, "_schema", None)  # a higher-order operator has none
        if schema is None or schema.name.startswith(_WITHOUT_DERIVATIVES):
            return func(*args, **kwargs)
        # A kernel of the user's may take derivatives, which torch does not record inside of a mode.
        with torch_private.autograd.dispatched_by(self._keys_outside):
            return func(*args, **kwargs)

    def _is_seen(self, func: Any) -> bool:
        return self._sees_gathers or func not in GATHERS


def start_collective(operator: Any, args: tuple[Any, ...]) -> torch.Tensor:
    """Launch a graph's collective; returns what is to be awaited."""
    awaited: torch.Tensor = awaited_of(operator, args, operator(*args))
    return awaited


UNNAMED = contextlib.nullcontext()  # what `profiled` returns while nothing records


def profiled(what: str, name: Callable[[int], str], bucket: int) -> AbstractContextManager[object]:
    """The range "compiled_ddp: `what` `name(bucket)`" in torch.profiler, and in NVTX under emit_nvtx.

    Nothing where neither records.
    """
    if torch_private.autograd.profiler_is_on():
        return record_function(f"compiled_ddp: {what} {name(bucket)}")
    return UNNAMED
