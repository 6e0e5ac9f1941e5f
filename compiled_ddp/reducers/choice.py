"""Which reducer a backward has."""

from collections.abc import Sequence

import torch

from compiled_ddp.plan import Bucket, Section
from compiled_ddp.ranks.communicator import Communicator
from compiled_ddp.reducers.ddp_hook import DDPHook, TorchCommHook
from compiled_ddp.reducers.hook_state import BucketHook
from compiled_ddp.reducers.reducer import Reducer
from compiled_ddp.reducers.traced_hook import TracedHook


def reducer_of(
    communicator: Communicator,
    sections: Sequence[Section],
    buckets: Sequence[tuple[int, Bucket]],
    parameters: Sequence[torch.nn.Parameter],
    *,
    traced_hook: BucketHook | None,
    ddp_hook: TorchCommHook | None,
) -> Reducer:
    """For a backward that launches these `sections`, with these `buckets`, each with the number of its section.

    At most one of the hooks is given.
    """
    if ddp_hook is not None:
        return DDPHook(communicator, ddp_hook, [bucket for _, bucket in buckets], parameters)
    if traced_hook is not None:
        return TracedHook(communicator, traced_hook, sections)
    return Reducer(communicator)
