"""What torchrun gives the processes that it starts, for ranks that are there already."""

import contextlib
import os
import socket
from collections.abc import Iterator
from unittest import mock


def free_port() -> int:
    (port,) = free_ports(1)
    return port


def free_ports(number: int) -> list[int]:
    """Different ones: that behind a free one may be anybody's."""
    with contextlib.ExitStack() as probes:
        sockets = [probes.enter_context(socket.socket()) for _ in range(number)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in sockets]


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
