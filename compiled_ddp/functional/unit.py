"""The reductions that a rank launches before it looks at what others tell: one of an eager call, all of a graph."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from compiled_ddp.functional.agreements import Agreements
from compiled_ddp.functional.communicator import Communicator
from compiled_ddp.functional.proof import Evidence, observed, watching
from compiled_ddp.functional.wanted import Agreed, Wanted
from compiled_ddp.ranks.agreement import Description


@dataclass(frozen=True, eq=False)
class Run:
    """One reduction; `leading` is where its leading riders are read from."""

    communicator: Communicator
    wanted: Wanted
    leading: Tensor


class Unit:
    """[Note: every rank launches what all expect]"""

    def __init__(self, runs: Sequence[Run]) -> None:
        """At least one."""
        self._runs = runs
        self._launched: list[tuple[Communicator, Agreed, bool]] = []  # the latest time; whether ranks verify it
        self._evidence: dict[Communicator, list[Evidence]] = {}
        self.communicators = tuple(dict.fromkeys(run.communicator for run in runs))

    @property
    def _name(self) -> str:
        return self._runs[0].wanted.function

    def take_turn(self, orders: Sequence[tuple[int, ...]]) -> list[Agreed]:
        """What is launched for each reduction; new ones are in the `orders` of rank 0.

        Raises RuntimeError on every rank where other ranks want something else.
        """
        unexpected = self._unexpected()
        if unexpected:
            self._agree(unexpected, [orders[self._runs.index(run)] for run in unexpected])
        ahead = {each: iter(each.ahead(len(self._of(each)))) for each in self.communicators}
        return [next(ahead[run.communicator]) for run in self._runs]

    def begin(self, *, is_new: bool = False) -> None:
        """The reductions are about to be launched, behind `take_turn`; by a graph that `is_new`, to be proven."""
        remaining = {each: len(self._of(each)) for each in self.communicators}
        launched = []
        for run in self._runs:
            remaining[run.communicator] -= 1
            agreed = run.communicator.begin(run.leading, remaining=remaining[run.communicator], wishes=is_new)
            launched.append((run.communicator, agreed, run.communicator.proof.verifies(agreed)))
        self._launched = launched

    @contextlib.contextmanager
    def watching(self, *, in_cuda_graphs: Callable[[torch.device], bool]) -> Iterator[None]:
        """Note, where ranks verify it, what the graph that runs in here launches; `prove` compares it."""
        sees_values = not any(in_cuda_graphs(run.wanted.device) for run in self._runs)
        with contextlib.ExitStack() as stack:
            self._evidence = {
                each: stack.enter_context(watching(self._launched_on(each), each.group_name, sees_values=sees_values))
                for each in self.communicators
            }
            yield

    def _launched_on(self, communicator: Communicator) -> list[tuple[Agreed, bool]]:
        return [(agreed, verifies) for each, agreed, verifies in self._launched if each is communicator]

    def note_reduced(self, gradients: Sequence[Tensor], sums: Sequence[Tensor]) -> None:
        """Note, where ranks verify it, what the one reduction here has made of gradients."""
        ((communicator, agreed, verifies),) = self._launched
        self._evidence = {communicator: [observed(agreed, gradients, sums)] if verifies else []}

    def prove(self) -> None:
        """Raise RuntimeError, on every rank, where a gradient is not what was sent; behind `check`."""
        for communicator, evidence in self._evidence.items():
            communicator.prove(evidence)

    def check(self, sums: Sequence[Tensor]) -> None:
        """Raise RuntimeError where the sums of the leading riders say that another rank has launched zeros."""
        for each in self.communicators:
            each.look([own for run, own in zip(self._runs, sums, strict=True) if run.communicator is each])
        departed = [each for each in self.communicators if each.departures.launches]
        if departed:
            _depart_until_known(departed)
            self._compare(self._runs)
            raise departed[0].give_up(f"a rank has not launched what {self._name} was expected to")

    def _of(self, communicator: Communicator) -> list[Run]:
        return [run for run in self._runs if run.communicator is communicator]

    def _unexpected(self) -> list[Run]:
        """What ranks must agree on."""
        found = []
        for each in self.communicators:
            own = self._of(each)
            found += own[: each.unexpected([run.wanted for run in own])]
        return [run for run in self._runs if run in found]

    def _agree(self, runs: Sequence[Run], orders: Sequence[tuple[int, ...]]) -> None:
        is_alone = _depart(self.communicators)
        self._compare(self._runs if is_alone else runs)
        if is_alone:
            raise self.communicators[0].give_up(f"other ranks have launched something else than {self._name}")
        known = [run.communicator.known(run.wanted) for run in runs]
        own = [order if one is None else one.order for one, order in zip(known, orders, strict=True)]
        first = self.communicators[0]
        for run, order in zip(runs, first.agreements.orders_of_first(own, self._name), strict=True):
            run.communicator.note_agreed(run.wanted, order)

    def _compare(self, runs: Sequence[Run]) -> None:
        """Raise the same error on every rank unless all want these."""
        for each in self.communicators:
            each.forget_departures()
        first = self.communicators[0]
        first.agreements.compare(functools.partial(_describe, runs), self._name, first.made)


def _describe(runs: Sequence[Run]) -> Description:
    found: Description = {}
    for number, run in enumerate(runs):
        behind = f" of reduction {number + 1} in a row" if number else ""
        found |= {name + behind: properties for name, properties in run.wanted.describe().items()}
    return found


def break_off(communicators: Sequence[Communicator], agreements: Agreements, what: str, error: BaseException) -> None:
    """Tell the other ranks of an error, which the caller raises: they launch on these, or compare what they want."""
    told = error if isinstance(error, Exception) else RuntimeError(f"{type(error).__name__}: {error}")

    def describe() -> Description:
        raise told

    with contextlib.suppress(type(told)):
        _depart(communicators)
        for each in communicators:
            each.forget_departures()
        agreements.compare(describe, what, next((each.made for each in communicators), None))


def _depart(communicators: Sequence[Communicator]) -> bool:
    """Send zeros for what is expected; returns whether other ranks have launched it."""
    used = [each for each in communicators if each.ahead(1)]
    if not used:
        return False
    used[0].depart()
    if used[0].departures.are_everybodys:
        return False
    for each in used[1:]:
        each.depart()
    _depart_until_known(used)
    return True


def _depart_until_known(communicators: Sequence[Communicator]) -> None:
    for ends in range(1, communicators[0].ends_to_know + 1):
        for each in communicators:
            each.depart_until_known(ends)
