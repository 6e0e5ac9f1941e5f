"""What a rank tells all others in the riders of a backward, what it keeps for that, and reading what came back.

[Note: forwards that are no step] A rank whose forward raised may try again, with two halves of its batch say: then what
it sends belongs to the step in which the others are, and only forwards that returned count. Or all ranks have dropped
that step, as they had agreed, and each has given up one forward. So ranks average one step if equally many of their
forwards have returned, or if they have begun equally many. (A rank that goes on with its next batch after one that
raised cannot be told from one that tries again: as under DDP its next step is averaged with the others' step.)
"""

import enum
import functools
import itertools
import operator
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

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

# ---- how many have begun that a synchronised backward was to follow --------------------------------------------------


@dataclass(frozen=True)
class ForwardNumbers:
    """A rank's numbers of forwards when a synchronised backward begins. [Note: forwards that are no step]"""

    begun: int  # but for those whose output was thrown away
    returned: int  # these without those that raised, as far as other ranks have not forgiven them


class _Graph:
    """Lives as long as one of the autograd nodes it is kept with."""


class ForwardCount:
    """How many forwards this rank has begun that a synchronised backward was to follow.

    A forward whose graph is dead before the next one begins, without a backward having reached it, is taken back:
    nobody can run its backward any more, so throwing an output away harms nothing. One that raised stays counted until
    the ranks turn out to average one step without it; `take_back` is for what has ended on every rank.
    """

    def __init__(self) -> None:
        self.value = 0
        self._waiting = 0  # of these, since the latest backward began
        self._raised = 0  # of these
        self._unsettled: list[int] = []  # that raised before each backward whose outcome is not known yet
        self._latest: weakref.ref[_Graph] | None = None  # of the latest forward, if it has returned and still waits

    def begin(self, *, after_exception: Callable[[], object] = bool) -> None:
        """Count a forward that begins; after an exception in a backward, the one before it was not thrown away."""
        if self._latest is not None and not self.waits_alive and not after_exception():
            self.value -= 1
            self._waiting -= 1
        self._latest = None
        self.value += 1
        self._waiting += 1

    def begin_late(self) -> None:
        """Count one that has begun uncounted, and whose backward begins now; a no-op if a counted one waits for it."""
        if not self._waiting:
            self.value += 1
            self._waiting += 1

    def returned(self, nodes: Iterable[Any]) -> None:
        """Note the autograd nodes of the outputs that the counted forward has returned."""
        graph = _Graph()
        for node in nodes:
            node.metadata["compiled_ddp.forward"] = graph
        self._latest = weakref.ref(graph)

    def raised(self) -> None:
        """Note that the counted forward has raised."""
        self._raised += 1

    @property
    def waits_alive(self) -> bool:
        """Whether the latest forward waits for a backward that somebody may still run."""
        return self._latest is not None and self._latest() is not None

    def follow(self, value: int) -> None:
        """Take the number that other ranks have, on one that shadows them."""
        self.value, self._latest = value, None
        self._raised = 0
        self._unsettled.clear()

    def backward_began(self) -> ForwardNumbers:
        """Keep the latest forward counted whatever becomes of its graph; returns what to tell the other ranks."""
        self._unsettled.append(self._raised)
        self._latest, self._waiting, self._raised = None, 0, 0
        return ForwardNumbers(self.value, self.value - sum(self._unsettled))

    def take_back_backward(self) -> None:
        """The latest one could not begin, and nothing of it was sent."""
        self._unsettled.pop()

    def settle(self, *, backwards: int, forgiven: bool) -> None:
        """The outcome of so many backwards, the earliest ones, is known: whether ranks averaged one step after all."""
        if forgiven:
            self.value -= sum(self._unsettled[:backwards])
        del self._unsettled[:backwards]

    def take_back(self) -> None:
        """Take back the forwards that wait for a backward: none comes that other ranks take part in."""
        self.value -= self._waiting
        self._latest, self._waiting, self._raised = None, 0, 0


# ---- the latest one --------------------------------------------------------------------------------------------------


class LatestForward:
    """Whether the latest forward was synchronised, who called it, and whether it still waits for its backward."""

    def __init__(self) -> None:
        self.synchronises = True  # whether its backward does: False under no_sync
        # Whether it was synchronised, or one before it in whose output nothing is seen of a graph, and no backward has
        # begun since.
        self.awaits_backward = False
        self._is_hidden = False  # whether the one that waits has returned no autograd node that was found
        self.count = ForwardCount()
        self._is_counted = False  # whether it is one of `count`
        self._may_count_late = False  # whether one was synchronised and not counted since the latest backward
        self.was_reached = False  # whether a backward, or a torch.autograd.grad, has begun since
        self._thread = 0

    def begin(self, *, synchronise: bool, counted: bool) -> None:
        """`counted` tells whether every rank is to begin as many such forwards as this one, which is in `count` then.

        Otherwise it is once its backward begins, if no counted one waits for that: one rank may train in eval mode.
        A local one takes the place of one that waits, unless that has hidden its graph (in a closure, in the module):
        nothing but the first gradient tells that its backward has come, and as under DDP this is taken for it.
        """
        self.synchronises = synchronise
        self.awaits_backward = synchronise or (self.awaits_backward and self._is_hidden)
        self._is_hidden = self._is_hidden and not synchronise
        self._thread = threading.get_ident()
        self._is_counted, self.was_reached = counted, False
        self._may_count_late = self._may_count_late or (synchronise and not counted)

    def begin_inside_backward(self, *, synchronise: bool, under_way: bool) -> None:
        """A reentrant checkpoint runs one of its own; `under_way` tells whether in a synchronised backward."""
        self.synchronises = synchronise
        self._is_counted = False
        self.awaits_backward = synchronise and not under_way

    def raised(self) -> None:
        """It has ended with an exception. [Note: forwards that are no step]"""
        if self._is_counted:
            self.count.raised()

    def returned(self, nodes: Collection[Any]) -> None:
        """It has returned outputs of these autograd nodes; one that runs again inside a backward has done so before."""
        self._is_hidden = self.awaits_backward and not nodes
        if self._is_counted and self.awaits_backward:
            self.count.returned(nodes)

    def backward_began(self, *, accumulates: bool) -> None:
        """It waits no more, unless a torch.autograd.grad, which does not accumulate, has come before its backward."""
        self.was_reached = True
        if self._may_count_late:
            self._may_count_late = False
            if self.awaits_backward:
                self.count.begin_late()
        self.awaits_backward = self.awaits_backward and not accumulates

    def drop(self) -> None:
        """No backward follows the forwards that wait for one, on any rank."""
        self.awaits_backward = self._may_count_late = False
        self.count.take_back()

    @property
    def is_of_this_thread(self) -> bool:
        return self._thread == threading.get_ident()

    def is_awaited(self) -> bool:
        """Whether it still waits for its backward, and its output has not just been thrown away.

        An exception that is being handled may be what has thrown it away.
        """
        return self.awaits_backward and (self.count.waits_alive or sys.exc_info()[0] is not None)


# ---- riders: what this rank tells ------------------------------------------------------------------------------------

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


# Most steps differ in their counts alone, which begin anew after `COUNT_MODULUS` of them; sections, by their lengths.
@functools.lru_cache(maxsize=16 * COUNT_MODULUS)
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


# ---- what one backward leaves to the next one ------------------------------------------------------------------------


class CarriedOver:
    """Gradients that are still to be reduced, what the other ranks are still to be told, and the user's own values."""

    def __init__(self) -> None:
        self.used: set[int] = set()  # parameters used by local backwards since the last synchronised one
        self.expected_gradients: Counter[int] = Counter()  # the most gradients each has got in one backward
        self.weight = 1.0  # of this rank in a weighted mean
        self.piggyback: torch.Tensor | None = None  # the user's rider elements for the next synchronised backward
        self.piggybacked: torch.Tensor | None = None  # their sums over ranks in the latest one
        self.to_tell: set[Flag] = set()  # by the backward that begins next

    # ---- gradients ---------------------------------------------------------------------------------------------------

    def note_local_use(self, indices: Iterable[int]) -> None:
        """A local backward has brought these parameters gradients."""
        self.used.update(indices)

    def note_reduced(self) -> None:
        """All that had been used has been reduced."""
        self.used = set()

    def note_gradients(self, arrived: Mapping[int, int]) -> None:
        """So many gradients each parameter has got in a backward."""
        self.expected_gradients |= Counter(arrived)

    def begin_anew(self) -> None:
        """The sequence is another one."""
        self.expected_gradients = Counter()

    def renumber(self, place_of: Callable[[int], int | None]) -> None:
        """The parameters have other indices; None is for those that are trained no more."""
        self.used = {place for index in self.used if (place := place_of(index)) is not None}

    # ---- for the other ranks -----------------------------------------------------------------------------------------

    def note_lost(self, *, tell: bool = True, state: bool = False) -> None:
        """The backward has ended here with an error when everything of it had been sent.

        With `state`, also the new state of a traced communication hook is lost. Others are told of it in the next
        backward, unless they know: then `tell` is False.
        """
        self.to_tell = {flag for flag, wanted in ((Flag.LOST, tell), (Flag.STATE_LOST, state)) if wanted}

    def take_flags(self) -> set[Flag]:
        """What the backward that begins must tell."""
        flags, self.to_tell = self.to_tell, set()
        return flags

    # ---- the user's --------------------------------------------------------------------------------------------------

    def set_weight(self, weight: float) -> None:
        self.weight = weight

    def set_piggyback(self, values: torch.Tensor) -> None:
        """Send these values, of shape (number of names in `Options.piggyback`,), along with the next riders."""
        self.piggyback = values

    def take_sums(self, riders: Sequence[torch.Tensor], count: int) -> None:
        """Keep the sums of the `count` values that were sent along; every section carries the same."""
        if count and riders:
            self.piggybacked = riders[-1][-count:].clone()
            self.piggyback = None

    def put_aside(self) -> None:
        """Forget what has not been sent."""
        self.used, self.piggyback = set(), None

    def take_up_again(self, used: set[int], piggyback: torch.Tensor | None) -> None:
        """Bring back what was put aside."""
        self.used, self.piggyback = used, piggyback


# ---- riders: what came back ------------------------------------------------------------------------------------------


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
        same_begun = self._agree(sections, *_BEGUN)
        if same_begun and not any(map(any, map(_flags_in, sections))):
            return _quiet(backwards)
        same_returned = same_begun or self._agree(sections, *_RETURNED)
        return Findings(
            backwards=backwards,
            counts_differ=not same_returned,
            forgiven=same_returned and not same_begun,
            most=[max(sums) for sums in zip(*sections, strict=True)],
            are_quiet=False,
        )

    def _agree(self, sections: list[list[float]], count: int, squared: int) -> bool:
        """Whether all ranks have the same count: its variance over ranks, exact in these sums of small integers."""
        for sums in sections:  # noqa: SIM110
            if self._world_size * sums[squared] != sums[count] ** 2:
                return False
        return True
