"""In which order the buckets of one backward are launched, whoever produces the gradients."""

from collections.abc import Callable, Sequence

from compiled_ddp.backward.flat_buffers import SequenceBuffers
from compiled_ddp.backward.gradients import Gradients
from compiled_ddp.backward.launch import Launch
from compiled_ddp.backward.launches import Launches
from compiled_ddp.backward.reservations import Reservations
from compiled_ddp.backward.riders import Flag, Message
from compiled_ddp.ranks.progress import RankProgress


class Launcher:
    """A cursor over the sequence; what hooks launch is filled by `Gradients`. It never touches .grad.

    A section is launched by the captured segment that reserves it, at the moment it does; otherwise bucket by bucket
    as hooks bring the gradients, and at the end of backward with what there is. [Note: every rank launches in the same
    order]: the cursor only moves forward, over whole buckets, and `launch_rest` moves it to the end, so whatever a
    rank ran, it issues the same collectives with the same sizes in the same order as all others.
    """

    def __init__(
        self,
        buffers: SequenceBuffers,
        launches: Launches,
        gradients: Gradients,
        reservations: Reservations,
        message: Message,
        rank_progress: RankProgress,
    ) -> None:
        self.positions_in, self._reservations = buffers.positions_in, reservations  # the buckets of each section
        self._launches, self._gradients = launches, gradients
        self._message, self._rank_progress = message, rank_progress
        # After `break_off`: whether those of all that was launched can be read. Else nobody knows what others do next.
        self.riders_are_known = True
        self._cursor = 0
        self._broke_in_launch = False  # whether an exception has ended a launch by hooks

    # ---- graphs ------------------------------------------------------------------------------------------------------

    def is_next(self, section: int) -> bool:
        """Whether a graph may reserve a section: all before it has been launched."""
        return self._reservations.is_free(section) and self._cursor == self.positions_in[section].start

    def has_launched(self, section: int) -> bool:
        """Whether all buckets of a section have been launched, or a graph has reserved them."""
        return self._cursor > self.positions_in[section][-1]

    def waits_in_vain_before(self, section: int, comes: Callable[[int], bool]) -> bool:
        """Whether hooks wait before a section for what will not come; `comes` tells which gradients still may."""
        waiting = self._waiting_before(section)
        if not waiting or not self._reservations.is_free(section):
            return False
        of_graphs = any(self._reservations.waits_for_graph(launch.section) for launch in waiting)
        return not of_graphs and not any(comes(index) for launch in waiting for index in launch.missing)

    def waits_for_skipped_graphs_before(self, section: int) -> bool:
        """Whether all that hooks wait for before a section is of graphs' sections, which were left to them."""
        return all(self._reservations.is_of_graph(launch.section) for launch in self._waiting_before(section))

    def _waiting_before(self, section: int) -> Sequence[Launch]:
        """What is to be launched before a section, in order."""
        return self._launches.buckets[self._cursor : self.positions_in[section].start]

    def reserve(self, section: int) -> None:
        """Hand a section to the captured segment that is about to run; what is missing before it is sent as zeros."""
        positions = self.positions_in[section]
        if self._cursor < positions.start:
            self._launch_to(positions.start)
        self._reservations.reserve(section)
        self._rank_progress.graph_began(self._cursor)
        self._cursor += len(positions)

    def release(self, section: int) -> None:
        """Undo a reservation before the graph has launched anything: hooks launch the section."""
        self._reservations.release(section)
        self._rank_progress.graph_ended()
        self._cursor = self.positions_in[section].start

    # ---- hooks -------------------------------------------------------------------------------------------------------

    def launch_complete(self) -> None:
        """Launch every bucket that hooks have filled, up to the first one that is not."""
        buckets = self._launches.buckets
        while self._cursor < len(buckets):
            launch = buckets[self._cursor]
            if launch.missing or (not launch.bucket.gradients and not self._section_has_begun()):
                return
            self._launch()

    def _section_has_begun(self) -> bool:
        """Whether the bucket before the cursor, of the same section, was launched by hooks."""
        return self._cursor > 0 and self._launches.buckets[self._cursor - 1].work is not None

    def has_rest(self) -> bool:
        """Whether a bucket has not been launched. The last one carries riders, and so the message to every rank."""
        return self._cursor < len(self._launches.buckets)

    def launch_rest(self) -> None:
        """Launch every bucket that has not been, with zeros or an earlier .grad for what this rank did not produce."""
        if self._cursor < len(self._launches.buckets):
            self._launch_to(len(self._launches.buckets))

    def _launch_to(self, position: int) -> None:
        while self._cursor < position:
            for index in sorted(self._launches.buckets[self._cursor].missing):
                self._gradients.fill_missing(index, self._cursor)
            self._launch()

    def _launch(self) -> None:
        position = self._cursor
        self._gradients.put_gathered(position)
        flat = self._launches.make_ready(position)
        try:
            self._launches.start(position, flat)
        except BaseException as error:
            self._broke_in_launch = True
            if self._launches.reducer.has_failed:
                self._send_riders_alone()
                self._launches.explain_failed_reducer(error, position)
            else:
                self._launches.explain(error, position, "could not be launched")
            raise
        self._cursor += 1

    def _send_riders_alone(self) -> None:
        """To tell the other ranks that the reducer has failed here."""
        self._message.note(Flag.ABORTED, Flag.HOOK_FAILED)
        self._cursor += 1
        self._launch_to(len(self._launches.buckets))

    # ---- an exception ------------------------------------------------------------------------------------------------

    def break_off(self) -> None:
        """Find out what has been launched when an exception ended this backward, so that the rest can follow.

        The process group's own count of collectives tells it, however far a graph or a line of ours had come. What is
        left of a bucket that a communication hook reduces by several is launched here.
        """
        broken = self._reservations.incomplete()
        for section in broken:
            self._reservations.release(section)
        if not self._launches.reducer.counts_collectives:  # and no graph launches anything
            return
        if not self._rank_progress.counts_launches:
            self.riders_are_known = not broken and not self._broke_in_launch
            return
        left = self._launches.launched_collectives
        self._cursor = 0
        while self._cursor < len(self._launches.buckets) and left > 0:
            self._launches.note_launched(self._cursor, left)
            left = max(left - self._launches.collectives[self._cursor], 0)
            self._cursor += 1
        self.riders_are_known = all(map(self._launches.riders.are_known, range(self._cursor)))
