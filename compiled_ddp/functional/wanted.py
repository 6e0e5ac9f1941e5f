"""What a call of a gradient function wants to have summed up over ranks, and what ranks have agreed to launch."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from compiled_ddp.functional.operator import plan_of, spec_of
from compiled_ddp.passes.ops import sum_over_ranks
from compiled_ddp.plan import BucketPlan
from compiled_ddp.planning.assignment import MEBIBYTE
from compiled_ddp.ranks.agreement import Description

DEFAULT_BUCKET_CAP_MB = 8.0


@dataclass(frozen=True)
class Wanted:
    """A reduction, in the shapes in which it is launched: below vmap those of the whole batch."""

    function: str
    reduction: str
    bucket_cap_mb: float | None
    gradients: tuple[tuple[str, tuple[int, ...], torch.dtype, torch.device], ...]  # name, shape, ...
    passengers: int  # float32 elements of the user's

    @property
    def capacities_bytes(self) -> tuple[float, ...]:
        return ((DEFAULT_BUCKET_CAP_MB if self.bucket_cap_mb is None else self.bucket_cap_mb) * MEBIBYTE,)

    @property
    def device(self) -> torch.device:
        """Where the riders are."""
        return self.gradients[0][3]

    def describe(self) -> Description:
        """What all ranks must have alike."""
        properties: Description = {
            "the function": [self.function],
            "reduction": [self.reduction],
            "bucket_cap_mb": [self.bucket_cap_mb],
        }
        properties |= {name: [str(dtype), list(shape)] for name, shape, dtype, _ in self.gradients}
        return properties | {"the number of values that ride along": [self.passengers]}


@dataclass(frozen=True, eq=False)
class Agreed:
    """One that all ranks know; `order` is that of the gradients in the buckets."""

    wanted: Wanted
    order: tuple[int, ...]
    world_size: int

    @property
    def plan(self) -> BucketPlan:
        specs = tuple(
            spec_of(index, shape, dtype, device)
            for index, (_, shape, dtype, device) in enumerate(self.wanted.gradients)
        )
        return plan_of(specs, self.order, self.wanted.capacities_bytes, self.world_size, self.wanted.passengers)

    def launch(
        self, gradients: Sequence[Tensor], passengers: Sequence[Tensor], leading: Tensor, group_name: str
    ) -> list[Tensor]:
        """The sums over ranks: of gradients, passengers and the leading riders."""
        capacities = list(self.wanted.capacities_bytes)
        sums: list[Tensor] = sum_over_ranks(
            list(gradients), list(passengers), leading, list(self.order), capacities, self.world_size, group_name
        )
        return sums

    def zeros(self) -> tuple[list[Tensor], list[Tensor]]:
        """Gradients and passengers that add nothing to those of other ranks."""
        wanted = self.wanted
        gradients = [torch.zeros(shape, dtype=dtype, device=device) for _, shape, dtype, device in wanted.gradients]
        return gradients, [torch.zeros(wanted.passengers, dtype=torch.float32, device=wanted.device)]


SEEN = 32  # launches that expectations come from
_LONGEST = 8  # of them, in a row, that are compared


def likely_next(past: Sequence[Agreed]) -> Agreed | None:
    """What most often followed the latest launches, as many of them in a row as have been seen; of several the latest.

    None where nothing has been launched.
    """
    if len(set(past)) < 2:
        return past[-1] if past else None
    followers, longest = [past[-1]], 0
    for end in range(len(past) - 1, 0, -1):
        length = _alike(past, end)
        if length > longest:
            followers, longest = [], length
        if length == longest > 0:
            followers.append(past[end])
    return max(followers, key=followers.count)


def _alike(past: Sequence[Agreed], end: int) -> int:
    """How many of the launches before `end` are the latest ones."""
    length = 0
    while length < min(end, _LONGEST) and past[end - 1 - length] is past[-1 - length]:
        length += 1
    return length
