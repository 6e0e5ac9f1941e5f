"""What riders carry from this rank, and reading what came back without making a GPU wait."""

import enum
import functools
import itertools
import operator
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field

import torch

from compiled_ddp.plan import (
    ABORTED,
    COUNT_MODULUS,
    FIRST_USED,
    FORWARD_COUNT,
    FORWARD_COUNT_SQUARED,
    GRAPH_MISMATCH,
    HOOK_FAILED,
    LOST,
    NEWLY_USED,
    RETURNED_COUNT,
    RETURNED_COUNT_SQUARED,
    STATE_LOST,
    VERIFY,
    WEIGHT,
    Riders,
)
from compiled_ddp.ranks.host_numbers import LateRows, to_copy
from compiled_ddp.step.forwards import ForwardNumbers

# A count and its square.
_BEGUN = FORWARD_COUNT, FORWARD_COUNT_SQUARED
_RETURNED = RETURNED_COUNT, RETURNED_COUNT_SQUARED


class Flag(enum.IntEnum):
    """What a rank may have to tell all others in a backward; the value is its element of the riders: see `Riders`."""

    ABORTED = ABORTED
    LOST = LOST
    STATE_LOST = STATE_LOST
    VERIFY = VERIFY
    NEWLY_USED = NEWLY_USED
    GRAPH_MISMATCH = GRAPH_MISMATCH
    HOOK_FAILED = HOOK_FAILED


@dataclass
class Message:
    """What this rank tells all others in the riders of every section of one backward."""

    forwards: ForwardNumbers
    weight: float = 1.0
    piggyback: torch.Tensor | None = None  # the user's values, shape (riders.passengers,); None for zeros
    flags: set[Flag] = field(default_factory=set)

    def note(self, *flags: Flag) -> None:
        self.flags.update(flags)

    def of_the_same_step(self) -> "Message":
        """The message of a further reduction in the same step."""
        return Message(self.forwards, self.weight)


def write_riders(into: torch.Tensor, riders: Riders, message: Message, unused: Set[int]) -> torch.Tensor:
    """Put this rank's rider elements into `into`, shape (riders.numel,), which is returned.

    Of the `unused` parameters this rank produced no gradient.
    """
    if not unused and not riders.passengers:
        return into.copy_(_usual(message, riders.numel, into.device), non_blocking=True)
    users = riders.numel - riders.passengers
    into[:FIRST_USED].copy_(_leading(message, into.device), non_blocking=True)
    used = into[FIRST_USED:users]
    if unused:
        used.copy_(to_copy([float(index not in unused) for index in riders.indices], into.device), non_blocking=True)
    else:
        used.fill_(1.0)
    if riders.passengers:
        if message.piggyback is None:
            into[users:].zero_()
        else:
            into[users:].copy_(message.piggyback, non_blocking=True)
    return into


def _leading(message: Message, device: torch.device) -> torch.Tensor:
    """The elements that come before those of the parameters, to be copied to `device`; only to be read."""
    return _usual(message, FIRST_USED, device)


def _usual(message: Message, numel: int, device: torch.device) -> torch.Tensor:
    """The riders of a rank that has used every parameter, shape (numel,), without passengers; only to be read."""
    forwards = message.forwards
    counts = forwards.begun % COUNT_MODULUS, forwards.returned % COUNT_MODULUS
    return _usual_of(*counts, message.weight, frozenset(message.flags), numel, device)


# Most steps differ in their counts alone, which begin anew after `COUNT_MODULUS` of them.
@functools.lru_cache(maxsize=4 * COUNT_MODULUS)
def _usual_of(
    begun: int, returned: int, weight: float, flags: Set[Flag], numel: int, device: torch.device
) -> torch.Tensor:
    values = [0.0] * FIRST_USED
    for (count, squared), number in zip((_BEGUN, _RETURNED), (begun, returned), strict=True):
        values[count], values[squared] = float(number), float(number**2)
    for flag in flags:
        values[flag] = 1.0
    values[WEIGHT] = weight
    return to_copy([*values, *itertools.repeat(1.0, numel - FIRST_USED)], device)


def ranks_using(riders: Riders, sums: torch.Tensor) -> dict[int, float]:
    """On how many ranks each parameter of a section is used, by the `sums` of its riders; reads from their device."""
    return dict(zip(riders.indices, sums[FIRST_USED:].tolist(), strict=False))


_flags_in = operator.itemgetter(*Flag)


@dataclass(frozen=True)
class Findings:
    """What the riders of a backward say, the same on every rank."""

    backwards: int = 0  # how many they are of: none, this one, the one before it, or both
    counts_differ: bool = False  # whether the ranks average different steps: [Note: forwards that are no step]
    forgiven: bool = False  # whether they do not, as they have begun different numbers of forwards that raised
    most: Sequence[float] = (0.0,) * FIRST_USED  # the largest sum over ranks of each leading element, over sections
    are_quiet: bool = (
        True  # whether no rank has told anything that another one would have to heed: `most` is zeros then
    )

    def ranks_with(self, flag: Flag) -> int:
        """On how many ranks the flag is set."""
        return int(self.most[flag])


_quiet = functools.lru_cache(Findings)


class RiderReader:
    """Reads what every rank must know of a backward: at once on CPU, elsewhere when the next one ends."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self.was_at_once = True  # whether the last findings were those of the backward that they were read in
        self._late = LateRows()

    def read(self, riders: Iterable[torch.Tensor], *, at_once: bool = False) -> Findings:
        """What `riders`, one tensor per section, say; or those of the call before.

        With `at_once` the device is waited for: what follows must not happen on some ranks alone.
        """
        leading, device = [], None
        for rider in riders:
            leading.append(rider[:FIRST_USED])
            if not rider.is_cpu and device is None:
                device = rider.device
        if not leading:
            return Findings()
        self.was_at_once = at_once or device is None
        before = [] if self._late.copied is None else self._late.take()
        if self.was_at_once:
            return self._findings([*before, *map(torch.Tensor.tolist, leading)], backwards=1 + bool(before))
        assert device is not None
        self._late.copy(leading, device)
        return self._findings(before, backwards=1) if before else Findings()

    def _findings(self, sections: list[list[float]], *, backwards: int) -> Findings:
        same_begun = True
        for sums in sections:
            same_begun = same_begun and self._agree(sums, *_BEGUN)
        if same_begun and not any(map(any, map(_flags_in, sections))):
            return _quiet(backwards)
        same_returned = same_begun or all(self._agree(sums, *_RETURNED) for sums in sections)
        return Findings(
            backwards=backwards,
            counts_differ=not same_returned,
            forgiven=same_returned and not same_begun,
            most=[max(sums) for sums in zip(*sections, strict=True)],
            are_quiet=False,
        )

    def _agree(self, sums: list[float], count: int, squared: int) -> bool:
        """Whether all ranks have the same count: its variance over ranks, exact in these sums of small integers."""
        return self._world_size * sums[squared] == sums[count] ** 2
