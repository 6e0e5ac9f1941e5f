"""How one gradient function's trees are reduced: at once, as an operator of a graph that is traced, or not at all."""

import contextlib
import functools
import weakref
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from compiled_ddp import torch_private
from compiled_ddp.comm_hooks import Ranks
from compiled_ddp.functional.agreements import Agreements
from compiled_ddp.functional.around_sum import AroundSum
from compiled_ddp.functional.communicator import Communicator, Leading
from compiled_ddp.functional.first_parameters import FirstParameters
from compiled_ddp.functional.on_buckets import Kept, OnBuckets
from compiled_ddp.functional.operator import SumOverRanks, naming_buckets
from compiled_ddp.functional.session import Session, current_session
from compiled_ddp.functional.shares import scattered_by
from compiled_ddp.functional.unit import Run, Unit, break_off
from compiled_ddp.functional.wanted import UNPLANNED, Agreed, Arrival, ByRows, Scattered, Wanted
from compiled_ddp.options import is_number
from compiled_ddp.passes.inline_hook import HOOKS_GROUP
from compiled_ddp.plan import FIRST_USED, gradient_dtype
from compiled_ddp.planning.saved_plan import SavedPlan
from compiled_ddp.ranks.rank_group import check_kind
from compiled_ddp.users_code import warn_user

Kind = Literal["mean", "sum", "weighted"]


@dataclass(frozen=True)
class Options:
    """The options of a gradient function, as in `grad`."""

    process_group: dist.ProcessGroup | Communicator | None
    reduction: Kind
    bucket_cap_mb: float | None
    is_scattered: bool = False  # whether each rank gets its share, in a compiled step that gathers what becomes of it
    numbers: int = 0  # that it sums up in between: see `Scattered`
    is_gathered_later: bool = False  # likewise
    whole: bool = False  # whether the sums are gathered, so that any part of them may be a rank's share
    hook: AroundSum | OnBuckets | None = None  # of a compiled step; makes the mean
    plan: SavedPlan | None = None  # of a compiled step, in place of one that is made for the link
    by_rows: ByRows | None = None  # of a compiled step

    def __post_init__(self) -> None:
        if not isinstance(self.process_group, Communicator):
            check_kind(self.process_group)
        if self.reduction not in get_args(Kind):
            raise ValueError(f"reduction must be one of {', '.join(get_args(Kind))}, found {self.reduction!r}.")
        cap: object = self.bucket_cap_mb
        if cap is not None and not (is_number(cap) and cap >= 0):
            raise ValueError(f"bucket_cap_mb must be a size in MiB, 0 or more, found {cap!r}.")


_MANY = 16
_made: Counter[tuple[str, str]] = Counter()  # gradient functions with a communicator of their own, by name and place


def _tell_of_many(name: str, place: str) -> None:
    _made[name, place] += 1
    if _made[name, place] == _MANY:
        warn_user(
            f"{name} has been made {_MANY} times, each with a communicator of its own, which takes time and is kept: "
            "make the gradient function once, outside of the loop, or let several share a Communicator."
        )


def current_world() -> Hashable:
    """A reference to the default process group, which does not keep it; None without one."""
    world = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    return None if world is None else weakref.ref(world)


class GradientReduction:
    """The reductions of one gradient function."""

    def __init__(self, name: str, place: str, options: Options) -> None:
        """It is defined at `place`, by which ranks tell functions of one name apart."""
        self.name, self.place, self.options = name, place, options
        self._communicator: Communicator | None = None
        self._leading: dict[torch.device, Leading] = {}
        self._world: Hashable = None  # in which the communicator was made
        self._is_alone: bool | None = None  # whether there are no other ranks; None until the first call

    @property
    def communicator(self) -> Communicator:
        assert self._communicator is not None, "asked of ranks that are alone"
        return self._communicator

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The user's, once `find_ranks` was called; None without torch.distributed."""
        return None if self._communicator is None else self._communicator.process_group

    @property
    def world_size(self) -> int:
        return 1 if self._communicator is None else self._communicator.world_size

    @property
    def own_rank(self) -> int:
        return 0 if self._communicator is None else self._communicator.rank

    @property
    def for_hooks(self) -> Ranks:
        """The ranks as communication hooks see them whose programs go into graphs, before there is a group."""
        is_on_gloo = self._communicator is not None and self._communicator.agreements.ranks.is_gloo
        return Ranks(self.world_size, HOOKS_GROUP, self.own_rank if is_on_gloo else None)

    @property
    def global_rank(self) -> int:
        return 0 if self._communicator is None else dist.get_rank()

    def find_ranks(self) -> None:
        """At the first call: make the communicator, or warn that there is nothing to reduce over.

        Without torch.distributed each call looks anew; behind destroy_process_group and another init_process_group the
        communicator is another one too, unless it, or its group, is the user's.
        """
        given, world = self.options.process_group, current_world()
        if self._communicator is not None and (given is not None or world == self._world):
            return
        is_first = self._communicator is None
        self._communicator, self._world = None, world
        is_there = given is not None or (dist.is_available() and dist.is_initialized())
        if is_there:
            self._communicator = given if isinstance(given, Communicator) else Communicator(given)
            if self._communicator is not given and is_first:
                _tell_of_many(self.name, self.place)
        was_alone = self._is_alone
        self._is_alone = not is_there or self.communicator.world_size == 1
        if self._is_alone and not was_alone:
            why = "there is one rank" if is_there else "torch.distributed is not initialised"
            warn_user(f"{self.name} returns this process's own gradients, as {why}.")

    @property
    def is_alone(self) -> bool:
        return self._is_alone is True

    @property
    def communicators(self) -> tuple[Communicator, ...]:
        """The one, once this function has been called among several ranks, for as long as these are there."""
        is_gone = self.options.process_group is None and self._world != current_world()
        return () if self._communicator is None or self.is_alone or is_gone else (self._communicator,)

    def agreements(self) -> Agreements | None:
        """The agreements among this function's ranks, also before its first call; None where there is one rank."""
        group = self.options.process_group
        if isinstance(group, Communicator):
            return group.agreements
        has_ranks = dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1
        return Agreements.of(group) if has_ranks else None

    def sum(
        self, parameters: Mapping[str, Tensor], gradients: Sequence[Tensor], passengers: Sequence[Tensor]
    ) -> list[Tensor]:
        """The sums over ranks of the gradients with respect to `parameters`, then of the passengers."""
        session = current_session()
        if session is not None:
            reduce = functools.partial(self._trace, session, parameters)
        elif torch_private.tracing.is_tracing():
            reduce = functools.partial(self._trace_for_others, parameters)
        else:
            reduce = functools.partial(self._reduce, parameters)
        return list(SumOverRanks.apply(reduce, len(gradients), *gradients, *passengers))  # type: ignore[no-untyped-call]

    def planned(self, parameters: Mapping[str, Tensor], passengers: Sequence[Tensor]) -> Agreed:
        """The reduction of such gradients and passengers by whole buckets, as a step that is traced wants it."""
        wanted = self._wanted(parameters, [*parameters.values()], passengers)
        assert wanted.planner is not None, "buckets depend on the link"
        return Agreed(wanted, Arrival.last_first(wanted), self.world_size, wanted.planner)

    def by_buckets(
        self, parameters: Mapping[str, Tensor], gradients: Sequence[Tensor], passengers: Sequence[Tensor], kept: Kept
    ) -> tuple[list[Tensor], list[Tensor]]:
        """What a hook on buckets makes of gradients, and the sums of passengers; and what it keeps.

        In a graph that is traced, or where one rank is alone.
        """
        hook, planned = self.options.hook, self.planned(parameters, passengers)
        assert isinstance(hook, OnBuckets)

        def reduce(given: Sequence[Tensor]) -> Sequence[Tensor]:
            if self.is_alone:
                results = hook.alone(gradients, planned.plan, given)
                return [*results[: len(gradients)], *passengers, *results[len(gradients) :]]
            session = current_session()
            assert session is not None, "a hook on buckets is a compiled step's"
            leading = Leading(planned.wanted.device)
            results = planned.launch(gradients, passengers, leading.tensor, "", [*given])
            place = len(gradients) + len(passengers)
            session.note_run(Run(self.communicator, planned.wanted, leading), results.pop(place), parameters)
            return results

        return hook.reduced(planned.plan, reduce, kept)

    def note_call(self) -> None:
        """Let the step that is being traced know whom to tell of an error."""
        session = current_session()
        if session is not None:
            session.note_call(self.communicator)

    @property
    def failures(self) -> int:
        """How often something has failed that other ranks know of, or find out."""
        return self.communicator.agreements.failures

    def break_off(self, error: BaseException) -> None:
        """Tell the other ranks that nothing can be reduced here: none is left waiting."""
        break_off((self.communicator,), self.communicator.agreements, self.name, error)

    # ---- below all transforms ----------------------------------------------------------------------------------------

    def _wanted(
        self, parameters: Mapping[str, Tensor], gradients: Sequence[Tensor], passengers: Sequence[Tensor]
    ) -> Wanted:
        found = [(name, tuple(g.shape), g.dtype, g.device) for name, g in zip(parameters, gradients, strict=True)]
        ridden = sum(passenger.numel() for passenger in passengers)
        options, scattered = self.options, None
        if options.is_scattered:
            by = scattered_by(self.communicator.process_group, gradients[0].device)
            gathered = tuple(gradient_dtype(parameter) for parameter in parameters.values())
            kinds = {(dtype, gradient.dtype) for dtype, gradient in zip(gathered, gradients, strict=True)}
            are_alike = len({sent for _, sent in kinds}) == len(kinds)  # in each bucket, behind a hook that converts
            scattered = Scattered(by, options.numbers, options.is_gathered_later, options.whole and are_alike, gathered)
        buckets = options.bucket_cap_mb, options.plan
        hook = options.hook if isinstance(options.hook, OnBuckets) else None
        return Wanted(
            self.name, self.place, options.reduction, *buckets, tuple(found), ridden, scattered, hook, options.by_rows
        )

    def _reduce(
        self, parameters: Mapping[str, Tensor], gradients: Sequence[Tensor], passengers: Sequence[Tensor]
    ) -> Sequence[Tensor]:
        wanted, first = self._wanted(parameters, gradients, passengers), FirstParameters([parameters])
        if wanted.device not in self._leading:
            self._leading[wanted.device] = Leading(wanted.device)
        leading = self._leading[wanted.device]
        unit = Unit([Run(self.communicator, wanted, leading)])
        (agreed,) = unit.take_turn([Arrival.last_first(wanted)], first)
        unit.begin()
        is_profiled = torch_private.autograd.profiler_is_on()
        with unit.launching(), naming_buckets(agreed.bucket_name) if is_profiled else contextlib.nullcontext():
            *sums, turn = agreed.launch(gradients, passengers, leading.tensor, self.communicator.group_name)
        unit.note_reduced(gradients, sums)
        unit.check([turn])
        unit.prove()
        first.warn()
        return sums

    def _trace(
        self,
        session: Session,
        parameters: Mapping[str, Tensor],
        gradients: Sequence[Tensor],
        passengers: Sequence[Tensor],
    ) -> Sequence[Tensor]:
        """Ranks agree when all of the step has been traced: the order of gradients is not known before."""
        wanted = self._wanted(parameters, gradients, passengers)
        leading = Leading(wanted.device)
        unplanned = Agreed(wanted, Arrival.last_first(wanted), self.world_size, UNPLANNED)
        *sums, turn = unplanned.launch(gradients, passengers, leading.tensor, "")
        session.note_run(Run(self.communicator, wanted, leading), turn, parameters)
        return sums

    def _trace_for_others(
        self, parameters: Mapping[str, Tensor], gradients: Sequence[Tensor], passengers: Sequence[Tensor]
    ) -> Sequence[Tensor]:
        """In a graph that somebody else traces, on all ranks, and in which nobody looks at the riders."""
        wanted, communicator = self._wanted(parameters, gradients, passengers), self.communicator
        with torch_private.tracing.outside_of_traces():
            agreed = communicator.order.known(wanted)
            if agreed is None:
                communicator.agreements.compare(wanted.describe, self.name, communicator.made)
                (arrival,) = communicator.agreements.arrivals_of_first([Arrival.last_first(wanted)], self.name)
                agreed = communicator.note_agreed(wanted, arrival, is_next=False)
        leading = torch.zeros(FIRST_USED, dtype=torch.float32, device=wanted.device)
        return agreed.launch(gradients, passengers, leading, communicator.group_name)[:-1]
