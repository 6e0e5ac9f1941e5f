"""The buckets of one backward: which rank uses what of them, who launches them, and waiting for them."""

import functools
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from compiled_ddp.checks.proof import Recording
from compiled_ddp.passes.ops import wait_tensor
from compiled_ddp.plan import HOOK_FAILED, Bucket, Section
from compiled_ddp.ranks.communicator import Communicator
from compiled_ddp.ranks.launch_observer import profiled
from compiled_ddp.ranks.progress import failed_in_collective
from compiled_ddp.reducers.averaging import Averaging
from compiled_ddp.reducers.reducer import Reducer, Work
from compiled_ddp.step.buffers import SequenceBuffers
from compiled_ddp.step.channel import Message, ranks_using, write_riders

# ---- which parameters this rank has a gradient of to reduce ----------------------------------------------------------


class Usage:
    """What earlier local backwards have accumulated, and what this one brings."""

    def __init__(
        self,
        used_before: Set[int],
        *,
        sends_zeros: bool = False,
        delayed: bool = False,
        expected_gradients: Mapping[int, int] | None = None,
    ) -> None:
        """`used_before` have been used since the last synchronised backward. The others are `Circumstances`.

        With `sends_zeros`, in a torch.autograd.grad, nothing counts as used: hooks send zeros.
        """
        self.arrived: dict[int, int] = {}  # how many gradients each parameter has got
        self.before = used_before
        self._sends_zeros, self._delayed, self._expected = sends_zeros, delayed, expected_gradients

    def is_used(self, index: int) -> bool:
        """Whether this rank has a gradient to reduce, produced since the last synchronised backward."""
        return not self._sends_zeros and (index in self.arrived or index in self.before)

    def unused(self, indices: Iterable[int]) -> set[int]:
        """The parameters among these without a gradient to reduce."""
        return set(indices) if self._sends_zeros else set(indices).difference(self.arrived, self.before)

    def note_gradient(self, index: int) -> None:
        """A parameter has got a gradient."""
        self.arrived[index] = self.arrived.get(index, 0) + 1

    def note_gradients(self, indices: Iterable[int]) -> None:
        """Each of these has got one."""
        if self.arrived:
            self.arrived |= {index: self.arrived.get(index, 0) + 1 for index in indices}
        else:
            self.arrived = dict.fromkeys(indices, 1)

    def note_any(self, indices: Iterable[int]) -> None:
        """Each of these has got one, if not more."""
        for index in indices:
            self.arrived.setdefault(index, 1)

    def awaits_more(self, index: int) -> bool:
        """Whether more may be added to .grad before it goes into its bucket, at the end of the backward at the latest.

        `index` has got a gradient.
        """
        return self._delayed or (
            self._expected is not None and self.arrived[index] < self._expected.get(index, math.inf)
        )


# ---- which sections captured graphs reduce, and which are left to hooks ----------------------------------------------


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


# ---- one bucket ------------------------------------------------------------------------------------------------------


class LaunchedByGraph:
    """What stands for the Work of a bucket that a graph had launched when an exception ended it."""

    def __init__(self, flat: torch.Tensor | None) -> None:
        """`flat` is the memory that was launched, None where nobody knows it."""
        self.flat = flat

    def wait(self) -> None:
        self.wait_for_collectives()

    def wait_for_collectives(self) -> None:
        if self.flat is not None:
            wait_tensor(self.flat)  # a no-op where the graph has waited for it


@dataclass
class Launch:
    """What has become of a bucket so far."""

    section: int
    bucket: Bucket
    missing: set[int]  # gradients that hooks wait for
    gathered: dict[int, torch.Tensor]  # gradients that have come, and are to be put into the bucket together
    work: Work | None = None  # what hooks have launched
    _summed: torch.Tensor | None = None  # what that sums, until the mean has been made of it

    def sums(self, outgoing: torch.Tensor) -> None:
        """Hooks launch this."""
        self._summed = outgoing

    def started(self, work: Work) -> None:
        self.work = work

    def take_summed(self) -> torch.Tensor | None:
        """The sum that has arrived, once; None where hooks have launched nothing."""
        summed, self._summed = self._summed, None
        return summed


# ---- starting the reduction of each bucket, and waiting for it -------------------------------------------------------


class Launches:
    """The buckets of one backward, called by their position in the launch order.

    In which order they are started, and what is in them, others decide: `SynchronisedBackward` and `Gradients`.
    """

    def __init__(
        self,
        buffers: SequenceBuffers,
        reservations: Reservations,
        *,
        message: Message,
        usage: Usage,
        averaging: Averaging,
        reducer: Reducer,
        communicator: Communicator,
        recording: Recording | None,
    ) -> None:
        """`reducer` launches what hooks have filled; a `recording` is told of it."""
        awaited = zip(buffers.buckets, buffers.indices_in, strict=True)
        self.buckets = [Launch(place, bucket, set(indices), {}) for (place, bucket), indices in awaited]
        self.reducer = reducer
        self.collectives = reducer.collectives(len(self.buckets))  # of each
        self.buffers, self.usage, self.averaging, self.recording = buffers, usage, averaging, recording
        self._reservations, self._message, self._communicator = reservations, message, communicator
        self._rank_progress = communicator.progress
        self._launches_before = self._rank_progress.launches
        self._lent: dict[int, torch.Tensor] = {}  # position -> memory that the running graph fills
        self._using: dict[int, dict[int, float]] = {}  # section -> parameter -> on how many ranks it is used

    def positions_by_hooks(self, index: int) -> Sequence[int]:
        """The buckets that carry this gradient and that no graph has reserved."""
        positions, reserved = self.buffers.positions_of.get(index, ()), self._reservations.reserved
        return [p for p in positions if self.buckets[p].section not in reserved] if reserved else positions

    def by_hooks(self) -> list[int]:
        """The buckets that hooks have launched, or that a graph had when an exception ended it."""
        return [position for position, launch in enumerate(self.buckets) if launch.work is not None]

    def named_fold(self, position: int) -> AbstractContextManager[object]:
        """The name in a profile of what puts gradients into a bucket."""
        return profiled("fold", self._rank_progress.bucket, position)

    # ---- start -------------------------------------------------------------------------------------------------------

    def make_ready(self, position: int) -> torch.Tensor:
        """Write this rank's riders into a bucket that hooks have filled; returns what is to be summed over ranks."""
        launch, buffer = self.buckets[position], self.buffers[position]
        if buffer.writers.have_streams:
            buffer.writers.before_read()
        layout = launch.bucket.riders
        if layout is not None and buffer.riders is not None:
            write_riders(buffer.riders, layout, self._message, self.usage.unused(layout.indices))
        if self.recording is not None:
            self.recording.launching(launch.bucket)
        if not self.averaging.changes_sums:
            return buffer.flat
        outgoing = self.averaging.outgoing(buffer.flat)
        launch.sums(outgoing)
        return outgoing

    def start(self, position: int, flat: torch.Tensor) -> None:
        """Launch what `make_ready` has returned."""
        launch = self.buckets[position]
        with self._communicator.observing("launch", position):
            launch.started(self.reducer.start(position, flat, lambda: self.usage.unused(launch.bucket.indices)))
        self._rank_progress.hooks_launched(position)

    def lend(self, positions: Iterable[int]) -> list[torch.Tensor]:
        """Memory for these buckets of a reserved section, for its graph to pack them into."""
        self._lent = self.buffers.lend(positions)
        self._rank_progress.graph_fills(self._lent)
        return list(self._lent.values())

    def has_lent(self, memory: Mapping[int, torch.Tensor]) -> None:
        """A graph has got it, by position."""
        self._lent = {**memory}

    def take_back(self) -> None:
        """The graph that memory was lent to has run."""
        self._lent = {}

    def take_over(self, position: int, missing: set[int], gathered: dict[int, torch.Tensor], work: Work | None) -> None:
        """A bucket has come so far already."""
        launch = self.buckets[position]
        self.usage.note_any(launch.missing - missing)
        launch.missing, launch.gathered, launch.work = missing, gathered, work

    def count_from(self, launches_before: int) -> None:
        """This backward had begun when there were so many launches on the communicator."""
        self._launches_before = launches_before

    # ---- an exception ------------------------------------------------------------------------------------------------

    @property
    def launched_collectives(self) -> int:
        """How many have been launched on the communicator in this backward, by whomever."""
        return self._rank_progress.launches - self._launches_before

    def note_launched(self, position: int, collectives: int) -> None:
        """So many of a bucket's collectives had been launched when an exception ended the backward; launch the others.

        Some of them by a graph that has not returned.
        """
        launch = self.buckets[position]
        launch.missing.clear()
        if launch.section not in self._reservations.reserved and launch.work is None:
            launch.started(LaunchedByGraph(self._lent.get(position)))
            if position not in self._lent:
                self.buffers[position].leave_memory()
        if collectives < self.collectives[position]:
            launch.started(self.reducer.start_rest(position, collectives))

    def lost_hook_state(self) -> bool:
        """Whether a graph broke off after a bucket's launch, and nothing tells the hook's new state for it."""
        return any(
            isinstance(launch.work, LaunchedByGraph) and self.reducer.has_state(position)
            for position, launch in enumerate(self.buckets)
        )

    def explain(self, error: BaseException, position: int, what: str) -> None:
        """Raise a failure of a bucket's collective, in words; note where any other exception came from."""
        hooked = self.reducer.runs_users_code(position)
        if isinstance(error, RuntimeError) and (not hooked or failed_in_collective(error)):
            raise self._communicator.failure(error, f"{self._name(position)} {what}") from error
        if hooked:
            error.add_note(f"in the communication hook, for {self._name(position)}")

    def explain_failed_reducer(self, error: BaseException, position: int) -> None:
        """As `explain`, where nothing but riders can be launched any more."""
        where = f"{self.reducer.name} failed for {self._name(position)}"
        if isinstance(error, RuntimeError):  # of a collective, maybe
            raise self._communicator.failure(error, where) from error
        error.add_note(where)

    def _name(self, position: int) -> str:
        return f"{self._rank_progress.bucket(position)} on rank {self._communicator.global_rank}"

    # ---- wait --------------------------------------------------------------------------------------------------------

    def wait(self, *, results: bool = True) -> None:
        """Wait for every bucket that hooks launched; a graph waits for its own.

        Without `results`, a communication hook computes nothing of them, which may raise: the riders alone can be read.
        Not for a communication hook that has failed on some rank: what the others launched may never end.
        """
        last = len(self.buckets) - 1
        if not self.reducer.counts_collectives:
            self.wait_for(last)
            riders = self.buffers[last].riders
            if riders is not None and riders.device.type == "cpu" and riders[HOOK_FAILED] > 0:
                self.reducer.note_failed()
            if self.reducer.has_failed:
                return
        self.wait_for(*range(last + 1), results=results)
        if self.reducer.counts_collectives:
            self._rank_progress.all_launched()

    def wait_for(self, *positions: int, results: bool = True) -> None:
        """Wait for these buckets, where hooks have launched them."""
        for position in positions:
            work = self.buckets[position].work
            if work is not None:
                self._rank_progress.hooks_await(position)
                try:
                    with self._communicator.observing("wait for", position):
                        if results:
                            work.wait()
                        else:
                            work.wait_for_collectives()
                except BaseException as error:
                    self.explain(error, position, "was launched but not reduced")
                    raise
                writers = self.buffers[position].writers
                if writers.have_streams:
                    writers.after_wait()
                self._rank_progress.hooks_await(None)
        if self.averaging.changes_sums:
            for position in positions:
                self._conclude(position)

    def _conclude(self, position: int) -> None:
        """Make of a sum that has arrived what .grad shall be."""
        launch = self.buckets[position]
        summed, section = launch.take_summed(), launch.section
        if summed is not None:
            self.averaging.conclude(summed, self.buffers[position].gradients, lambda: self._await_riders_of(section))

    def sum_over_result(self) -> float:
        """What a result is to be multiplied by to be the sum of what ranks have brought. May read from the device."""
        return self.averaging.sum_over_result(lambda: self.riders()[0])

    def flat_gradients(self) -> list[torch.Tensor]:
        """The reduced gradients of every bucket that hooks launched, flat, in launch order and without riders."""
        return [self.buffers[p].gradients for p in self.by_hooks() if self.buckets[p].bucket.gradients]

    # ---- the riders that come back, in the last bucket of each section, whoever has launched it ----------------------

    def riders(self) -> list[torch.Tensor]:
        """The sums over ranks, of every section."""
        found = []
        for position in self.buffers.with_riders:
            if self.buckets[position].work is not None:
                found.append(self._riders_at(position))
        found += self._reservations.reserved.values()
        return [riders for riders in found if riders is not None]

    def knows_riders_at(self, position: int) -> bool:
        """Whether those of a launched bucket, if it has any, can be read."""
        launch = self.buckets[position]
        is_of_graph = launch.section in self._reservations.reserved
        return launch.bucket.riders is None or is_of_graph or self._riders_at(position) is not None

    def used_on_any_rank(self, position: int) -> Set[int]:
        """The parameters of a bucket that any rank has used since the last synchronised backward.

        Hooks have launched it. Reads from the device, once for each section, on ranks that have not used such a one.
        """
        indices = self.buffers.indices_in[position]
        unused_here = self.usage.unused(indices)
        if not unused_here:
            return indices
        ranks = self._ranks_using(self.buckets[position].section)
        return indices.difference(index for index in unused_here if ranks[index] == 0)

    def unused_everywhere(self) -> set[int]:
        """The parameters that hooks reduced and no rank has used."""
        return {i for p in self.by_hooks() for i in self.buffers.indices_in[p].difference(self.used_on_any_rank(p))}

    def _ranks_using(self, section: int) -> dict[int, float]:
        if section not in self._using:
            layout = self.buckets[self.buffers.positions_in[section][-1]].bucket.riders
            assert layout is not None
            self._using[section] = ranks_using(layout, self._riders_of(section))
        return self._using[section]

    def _riders_at(self, position: int) -> torch.Tensor | None:
        """The riders of a bucket that hooks launched, or a graph that broke off; None where there are none."""
        work, layout = self.buckets[position].work, self.buckets[position].bucket.riders
        if isinstance(work, LaunchedByGraph):
            return None if work.flat is None or layout is None else layout.view(work.flat)
        return None if work is None else self.buffers[position].riders

    def _riders_of(self, section: int) -> torch.Tensor:
        riders = self._riders_at(self.buffers.positions_in[section][-1])
        assert riders is not None
        return riders

    def _await_riders_of(self, section: int) -> torch.Tensor:
        """The riders of a section that hooks have launched, once they have arrived."""
        carrier = self.buckets[self.buffers.positions_in[section][-1]]
        assert carrier.work is not None
        carrier.work.wait()
        return self._riders_of(section)
