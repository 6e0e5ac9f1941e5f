"""The wrapper's own communicator: one process group, one store, one timeout."""

import contextlib
import hashlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from compiled_ddp import torch_private
from compiled_ddp.comm_hooks import Ranks
from compiled_ddp.errors import NotInitialisedError, WrongKindError
from compiled_ddp.ranks import group_name
from compiled_ddp.ranks.hang_report import HangReporter
from compiled_ddp.ranks.progress import RankProgress, frames_of_error
from compiled_ddp.ranks.store import Store

# How many wrappers each rank set has had, per default process group. [Note: one communicator per wrapper]
_wrappers_made: "weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], int]]" = weakref.WeakKeyDictionary()


# The groups of communicators that were collected as garbage. A group ends when what it has launched has ended on other
# ranks too, which a destructor must not wait for: the next communicator to be made does.
_abandoned: "list[weakref.ref[dist.ProcessGroup]]" = []


class RankGroup:
    """The user's ranks, and the store through which they agree on things; no collective is needed for that.

    `name` is made of the global ranks and the wrapper's ordinal among the wrappers of these ranks, so it is the same
    on every rank and in every run.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        """Read the user's group; None is the default one.

        Raises RuntimeError if torch.distributed is not initialised, ValueError if this process is not in `group`,
        TypeError if that is no process group.
        """
        if not dist.is_available() or not dist.is_initialized():
            raise NotInitialisedError(
                "torch.distributed is not initialised: call torch.distributed.init_process_group() before wrapping "
                "the model, and start the script with torchrun (or set RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT)."
            )
        given: object = group
        if given is dist.GroupMember.NON_GROUP_MEMBER:
            raise WrongKindError(
                f"global rank {dist.get_rank()} is not a member of process_group: wrap the model only on the ranks "
                "that belong to the group."
            )
        if not isinstance(group, dist.ProcessGroup | None):
            raise TypeError(
                f"process_group must be a ProcessGroup, as torch.distributed.new_group() returns, or None, found "
                f"{group!r}."
            )
        default_group = dist.group.WORLD
        assert default_group is not None
        group = group or default_group
        self.group = weakref.ref(group)
        self.ranks = tuple(dist.get_process_group_ranks(group))
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self.timeout: timedelta = torch_private.groups.group_timeout(group)
        made = _wrappers_made.setdefault(default_group, {})
        ordinal = made.get(self.ranks, 0)
        made[self.ranks] = ordinal + 1
        ranks_hash = hashlib.sha256(repr(self.ranks).encode()).hexdigest()[:12]
        self.name = f"compiled_ddp/{ranks_hash}/{ordinal}"
        self._store = Store(self.name)
        # Until `explain_waits`:
        self.note_wait: Callable[[str], None] = lambda _: None
        self.failure: Callable[[RuntimeError], RuntimeError] = lambda error: error

    def explain_waits(self, note_wait: Callable[[str], None], failure: Callable[[RuntimeError], RuntimeError]) -> None:
        """From now on waits for other ranks are noted, and their errors go through `failure`, which explains them."""
        self.note_wait, self.failure = note_wait, failure

    @property
    def process_group(self) -> dist.ProcessGroup:
        group = self.group()
        assert group is not None, "the user's group has been destroyed"
        return group

    def publish(self, key: str, value: str) -> None:
        """Make `value` readable by every rank under `key`."""
        with self._reaching_store(f"to publish {key!r} for the other ranks"), self._store.connection() as store:
            store.set(key, value)

    def read(self, key: str, *, writer: int, purpose: str, patience: float = 1.0) -> str:
        """Wait for what the group's rank `writer` publishes under `key`.

        Raises RuntimeError, naming the silent rank, when `patience` times the group's timeout is over.
        """
        timeout = self.timeout * patience
        here, there = self.ranks[self.rank], self.ranks[writer]
        self.note_wait(f"rank {there}, through the store, {purpose}")
        value: str | None = None
        silence: Exception | None = None
        with self._reaching_store(f"to wait for rank {there} ({purpose})"), self._store.connection() as store:
            try:
                store.wait([key], timeout)
                value = store.get(key).decode()
            except dist.DistStoreError as error:
                silence = error
        if value is None:
            silent = RuntimeError(
                f"rank {here} waited {timeout.total_seconds():g} s for rank {there} ({purpose}), which "
                f"stayed silent: it has stopped, or does not take part in {self.name}. Every rank of the group must "
                "wrap the same models in the same order and run the same synchronised backwards."
            )
            raise self.failure(silent) from silence
        self.note_wait("")
        return value

    @contextlib.contextmanager
    def _reaching_store(self, what: str) -> Iterator[None]:
        """Explain what the store raises in here."""
        try:
            yield
        except RuntimeError as error:  # those of torch.distributed among them
            unreachable = RuntimeError(
                f"rank {self.ranks[self.rank]} could not reach the store of torch.distributed {what}: {error} The "
                "process that hosts the store (rank 0, or the agent of torchrun) has ended, or the connection to it "
                "is lost. Look there for the first error, and start all ranks again."
            )
            raise self.failure(unreachable) from error

    def new_process_group(self) -> tuple[dist.ProcessGroup, str]:
        """A further process group of the same ranks, under `name`, and the name that graphs call it by."""
        try:
            return torch_private.groups.new_group_named(
                self.name, self.ranks, parent=self.process_group, timeout=self.timeout
            )
        except RuntimeError as error:
            here, others = self.ranks[self.rank], list(self.ranks)
            raise RuntimeError(
                f"rank {here} could not make the process group of {self.name} with ranks {others}: {error} One of "
                "them, or the process that hosts the store of torch.distributed (rank 0, or the agent of torchrun), "
                "has ended or cannot be reached. Look there for the first error, and start all ranks again."
            ) from error

    def hang_reporter(self, rank_progress: RankProgress) -> HangReporter:
        """What explains failed waits of these ranks; it has the store too."""
        return HangReporter(rank_progress, self._store.shared, rank=self.rank, ranks=self.ranks, timeout=self.timeout)


class Communicator:
    """[Note: one communicator per wrapper]

    The order of collectives on it depends on nothing but its wrapper: neither on other wrappers, nor on collectives
    of the model or the user. On a shared group, two ranks that swap two all-reduces of equal size both get wrong
    sums and no error.
    """

    def __init__(self, ranks: RankGroup) -> None:
        _destroy_abandoned()
        self.ranks = ranks
        self.rank, self.world_size = ranks.rank, ranks.world_size
        self.closed = False
        world = dist.group.WORLD
        assert world is not None
        group, self.group_name = ranks.new_process_group()
        # torch.distributed owns the groups: held here, their threads would live on after they are destroyed.
        self._group = weakref.ref(group)
        self._at_end = weakref.finalize(self, _abandoned.append, self._group)
        self._at_end.atexit = False
        self.progress = RankProgress(group)
        self._hangs = ranks.hang_reporter(self.progress)
        ranks.explain_waits(self.progress.note_wait, self.failure)

    @property
    def group(self) -> dist.ProcessGroup:
        """Raises RuntimeError once it has been destroyed."""
        group = self._group()
        if group is None:
            raise RuntimeError(
                f"the process group of {self.ranks.name} has been destroyed: make the wrapper anew after "
                "torch.distributed.init_process_group()."
            )
        return group

    def for_hooks(self) -> Ranks:
        """The ranks as a communication hook sees them."""
        return Ranks(self.world_size, self.group_name, self.rank if _is_gloo(self.group) else None)

    def all_reduce(self, flat_buffer: torch.Tensor) -> dist.Work:
        """Launch the sum over ranks of `flat_buffer`, in place."""
        work: dist.Work | None = dist.all_reduce(flat_buffer, group=self.group, async_op=True)
        assert work is not None
        return work

    def maximum(self, values: torch.Tensor) -> None:
        """Overwrite `values` with their maximum over ranks."""
        self.refuse_if_failed()
        with self.explaining("a maximum over ranks failed"):
            dist.all_reduce(values, dist.ReduceOp.MAX, group=self.group)

    def broadcast(self, tensors: Sequence[torch.Tensor], *, source: int = 0) -> None:
        """Overwrite `tensors` with those of the group's rank `source`."""
        if tensors and self.world_size > 1:
            self.refuse_if_failed()
            self.progress.note_wait(f"the parameters and buffers of {self._format_rank(source)}")
            with self.explaining("the broadcast of parameters and buffers failed"):
                torch_private.groups.broadcast_coalesced(self.group, list(tensors), source=source)
            self.progress.note_wait("")

    def _format_rank(self, rank: int) -> str:
        return f"rank {self.ranks.ranks[rank]}" if rank else "the group's first rank"

    def failure(self, error: RuntimeError, what: str | None = None) -> RuntimeError:
        """`error`, of a wait or a launch, in the words of `what`, with a report of where every rank stands."""
        message = f"{what}: {error}" if what else str(error)
        return RuntimeError(f"{message}\n{self._hangs.report(frames_of_error(error))}")

    @contextlib.contextmanager
    def explaining(self, what: str) -> Iterator[None]:
        """Raise a RuntimeError in here, of a collective, again as `failure`."""
        try:
            yield
        except RuntimeError as error:
            raise self.failure(error, f"rank {self.ranks.ranks[self.rank]}: {what}") from error

    def give_up(self, why: str) -> RuntimeError:
        """Launch nothing from here on, as other ranks may launch what this one does not; returns an error to raise."""
        self._hangs.note_failure(why)
        return self._refusal()

    @property
    def has_failed(self) -> bool:
        """Whether a wait has."""
        return bool(self._hangs.failed_before)

    def refuse_if_failed(self) -> None:
        """Raise RuntimeError once a wait has failed: what other ranks have sent for it may meet a later collective."""
        if self._hangs.failed_before:
            raise self._refusal()

    def _refusal(self) -> RuntimeError:
        return RuntimeError(
            f"rank {self.ranks.ranks[self.rank]}: {self._hangs.failed_before} What was sent for it may still arrive, "
            "and be taken for a later step's: load a checkpoint in new processes, or unwrap() and wrap again on every "
            "rank."
        )

    def close(self) -> None:
        """Destroy the communicator; a no-op the second time, and once torch.distributed has been shut down."""
        self._hangs.close()
        self._at_end.detach()
        _end(self._group())
        self.closed = True

    def abandon(self) -> None:
        """Leave the communicator to be destroyed when the next one is made: other ranks need not end it at once."""
        self._hangs.close()
        self._at_end()
        self.closed = True


def _end(group: dist.ProcessGroup | None, *, only_gloo: bool = False) -> None:
    if group is None:
        return
    group_name.forget(group)
    is_open = dist.is_initialized() and torch_private.groups.is_registered(group)
    if is_open and (not only_gloo or _is_gloo(group)):
        dist.destroy_process_group(group)


def _destroy_abandoned() -> None:
    while _abandoned:
        _end(_abandoned.pop()(), only_gloo=True)  # elsewhere it may be a collective


def _is_gloo(group: dist.ProcessGroup | None) -> bool:
    """Whether `group` has no other backend, for no kind of device."""
    return {part.rpartition(":")[2] for part in dist.get_backend_config(group).split(",")} == {"gloo"}
