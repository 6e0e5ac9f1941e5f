"""Which sections of a running backward captured graphs reduce, and which are left to hooks."""

import functools
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import torch

from compiled_ddp.plan import Section


class Reservations:
    """A section is reserved by the graph that is about to run, and is complete when that has reduced it."""

    def __init__(self, sections: Sequence[Section]) -> None:
        self._sections = sections
        self._by_hooks: set[int] = set()  # sections that no graph may reserve any more
        self.reserved: dict[int, torch.Tensor | None] = {}  # section -> its riders; None until it is complete

    # ---- what is left to hooks ---------------------------------------------------------------------------------------

    def leave_to_hooks(self, indices: set[int]) -> set[int]:
        """Let no graph reserve a section with one of these parameters; returns all parameters that this concerns.

        Nor one that shares others with such a section; nor, behind such a section, one of a parameter that stands in
        several: the cursor waits there for hooks, so a graph might come too late for one of them and not for another.
        """
        found = -1
        sharing = self._sections_that_share
        while len(self._by_hooks) != found:
            found = len(self._by_hooks)
            self._by_hooks.update(n for n, s in enumerate(self._sections) if not indices.isdisjoint(s.plan.indices))
            first = min(self._by_hooks, default=len(self._sections))
            self._by_hooks.update(n for n in sharing if n > first)
            indices = indices.union(*(self._sections[n].plan.indices for n in self._by_hooks))
        return indices

    def leave_all_to_hooks(self) -> None:
        """Let no graph reserve a section."""
        self._by_hooks.update(range(len(self._sections)))

    # ---- what graphs reserve -----------------------------------------------------------------------------------------

    def is_free(self, section: int) -> bool:
        """Whether a graph may reserve the section, if the backward has come to it."""
        return section not in self._by_hooks and section not in self.reserved

    def is_of_graph(self, section: int) -> bool:
        """Whether a graph reduces the section where all goes well."""
        return self._sections[section].origin == "graph"

    def waits_for_graph(self, section: int) -> bool:
        """Whether hooks must not launch the section before a graph has come."""
        return self.is_of_graph(section) and section not in self._by_hooks

    def reserve(self, section: int) -> None:
        self.reserved[section] = None

    def release(self, section: int) -> None:
        """Leave a reserved section to hooks, as its graph has launched nothing."""
        del self.reserved[section]
        self._by_hooks.add(section)

    def complete(self, section: int, riders: torch.Tensor) -> None:
        """The section's graph has run, and returned these reduced riders."""
        self.reserved[section] = riders

    def incomplete(self) -> list[int]:
        """What is reserved by graphs that have not run."""
        return [section for section, riders in self.reserved.items() if riders is None]

    # ---- parameters of several sections ------------------------------------------------------------------------------

    def graphs_to_run_with(self, section: int) -> Iterator[int]:
        """The graphs' sections of which all or none are to be reserved, `section` among them."""
        sharing = self._sections_that_share
        together = sharing if section in sharing else [section]
        yield from (n for n in together if self._sections[n].origin == "graph")

    def shares_with_reserved(self, indices: Iterable[int]) -> set[int]:
        """Which of these parameters stand in a section that is reserved."""
        return {i for section in self.reserved for i in self._sections[section].plan.indices} & set(indices)

    @functools.cached_property
    def _sections_that_share(self) -> list[int]:
        """The sections with a parameter that stands in another one too."""
        indices = [*itertools.chain.from_iterable(section.plan.indices for section in self._sections)]
        if len({*indices}) == len(indices):
            return []
        count = Counter(indices)
        return [n for n, section in enumerate(self._sections) if any(count[i] > 1 for i in section.plan.indices)]
