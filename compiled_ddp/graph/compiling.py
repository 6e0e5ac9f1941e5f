"""How Python is set up while compilers run in it."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from compiled_ddp.collector import full_collections_put_off
from compiled_ddp.frames import with_room_for_frames

P = ParamSpec("P")
T = TypeVar("T")


def compiling(function: Callable[P, T]) -> Callable[P, T]:
    """`function`, which runs a compiler: with room for its frames, and no collections of all objects."""

    @with_room_for_frames
    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        with full_collections_put_off():
            return function(*args, **kwargs)

    return call
