"""Starting the reduction of each bucket, and waiting for it."""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager

import torch

from compiled_ddp.backward.flat_buffers import SequenceBuffers
from compiled_ddp.backward.launch import Launch, LaunchedByGraph
from compiled_ddp.backward.reduced_riders import ReducedRiders
from compiled_ddp.backward.reservations import Reservations
from compiled_ddp.backward.riders import Message, write_riders
from compiled_ddp.backward.usage import Usage
from compiled_ddp.checks.proof import Recording
from compiled_ddp.plan import HOOK_FAILED
from compiled_ddp.ranks.communicator import Communicator
from compiled_ddp.ranks.launch_observer import profiled
from compiled_ddp.ranks.progress import failed_in_collective
from compiled_ddp.reducers.averaging import Averaging
from compiled_ddp.reducers.reducer import Reducer


class Launches:
    """The buckets of one backward, called by their position in the launch order.

    In which order they are started, and what is in them, others decide: `Launcher` and `Gradients`.
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
        self.riders = ReducedRiders(self.buckets, buffers, reservations, usage)
        self.reducer = reducer
        self.collectives = reducer.collectives(len(self.buckets))  # of each
        self._buffers, self._reservations = buffers, reservations
        self._message, self._usage, self._averaging = message, usage, averaging
        self._communicator, self._recording = communicator, recording
        self._rank_progress = communicator.progress
        self._launches_before = self._rank_progress.launches
        self._lent: dict[int, torch.Tensor] = {}  # position -> memory that the running graph fills

    def positions_by_hooks(self, index: int) -> Sequence[int]:
        """Of the buckets that carry this gradient, those that no graph has reserved."""
        positions, reserved = self._buffers.positions_of.get(index, ()), self._reservations.reserved
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
        launch, buffer = self.buckets[position], self._buffers[position]
        buffer.writers.before_read()
        layout = launch.bucket.riders
        if layout is not None and buffer.riders is not None:
            write_riders(buffer.riders, layout, self._message, self._usage.unused(layout.indices))
        if self._recording is not None:
            self._recording.launching(launch.bucket)
        outgoing = self._averaging.outgoing(buffer.flat)
        launch.sums(outgoing)
        return outgoing

    def start(self, position: int, flat: torch.Tensor) -> None:
        """Launch what `make_ready` has returned."""
        launch = self.buckets[position]
        with profiled("launch", self._rank_progress.bucket, position):
            launch.started(self.reducer.start(position, flat, lambda: self._usage.unused(launch.bucket.indices)))
        self._rank_progress.hooks_launched(position)

    def lend(self, positions: Iterable[int]) -> list[torch.Tensor]:
        """Memory for these buckets of a reserved section, for its graph to pack them into."""
        self._lent = {}
        for position in positions:
            bucket = self.buckets[position].bucket
            if bucket.kept:
                self._lent[position] = self._buffers[position].lend()
            else:
                self._lent[position] = torch.empty(bucket.numel, dtype=bucket.dtype, device=bucket.device)
        self._rank_progress.graph_fills(self._lent)
        return list(self._lent.values())

    def take_back(self) -> None:
        """The graph that memory was lent to has run."""
        self._lent = {}

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
                self._buffers[position].leave_memory()
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
        """The same where nothing but riders can be launched any more."""
        where = f"{self.reducer.name} failed for {self._name(position)}"
        if isinstance(error, RuntimeError):  # of a collective, maybe
            raise self._communicator.failure(error, where) from error
        error.add_note(where)

    def _name(self, position: int) -> str:
        return f"{self._rank_progress.bucket(position)} on rank {self._communicator.rank}"

    # ---- wait --------------------------------------------------------------------------------------------------------

    def wait(self, *, results: bool = True) -> None:
        """Wait for every bucket that hooks launched; a graph waits for its own.

        Without `results`, a communication hook computes nothing of them, which may raise: the riders alone can be read.
        Not for a communication hook that has failed on some rank: what the others launched may never end.
        """
        last = len(self.buckets) - 1
        if not self.reducer.counts_collectives:
            self.wait_for(last)
            riders = self._buffers[last].riders
            if riders is not None and riders.device.type == "cpu" and riders[HOOK_FAILED] > 0:
                self.reducer.note_failed()
            if self.reducer.has_failed:
                return
        self.wait_for(*range(last + 1), results=results)
        if self.reducer.counts_collectives:
            self._rank_progress.all_launched(self._launches_before + sum(self.collectives))

    def wait_for(self, *positions: int, results: bool = True) -> None:
        """Wait for these buckets, where hooks have launched them."""
        for position in positions:
            work = self.buckets[position].work
            if work is not None:
                self._rank_progress.hooks_await(position)
                try:
                    with profiled("wait for", self._rank_progress.bucket, position):
                        if results:
                            work.wait()
                        else:
                            work.wait_for_collectives()
                except BaseException as error:
                    self.explain(error, position, "was launched but not reduced")
                    raise
                writers = self._buffers[position].writers
                if writers.have_streams:
                    writers.after_wait()
                self._rank_progress.hooks_await(None)
        if self._averaging.changes_sums:
            for position in positions:
                self._conclude(position)

    def _conclude(self, position: int) -> None:
        """Make of a sum that has arrived what .grad shall be."""
        launch = self.buckets[position]
        summed, section = launch.take_summed(), launch.section
        if summed is not None:
            self._averaging.conclude(summed, self._buffers[position].gradients, lambda: self.riders.await_of(section))

    def sum_over_result(self) -> float:
        """What a result is to be multiplied by to be the sum of what ranks have brought. May read from the device."""
        return self._averaging.sum_over_result(lambda: self.riders.of_every_section()[0])

    def flat_gradients(self) -> list[torch.Tensor]:
        """The reduced gradients of every bucket that hooks launched, flat, in launch order and without riders."""
        return [self._buffers[p].gradients for p in self.by_hooks() if self.buckets[p].bucket.gradients]
