"""Ranks on this machine, for a command that no launcher has started."""

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from uuid import uuid4

from torch.distributed.launcher.api import LaunchConfig, elastic_launch


def run_on_own_ranks(
    ranks: int, entry: Callable[..., Any] | str, *arguments: Any, environment: Mapping[str, str]
) -> dict[int, Any]:
    """Start so many processes, and wait for them: what a function `entry` returned, by rank, or nothing of a command.

    `environment` is added to that of each; torch's launcher sets RANK and the rest. Ranks meet over loopback. A rank
    that fails ends the others, and raises here.
    """
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        local_addr="localhost",  # of the ranks' store: the machine's own name may not resolve
    )
    interface = {
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    }
    with environment_with({**interface, **environment}):  # the launcher hands its own to the ranks
        returned: dict[int, Any] = elastic_launch(config, entry)(*arguments)
    return returned


def threads_for(ranks: int) -> dict[str, str]:
    """The environment of so many processes that share this machine's cores; OMP_NUM_THREADS holds as it is."""
    return {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks)))}


@contextmanager
def environment_with(settings: Mapping[str, str]) -> Iterator[None]:
    """This process has `settings` in its environment, and hands them to those that it starts."""
    before = dict(os.environ)
    os.environ.update(settings)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
