"""What torchrun gives the processes that it starts, for ranks that are there already."""

import contextlib
import os
import socket
from collections.abc import Iterator
from unittest import mock


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def environment(rank: int, world_size: int, port: int) -> Iterator[None]:
    """The variables by which `rank` finds the others; `port` is free on this machine."""
    variables = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
    }
    with mock.patch.dict(os.environ, variables):
        yield
