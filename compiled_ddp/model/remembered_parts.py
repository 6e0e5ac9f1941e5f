"""What stands in the modules of a model, compared with what stood there before."""

import itertools
import operator
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn

Part = nn.Module | torch.Tensor | None


class RememberedParts:
    """Modules' dictionaries, as they change, beside what they held when this was made.

    [Note: as it was] A model of 800 parameters has 800 dictionaries. Their views follow them, so that one iterator over
    all views, compared with a list, tells in C whether anything stands elsewhere.
    """

    def __init__(self, siblings: Sequence[Mapping[str, Part]]) -> None:
        """`siblings` are the `_modules`, `_parameters` or `_buffers` of some modules."""
        self._now, self._before = siblings, [dict(now) for now in siblings]
        self._dictionaries = [now for now in siblings if isinstance(now, dict)]
        # What TorchScript has in place of one has no views, and other parts under the same names for good.
        self._others = [(now, dict(now)) for now in siblings if not isinstance(now, dict)]
        filled = [now for now in self._dictionaries if now]
        self._names, self._values = [now.keys() for now in filled], [now.values() for now in filled]
        self._lengths_before = [*map(len, self._dictionaries)]
        self.number = sum(self._lengths_before)
        self._names_before, self._values_before = [*_chained(self._names)], [*_chained(self._values)]

    def are_untouched(self) -> bool:
        """Whether each holds the same under the same names, in the same order."""
        return (
            [*map(len, self._dictionaries)] == self._lengths_before
            and all(map(operator.is_, _chained(self._values), self._values_before))
            and [*_chained(self._names)] == self._names_before
            and all(itertools.starmap(_are_the_same, self._others))
        )

    @property
    def dictionaries(self) -> Sequence[dict[str, Part]]:
        """Those of them that are plain ones, which hold `number` parts together."""
        return self._dictionaries

    def are_in_place(self) -> bool:
        """Whether each holds the same in the same order, under whatever names."""
        return all(map(_are_the_same, self._now, self._before))

    def parts(self) -> Iterator[Part]:
        """What they hold now."""
        return _chained([now.values() for now in self._now])


_chained = itertools.chain.from_iterable


def _are_the_same(now: Mapping[str, Part], before: Mapping[str, Part]) -> bool:
    return len(now) == len(before) and all(map(operator.is_, now.values(), before.values()))
