"""Around one run of a graph that launches its buckets by itself: names for the profiler, a report of a failed wait."""

import contextlib
from collections.abc import Iterator

from compiled_ddp import torch_private
from compiled_ddp.communicator import Communicator
from compiled_ddp.launch_observer import LaunchObserver, profiled


@contextlib.contextmanager
def watched_graph(communicator: Communicator) -> Iterator[None]:
    """Watch the graph that `communicator.standing` has been told of."""
    try:
        with communicator.explaining("a collective in the backward graph failed"), _named_in_profiles(communicator):
            yield
    finally:
        communicator.standing.graph_ended()


def _named_in_profiles(communicator: Communicator) -> contextlib.AbstractContextManager[object]:
    if not torch_private.profiler_is_on():
        return contextlib.nullcontext()
    standing = communicator.standing
    return LaunchObserver(
        communicator.group_name,
        standing.first_of_graph,
        launch=lambda bucket, _: profiled("launch", standing.bucket, bucket),
        wait=lambda bucket: profiled("wait for", standing.bucket, bucket),
    )
