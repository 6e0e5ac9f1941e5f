"""What a captured graph's backward does with a reserved section, without a compiler."""

from collections.abc import Mapping

import torch
from torch import Tensor
from wire import WiredCommunicator

from compiled_ddp.plan import BucketPlan
from compiled_ddp.step.graphs import ReservedSection
from compiled_ddp.step.steady import SteadyGraph


class GraphRun:
    """Launches its buckets when it is made; what comes back follows in `complete`."""

    def __init__(
        self,
        reserved: ReservedSection | SteadyGraph,
        plan: BucketPlan,
        gradients: Mapping[int, Tensor | None],
        communicator: WiredCommunicator,
        *,
        most: int = 99,
        lent: bool = True,
    ) -> None:
        """`gradients` has what the graph computes for each parameter, None where that is nothing.

        An exception ends it after `most` launches. Where no memory is `lent`, as on a GPU, it allocates its own.
        """
        self.plan, self._communicator = plan, communicator
        missing = [index for index, gradient in gradients.items() if gradient is None]
        buckets, folded = range(len(plan.buckets)) if lent else (), list[Tensor]()
        given: list[Tensor] | None = None
        if isinstance(reserved, SteadyGraph):
            assert not missing
            given = reserved.inputs(buckets, GraphRun, plan.fingerprint)
            reserved = reserved if given is not None else reserved.in_general()
        if given is not None:
            riders, *self.flats = given
        else:
            assert isinstance(reserved, ReservedSection)
            folded += reserved.gradients_to_fold()
            self.flats = reserved.lend_buffers(buckets)
            riders = reserved.rider_values(missing)
        self.reserved = reserved
        earlier = dict(zip(plan.indices, folded or [torch.zeros(())] * len(plan.indices), strict=True))
        self.flats = self.flats or [torch.empty(bucket.numel) for bucket in plan.buckets]
        self._works = []
        for bucket, flat in [*zip(plan.buckets, self.flats, strict=True)][:most]:
            for gradient in bucket.gradients:
                brought = gradients[gradient.index]
                total = earlier[gradient.index] + (0.0 if brought is None else brought)
                gradient.view(flat).copy_(total * plan.share)
            if bucket.riders is not None:
                bucket.riders.view(flat).copy_(riders)
            self._works.append(communicator.all_reduce(flat))

    def wait(self) -> None:
        """For all that has been launched."""
        for work in self._works:
            work.wait()

    def complete(self) -> dict[int, Tensor]:
        """Wait; returns the means, which `accumulate_all` takes."""
        self.wait()
        riders = self.plan.riders.view(self.flats[-1]).clone()
        left_out = self.reserved.unused_everywhere(riders) if isinstance(self.reserved, ReservedSection) else set[int]()
        of_buckets = zip(self.plan.buckets, self.flats, strict=True)
        means = {g.index: g.view(flat).clone() for bucket, flat in of_buckets for g in bucket.gradients}
        means = {index: mean for index, mean in means.items() if index not in left_out}
        self._communicator.progress.graph_ended()
        handed_out = self.reserved.complete(riders, list(means), list(means.values()), left_out)
        return dict(zip(means, handed_out, strict=True))
