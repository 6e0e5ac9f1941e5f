"""What reduces the buckets that hooks launch in one backward: one interface, whoever does it."""

from collections.abc import Callable, Iterable, Sequence, Set
from typing import Protocol

import torch
import torch.distributed as dist

from compiled_ddp.ranks.communicator import Communicator


class Work(Protocol):
    """A bucket's reduction under way."""

    def wait(self) -> None:
        """Leave the result in the flat buffer; a no-op the second time."""

    def wait_for_collectives(self) -> None:
        """Compute nothing of what comes after them, which `wait` may still do."""


class AllReduceWork:
    """One all-reduce, in place."""

    def __init__(self, work: dist.Work) -> None:
        self._work = work

    def wait(self) -> None:
        self._work.wait()

    def wait_for_collectives(self) -> None:
        self._work.wait()


class NothingLaunched:
    """Where a bucket is left out."""

    def wait(self) -> None:
        pass

    def wait_for_collectives(self) -> None:
        pass


class Reducer:
    """Sums each bucket over ranks by an all-reduce. Buckets are called by their position in what is launched."""

    counts_collectives = True  # whether nothing else is launched on the communicator

    def __init__(self, communicator: Communicator, rows: Sequence[int | None] = ()) -> None:
        """`rows` has each bucket's `Bucket.row`, by position."""
        self._communicator, self._rows = communicator, rows

    def start(self, position: int, flat_buffer: torch.Tensor, unused: Callable[[], Set[int]]) -> Work:
        """Launch what reduces a bucket, without waiting. `unused` tells which of its parameters this rank left so."""
        work = self._communicator.all_reduce(flat_buffer, self._rows[position] if self._rows else None)
        if self._communicator.recorder is not None:
            self._communicator.recorder.follow(position, work)
        return AllReduceWork(work)

    def start_rest(self, position: int, launched: int) -> Work:
        """After `launched` of a bucket's collectives, launch the others: nobody uses what becomes of it."""
        raise NotImplementedError("an all-reduce has no parts")

    def collectives(self, buckets: int) -> list[int]:
        """How many on the communicator reduce each of so many buckets, on every rank and in a graph, too."""
        return [1] * buckets

    def runs_users_code(self, position: int) -> bool:
        """Whether what is raised for this bucket may come from a communication hook's own code."""
        return False

    @property
    def name(self) -> str:
        """In messages."""
        return "the all-reduce"

    @property
    def has_failed(self) -> bool:
        """Whether collectives may not match those of other ranks any more."""
        return False

    def note_failed(self) -> None:
        """It has failed, on some rank."""

    # ---- what is kept from step to step ------------------------------------------------------------------------------

    def has_state(self, position: int) -> bool:
        """Whether something is kept for this bucket."""
        return False

    def state(self, positions: Iterable[int]) -> list[torch.Tensor]:
        """What is kept for these buckets, one after the other, for the graph that launches them."""
        return []

    def keep(self, positions: Iterable[int], new: Sequence[torch.Tensor], left_out: Set[int]) -> None:
        """Take what a graph has made of `state(positions)`; nothing becomes of its gradients of `left_out`."""

    def settle(self, unused: Callable[[], Set[int]]) -> None:
        """The backward has ended well: from now on the state is what it has made of it.

        `unused` tells which of the parameters reduced by hooks no rank has used, whose .grad stays as it was.
        """
