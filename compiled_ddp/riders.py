"""What riders carry from this rank, and reading what came back without making a GPU wait."""

from collections.abc import Callable, Iterable

import torch

from compiled_ddp.plan import ABORTED, COUNT_MODULUS, FIRST_USED, FORWARD_COUNT, FORWARD_COUNT_SQUARED, Riders


def rider_values(
    riders: Riders, *, forward_count: int, used: Callable[[int], bool], aborted: bool = False
) -> torch.Tensor:
    """This rank's rider elements, shape (riders.numel,), on CPU; `used` tells whether it produced a gradient."""
    count = float(forward_count % COUNT_MODULUS)
    values = [0.0] * FIRST_USED
    values[FORWARD_COUNT], values[FORWARD_COUNT_SQUARED] = count, count * count
    values[ABORTED] = float(aborted)
    return torch.tensor(values + [float(used(index)) for index in riders.indices])


class AbortReader:
    """On how many ranks a backward broke off: at once on CPU, one backward later elsewhere.

    A device-to-host read in every step would stall a GPU, so there the value is copied to pinned memory behind the
    kernels of this backward, and read when the next one ends.
    """

    def __init__(self) -> None:
        self._copied: torch.Tensor | None = None
        self._ready: torch.Event | None = None

    def read(self, riders: Iterable[torch.Tensor], *, at_once: bool = False) -> int:
        """The largest number of broken-off ranks in `riders`, or in those of the call before.

        With `at_once` the device is waited for: what follows must not happen on some ranks alone.
        """
        values = [rider[ABORTED] for rider in riders]
        if not values:
            return 0
        if at_once or values[0].device.type == "cpu":
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
