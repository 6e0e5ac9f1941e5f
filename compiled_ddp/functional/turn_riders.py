"""What the leading riders of a functional reduction tell, and reading it without making a GPU wait."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from compiled_ddp import torch_private
from compiled_ddp.plan import COUNT_MODULUS, FIRST_USED

# | element | value on each rank, summed over ranks |
# |---|---|
# | `_CALL`, `_CALL_SQUARED` | reductions begun, modulo `COUNT_MODULUS`, and its square |
# | `_DEPARTED` | 1 where this rank cannot launch what all expect, and has sent zeros |
# | `_REMAINING` | how many more this rank launches before it looks at what the others tell |
_CALL, _CALL_SQUARED, _DEPARTED, _REMAINING = range(4)


def new_leading(device: torch.device) -> Tensor:
    """Memory for the leading riders."""
    with torch_private.tracing.outside_of_traces():
        return torch.zeros(FIRST_USED, dtype=torch.float32, device=device)


def write_turn(into: Tensor, *, call: int, remaining: int, departs: bool = False) -> None:
    values = [0.0] * FIRST_USED
    values[_CALL] = float(call % COUNT_MODULUS)
    values[_CALL_SQUARED] = values[_CALL] ** 2
    values[_DEPARTED], values[_REMAINING] = float(departs), float(remaining)
    with torch_private.tracing.outside_of_traces():
        into.copy_(torch.tensor(values, dtype=torch.float32, device="cpu"), non_blocking=True)


@dataclass(frozen=True)
class Turn:
    """What the summed riders of one reduction say, on all ranks alike."""

    departed: int  # ranks that could not launch what was expected
    ends: bool  # whether every rank looks at the riders behind this reduction
    same_call: bool

    @classmethod
    def of(cls, sums: Sequence[float], world_size: int) -> "Turn":
        same_call = world_size * sums[_CALL_SQUARED] == sums[_CALL] ** 2
        return cls(int(sums[_DEPARTED]), sums[_REMAINING] == 0, same_call)


class TurnReader:
    """Reads what ranks tell at once on CPU, elsewhere when the next ones are read: a GPU is not waited for."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._copied: Tensor | None = None
        self._ready: torch.Event | None = None

    def read(self, sums: Sequence[Tensor]) -> list[Turn]:
        """What has come to be known, in order. Where a rank has departed, everything."""
        if sums[0].device.type == "cpu":
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
