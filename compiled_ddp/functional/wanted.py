"""What a rank wants to launch next, as it compares it with others; and the reductions that ranks have agreed on."""

import functools
import hashlib
import itertools
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from compiled_ddp.functional.on_buckets import OnBuckets, launch_zeros
from compiled_ddp.functional.operator import plan_of, spec_of
from compiled_ddp.passes.ops import gather_shares, sum_numbers, sum_over_ranks
from compiled_ddp.plan import BucketPlan, GradientSpec, rows_of
from compiled_ddp.planning.cost_model import BackwardWork, Work
from compiled_ddp.planning.planners import MEBIBYTE, Planner, SizedBuckets
from compiled_ddp.planning.saved_plan import SavedPlan
from compiled_ddp.ranks.agreement import Description
from compiled_ddp.ranks.progress import format_bucket
from compiled_ddp.reducers.traced_hook import HookProgram

_NEXT = "the next collective"
_OF_HOOKS = MEBIBYTE, 25 * MEBIBYTE  # DDP's sizes, as ranks that trace have not measured their link yet
_MOST_TOLD = 4  # of what follows it, one by one


@dataclass(frozen=True)
class Scattered:
    """A reduction of which each rank gets its share: by which collective, and what is launched behind it.

    That is, for the graph's update, a sum of so many float64 `numbers`, where there are any, and then the gathering of
    all shares, of the last bucket first where that goes on when the step has returned: `passes.gather_later`. Buckets
    are `whole` where these are of the sums themselves.
    """

    by: str
    numbers: int
    is_gathered_later: bool
    whole: bool
    gathered: tuple[torch.dtype, ...] = field(repr=False)  # of each share; a hook may have compressed what is scattered


@dataclass(frozen=True)
class ByRows:
    """Gradients that are summed by rows, of which zeros are not sent: those with these names, embeddings' as a rule.

    Where that is left to the plan, those of them for which it may pay.
    """

    names: frozenset[str]
    is_planned: bool

    def __repr__(self) -> str:
        """The same on every rank."""
        return f"{sorted(self.names)}{', where it may pay' if self.is_planned else ''}"

    def has(self, gradient: GradientSpec, name: str, planner: Planner) -> bool:
        """Whether it is one of them, by this planner."""
        is_one = name in self.names
        return is_one and (not self.is_planned or planner.sends_rows(name, gradient.size[0], gradient.nbytes))


@dataclass(frozen=True)
class Wanted:
    """A reduction, in the shapes in which it is launched: below vmap those of the whole batch."""

    function: str
    place: str  # where it is defined
    reduction: str
    bucket_cap_mb: float | None  # None for what suits the link
    plan: SavedPlan | None  # that has the buckets; None for one of that size
    gradients: tuple[tuple[str, tuple[int, ...], torch.dtype, torch.device], ...]  # name, shape, ...
    passengers: int  # float32 elements of the user's
    scattered: "Scattered | None" = None  # None where every rank gets all sums
    hook: OnBuckets | None = None  # that reduces buckets in place of a sum, the same one on every rank
    by_rows: ByRows | None = None  # None where all are sent whole

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        """Asked for in each call, of what may have thousands of gradients."""
        return hash((self.function, self.place, self.gradients, self.passengers))

    @property
    def device(self) -> torch.device:
        """Where the riders are."""
        return self.gradients[0][3]

    @property
    def planner(self) -> Planner | None:
        """What fills its buckets; None for what suits the link."""
        if self.plan is not None:
            return self.plan
        if self.bucket_cap_mb is not None:
            return SizedBuckets((self.bucket_cap_mb * MEBIBYTE,))
        return None if self.hook is None else SizedBuckets(_OF_HOOKS)

    @property
    def gathers_what_it_scatters(self) -> bool:
        """Whether shares are gathered in the dtype in which they are scattered, if they are."""
        return self.scattered is None or self.scattered.gathered == tuple(dtype for _, _, dtype, _ in self.gradients)

    def gathered_in(self, dtypes: Iterable[torch.dtype]) -> "Wanted":
        """The same, with shares gathered in these dtypes."""
        assert self.scattered is not None, "no sum is scattered"
        return replace(self, scattered=replace(self.scattered, gathered=tuple(dtypes)))

    def describe(self) -> Description:
        """Describe what must be equal on all ranks."""
        properties: Description = {
            "the function": [self.function],
            "where it is defined": [self.place],
            "reduction": [self.reduction],
            "bucket_cap_mb": [self.bucket_cap_mb],
            "plan": [repr(self.plan)],
        }
        for name, shape, dtype, _ in self.gradients:  # a parameter may be called as one of these
            properties[f"parameter {name}" if name in properties else name] = [str(dtype), list(shape)]
        properties["the number of values that ride along"] = [self.passengers]
        properties["what is sent by rows"] = [repr(self.by_rows)]
        return properties | {"what each rank gets": ["all" if self.scattered is None else f"shares, {self.scattered}"]}

    def in_short(self) -> str:
        """Another one wherever a rank wants anything else."""
        return f"the gradients of {self.function} ({_digest(self.describe())})"


@dataclass(frozen=True)
class LossCollective:
    """A collective in the loss of a function, or in its derivative, as its how many-th there; or of no function."""

    what: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    function: str = ""
    number: int = 1

    @property
    def caller(self) -> str:
        """The function to name in an error about this collective."""
        return self.function or self.what

    @property
    def place(self) -> str:
        return f"collective {self.number} in the loss of {self.function}" if self.function else "it"

    def describe(self) -> list[object]:
        """Describe what must be equal on all ranks."""
        return [self.what, str(self.dtype), list(self.shape)]

    def in_short(self) -> str:
        return f"{self.place} ({self.what} of {str(self.dtype).removeprefix('torch.')} {list(self.shape)})"


def describe(
    following: Sequence[Wanted | LossCollective], communicators: Sequence[str] = (), *, are_launched: bool = False
) -> Description:
    """What ranks compare of what comes next on each of them, at least one.

    Reductions of one name and with equal trees are told apart by their `communicators`.

    The first difference explains best: first comes the kind of the next collective, then that one itself, or all
    reductions where it is one, and then the others as a whole.
    """
    first, others = following[0], following[1:]
    if isinstance(first, LossCollective):
        description: Description = {_NEXT: ["a collective in a loss"], first.place: first.describe()}
    else:
        description = {_NEXT: ["a sum of gradients"]}
        reductions = [each for each in following if isinstance(each, Wanted)]
        others = [each for each in following if isinstance(each, LossCollective)]
        for number, each in enumerate(reductions, start=1):
            behind = f" of reduction {number} in a row" if number > 1 else ""
            description |= {name + behind: properties for name, properties in each.describe().items()}
    description["what follows it"] = _in_short(others)
    description["the communicator"] = [", ".join(communicators)]
    return description | {"whether it has been launched": [are_launched]}


def agreed_apart(what: str) -> Description:
    """What ranks compare where `what` comes next, which is no reduction."""
    return {_NEXT: [what]}


def _in_short(following: Sequence[Wanted | LossCollective]) -> list[object]:
    told = [each.in_short() for each in following]
    left = told[_MOST_TOLD:]
    more = [f"and {len(left)} more ({_digest(left)})"] if left else []
    return [*told[:_MOST_TOLD], *more] or ["nothing"]


def _digest(value: object) -> str:
    """A hash that tells values apart."""
    return hashlib.sha256(repr(value).encode()).hexdigest()[:8]


UNPLANNED = SizedBuckets((0.0,))  # what ranks have not agreed on yet: each gradient by itself


@dataclass(frozen=True)
class Arrival:
    """The order in which gradients are ready, and what is computed until each is; None where nobody has counted it."""

    order: tuple[int, ...]
    work: BackwardWork | None = None

    @classmethod
    def last_first(cls, wanted: Wanted) -> "Arrival":
        """The order in which a backward usually produces them."""
        return cls(tuple(reversed(range(len(wanted.gradients)))))

    def work_of(self, indices: Sequence[int]) -> BackwardWork | None:
        """That of these gradients, in another order."""
        places = {index: place for place, index in enumerate(self.order)}
        return None if self.work is None else self.work.only([places[index] for index in indices])

    @classmethod
    def from_json(cls, text: str) -> "Arrival":
        order, works = json.loads(text)
        if works is None:
            return cls(tuple(order))
        *until_ready, total = (Work(*each) for each in works)
        return cls(tuple(order), BackwardWork(tuple(until_ready), total))

    def to_json(self) -> str:
        works = None
        if self.work is not None:
            works = [(each.flops, each.nbytes) for each in (*self.work.until_ready, self.work.total)]
        return json.dumps((self.order, works))


@dataclass(frozen=True, eq=False)
class Agreed:
    """One that all ranks know: `planner` fills buckets with its gradients as they arrive.

    Buckets of a hook are known before that, and have them as they usually do.
    """

    wanted: Wanted
    arrival: Arrival
    world_size: int
    planner: Planner

    @functools.cached_property
    def _buckets(self) -> tuple[tuple[int, ...], ...]:
        """The gradients of each; a last one without any has the riders alone, as where the plan is scattered."""
        arrival = self.arrival if self.wanted.hook is None else Arrival.last_first(self.wanted)
        filled = self.planner.fill([self.gradients[index] for index in arrival.order], self.names, arrival.work)
        buckets = [tuple(gradient.index for gradient in bucket) for bucket in filled]
        return (*buckets, ()) if self.planner.naive and self.wanted.hook is None else tuple(buckets)

    @functools.cached_property
    def _places(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The order of the gradients in the buckets, and how many each has."""
        return tuple(itertools.chain.from_iterable(self._buckets)), tuple(map(len, self._buckets))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, *_ in self.wanted.gradients)

    @functools.cached_property
    def gradients(self) -> tuple[GradientSpec, ...]:
        wanted, by_rows = self.wanted.gradients, self.wanted.by_rows
        specs = tuple(spec_of(index, shape, dtype, device) for index, (_, shape, dtype, device) in enumerate(wanted))
        if by_rows is None:
            return specs
        return tuple(
            spec.by_rows if by_rows.has(spec, name, self.planner) else spec
            for name, spec in zip(self.names, specs, strict=True)
        )

    @property
    def rows(self) -> set[int]:
        """How many elements the rows have by which some are sent."""
        return rows_of(self.gradients)

    @functools.cached_property
    def plan(self) -> BucketPlan:
        """Asked several times in each step, and the same each time."""
        scattered, of_all = self.wanted.scattered, (self.gradients, *self._places, self.world_size)
        whole = scattered is not None and scattered.whole
        by_hook = self.wanted.hook is not None
        return plan_of(
            *of_all, self.wanted.passengers, is_scattered=scattered is not None, whole=whole, by_hook=by_hook
        )

    @property
    def programs(self) -> list[HookProgram | None]:
        """Those of the communication hook that reduces buckets: one for each, none without a hook."""
        return [] if self.wanted.hook is None else self.wanted.hook.programs(self.plan)

    def bucket_name(self, position: int) -> str:
        """The name of the bucket at `position` of the launch order, in profiles."""
        return f"{format_bucket(position, self.plan.buckets[position], self.names)} of {self.wanted.function}"

    def launch(
        self,
        gradients: Sequence[Tensor],
        passengers: Sequence[Tensor],
        leading: Tensor,
        group_name: str,
        kept: Sequence[Tensor] | None = None,
    ) -> list[Tensor]:
        """The sums over ranks: of gradients, or this rank's shares of them, of passengers and of the leading riders.

        With what a hook has `kept`, its means in place of sums, and last what becomes of that.
        """
        order, lengths = map(list, self._places)
        scattered = self.wanted.scattered
        how = ("", False) if scattered is None else (scattered.by, scattered.whole)
        sums: list[Tensor] = sum_over_ranks(
            list(gradients), list(passengers), leading, order, lengths, self.world_size, group_name, *how, kept
        )
        return sums

    def launch_zeros(self, leading: Tensor, group_name: str) -> Tensor:
        """Launch all that others do, adding nothing to it; returns the sums of the leading riders."""
        wanted, scattered = self.wanted, self.wanted.scattered
        if scattered is None:
            return launch_zeros(self.plan, self.programs or [None] * len(self.plan.buckets), leading, group_name)
        gradients = [torch.zeros(shape, dtype=dtype, device=device) for _, shape, dtype, device in wanted.gradients]
        passengers = [torch.zeros(wanted.passengers, dtype=torch.float32, device=wanted.device)]
        *sums, leading_sums = self.launch(gradients, passengers, leading, group_name)
        if scattered.numbers:
            sum_numbers(torch.zeros(scattered.numbers, dtype=torch.float64, device=wanted.device), group_name)
        buckets = [*reversed(self._buckets)] if scattered.is_gathered_later else self._buckets
        order, lengths = [*itertools.chain.from_iterable(buckets)], [*map(len, buckets)]
        shares = [each.to(dtype) for each, dtype in zip(sums, scattered.gathered, strict=False)]
        gather_shares(shares, order, lengths, self.world_size, group_name, scattered.by)
        return leading_sums
