"""Room for Python's frames, where calls go deep."""

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

# [Note: room for frames] CPython (3.11 to 3.13, tried) keeps the frames of running functions in chunks of 16 KiB, and
# gives a chunk back to the system when the first frame in it ends. What is called in a loop and just does not fit into
# a chunk any more costs an mmap, a page fault and a munmap each time, more than the call itself. Which calls those are
# goes by the bytes of all frames below, so by chance. Compilers nest hundreds of calls and loop at every depth: it was
# up to a third of a forward that compiles, and five frames more or less around the same compiler made that difference.
# A frame that does not fit into a chunk gets one twice as large or more, to which it leaves the rest. So one frame of
# half a megabyte, which nothing ever touches, has half a megabyte behind it: some two thousand frames.
_FRAME_SLOTS = 2**16  # of 8 bytes


def with_room_for_frames(function: Callable[P, T]) -> Callable[P, T]:
    """`function`, below which calls may nest without a new chunk of the interpreter's stack for some of them.

    It costs a call and an mmap: not for what runs in every step.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        return function(*args, **kwargs)

    in_python: Any = call
    in_python.__code__ = in_python.__code__.replace(co_stacksize=_FRAME_SLOTS)
    return call
