"""A communication hook as a whole step takes it that is given whole buckets, and may keep something for each.

So buckets are known before a step is traced: what is kept for them is among its arguments, and what becomes of that
among its results. `passes.form_buckets` puts the hook's programs into the graph. What is kept is a `BucketHook`'s, as
that of a wrapper, with its [Note: what was sent and what is owed].
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.fx import Node

from compiled_ddp.comm_hooks import CommHook, Ranks
from compiled_ddp.passes.inline_hook import HOOKS_GROUP
from compiled_ddp.passes.ops import all_reduce, wait_tensor
from compiled_ddp.plan import Bucket, BucketPlan, Section, gradient_dtype
from compiled_ddp.reducers.traced_hook import (
    BucketHook,
    HookProgram,
    check_hook,
    example,
    initial_state,
    launch_of_zeros,
)
from compiled_ddp.torch_private.tracing import outside_of_traces

_ELEMENTS = 64  # of the gradients by which ranks compare what it does


class Kept(NamedTuple):
    """What a step is given of a hook."""

    tensors: Sequence[Tensor]  # of all buckets, in launch order
    used: Tensor | None  # for each parameter above 0 where this rank has a gradient of it; None where it has all


NOTHING_KEPT = Kept((), None)


class OnBuckets:
    """A hook with its programs, and with what it keeps for the buckets of a model's parameters."""

    told = "Buckets"  # what it is given, in `explain()`

    def __init__(self, hook: CommHook) -> None:
        self.hook = hook
        self._ranks: Ranks | None = None  # for which `_on` is
        self._on: BucketHook | None = None
        self._parameters: dict[str, Tensor] = {}  # all that there were; their places are what `_on` numbers them by
        self.tensors: tuple[Tensor, ...] = ()  # what is kept for the buckets that there are now, in launch order

    def check(self, parameters: Mapping[str, Tensor], ranks: int) -> list[str]:
        """What ranks compare: which hook, and what it does to gradients of these parameters.

        Raises TypeError or ValueError for what is no hook.
        """
        check_hook(self.hook, parameters)
        like = {(gradient_dtype(each), each.device) for each in parameters.values()}
        flats = [example(_ELEMENTS, dtype, device) for dtype, device in like]
        of_ranks = Ranks(ranks, HOOKS_GROUP)
        programs = [HookProgram(self.hook, of_ranks, flat, initial_state(self.hook, flat)) for flat in flats]
        return sorted(program.identity for program in programs)

    # ---- what it keeps -----------------------------------------------------------------------------------------------

    def know(self, parameters: Mapping[str, Tensor], ranks: Ranks) -> None:
        """These, which may be more than are trained, are what it may keep something for, among these ranks."""
        self._parameters |= parameters
        if ranks != self._ranks:
            before, self._on, self._ranks = self._on, BucketHook(self.hook, ranks), ranks
            if before is not None:
                self._on.load_state_dict(before.state_dict(self._names), self._names, [*self._parameters.values()])

    def begin(self, plan: BucketPlan, names: Sequence[str]) -> None:
        """Let `tensors` be what is kept for the buckets of a plan of gradients with these `names`, which are known."""
        with outside_of_traces():
            numbers = {name: number for number, name in enumerate(self._names)}
            renumbered = plan.renumbered({place: numbers[name] for place, name in enumerate(names)})
            section = Section(renumbered, "graph")
            self._own.adopt([section], self._names, lasting=True)
            self.tensors = tuple(each for place in self._own.places([section]) for each in self._own.state(place))

    def state_dict(self) -> dict[str, list[Tensor]]:
        return {} if self._on is None else self._on.state_dict(self._names)

    def load_state_dict(self, state: Mapping[str, Sequence[object]]) -> None:
        """Behind `know`, and before the next `begin`."""
        self._own.load_state_dict(state, self._names, [*self._parameters.values()])
        self.tensors = ()

    @property
    def _names(self) -> list[str]:
        return [*self._parameters]

    @property
    def _own(self) -> BucketHook:
        assert self._on is not None, "no ranks are known"
        return self._on

    # ---- in a step ---------------------------------------------------------------------------------------------------

    def programs(self, plan: BucketPlan) -> list[HookProgram | None]:
        """That of each bucket; None for the riders' own."""
        with outside_of_traces():
            return [self._own.program(bucket) for bucket in plan.buckets]

    def reduced(
        self, plan: BucketPlan, reduce: Callable[[Sequence[Tensor]], Sequence[Tensor]], kept: Kept
    ) -> tuple[list[Tensor], list[Tensor]]:
        """What `reduce` makes of gradients, and lets ride along, and what is kept from then on.

        It is given what is kept as the hook is to see it. Its results are the means, the sum over ranks of `kept.used`
        or of ones, and last what becomes of what it was given.
        """
        given, used = [*kept.tensors], kept.used
        if used is not None:
            given = [
                _with_parts(bucket, tensor, lambda index, part: torch.where(used[index].to(part.device) > 0, part, 0))
                if slot in self._own.owed
                else tensor
                for bucket, slot, tensor in self._slots(plan, given)
            ]
        results = [*reduce(given)]
        first = len(results) - len(given)
        results, new = results[:first], results[first:]
        if used is not None:
            some = results[-1] > 0
            slots = zip(self._slots(plan, kept.tensors), new, strict=True)
            new = [self._settled(bucket, slot, old, each, used > 0, some) for (bucket, slot, old), each in slots]
        return results, new

    def alone(self, gradients: Sequence[Tensor], plan: BucketPlan, given: Sequence[Tensor]) -> list[Tensor]:
        """The means where there is no other rank, and what becomes of what is kept; of one traced step."""
        means, new, rest = dict[int, Tensor](), list[Tensor](), iter(given)
        for bucket, program in zip(plan.buckets, self.programs(plan), strict=True):
            if program is None:
                means |= {index: gradients[index] for index in bucket.indices}
                continue
            flat = torch.cat([gradients[index].reshape(-1) for index in bucket.indices])
            state = [next(rest) for _ in program.state]
            mean, *state = program.run_alone(flat, state)
            mean = torch.view_as_complex(mean.view(-1, 2)) if flat.is_complex() else mean
            means |= {each.index: each.view(mean) for each in bucket.gradients}
            new += state
        return [*(means[index] for index in range(len(gradients))), *new]

    def _slots(self, plan: BucketPlan, tensors: Sequence[Tensor]) -> Iterator[tuple[Bucket, int, Tensor]]:
        """What is kept, each with its bucket and its place in that one's state."""
        rest = iter(tensors)
        for bucket, program in zip(plan.buckets, self.programs(plan), strict=True):
            for slot in range(0 if program is None else len(program.state)):
                yield bucket, slot, next(rest)

    def _settled(self, bucket: Bucket, slot: int, old: Tensor, new: Tensor, used: Tensor, some: Tensor) -> Tensor:
        """What is kept behind a step: as it was of what no rank has `used`, and with what was held back of the rest."""
        used, some = used.to(new.device), some.to(new.device)
        if slot not in self._own.elementwise(bucket):
            return torch.where(torch.stack([some[index] for index in bucket.indices]).any(), new, old)
        before = dict(_parts(bucket, old))

        def settled(index: int, part: Tensor) -> Tensor:
            if slot in self._own.owed:
                part = torch.where(used[index], part, part + before[index])
            return torch.where(some[index], part, before[index])

        return _with_parts(bucket, new, settled)


def _with_parts(bucket: Bucket, flat: Tensor, change: Callable[[int, Tensor], Tensor]) -> Tensor:
    return torch.cat([change(index, part) for index, part in _parts(bucket, flat)])


def _parts(bucket: Bucket, flat: Tensor) -> Iterator[tuple[int, Tensor]]:
    """What a tensor as long as the bucket has of each gradient, flat; complex ones as pairs."""
    pairs = 2 if bucket.dtype.is_complex else 1
    sizes = [gradient.numel * pairs for gradient in bucket.gradients]
    return zip(bucket.indices, flat.split(sizes), strict=True)


def in_launch_order(programs: Sequence[HookProgram | None]) -> list[tuple[int, Node | None]]:
    """What graphs launch by these programs of all buckets, each with its bucket's place; None for the sum of a bucket.

    First comes what can be launched at once, then what needs results of others, and last the riders, in the last
    bucket: as `passes.step_pipeline` has it.
    """
    first, later = list[tuple[int, Node | None]](), list[tuple[int, Node | None]]()
    for place, program in enumerate(programs[:-1]):
        if program is None:
            first.append((place, None))
            continue
        at_once, behind = program.rounds
        first += ((place, launch) for launch in at_once)
        later += ((place, launch) for launch in behind)
    return [*first, *later, (len(programs) - 1, None)] if programs else []


def launch_zeros(plan: BucketPlan, programs: Sequence[HookProgram | None], leading: Tensor, group_name: str) -> Tensor:
    """Launch what graphs do by these programs, adding nothing to it; returns the sums of the leading riders.

    A bucket without one is summed, as is the last one, which has the riders.
    """
    launched = list[Tensor]()
    for place, launch in in_launch_order(programs):
        if launch is not None:
            launched.append(launch_of_zeros(launch, group_name))
            continue
        bucket = plan.buckets[place]
        flat = torch.zeros(bucket.numel, dtype=bucket.dtype, device=bucket.device)
        if bucket.riders is not None:
            bucket.riders.view(flat)[: leading.numel()] = leading
        launched.append(all_reduce(flat, "sum", bucket.group_name(group_name)))
    for result in launched:
        wait_tensor(result)
    return plan.riders.view(launched[-1])[: leading.numel()]
