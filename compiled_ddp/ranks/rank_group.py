"""The user's ranks, and the store through which they agree on things; no collective is needed for that."""

import contextlib
import hashlib
import time
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta

import torch.distributed as dist

from compiled_ddp import torch_private
from compiled_ddp.errors import NotInitialisedError, WrongKindError
from compiled_ddp.ranks.hang_report import HangReporter
from compiled_ddp.ranks.progress import RankProgress
from compiled_ddp.ranks.store import Store

_POLL_SECONDS = 0.002

# How many wrappers each rank set has had, per default process group. [Note: one communicator per wrapper]
_wrappers_made: "weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], int]]" = weakref.WeakKeyDictionary()


class RankGroup:
    """The user's ranks, and the store through which they agree on things; no collective is needed for that.

    `name` is made of the global ranks and the wrapper's ordinal among the wrappers of these ranks, so it is the same
    on every rank and in every run.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        """Read the user's group; None is the default one.

        Raises RuntimeError if torch.distributed is not initialised, ValueError if this process is not in `group`,
        TypeError if that is no process group, or none of torch.distributed's.
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
        try:
            self.ranks = tuple(dist.get_process_group_ranks(group))
        except KeyError as error:
            raise WrongKindError(
                f"process_group must be one that torch.distributed knows, of init_process_group() or new_group(): "
                f"{group!r} was made otherwise, or has been destroyed. A group of another library's can reduce "
                "in a hook instead: wrap with a group of torch.distributed, and call register_comm_hook()."
            ) from error
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self.timeout: timedelta = torch_private.groups.group_timeout(group)
        made = _wrappers_made.setdefault(default_group, {})
        ordinal = made.get(self.ranks, 0)
        made[self.ranks] = ordinal + 1
        ranks_hash = hashlib.sha256(repr(self.ranks).encode()).hexdigest()[:12]
        self.name = f"compiled_ddp/{ranks_hash}/{ordinal}"
        self._store = Store(self.name)
        self.leave_waits_unexplained()

    def explain_waits(self, note_wait: Callable[[str], None], failure: Callable[[RuntimeError], RuntimeError]) -> None:
        """From now on waits for other ranks are noted, and their errors go through `failure`, which explains them."""
        self.note_wait, self.failure = note_wait, failure

    def leave_waits_unexplained(self) -> None:
        """As before `explain_waits`."""
        self.explain_waits(lambda _: None, lambda error: error)

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

    @property
    def is_gloo(self) -> bool:
        """Whether the user's group has no other backend, for no kind of device."""
        return is_gloo(self.process_group)

    def published(self, key: str) -> str | None:
        """What any rank has published under `key`, waiting for nobody; None where the store cannot be reached, too."""
        with contextlib.suppress(RuntimeError), self._store.connection() as store:
            return store.get(key).decode() if store.check([key]) else None
        return None

    def silent(self, key: str, *, seconds: float) -> list[int]:
        """The ranks of the group that do not publish anything under `key`/rank within so many seconds."""
        deadline, left = time.monotonic() + seconds, [*range(self.world_size)]
        with self._reaching_store(f"to look for {key!r}"), self._store.connection() as store:
            while left := [rank for rank in left if not store.check([f"{key}/{rank}"])]:
                if time.monotonic() > deadline:
                    break
                time.sleep(_POLL_SECONDS)
        return left

    def new_process_group(self, occasion: str, *, is_models: bool) -> tuple[dist.ProcessGroup, str]:
        """A further process group of the same ranks, under `name`, and the name that graphs call it by.

        One that is made again needs an `occasion` of its own; for `is_models` see `Communicator`.
        """
        try:
            return torch_private.groups.new_group_named(
                self.name, self.ranks, self.process_group, timeout=self.timeout, occasion=occasion, is_models=is_models
            )
        except RuntimeError as error:
            here, others = self.ranks[self.rank], list(self.ranks)
            raise RuntimeError(
                f"rank {here} could not make the process group of {self.name} with ranks {others}: {error} One of "
                "them, or the process that hosts the store of torch.distributed (rank 0, or the agent of torchrun), "
                "has ended or cannot be reached. Look there for the first error, and start all ranks again."
            ) from error

    def hang_reporter(self, rank_progress: RankProgress, occasion: str) -> HangReporter:
        """What explains failed waits of these ranks; it has the store too."""
        store = dist.PrefixStore(occasion, self._store.shared)
        return HangReporter(rank_progress, store, rank=self.rank, ranks=self.ranks, timeout=self.timeout)


def is_gloo(group: dist.ProcessGroup | None) -> bool:
    """Whether `group` has no other backend, for no kind of device."""
    return {part.rpartition(":")[2] for part in dist.get_backend_config(group).split(",")} == {"gloo"}
