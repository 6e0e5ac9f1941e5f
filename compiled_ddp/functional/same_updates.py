"""Whether a hook on buckets leaves the same on all ranks, seen by what becomes of parameters.

No sum proves what such a hook makes of gradients, and one that has something of this rank's own in it lets the models
drift apart. So ranks compare checksums of parameters behind the first update that changes any; of gradients, where the
update is not the graph's, and may raise on one rank.
"""

import functools
from collections.abc import Mapping

from torch import Tensor

from compiled_ddp.comm_hooks import CommHook
from compiled_ddp.formatting import format_function, format_names
from compiled_ddp.functional.communicator import Communicator
from compiled_ddp.functional.first_parameters import checksums_of
from compiled_ddp.plan import BucketPlan


class SameUpdates:
    """Of one hook; compared anew where it has other buckets."""

    def __init__(self, hook: CommHook) -> None:
        self._hook = hook
        self._plan: BucketPlan | None = None
        self.is_seen = False  # whether ranks have compared an update by this plan, which is the same on all of them

    def begin(self, plan: BucketPlan) -> None:
        if plan != self._plan:
            self._plan, self.is_seen = plan, False

    def compare(self, communicator: Communicator, before: Mapping[str, int], tensors: Mapping[str, Tensor]) -> None:
        """Parameters, or their gradients, are these behind an update, and had the checksums `before` it. A collective.

        Raises RuntimeError, on every rank, where they are no longer alike. Where they were not alike before, as first
        parameters are told of that may be meant to differ, this tells nothing.
        """
        after, agreements = checksums_of(tensors), communicator.agreements
        compare = functools.partial(agreements.compare, dict, format_function(self._hook), communicator.made)
        differed, differ = compare(checksums=lambda: before), compare(checksums=lambda: after)
        self.is_seen = bool(differed) or after != before
        if differ and not differed:
            ranks = format_names([str(rank) for rank in sorted(differ)])
            name, number = differ[min(differ)]
            others = f" and {number - 1} more" if number > 1 else ""
            raise RuntimeError(
                f"behind an update with comm_hook={format_function(self._hook)} what comes of parameter "
                f"{name}{others} on rank {ranks} is not what it is on rank {agreements.ranks.ranks[0]}: what a hook "
                "returns must be made of what all ranks get from its collectives alone, and not of this rank's own "
                "gradients. The models have drifted apart: begin with other weights, and with another hook."
            )
