"""What ranks compare through the store, wherever each of them stands, and how those that wait elsewhere are called.

[Note: closing ends the waits of others] From outside nothing ends a wait of gloo's. But a collective fails at once
where one of its ranks has closed its connections. So a rank that cannot launch what others may wait for says so in the
store, and closes its end of all groups of these ranks. The others fail wherever they wait, find it said, close their
ends too, and take part in the comparison that follows. All groups are made anew when they are next agreed on.
"""

import contextlib
import json
import time
import weakref
from collections.abc import Callable, Hashable, Mapping

import torch
import torch.distributed as dist

from compiled_ddp import torch_private
from compiled_ddp.functional.launch_order import LaunchOrder
from compiled_ddp.functional.open_groups import OpenGroups
from compiled_ddp.ranks import communicator as ranks
from compiled_ddp.ranks.agreement import Description, Differing, agree_on_description
from compiled_ddp.ranks.link_speed import bucket_cap_for, measure_bytes_per_second
from compiled_ddp.ranks.rank_group import RankGroup

_PATIENCE_SECONDS = 1.0  # until it is asked where those stand that have not come to compare

_FOR_AN_ERROR = "for an error"  # what a rank calls others for that has nothing to compare

_Key = tuple[tuple[int, ...], str]  # ranks, backends

# [Note: agreements are counted for each set of ranks] A rank that raises may not have come as far as the function that
# the others wait for, nor know which that is. So the name of an agreement does not depend on it: the rank takes part in
# the next one with its error, which is raised everywhere then.
_made: "weakref.WeakKeyDictionary[dist.ProcessGroup, dict[_Key, Agreements]]" = weakref.WeakKeyDictionary()


class Agreements:
    """Those of some ranks, in order. [Note: agreements are counted for each set of ranks]"""

    def __init__(self, process_group: dist.ProcessGroup | None) -> None:
        self.ranks = RankGroup(process_group)
        self._number = 0
        self.failures = 0  # how many times something has failed that other ranks need not be told of
        self.groups = OpenGroups(self.ranks)
        self._bucket_caps_mb: dict[torch.device, float] = {}
        self.forget_order()

    @classmethod
    def of(cls, process_group: dist.ProcessGroup | None) -> "Agreements":
        """Those of this group's ranks. Raises as `RankGroup`."""
        world = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
        if world is None or not isinstance(process_group, dist.ProcessGroup | None):
            return cls(process_group)  # which says why not
        group = process_group or world
        key = tuple(dist.get_process_group_ranks(group)), dist.get_backend_config(group)
        made = _made.setdefault(world, {})
        if key not in made:
            made[key] = cls(process_group)
        return made[key]

    def forget_order(self) -> None:
        """What was launched says nothing any more about what comes next, on any rank."""
        self.order = LaunchOrder[Hashable]()  # of what these ranks launch, on whichever group

    @property
    def occasion(self) -> str:
        """Another one for each group that ranks make behind an agreement."""
        return f"agreement {self._number}"

    # ---- comparing ---------------------------------------------------------------------------------------------------

    def compare(
        self,
        describe: Callable[[], Description],
        what: str,
        explained_by: "ranks.Communicator | None" = None,
        *,
        checksums: Callable[[], Mapping[str, int]] = dict,
    ) -> Differing:
        """Raise the same error on every rank unless `describe()` is the same everywhere; see `agree_on_description`.

        A wait that fails is explained by the communicator, where there is one. Closes the groups if a rank has.
        """
        self._number += 1
        if explained_by is not None:
            explained_by.explain_waits_of(self.ranks)
        else:
            self.ranks.leave_waits_unexplained()
        try:
            return agree_on_description(
                self.ranks,
                describe,
                occasion=f"functional/{self._number}",
                purpose=f"to compare what {what} is called with",
                failure=f"{what} has reduced nothing",
                checksums=checksums,
            )
        except BaseException:
            self.failures += 1
            raise
        finally:
            if self.ranks.published(self._closed_before(self._number)) is not None:
                self._close_all()

    def tell(self, error: BaseException, what: str, explained_by: "ranks.Communicator | None" = None) -> None:
        """Let the next comparison, which others take part in or are called to, raise `error` on every rank but here."""
        told = error if isinstance(error, Exception) else RuntimeError(f"{type(error).__name__}: {error}")

        def describe() -> Description:
            raise told

        with contextlib.suppress(type(told)):
            self.compare(describe, what, explained_by)

    def orders_of_first(self, orders: list[tuple[int, ...]], what: str) -> list[tuple[int, ...]]:
        """Rank 0's orders of gradients; everybody else's are ignored."""
        key = f"functional/{self._number}/orders"
        if self.ranks.rank == 0:
            self.ranks.publish(key, json.dumps(orders))
            return orders
        text = self.ranks.read(key, writer=0, purpose=f"for the order of the gradients of {what}")
        return [tuple(order) for order in json.loads(text)]

    def bucket_cap_mb(self, communicator: ranks.Communicator, device: torch.device) -> float:
        """The size of a bucket that suits the link, the same on every rank. A collective, once for each device."""
        if device not in self._bucket_caps_mb:
            explained = communicator.explaining("the link could not be measured")
            with explained, torch_private.tracing.outside_of_traces():
                speed = measure_bytes_per_second(communicator, device)
            self._bucket_caps_mb[device] = bucket_cap_for(speed)
        return self._bucket_caps_mb[device]

    # ---- those that wait elsewhere -----------------------------------------------------------------------------------

    def call(self) -> None:
        """This rank is about to compare. The others are called if some of them wait elsewhere, in vain.

        One that has launched no more than this rank is only late, and its waits will end: closing the groups would
        break them. A no-op while there is no group.
        """
        if not self.groups.are_any:
            return
        self._publish_coming()
        deadline = time.monotonic() + self.ranks.timeout.total_seconds()
        while self.ranks.silent(self._coming(), seconds=_PATIENCE_SECONDS) and time.monotonic() < deadline:
            if self.is_called:
                return
            if self.groups.wait_for_this_rank:
                self.call_at_once()
                return

    def call_at_once(self, *, is_error: bool = False) -> None:
        """End the waits of all others. [Note: closing ends the waits of others]"""
        self.ranks.publish(self._closed_before(self._number + 1), _FOR_AN_ERROR if is_error else "to compare")
        self.heed_call()

    @property
    def is_called(self) -> bool:
        """Whether another rank has ended the waits of this one."""
        return self.ranks.published(self._closed_before(self._number + 1)) is not None

    def heed_call(self) -> None:
        """Close the groups, and let the others know that this rank is about to compare."""
        self._publish_coming()
        self._close_all()

    def come(self, describe: Callable[[], Description], what: str) -> RuntimeError:
        """Having been called, compare with the others what they wanted; returns the error, which is one everywhere."""
        is_error = self.ranks.published(self._closed_before(self._number + 1)) == _FOR_AN_ERROR
        self.heed_call()
        try:
            self.compare(dict if is_error else describe, what)
        except RuntimeError as error:
            return error
        return RuntimeError(f"{what} has reduced nothing, as other ranks did not take part in it.")

    def give_up(self) -> None:
        """A wait has failed, and nobody called: the waits of other ranks fail too."""
        self.failures += 1
        self._close_all()

    def _coming(self) -> str:
        return f"functional/{self._number + 1}/coming"

    def _publish_coming(self) -> None:
        self.ranks.publish(f"{self._coming()}/{self.ranks.rank}", "")

    def _closed_before(self, number: int) -> str:
        return f"functional/{number}/closed"

    def _close_all(self) -> None:
        self.groups.close()
        self.forget_order()
