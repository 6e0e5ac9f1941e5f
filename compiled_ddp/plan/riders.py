"""The riders: the float32 elements that travel with one of a plan's buckets, and what each of them carries."""

import functools
from dataclasses import dataclass

import torch

# What each leading rider element carries; one element per gradient of the plan follows them, and then the user's own.
FORWARD_COUNT = 0
FORWARD_COUNT_SQUARED = 1
RETURNED_COUNT = 2
RETURNED_COUNT_SQUARED = 3
ABORTED = 4
LOST = 5
VERIFY = 6
NEWLY_USED = 7
GRAPH_MISMATCH = 8
WEIGHT = 9
HOOK_FAILED = 10
STATE_LOST = 11
FIRST_USED = 12

COUNT_MODULUS = 16  # sums of squares stay exact in float32, in any order, up to 74,565 ranks


@dataclass(frozen=True)
class Riders:
    """Layout of the float32 elements that travel at the end of a plan's last bucket, or in a first one of their own.

    | element | value on each rank, summed over ranks |
    |---|---|
    | `FORWARD_COUNT` | forwards begun to be synchronised, modulo `COUNT_MODULUS` |
    | `FORWARD_COUNT_SQUARED` | its square: the counts agree if and only if the variance over ranks is zero |
    | `RETURNED_COUNT`, `..._SQUARED` | the same without the forwards that raised; [Note: forwards that are no step] |
    | `ABORTED` | 1 where the backward broke off and the rest of it goes out as zeros |
    | `LOST` | 1 where the backward before broke off when everything of it had been sent |
    | `STATE_LOST` | 1 where that one has left no state of a traced communication hook that fits the other ranks' |
    | `VERIFY` | 1 where a rank wishes to prove the reduction |
    | `NEWLY_USED` | 1 where this rank has used parameters of "unused" sections after all |
    | `GRAPH_MISMATCH` | 1 where the graphs of the backward do not fit the sequence |
    | `HOOK_FAILED` | 1 where the communication hook raised, and no further bucket was handed to it |
    | `WEIGHT` | this rank's weight in a weighted mean |
    | `FIRST_USED + k` | 1 where the k-th gradient of the plan was produced on this rank |
    | the last `passengers` | what the user gives to `piggyback` |

    Riders are never scaled, compressed or handed to a communication hook.
    """

    offset_elements: int
    indices: tuple[int, ...]  # the plan's gradients in order: whose `used` element stands where
    passengers: int = 0

    @functools.cached_property
    def numel(self) -> int:
        return FIRST_USED + len(self.indices) + self.passengers

    def view(self, flat_buffer: torch.Tensor) -> torch.Tensor:
        """The rider elements as a view of `flat_buffer`, shape (numel,)."""
        return flat_buffer.narrow(0, self.offset_elements, self.numel)
