"""The group that collectives inside of losses run on; each is agreed on before anything is launched."""

import contextlib
import functools
import weakref
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

import torch.distributed as dist

from compiled_ddp.functional.agreements import Agreements
from compiled_ddp.functional.wanted import LossCollective, describe
from compiled_ddp.ranks import communicator as ranks
from compiled_ddp.ranks.progress import failed_in_collective

_made: "weakref.WeakKeyDictionary[dist.ProcessGroup, dict[Agreements, LossGroup]]" = weakref.WeakKeyDictionary()
_of_groups: "weakref.WeakKeyDictionary[dist.ProcessGroup, LossGroup]" = weakref.WeakKeyDictionary()  # the same ones


class LossGroup:
    """The group that collectives in losses, and top-level ones, of some ranks run on.

    [Note: every rank launches what all expect] What comes next follows from what has come, alike on all ranks. A rank
    that wants something else compares with the others before it launches anything, so that collectives of different
    sizes never meet; and it calls those that have launched what was expected.
    """

    def __init__(self, agreements: Agreements) -> None:
        self.agreements = agreements
        self._made: ranks.Communicator | None = None
        self._calls = 0
        agreements.groups.add(self)

    @classmethod
    def of(cls, process_group: dist.ProcessGroup | None) -> "LossGroup":
        """The group for losses of this process group's ranks. Raises as `RankGroup`."""
        if process_group is not None and process_group in _of_groups:
            return _of_groups[process_group]
        agreements, world = Agreements.of(process_group), dist.group.WORLD
        assert world is not None
        made = _made.setdefault(world, {})
        if agreements not in made:
            made[agreements] = cls(agreements)
        return _of_groups.setdefault(process_group or world, made[agreements])

    @property
    def name(self) -> str:
        """What graphs call the group, also before it is made."""
        return self.agreements.ranks.name

    @property
    def is_open(self) -> bool:
        """Whether there is a group."""
        return self._made is not None

    @property
    def launches(self) -> int:
        """How many collectives this rank has launched on the group."""
        return self._own().progress.launches

    def open(self) -> None:
        """Make the group, unless there is one: ranks have just agreed on a collective of it."""
        if self._made is None:
            occasion = self.agreements.occasion
            self._made = ranks.Communicator(self.agreements.ranks, occasion=occasion, is_models=True)
            self.agreements.groups.note_open(self.name)

    @property
    def waits_for_this_rank(self) -> bool:
        """Whether some rank has launched more on the group than this one."""
        return self._own().waits_for_this_rank

    def close(self) -> None:
        """End this rank's part in the group; the next agreement makes another one."""
        if self._made is not None:
            self._made.close()
            self._made = None

    def _own(self) -> ranks.Communicator:
        assert self._made is not None, "no agreement yet"
        return self._made

    def agree(self, following: Sequence[LossCollective]) -> None:
        """These come next on this rank. Raises RuntimeError, on every rank, where that is not so on all of them.

        A comparison, where ranks would not expect them. Makes the group at the first one.
        """
        while number := self.agreements.order.unexpected(following):
            self.agreements.call()
            next_ones = following[:number]
            self.agreements.compare(functools.partial(describe, next_ones), next_ones[0].caller, self._made)
            self.open()
            self.agreements.order.note_agreed(next_ones)

    def begin(self, collectives: Sequence[LossCollective]) -> None:
        """These are about to be launched. Raises RuntimeError once a wait has failed."""
        own = self._own()
        own.refuse_if_failed()
        self._calls += 1
        own.progress.forward_began(self._calls)
        own.progress.note_wait(f"{collectives[0].what} of {collectives[0].caller}")

    @contextlib.contextmanager
    def launching(self, collectives: Sequence[LossCollective]) -> Iterator[None]:
        """Agree on these; raise what goes wrong as they are launched and awaited, on every rank by name."""
        self.agree(collectives)
        self.begin(collectives)
        self.agreements.order.note_launched(collectives)
        try:
            yield
            self._own().progress.note_wait("")
        except RuntimeError as error:
            if self.agreements.is_called:
                described = functools.partial(describe, collectives, are_launched=True)
                raise self.agreements.come(described, collectives[0].caller) from error
            if failed_in_collective(error):
                here = self.agreements.ranks.global_rank
                what = f"rank {here}: {collectives[0].what} of {collectives[0].caller} failed"
                failure = self._own().failure(error, what)
                self.agreements.give_up()
                raise failure from error
            raise


@dataclass(frozen=True, eq=False)
class LossLaunch:
    """A collective of a loss in a graph."""

    group: LossGroup
    wanted: LossCollective

    @property
    def key(self) -> Hashable:
        """Identifies the collective on all ranks."""
        return self.wanted


class LossLaunches:
    """The collectives in losses that one graph launches."""

    def __init__(self, launches: Sequence[LossLaunch]) -> None:
        groups = dict.fromkeys(launch.group for launch in launches)
        self._of_groups = {group: [each.wanted for each in launches if each.group is group] for group in groups}
        self.agreements = tuple(dict.fromkeys(group.agreements for group in groups))
        self._is_counted = False  # once a run has launched them all, and nothing else

    def agree(self) -> None:
        """They come next on this rank. Raises RuntimeError, on every rank, where that is not so on all of them."""
        for group, collectives in self._of_groups.items():
            group.agree(collectives)

    def note_launched(self) -> None:
        """They are about to be launched, behind `agree`: what follows them goes by that."""
        for group, collectives in self._of_groups.items():
            group.agreements.order.note_launched(collectives)

    @contextlib.contextmanager
    def launching(self) -> Iterator[None]:
        """A graph launches them in here, as agreed.

        Raises RuntimeError where a compiler has dropped or added some of them.
        """
        for group, collectives in self._of_groups.items():
            group.begin(collectives)
        before = [group.launches for group in self._of_groups]
        yield
        launched = [group.launches - number for group, number in zip(self._of_groups, before, strict=True)]
        planned = [*map(len, self._of_groups.values())]
        if launched != planned and not self._is_counted:
            raise RuntimeError(
                f"a compiled step has launched {sum(launched)} collectives of its losses in place of {sum(planned)}: "
                "please report the step. Eager calls, without compiled_ddp.functional.compile, are right."
            )
        self._is_counted = True

    @contextlib.contextmanager
    def launching_alone(self) -> Iterator[None]:
        """As `launching`, for a graph without reductions: agrees first, and raises on every rank what went wrong."""
        with contextlib.ExitStack() as stack:
            for group, collectives in self._of_groups.items():
                stack.enter_context(group.launching(collectives))
            with self.launching():
                yield
