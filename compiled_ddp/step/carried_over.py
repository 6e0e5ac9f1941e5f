"""What one backward of a wrapper leaves to the next one."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from compiled_ddp.backward.riders import Flag


class CarriedOver:
    """Gradients that are still to be reduced, what the other ranks are still to be told, and the user's own values."""

    def __init__(self) -> None:
        self.used: set[int] = set()  # parameters used by local backwards since the last synchronised one
        self.expected_gradients: Counter[int] = Counter()  # the most gradients each has got in one backward
        self.weight = 1.0  # of this rank in a weighted mean
        self.piggyback: torch.Tensor | None = None  # the user's rider elements for the next synchronised backward
        self.piggybacked: torch.Tensor | None = None  # their sums over ranks in the latest one
        self._to_tell: set[Flag] = set()

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
        self._to_tell = {flag for flag, wanted in ((Flag.LOST, tell), (Flag.STATE_LOST, state)) if wanted}

    def take_flags(self) -> set[Flag]:
        """What the backward that begins must tell."""
        flags, self._to_tell = self._to_tell, set()
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
