"""What ranks compare through the store, wherever each of them stands."""

import json
import weakref
from collections.abc import Callable

import torch.distributed as dist

from compiled_ddp.ranks import communicator as ranks
from compiled_ddp.ranks.agreement import Description, agree_on_description

# [Note: agreements are counted for each set of ranks] A rank that raises may not have come as far as the function that
# the others wait for, nor know which that is. So the name of an agreement does not depend on it: the rank takes part in
# the next one with its error, which is raised everywhere then.
_made: "weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], Agreements]]" = weakref.WeakKeyDictionary()


class Agreements:
    """Those of some ranks, in order. [Note: agreements are counted for each set of ranks]"""

    def __init__(self, process_group: dist.ProcessGroup | None) -> None:
        self._ranks = ranks.RankGroup(process_group)
        self._number = 0

    @classmethod
    def of(cls, process_group: dist.ProcessGroup | None) -> "Agreements":
        """Those of this group's ranks. Raises as `RankGroup`."""
        world = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
        if world is None or not isinstance(process_group, dist.ProcessGroup | None):
            return cls(process_group)  # which says why not
        members = tuple(dist.get_process_group_ranks(process_group or world))
        made = _made.setdefault(world, {})
        if members not in made:
            made[members] = cls(process_group)
        return made[members]

    def compare(
        self, describe: Callable[[], Description], what: str, explained_by: "ranks.Communicator | None" = None
    ) -> None:
        """Raise the same error on every rank unless `describe()` is the same everywhere; see `agree_on_description`.

        A wait that fails is explained by the communicator, where there is one.
        """
        self._number += 1
        if explained_by is not None:
            self._ranks.explain_waits(explained_by.progress.note_wait, explained_by.failure)
        agree_on_description(
            self._ranks,
            describe,
            occasion=f"functional/{self._number}",
            purpose=f"to compare what {what} is called with",
            failure=f"{what} has reduced nothing",
        )

    def orders_of_first(self, orders: list[tuple[int, ...]], what: str) -> list[tuple[int, ...]]:
        """Rank 0's orders of gradients; everybody else's are ignored."""
        key = f"functional/{self._number}/orders"
        if self._ranks.rank == 0:
            self._ranks.publish(key, json.dumps(orders))
            return orders
        text = self._ranks.read(key, writer=0, purpose=f"for the order of the gradients of {what}")
        return [tuple(order) for order in json.loads(text)]
