"""The wrapper's own communicator: one process group, one store, one timeout; and the name by which graphs call it.

[Note: one name in all graphs] A compiled graph calls its process group by a name. With the communicator's own, wrappers
of equal models could not share their backwards. So all graphs have one name, and torch.distributed is told whose it is
before one runs. A graph that runs while another wrapper's does, in another thread or inside of it, has its
communicator's own name: it is compiled once more. So has one that CUDA graphs replay, which call nothing by name.
"""

import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from compiled_ddp import torch_private
from compiled_ddp.comm_hooks import Ranks
from compiled_ddp.plan import name_for_rows
from compiled_ddp.ranks.launch_observer import UNNAMED, LaunchObserver, profiled
from compiled_ddp.ranks.progress import RankProgress, failed_in_collective, frames_of_error
from compiled_ddp.ranks.rank_group import RankGroup
from compiled_ddp.ranks.recorder import Act, Recorder
from compiled_ddp.ranks.row_sums import CountedRows, RowSums

# ---- the name in graphs ----------------------------------------------------------------------------------------------

SHARED_NAME = "compiled_ddp/graph"


class _Holder:
    """Whose name it is, and how many of its graphs run."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.group: weakref.ref[dist.ProcessGroup] | None = None
        self.running = 0


_holder = _Holder()


def _forget_name(group: dist.ProcessGroup) -> None:
    """No graph will call `group` any more: torch.distributed would hold it under the name.

    What sums by rows has no name there but torch's, by which it is not kept.
    """
    with _holder.lock:
        if _holder.group is not None and _holder.group() is group:
            torch_private.groups.forget_group_name(SHARED_NAME)
            _holder.group = None


class NameInGraphs(contextlib.AbstractContextManager[str]):
    """Entered, the name of `group` in a graph that runs in this context."""

    def __init__(
        self, group: dist.ProcessGroup, own_name: str, *, shared: bool, by_rows: Mapping[int | None, dist.ProcessGroup]
    ) -> None:
        """It is the one of all graphs if it is to be `shared`, and no graph of another group has it now.

        So it is for `by_rows`, what sums by rows for the group, by the width of these.
        """
        self._group, self._own_name, self._shared, self._by_rows = group, own_name, shared, by_rows
        self._holds = False

    def __enter__(self) -> str:
        if not self._shared:
            return self._own_name
        with _holder.lock:
            if _holder.group is None or _holder.group() is not self._group:
                if _holder.running:
                    return self._own_name
                torch_private.groups.name_group(self._group, SHARED_NAME)
                for row, by_rows in self._by_rows.items():
                    torch_private.groups.name_group(by_rows, name_for_rows(SHARED_NAME, row))
                _holder.group = weakref.ref(self._group)
            _holder.running += 1
        self._holds = True
        return SHARED_NAME

    def __exit__(self, *_: object) -> None:
        if self._holds:
            with _holder.lock:
                _holder.running -= 1


# ---- the communicator ------------------------------------------------------------------------------------------------

T = TypeVar("T")

# The groups of communicators that were collected as garbage. A group ends when what it has launched has ended on other
# ranks too, which a destructor must not wait for: the next communicator to be made does.
_abandoned: "list[weakref.ref[dist.ProcessGroup]]" = []


# Those that were made here. A process that is forked has their groups without the threads that would run collectives.
_of_this_process: "weakref.WeakSet[Communicator]" = weakref.WeakSet()


def _leave_to_parent() -> None:
    """In a process that was just forked."""
    for communicator in _of_this_process:
        communicator._is_inherited = True
    _of_this_process.clear()


os.register_at_fork(after_in_child=_leave_to_parent)


class Communicator:
    """[Note: one communicator per wrapper]

    The order of collectives on it depends on nothing but its wrapper: neither on other wrappers, nor on collectives
    of the model or the user. On a shared group, two ranks that swap two all-reduces of equal size both get wrong
    sums and no error.
    """

    recorder: Recorder | None = None  # takes the times of the backwards that begin from here on
    _is_inherited = False  # whether this process was forked from the one that made it

    def __init__(
        self,
        ranks: RankGroup,
        *,
        occasion: str = "",
        is_models: bool = False,
        remedy: str = "unwrap() and wrap again on every rank",
    ) -> None:
        """`occasion` is another one for each that these ranks make. With `is_models` it is for the model's collectives.

        These count as those of the model itself, wherever a wrapper asks whether its model communicates. `remedy` is
        what helps in this process once a wait has failed.
        """
        _destroy_abandoned()
        self.ranks = ranks
        self.rank, self.world_size = ranks.rank, ranks.world_size
        self.closed, self._remedy = False, remedy
        _of_this_process.add(self)
        world = dist.group.WORLD
        assert world is not None
        group, self.group_name = ranks.new_process_group(occasion, is_models=is_models)
        # torch.distributed owns the groups: held here, their threads would live on after they are destroyed.
        self._group = weakref.ref(group)
        self._occasion, self._groups = occasion, [self._group]  # all that end with this one
        self._at_end = weakref.finalize(self, _abandoned.extend, self._groups)
        self._at_end.atexit = False
        self._row_sums: RowSums | None = None
        self.by_rows: dict[int | None, dist.ProcessGroup] = {}  # what sums by rows of so many elements
        self.progress = RankProgress(group)
        self._hangs = ranks.hang_reporter(group, self.progress, occasion)
        self.explain_waits_of(ranks)

    def explain_waits_of(self, ranks: RankGroup) -> None:
        """Waits of these ranks through the store are explained as those of collectives are."""
        ranks.explain_waits(self.progress.note_wait, self.failure, lambda: self._hangs.knows_why)

    @property
    def global_rank(self) -> int:
        return self.ranks.global_rank

    @property
    def group(self) -> dist.ProcessGroup:
        """Raises RuntimeError once it has been destroyed, and in a process that was forked from the group's."""
        if self._is_inherited:
            raise self._of_parent()
        group = self._group()
        if group is None:
            raise RuntimeError(
                f"the process group of {self.ranks.name} has been destroyed: make the wrapper anew after "
                "torch.distributed.init_process_group()."
            )
        return group

    def _of_parent(self) -> RuntimeError:
        return RuntimeError(
            f"process {os.getpid()} was forked from that of rank {self.global_rank}, without the threads that talk to "
            "other ranks: a collective would never end. Call the model itself, `wrapper.module`, in workers of a "
            "DataLoader and the like, or start processes by spawn."
        )

    def for_hooks(self) -> Ranks:
        """The ranks as a communication hook sees them."""
        return Ranks(self.world_size, self.group_name, self.rank if torch_private.groups.is_gloo(self.group) else None)

    def all_reduce(self, flat_buffer: torch.Tensor, row: int | None = None) -> dist.Work:
        """Launch the sum over ranks of `flat_buffer`, in place; with `row` by rows of so many elements, see `RowSums`.

        These are to be known by `sum_rows`.
        """
        return torch_private.groups.start_sum(self.by_rows.get(row, self.group), flat_buffer)

    def sum_rows(self, rows: Collection[int]) -> None:
        """Be able to sum by rows of so many elements. A collective, the first time that there are any."""
        if rows and self._row_sums is None:
            self._row_sums = RowSums(self.group, self._further_group("rows"))
        for row in {*rows}.difference(self.by_rows):
            assert self._row_sums is not None
            self.by_rows[row] = self._row_sums.group_of(row)
            torch_private.groups.name_group(self.by_rows[row], name_for_rows(self.group_name, row))
            _forget_name(self.group)  # graphs are to find this one too

    def exchange_both_ways(self) -> None:
        """Be able to scatter and gather with both directions of a link in use. A collective, the first time."""
        if torch_private.groups.is_gloo(self.group) and not torch_private.exchanges.has_way_back(self.group):
            torch_private.exchanges.let_send_back(self.group, by=self._further_group("back"))

    def _further_group(self, purpose: str) -> dist.ProcessGroup:
        """Another one of the same ranks, which ends with this one. A collective."""
        group, _ = self.ranks.new_process_group(self._occasion, is_models=False, purpose=f"/{purpose}")
        self._groups.append(weakref.ref(group))
        return group

    @property
    def counted_rows(self) -> CountedRows:
        """How many rows each rank had in the latest sums, see `RowSums`."""
        return {} if self._row_sums is None else self._row_sums.counted

    def run_graph(
        self, graph: Callable[[], T], group_name: str, watching: contextlib.AbstractContextManager[object] | None
    ) -> T:
        """What `graph` returns, of which `progress` has been told, and which calls the group `group_name`.

        It runs in the context `watching`, if there is one. A collective in it that fails is raised with a report of
        where every rank stands.
        """
        try:
            if watching is None and self.recorder is None and not torch_private.autograd.profiler_is_on():
                return graph()
            with self._observing_graph(group_name), watching or contextlib.nullcontext():
                return graph()
        except RuntimeError as error:
            if not failed_in_collective(error):
                raise
            raise self._explained(error, "a collective in the backward graph failed") from error
        finally:
            self.progress.graph_ended()

    def _observing_graph(self, group_name: str) -> contextlib.AbstractContextManager[object]:
        if self.recorder is None and not torch_private.autograd.profiler_is_on():
            return contextlib.nullcontext()
        return LaunchObserver(
            group_name,
            self.progress.first_of_graph,
            launch=lambda bucket, _: self.observing("launch", bucket),
            wait=lambda bucket: self.observing("wait for", bucket),
            start=self._start_in_graph,
        )

    def _start_in_graph(self, bucket: int, operator: Any, args: tuple[Any, ...]) -> torch.Tensor:
        if self.recorder is None or not self.recorder.follows_collectives:
            result: torch.Tensor = operator(*args)
            return result
        group = next(
            (self.by_rows[row] for row in self.by_rows if args[2].endswith(name_for_rows("", row))), self.group
        )
        reduced, work = torch_private.groups.start_sum_in_graph(group, operator, args)
        if work is not None:
            self.recorder.follow(bucket, work)
        return reduced  # type: ignore[no-any-return]

    # ---- looking at what is done to each bucket ----------------------------------------------------------------------

    def record(self, backwards: int) -> Recorder:
        """Record so many backwards, from the next one on."""
        self.recorder = Recorder(backwards, follows_collectives=torch_private.groups.is_gloo(self.group))
        return self.recorder

    def stop_recording(self) -> None:
        self.recorder = None

    def observing(self, what: Act, bucket: int) -> contextlib.AbstractContextManager[object]:
        """Within the context this is done to a bucket: its name in a profile, and its times where these are recorded.

        Nothing where neither is wanted.
        """
        if self.recorder is not None:
            return self.recorder.timing(what, bucket, profiled(what, self.progress.bucket, bucket))
        if torch_private.autograd.profiler_is_on():
            return profiled(what, self.progress.bucket, bucket)
        return UNNAMED

    # ---- other collectives -------------------------------------------------------------------------------------------

    def maximum(self, values: torch.Tensor) -> None:
        """Overwrite `values` with their maximum over ranks."""
        self.refuse_if_failed()
        with self.explaining("a maximum over ranks failed"):
            dist.all_reduce(values, dist.ReduceOp.MAX, group=self.group)

    def broadcast(self, tensors: Sequence[torch.Tensor], *, source: int = 0) -> None:
        """Overwrite `tensors` with those of the group's rank `source`."""
        if tensors and self.world_size > 1:
            self.refuse_if_failed()
            self.progress.broadcast_began(f"the parameters and buffers of {self._format_rank(source)}")
            try:  # `explaining` takes six calls, in each step of a model with buffers
                torch_private.groups.broadcast_coalesced(self.group, list(tensors), source=source)
            except RuntimeError as error:
                raise self._explained(error, "the broadcast of parameters and buffers failed") from error
            self.progress.note_wait("")

    def _format_rank(self, rank: int) -> str:
        return f"rank {self.ranks.ranks[rank]}" if rank else "the group's first rank"

    def failure(self, error: Exception, what: str | None = None) -> RuntimeError:
        """`error`, of a wait or a launch, in the words of `what`, with a report of where every rank stands."""
        report = self._hangs.report(frames_of_error(error))
        if report.is_reason:
            return RuntimeError(f"rank {self.global_rank}: {report.text}")
        message = f"{what}: {error}" if what else str(error)
        return RuntimeError(f"{message}\n{report.text}")

    @contextlib.contextmanager
    def explaining(self, what: str) -> Iterator[None]:
        """Raise a RuntimeError in here, of a collective, again as `failure`."""
        try:
            yield
        except RuntimeError as error:
            raise self._explained(error, what) from error

    def _explained(self, error: RuntimeError, what: str) -> RuntimeError:
        return self.failure(error, f"rank {self.global_rank}: {what}")

    @property
    def waits_for_this_rank(self) -> bool:
        """Whether some rank has launched more here than this one has. A question to all, that takes a second or two.

        True as well where launches cannot be counted.
        """
        return not self.progress.counts_launches or self._hangs.most_launches() > self.progress.launches

    def give_up(self, why: str) -> RuntimeError:
        """Launch nothing from here on, as other ranks may launch what this one does not; returns an error to raise."""
        self._hangs.note_failure(why)
        return self._refusal()

    @property
    def has_failed(self) -> bool:
        """Whether a wait has."""
        return bool(self._hangs.failed_before)

    def refuse_if_failed(self) -> None:
        """Raise RuntimeError once a wait has failed: what other ranks have sent for it may meet a later collective.

        And in a process that was forked, whose calls would end in one that nobody runs.
        """
        if self._is_inherited:
            raise self._of_parent()
        if self._hangs.failed_before:
            raise self._refusal()

    def _refusal(self) -> RuntimeError:
        return RuntimeError(
            f"rank {self.global_rank}: {self._hangs.failed_before} What was sent for it may still arrive, "
            f"and be taken for a later step's: load a checkpoint in new processes, or {self._remedy}."
        )

    def close(self) -> None:
        """Destroy the communicator; a no-op the second time, and once torch.distributed has been shut down."""
        self._hangs.close()
        self._at_end.detach()
        if self._row_sums is not None:
            self._forget_rows(self._row_sums)
        for group in reversed(self._groups):
            _end(group())
        self.closed = True

    def _forget_rows(self, row_sums: RowSums) -> None:
        row_sums.close()
        for row in self.by_rows:
            torch_private.groups.forget_group_name(name_for_rows(self.group_name, row))

    def abandon(self) -> None:
        """Leave the communicator to be destroyed when the next one is made: other ranks need not end it at once."""
        self._hangs.close()
        if self._row_sums is not None:
            self._forget_rows(self._row_sums)
        self._at_end()
        self.closed = True


def _end(group: dist.ProcessGroup | None, *, only_gloo: bool = False) -> None:
    if group is None:
        return
    _forget_name(group)
    is_open = dist.is_initialized() and torch_private.groups.is_registered(group)
    if is_open and (not only_gloo or torch_private.groups.is_gloo(group)):
        dist.destroy_process_group(group)


def _destroy_abandoned() -> None:
    while _abandoned:
        _end(_abandoned.pop()(), only_gloo=True)  # elsewhere it may be a collective
