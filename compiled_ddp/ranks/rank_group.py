"""The user's ranks, and the store through which they agree on things; no collective is needed for that."""

import contextlib
import functools
import hashlib
import itertools
import logging
import time
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta

import torch.distributed as dist

from compiled_ddp import torch_private
from compiled_ddp.errors import NotInitialisedError, WrongKindError
from compiled_ddp.ranks import pretended
from compiled_ddp.ranks.clock import OUTLAST_SECONDS, again_and_again, grace_seconds, within
from compiled_ddp.ranks.hang_report import HangReporter
from compiled_ddp.ranks.progress import RankProgress
from compiled_ddp.ranks.store import Answer, Store, part_of_default
from compiled_ddp.telling.slow_work import SlowWork

_log = logging.getLogger(__name__)

_POLL_SECONDS, _LONGEST_POLL_SECONDS = 0.002, 0.2
_MOST_KEYS = 1000  # that one request asks the store for
_LOOK_SECONDS = 1.0  # how often a rank that waits for a key looks at what else there is to know
# How long a rank that tells that it lives is waited for at most: as long as compilers may take.
_PATIENCE_SECONDS = 2 * 3600.0
_BEATS_PER_TIMEOUT, _SHORTEST_BEAT_SECONDS, _LONGEST_BEAT_SECONDS = 10, 0.2, 5.0

# How many wrappers each rank set has had, per default process group. [Note: one communicator per wrapper]
_wrappers_made: "weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], int]]" = weakref.WeakKeyDictionary()


def _forget(store: "weakref.ref[Store]") -> None:
    there = store()
    if there is not None:
        there.forget()


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
        check_kind(group)
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
        self._store = Store(part_of_default(self.name), self.timeout)
        # Wrappers that nobody has any more live until the collector comes.
        weakref.finalize(default_group, _forget, weakref.ref(self._store)).atexit = False
        self._beats = itertools.count()
        self.leave_waits_unexplained()

    def explain_waits(
        self,
        note_wait: Callable[[str], None],
        failure: Callable[[RuntimeError], RuntimeError],
        is_called_off: Callable[[], bool],
    ) -> None:
        """From now on waits for other ranks are noted, and their errors go through `failure`, which explains them.

        They end early once `is_called_off` tells that ranks know why they fail.
        """
        self.note_wait, self.failure, self._is_called_off = note_wait, failure, is_called_off

    def leave_waits_unexplained(self) -> None:
        """As before `explain_waits`."""
        self.explain_waits(lambda _: None, lambda error: error, lambda: False)

    @property
    def global_rank(self) -> int:
        """This rank as people know it, in whatever groups it is."""
        return self.ranks[self.rank]

    @property
    def process_group(self) -> dist.ProcessGroup:
        group = self.group()
        assert group is not None, "the user's group has been destroyed"
        return group

    def publish(self, key: str, value: str) -> None:
        """Make `value` readable by every rank under `key`."""
        with self._reaching_store(f"to publish {key!r} for the other ranks"):
            self._store.ask(lambda store: store.set(key, value))

    def beat_of(self, rank: int) -> str | None:
        """What the group's rank has left last as a sign of life, see `living`."""
        return self.published(_life(rank))

    def read(self, key: str, *, writer: int, purpose: str, patience: float = 1.0) -> str:
        """Wait for what the group's rank `writer` publishes under `key`.

        Raises RuntimeError, naming the silent rank, when `patience` times the group's timeout is over; one that tells
        that it lives, see `living`, is waited for until it has not told so for the timeout.
        """
        timeout = self.timeout.total_seconds()
        here, there = self.global_rank, self.ranks[writer]
        self.note_wait(f"rank {there}, through the store, {purpose}")
        with self._reaching_store(f"to wait for rank {there} ({purpose})"):
            value, waited = self._await(key, writer, seconds=timeout * patience, purpose=purpose)
        if value is None:
            silent = RuntimeError(
                f"rank {here} waited {waited:.3g} s for rank {there} ({purpose}), which "
                f"stayed silent: it has stopped, or does not take part in {self.name}. Every rank of the group must "
                "wrap the same models in the same order and run the same synchronised backwards."
            )
            raise self.failure(silent)
        self.note_wait("")
        return value

    def read_all(self, key: str, *, purpose: str) -> list[str]:
        """What `read_each` finds of all ranks but the first."""
        return [*self.read_each(key, first=1, purpose=purpose)]

    def read_each(self, key: str, *, first: int, purpose: str) -> Iterator[str]:
        """As `read`, what each of the group's ranks from `first` on publishes under `key`/rank, in their order.

        Those that are there come in one request for a thousand: each by itself would take ten thousand ranks a minute.
        """
        while first < self.world_size:
            missing = range(first, self.world_size)[:_MOST_KEYS]
            there = self._if_all_are_there([f"{key}/{writer}" for writer in missing])
            there = there or [self.read(f"{key}/{first}", writer=first, purpose=purpose)]
            yield from there
            first += len(there)

    def _if_all_are_there(self, keys: list[str]) -> list[str] | None:
        def ask(store: dist.Store) -> list[str] | None:
            # A FileStore gives one value at a time; torch's stubs do not know the question.
            if not store.has_extended_api() or not store.check(keys):  # type: ignore[attr-defined]
                return None
            return [value.decode() for value in store.multi_get(keys)]

        return self.ask_quietly(ask)

    def _await(self, key: str, writer: int, *, seconds: float, purpose: str) -> tuple[str | None, float]:
        """The value of `key`, and how many seconds it was waited for.

        None where it does not come in time, or where ranks have called off what waits for it.
        """
        began = time.monotonic()
        deadline, beat = began + seconds, None
        look = min(_LOOK_SECONDS, self.timeout.total_seconds() / 5)
        with contextlib.ExitStack() as telling:
            while True:
                left = deadline - time.monotonic()
                value = self._store.ask(functools.partial(_wait, key, min(max(left, 0.001), look)))
                if value is not None or left <= look or self._is_called_off():
                    return value, min(time.monotonic(), deadline) - began
                beat_now = self.beat_of(writer) or ""
                if beat is None:
                    telling.enter_context(self._telling_of_wait(writer, purpose))
                elif beat_now != beat:
                    deadline = max(deadline, time.monotonic() + self.timeout.total_seconds())
                    deadline = min(deadline, began + max(seconds, _PATIENCE_SECONDS))
                    self._tell_that_this_lives()  # for those who wait for this rank
                beat = beat_now

    def _telling_of_wait(self, writer: int, purpose: str) -> SlowWork:
        what = f"for rank {self.ranks[writer]} ({purpose})"
        return SlowWork(_log, ("waiting", "waited"), what=what, is_told=lambda: self.rank == 0)

    def living(self) -> contextlib.AbstractContextManager[None]:
        """While in this context, tell again and again that this rank lives: it may be in a compiler for long."""
        seconds = self.timeout.total_seconds() / _BEATS_PER_TIMEOUT
        seconds = min(max(seconds, _SHORTEST_BEAT_SECONDS), _LONGEST_BEAT_SECONDS)

        def beat() -> bool:
            with contextlib.suppress(RuntimeError):  # this rank finds out by itself that the store has ended
                self._tell_that_this_lives()
                return True
            return False

        return again_and_again(beat, seconds=seconds, name="compiled_ddp living")

    def _tell_that_this_lives(self) -> None:
        self._store.ask(functools.partial(_set, _life(self.rank), str(next(self._beats))))

    def outlast(self, occasion: str) -> None:
        """Stay until every rank knows of `occasion`, so has called this too, or a second has passed.

        Before an error that all ranks raise: the store may end with this process.
        """
        key, deadline = f"{occasion}/known", time.monotonic() + OUTLAST_SECONDS
        with contextlib.suppress(RuntimeError):
            known = self._store.ask(lambda store: store.add(key, 1))
            while known < self.world_size and time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS)
                known = self._store.ask(lambda store: store.add(key, 0))

    @contextlib.contextmanager
    def _reaching_store(self, what: str) -> Iterator[None]:
        """Explain what the store raises in here."""
        try:
            yield
        except RuntimeError as error:  # those of torch.distributed among them
            unreachable = RuntimeError(
                f"rank {self.ranks[self.rank]} could not reach the store of torch.distributed {what}: {error} The "
                "process that hosts the store (rank 0, or the agent of torchrun) has ended or is stopped, or the "
                "connection to it is lost. Look there for the first error, and start all ranks again."
            )
            raise self.failure(unreachable) from error

    @property
    def is_gloo(self) -> bool:
        """Whether the user's group has no other backend, for no kind of device."""
        return torch_private.groups.is_gloo(self.process_group)

    def published(self, key: str) -> str | None:
        """What any rank has published under `key`, waiting for nobody; None where the store cannot be reached, too."""
        return self.ask_quietly(lambda store: store.get(key).decode() if store.check([key]) else None)

    def ask_quietly(self, question: Callable[[dist.Store], Answer]) -> Answer | None:
        """What `question` makes of the store; None where that cannot be, which is no failure of these ranks."""
        with contextlib.suppress(RuntimeError):
            return self._store.ask(question)
        return None

    def publish_quietly(self, key: str, value: str) -> None:
        """As `publish`, where it can be; that it cannot is no failure of these ranks."""
        self.ask_quietly(functools.partial(_set, key, value))

    def silent(self, key: str, *, seconds: float) -> list[int]:
        """The ranks of the group that do not publish anything under `key`/rank within so many seconds."""
        deadline, left = time.monotonic() + seconds, [*range(self.world_size)]

        def look(store: dist.Store) -> list[int]:
            return [rank for rank in left if not store.check([f"{key}/{rank}"])]

        with self._reaching_store(f"to look for {key!r}"):
            while left := self._store.ask(look):
                if time.monotonic() > deadline:
                    break
                time.sleep(_POLL_SECONDS)
        return left

    def new_process_group(self, occasion: str, *, is_models: bool, purpose: str = "") -> tuple[dist.ProcessGroup, str]:
        """A further process group of the same ranks, under `name` and `purpose`, and the name that graphs call it by.

        One that is made again needs an `occasion` of its own; for `is_models` see `Communicator`.
        """
        make = functools.partial(
            torch_private.groups.new_group_named,
            f"{self.name}{purpose}",
            self.ranks,
            self.process_group,
            timeout=self.timeout,
            occasion=occasion,
            is_models=is_models,
        )
        # It waits for the others in the store, and then for each of them to connect.
        seconds = 2 * self.timeout.total_seconds() + grace_seconds(self.timeout)
        try:
            # Gloo needs no device, which a process that has been forked could not even ask for.
            call = make if self.is_gloo else torch_private.groups.on_this_device(make)
            return within(seconds, call, name="compiled_ddp group")
        except RuntimeError as error:
            here, others = self.ranks[self.rank], list(self.ranks)
            raise RuntimeError(
                f"rank {here} could not make the process group of {self.name} with ranks {others}: {error} One of "
                "them, or the process that hosts the store of torch.distributed (rank 0, or the agent of torchrun), "
                "has ended, is stopped or cannot be reached. Look there for the first error, and start all ranks again."
            ) from error

    def hang_reporter(self, group: dist.ProcessGroup, rank_progress: RankProgress, occasion: str) -> HangReporter:
        """What explains failed waits of these ranks on `group`; it has the store too."""
        store = dist.PrefixStore(occasion, self._store.shared)
        return HangReporter(rank_progress, store, group, rank=self.rank, ranks=self.ranks, timeout=self.timeout)


def check_kind(group: object) -> None:
    """Raise TypeError for what is neither a process group, nor None, nor what those outside of a group are given."""
    if not isinstance(group, dist.ProcessGroup | None) and group is not dist.GroupMember.NON_GROUP_MEMBER:
        raise TypeError(
            f"process_group must be a ProcessGroup, as torch.distributed.new_group() returns, or None, found {group!r}."
        )


def _life(rank: int) -> str:
    return f"lives/{rank}"


def _set(key: str, value: str, store: dist.Store) -> None:
    store.set(key, value)


def _wait(key: str, seconds: float, store: dist.Store) -> str | None:
    """What comes under `key` within so many seconds; None if nothing does.

    Not by the store's own `wait`: torch logs two lines of warning wherever one ends without its key.
    """
    deadline, pause = time.monotonic() + seconds, _POLL_SECONDS
    while pretended.current() is None and not store.check([key]):  # where nobody comes to publish it later
        if time.monotonic() > deadline:
            return None
        time.sleep(pause)
        pause = min(1.5 * pause, _LONGEST_POLL_SECONDS)
    return store.get(key).decode()
