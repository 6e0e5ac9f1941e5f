"""The ranks that functional gradients are reduced over, what they agree on, and what their riders tell."""

import contextlib
import json
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from compiled_ddp import torch_private
from compiled_ddp.backward.forward_count import Forwards
from compiled_ddp.backward.riders import Flag, Message, RiderReader, write_riders
from compiled_ddp.plan import FIRST_USED, Riders
from compiled_ddp.ranks import communicator as ranks
from compiled_ddp.ranks.agreement import Description, agree_on_description

_LEADING = Riders(0, ())


class Communicator:
    """Ranks, for one gradient function or for several.

    `process_group` is a process group of torch.distributed's, None for the default one. The collectives run on a group
    of their own, which is made when its first user is called. Functions that share a communicator must be called in
    the same order on every rank; each of them has one of its own where none is given.
    """

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        """Raises RuntimeError if torch.distributed is not initialised, ValueError if this process is not in it."""
        self._ranks = ranks.RankGroup(process_group)
        self.rank, self.world_size = self._ranks.rank, self._ranks.world_size
        self._made: ranks.Communicator | None = None
        self._agreements = 0
        self._calls = 0
        self._reader = RiderReader(self.world_size)

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The user's."""
        return self._ranks.process_group

    @property
    def group_name(self) -> str:
        """What graphs call the group that gradients are reduced on."""
        return self._own().group_name

    def _own(self) -> ranks.Communicator:
        assert self._made is not None, "no agreement yet"
        return self._made

    # ---- agreement, through the store --------------------------------------------------------------------------------

    def agree(self, describe: Callable[[], Description], what: str) -> int:
        """Raise the same error on every rank unless `describe()` is the same everywhere; returns its number.

        Makes the communicator's group at the first one.
        """
        self._agreements += 1
        agree_on_description(
            self._ranks,
            describe,
            occasion=f"agreement/{self._agreements}",
            purpose=f"to compare what {what} is called with",
            failure=f"{what} has reduced nothing",
        )
        if self._made is None:
            self._made = ranks.Communicator(self._ranks)
        return self._agreements

    def agree_on_order(self, agreement: int, order: Sequence[int], what: str) -> tuple[int, ...]:
        """Rank 0's order of gradients; everybody else's is ignored."""
        key = f"order/{agreement}"
        if self.rank == 0:
            self._ranks.publish(key, json.dumps(list(order)))
            return tuple(order)
        return tuple(json.loads(self._ranks.read(key, writer=0, purpose=f"for the order of the gradients of {what}")))

    # ---- what rides with gradients -----------------------------------------------------------------------------------

    def begin_call(self, leading: Tensor, what: str, *, broken: str = "") -> None:
        """Count a reduction, and write what this rank tells the others of it into `leading`.

        `broken` says why there is nothing to reduce here. Raises RuntimeError once a wait has failed.
        """
        own = self._own()
        own.refuse_if_failed()
        self._calls += 1
        own.progress.forward_began(self._calls)
        own.progress.note_wait(f"the gradients of {what}")
        message = Message(Forwards(self._calls, self._calls, 0))
        if broken:
            self._ranks.publish(f"broken/{self._calls}", f"rank {self._ranks.ranks[self.rank]}: {broken}")
            message.note(Flag.BROKE_OFF)
        with torch_private.tracing.outside_of_traces():
            write_riders(leading, _LEADING, message, set())

    def check(self, sums: Tensor, what: str) -> None:
        """Raise RuntimeError where the leading riders say that what was summed up does not belong together."""
        own = self._own()
        self.note_reduced(sums)
        findings = self._reader.read([sums])
        if findings.ranks_with(Flag.BROKE_OFF):
            why = self._ranks.read(f"broken/{self._calls}", writer=self.rank, purpose="for the error of another rank")
            raise RuntimeError(f"{what} has no gradients on any rank, because it raised on {why}")
        if findings.counts_differ:
            raise own.give_up(
                f"the ranks have called {what} in different steps: on this one it was reduction {self._calls}, "
                "on others another one. Call it the same number of times on every rank"
            )

    def note_reduced(self, _: Tensor) -> None:
        """Nothing is waited for any more."""
        self._own().progress.note_wait("")

    def explaining(self, what: str) -> contextlib.AbstractContextManager[None]:
        """Raise a RuntimeError in here, of a collective, with a report of where every rank stands."""
        return self._own().explaining(f"the gradients of {what} could not be reduced")


def new_leading(device: torch.device) -> Tensor:
    """Memory for the leading riders."""
    with torch_private.tracing.outside_of_traces():
        return torch.zeros(FIRST_USED, dtype=torch.float32, device=device)
