"""Reading the riders that came back, without making a GPU wait."""

from collections.abc import Iterable

import torch

from compiled_ddp.plan import ABORTED


class AbortReader:
    """On how many ranks a backward broke off: at once on CPU, one backward later elsewhere.

    A device-to-host read in every step would stall a GPU, so there the value is copied to pinned memory behind the
    kernels of this backward, and read when the next one ends.
    """

    def __init__(self) -> None:
        self._copied: torch.Tensor | None = None
        self._ready: torch.Event | None = None

    def read(self, riders: Iterable[torch.Tensor]) -> int:
        """The largest number of broken-off ranks in `riders`, or in those of the call before."""
        values = [rider[ABORTED] for rider in riders]
        if not values:
            return 0
        if values[0].device.type == "cpu":
            return int(max(value.item() for value in values))
        before = self._earlier()
        self._copied = torch.stack(values).amax().to("cpu", non_blocking=True)
        self._ready = torch.Event(values[0].device)
        self._ready.record()
        return before

    def _earlier(self) -> int:
        if self._copied is None or self._ready is None:
            return 0
        self._ready.synchronize()
        return int(self._copied.item())
