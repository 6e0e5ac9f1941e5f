"""Seeing the launches of a captured graph while it runs, without another variant of it and without recompiling."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from compiled_ddp.torch_private import TorchDispatchMode

_LAUNCHES = (
    torch.ops._c10d_functional.all_reduce.default,
    torch.ops._c10d_functional.all_reduce_.default,  # what Inductor makes of it
)


class LaunchObserver(TorchDispatchMode):
    """While entered, calls `before_launch(number, flat_buffer)` for every all-reduce on one communicator.

    `number` counts the launches from 0, so that it is the position of the bucket in the graph's plan. Launches from
    C++ (Inductor's `cpp_wrapper`) are not seen; `launched` tells how many were.
    """

    def __init__(self, group_name: str, *, before_launch: Callable[[int, torch.Tensor], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._group_name, self._before_launch = group_name, before_launch
        self.launched = 0

    supports_higher_order_operators = True  # passes them on like all others

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        # AOTAutograd may compile a backward when it first runs, on fake tensors.
        if func in _LAUNCHES and args[2] == self._group_name and type(args[0]) is torch.Tensor:
            self._before_launch(self.launched, args[0])
            self.launched += 1
        return func(*args, **(kwargs or {}))
