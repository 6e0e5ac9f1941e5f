"""One bucket in one backward."""

from dataclasses import dataclass

import torch

from compiled_ddp.passes.ops import wait_tensor
from compiled_ddp.plan import Bucket
from compiled_ddp.reducers.reducer import Work


class LaunchedByGraph:
    """What stands for the Work of a bucket that a graph had launched when an exception ended it."""

    def __init__(self, flat: torch.Tensor | None) -> None:
        """`flat` is the memory that was launched, None where nobody knows it."""
        self.flat = flat

    def wait(self) -> None:
        self.wait_for_collectives()

    def wait_for_collectives(self) -> None:
        if self.flat is not None:
            wait_tensor(self.flat)  # a no-op where the graph has waited for it


@dataclass
class Launch:
    """What has become of a bucket so far."""

    section: int
    bucket: Bucket
    missing: set[int]  # gradients that hooks wait for
    gathered: dict[int, torch.Tensor]  # gradients that have come, and are to be put into the bucket together
    work: Work | None = None  # what hooks have launched
    _summed: torch.Tensor | None = None  # what that sums, until the mean has been made of it

    def sums(self, outgoing: torch.Tensor) -> None:
        """Hooks launch this."""
        self._summed = outgoing

    def started(self, work: Work) -> None:
        self.work = work

    def take_summed(self) -> torch.Tensor | None:
        """The sum that has arrived, once; None where hooks have launched nothing."""
        summed, self._summed = self._summed, None
        return summed
