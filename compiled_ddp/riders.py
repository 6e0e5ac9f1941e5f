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
    HOOK_FAILED,
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
    hook_failed: bool = False
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
        if message.passengers is None:
            into[users:].zero_()
        else:
            into[users:].copy_(message.passengers, non_blocking=True)
    return into


def rider_values(riders: Riders, message: Message, used: Callable[[int], bool]) -> torch.Tensor:
    """This rank's rider elements but for the user's, on CPU; `used` tells whether it produced a gradient."""
    count = float(message.forward_count % COUNT_MODULUS)
    values = [0.0] * FIRST_USED
    values[FORWARD_COUNT], values[FORWARD_COUNT_SQUARED] = count, count * count
    values[ABORTED], values[ANNOUNCED], values[MISFIT], values[VERIFY] = map(
        float, (message.aborted, message.announced, message.misfit, message.verify)
    )
    values[HOOK_FAILED] = float(message.hook_failed)
    values[WEIGHT] = message.weight
    values += [float(used(index)) for index in riders.indices]
    return torch.tensor(values, dtype=torch.float32, device="cpu")


@dataclass(frozen=True)
class Findings:
    """What the riders of a backward say, the same on every rank."""

    aborted_on: int = 0  # ranks on which the backward broke off
    counts_differ: bool = False  # whether the ranks have begun different numbers of forwards
    announced: bool = False  # whether a rank has used a parameter of an "unused" section
    misfits_on: int = 0  # ranks whose graphs did not fit the sequence
    verify: bool = False  # whether a rank wishes that all prove the reduction
    hook_failed_on: int = 0  # ranks on which the communication hook raised


class RiderReader:
    """Reads what every rank must know of a backward: at once on CPU, one backward later elsewhere.

    A device-to-host read in every step would stall a GPU, so there the values are copied to pinned memory behind the
    kernels of this backward, and read when the next one ends.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self.was_at_once = True  # whether the last findings were those of the backward that they were read in
        self._copied: torch.Tensor | None = None
        self._ready: torch.Event | None = None

    def read(self, riders: Iterable[torch.Tensor], *, at_once: bool = False) -> Findings:
        """What `riders`, one tensor per section, say; or those of the call before.

        With `at_once` the device is waited for: what follows must not happen on some ranks alone.
        """
        leading = [rider[:FIRST_USED] for rider in riders]
        if not leading:
            return Findings()
        device = next((part.device for part in leading if part.device.type != "cpu"), torch.device("cpu"))
        together = torch.stack([part.to(device, non_blocking=True) for part in leading])
        self.was_at_once = at_once or device.type == "cpu"
        before = self._earlier()
        if self.was_at_once:
            return self._findings([*before, *together.tolist()])
        self._copied = together.to("cpu", non_blocking=True)
        self._ready = torch.Event(device)
        self._ready.record(torch.accelerator.current_stream(device))
        return self._findings(before) if before else Findings()

    def _earlier(self) -> list[list[float]]:
        """What has been copied and not been told yet."""
        if self._copied is None or self._ready is None:
            return []
        self._ready.synchronize()
        earlier: list[list[float]] = self._copied.tolist()
        self._copied = None
        return earlier

    def _findings(self, sections: list[list[float]]) -> Findings:
        return Findings(
            aborted_on=int(max(sums[ABORTED] for sums in sections)),
            announced=any(sums[ANNOUNCED] > 0 for sums in sections),
            misfits_on=int(max(sums[MISFIT] for sums in sections)),
            # The variance of the counts over ranks, exact in these sums of small integers.
            counts_differ=any(
                self._world_size * sums[FORWARD_COUNT_SQUARED] != sums[FORWARD_COUNT] ** 2 for sums in sections
            ),
            verify=any(sums[VERIFY] > 0 for sums in sections),
            hook_failed_on=int(max(sums[HOOK_FAILED] for sums in sections)),
        )
