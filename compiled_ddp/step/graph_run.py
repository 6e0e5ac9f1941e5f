"""Around one run of a graph that launches its buckets by itself: names for the profiler, a report of a failed wait."""

import contextlib
from collections.abc import Iterator

from compiled_ddp import torch_private
from compiled_ddp.ranks.communicator import Communicator
from compiled_ddp.ranks.launch_observer import LaunchObserver, profiled
from compiled_ddp.ranks.progress import failed_in_collective


@contextlib.contextmanager
def watched_graph(communicator: Communicator, group_name: str) -> Iterator[None]:
    """Watch the graph that `communicator.progress` has been told of, and which calls the group `group_name`."""
    try:
        with _named_in_profiles(communicator, group_name):
            yield
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
