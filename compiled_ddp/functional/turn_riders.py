"""What the leading riders of a functional reduction tell, and reading it without making a GPU wait."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from compiled_ddp import torch_private
from compiled_ddp.plan import COUNT_MODULUS, FIRST_USED
from compiled_ddp.step.riders import pinned_for

# | element | value on each rank, summed over ranks |
# |---|---|
# | `_CALL`, `_CALL_SQUARED` | reductions begun, modulo `COUNT_MODULUS`, and its square |
# | `_DEPARTED` | 1 where this rank cannot launch what all expect, and has sent zeros |
# | `_REMAINING` | how many more this rank launches before it looks at what the others tell |
# | `_WISHES` | 1 where a rank wishes to see the next launch of this reduction proven |
# | `_GROUPS`, `_GROUPS_SQUARED` | on how many communicators this rank launches before it looks, and its square |
_CALL, _CALL_SQUARED, _DEPARTED, _REMAINING, _WISHES, _GROUPS, _GROUPS_SQUARED = range(7)


def new_leading(device: torch.device) -> Tensor:
    """Memory for the leading riders."""
    with torch_private.tracing.outside_of_traces():
        return torch.zeros(FIRST_USED, dtype=torch.float32, device=device)


def write_turn(
    into: Tensor, *, call: int, remaining: int, groups: int, departs: bool = False, wishes: bool = False
) -> None:
    values = [0.0] * FIRST_USED
    values[_CALL] = float(call % COUNT_MODULUS)
    values[_CALL_SQUARED] = values[_CALL] ** 2
    values[_DEPARTED], values[_REMAINING], values[_WISHES] = float(departs), float(remaining), float(wishes)
    values[_GROUPS], values[_GROUPS_SQUARED] = float(groups), float(groups) ** 2
    with torch_private.tracing.outside_of_traces():
        on_host = torch.tensor(values, dtype=torch.float32, device="cpu")
        into.copy_(pinned_for(into.device, on_host), non_blocking=True)


@dataclass(frozen=True)
class Turn:
    """What the summed riders of one reduction say, on all ranks alike."""

    departed: int  # ranks that could not launch what was expected
    ends: bool  # whether every rank looks at the riders behind this reduction
    same_call: bool
    wishes: bool  # whether some rank wishes to see the next launch proven
    same_groups: bool  # whether all ranks launch on as many communicators before they look

    @classmethod
    def of(cls, sums: Sequence[float], world_size: int) -> "Turn":
        same_call = world_size * sums[_CALL_SQUARED] == sums[_CALL] ** 2
        same_groups = world_size * sums[_GROUPS_SQUARED] == sums[_GROUPS] ** 2
        return cls(int(sums[_DEPARTED]), sums[_REMAINING] == 0, same_call, sums[_WISHES] > 0, same_groups)


class Departures:
    """The launches since the first one in which a rank has departed, as far as this rank has read of them."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._turns: list[Turn] = []

    def note(self, turns: Sequence[Turn]) -> None:
        first = 0 if self._turns else next((n for n, turn in enumerate(turns) if turn.departed), len(turns))
        self._turns += turns[first:]

    @property
    def launches(self) -> int:
        return len(self._turns)

    @property
    def ends(self) -> int:
        """How often all ranks were about to look at the riders."""
        return sum(turn.ends for turn in self._turns)

    @property
    def are_everybodys(self) -> bool:
        """Whether no rank has launched what was expected, nor is about to."""
        return bool(self._turns) and all(turn.departed == self._world_size and turn.ends for turn in self._turns)


class TurnReader:
    """Reads what ranks tell at once on CPU, elsewhere when the next ones are read: a GPU is not waited for."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self.was_at_once = True  # whether what was read last is of what was launched last
        self._copied: Tensor | None = None
        self._ready: torch.Event | None = None

    def read(self, sums: Sequence[Tensor]) -> list[Turn]:
        """What has come to be known, in order. Where a rank has departed, everything."""
        self.was_at_once = sums[0].device.type == "cpu"
        if self.was_at_once:
            return [self._turn(row.tolist()) for row in sums]
        earlier = self.rest()
        self._copy(torch.stack(tuple(sums)))
        return [*earlier, *self.rest()] if any(turn.departed for turn in earlier) else earlier

    def rest(self) -> list[Turn]:
        """What has been launched and not been told yet."""
        if self._copied is None or self._ready is None:
            return []
        self._ready.synchronize()
        rows, self._copied = self._copied.tolist(), None
        return [self._turn(row) for row in rows]

    def _turn(self, row: Sequence[float]) -> Turn:
        return Turn.of(row, self._world_size)

    def _copy(self, rows: Tensor) -> None:
        self._copied = rows.to("cpu", non_blocking=True)
        self._ready = torch.Event(rows.device)
        self._ready.record(torch.accelerator.current_stream(rows.device))
