"""What riders carry from this rank, and reading what came back without making a GPU wait."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from compiled_ddp.plan import (
    ABORTED,
    ANNOUNCED,
    COUNT_MODULUS,
    FIRST_USED,
    FORWARD_COUNT,
    FORWARD_COUNT_SQUARED,
    MISFIT,
    VERIFY,
    WEIGHT,
    Riders,
)


@dataclass
class Message:
    """What this rank tells all others in the riders of every section of one backward; see `Riders`."""

    forward_count: int
    announced: int = 0
    misfit: bool = False
    aborted: bool = False
    verify: bool = False
    weight: float = 1.0
    passengers: torch.Tensor | None = None  # the user's values, shape (riders.passengers,); None for zeros

    def of_the_same_step(self) -> "Message":
        """The message of a further reduction in the same step."""
        return Message(self.forward_count, weight=self.weight)


def write_riders(into: torch.Tensor, riders: Riders, message: Message, used: Callable[[int], bool]) -> torch.Tensor:
    """Put this rank's rider elements into `into`, shape (riders.numel,), which is returned.

    `used` tells whether this rank produced a gradient.
    """
    users = riders.numel - riders.passengers
    into[:users].copy_(rider_values(riders, message, used), non_blocking=True)
    if riders.passengers:
        into[users:] = 0.0 if message.passengers is None else message.passengers
    return into


def rider_values(riders: Riders, message: Message, used: Callable[[int], bool]) -> torch.Tensor:
    """This rank's rider elements but for the user's, on CPU; `used` tells whether it produced a gradient."""
    count = float(message.forward_count % COUNT_MODULUS)
    values = [0.0] * FIRST_USED
    values[FORWARD_COUNT], values[FORWARD_COUNT_SQUARED] = count, count * count
    values[ABORTED], values[ANNOUNCED], values[MISFIT], values[VERIFY] = map(
        float, (message.aborted, message.announced, message.misfit, message.verify)
    )
    values[WEIGHT] = message.weight
    return torch.tensor(values + [float(used(index)) for index in riders.indices])


@dataclass(frozen=True)
class Findings:
    """What the riders of a backward say, the same on every rank."""

    aborted_on: int = 0  # ranks on which the backward broke off
    counts_differ: bool = False  # whether the ranks have begun different numbers of forwards
    announced: bool = False  # whether a rank has used a parameter of an "unused" section
    misfits_on: int = 0  # ranks whose graphs did not fit the sequence
    verify: bool = False  # whether a rank wishes that all prove the reduction


class RiderReader:
    """Reads what every rank must know of a backward: at once on CPU, one backward later elsewhere.

    A device-to-host read in every step would stall a GPU, so there the values are copied to pinned memory behind the
    kernels of this backward, and read when the next one ends.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._copied: torch.Tensor | None = None
        self._ready: torch.Event | None = None

    def read(self, riders: Iterable[torch.Tensor], *, at_once: bool = False) -> Findings:
        """What `riders`, one tensor per section, say; or those of the call before.

        With `at_once` the device is waited for: what follows must not happen on some ranks alone.
        """
        leading = [rider[:FIRST_USED] for rider in riders]
        if not leading:
            return Findings()
        if at_once or leading[0].device.type == "cpu":
            return self._findings(torch.stack(leading))
        before = self._earlier()
        self._copied = torch.stack(leading).to("cpu", non_blocking=True)
        self._ready = torch.Event(leading[0].device)
        self._ready.record()
        return before

    def _earlier(self) -> Findings:
        if self._copied is None or self._ready is None:
            return Findings()
        self._ready.synchronize()
        return self._findings(self._copied)

    def _findings(self, leading: torch.Tensor) -> Findings:
        sections = leading.tolist()
        return Findings(
            aborted_on=int(max(sums[ABORTED] for sums in sections)),
            announced=any(sums[ANNOUNCED] > 0 for sums in sections),
            misfits_on=int(max(sums[MISFIT] for sums in sections)),
            # The variance of the counts over ranks, exact in these sums of small integers.
            counts_differ=any(
                self._world_size * sums[FORWARD_COUNT_SQUARED] != sums[FORWARD_COUNT] ** 2 for sums in sections
            ),
            verify=any(sums[VERIFY] > 0 for sums in sections),
        )
