"""The riders that come back in one backward, and which parameters they say that ranks have used."""

from collections.abc import Sequence, Set

import torch

from compiled_ddp.backward.flat_buffers import SequenceBuffers
from compiled_ddp.backward.launch import Launch, LaunchedByGraph
from compiled_ddp.backward.reservations import Reservations
from compiled_ddp.backward.riders import ranks_using
from compiled_ddp.backward.usage import Usage


class ReducedRiders:
    """Reads the sums over ranks, whoever has launched the bucket that carries them: the last one of each section."""

    def __init__(
        self, launches: Sequence[Launch], buffers: SequenceBuffers, reservations: Reservations, usage: Usage
    ) -> None:
        self._launches, self._buffers, self._reservations, self._usage = launches, buffers, reservations, usage
        self._using: dict[int, dict[int, float]] = {}  # section -> parameter -> on how many ranks it is used

    def of_every_section(self) -> list[torch.Tensor]:
        found = []
        for position in self._buffers.with_riders:
            if self._launches[position].work is not None:
                found.append(self._at(position))
        found += self._reservations.reserved.values()
        return [riders for riders in found if riders is not None]

    def await_of(self, section: int) -> torch.Tensor:
        """The riders of a section that hooks have launched, once they have arrived."""
        carrier = self._launches[self._buffers.positions_in[section][-1]]
        assert carrier.work is not None
        carrier.work.wait()
        return self._of(section)

    def are_known(self, position: int) -> bool:
        """Whether those of a launched bucket, if it has any, can be read."""
        launch = self._launches[position]
        is_of_graph = launch.section in self._reservations.reserved
        return launch.bucket.riders is None or is_of_graph or self._at(position) is not None

    def used_on_any_rank(self, position: int) -> Set[int]:
        """The parameters of a bucket that any rank has used since the last synchronised backward.

        Hooks have launched it. Reads from the device, once for each section, on ranks that have not used such a one.
        """
        indices = self._buffers.indices_in[position]
        unused_here = self._usage.unused(indices)
        if not unused_here:
            return indices
        ranks = self._ranks_using(self._launches[position].section)
        return indices.difference(index for index in unused_here if ranks[index] == 0)

    def unused_everywhere(self) -> set[int]:
        """Of the parameters that hooks reduced, those that no rank has used."""
        by_hooks = [position for position, launch in enumerate(self._launches) if launch.work is not None]
        return {i for p in by_hooks for i in self._buffers.indices_in[p].difference(self.used_on_any_rank(p))}

    def _ranks_using(self, section: int) -> dict[int, float]:
        if section not in self._using:
            layout = self._launches[self._buffers.positions_in[section][-1]].bucket.riders
            assert layout is not None
            self._using[section] = ranks_using(layout, self._of(section))
        return self._using[section]

    def _at(self, position: int) -> torch.Tensor | None:
        """Of a bucket that hooks launched, or a graph that broke off; None where there are none."""
        work, layout = self._launches[position].work, self._launches[position].bucket.riders
        if isinstance(work, LaunchedByGraph):
            return None if work.flat is None or layout is None else layout.view(work.flat)
        return None if work is None else self._buffers[position].riders

    def _of(self, section: int) -> torch.Tensor:
        riders = self._at(self._buffers.positions_in[section][-1])
        assert riders is not None
        return riders
