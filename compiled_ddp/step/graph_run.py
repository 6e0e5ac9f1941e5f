"""One run of a graph that launches its buckets by itself: names for the profiler, a report of a failed wait."""

import contextlib
from collections.abc import Callable
from typing import TypeVar

from compiled_ddp import torch_private
from compiled_ddp.ranks.communicator import Communicator
from compiled_ddp.ranks.launch_observer import LaunchObserver, profiled
from compiled_ddp.ranks.progress import failed_in_collective

T = TypeVar("T")


def run_graph(
    graph: Callable[[], T],
    communicator: Communicator,
    group_name: str,
    watching: contextlib.AbstractContextManager[object] | None,
) -> T:
    """What `graph` returns, of which `communicator.progress` has been told, and which calls the group `group_name`.

    It runs in the context `watching`, if there is one. A collective in it that fails is raised with a report of where
    every rank stands.
    """
    try:
        if watching is None and not torch_private.autograd.profiler_is_on():
            return graph()
        with _named_in_profiles(communicator, group_name), watching or contextlib.nullcontext():
            return graph()
    except RuntimeError as error:
        if not failed_in_collective(error):
            raise
        rank = communicator.ranks.ranks[communicator.rank]
        raise communicator.failure(error, f"rank {rank}: a collective in the backward graph failed") from error
    finally:
        communicator.progress.graph_ended()


def _named_in_profiles(communicator: Communicator, group_name: str) -> contextlib.AbstractContextManager[object]:
    if not torch_private.autograd.profiler_is_on():
        return contextlib.nullcontext()
    rank_progress = communicator.progress
    return LaunchObserver(
        group_name,
        rank_progress.first_of_graph,
        launch=lambda bucket, _: profiled("launch", rank_progress.bucket, bucket),
        wait=lambda bucket: profiled("wait for", rank_progress.bucket, bucket),
    )
