"""What is known while a step is traced, and while a loss is called: reductions, and what communicates with whom."""

import contextlib
import contextvars
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.fx import Graph, Node

from compiled_ddp import torch_private
from compiled_ddp.functional.communicator import Communicator, are_sound
from compiled_ddp.functional.first_parameters import FirstParameters
from compiled_ddp.functional.loss_group import LossGroup, LossLaunch
from compiled_ddp.functional.random_state import TracedGenerators
from compiled_ddp.functional.unit import Launch, Run
from compiled_ddp.functional.wanted import LossCollective
from compiled_ddp.passes.ops import sum_over_ranks
from compiled_ddp.passes.recompute_regions import REGION, RESULT

# ---- which nodes of a traced step are computed again where a derivative reads them -----------------------------------


class RecomputedRegions:
    """The calls of a step that is being traced whose values are not kept, each a region of its graph."""

    def __init__(self, generators: TracedGenerators) -> None:
        self._generators = generators
        self._number = 0
        self._is_within = False

    def call(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The results of `function`, which are kept. Within another region it belongs to that one."""
        if self._is_within:
            return function(*args, **kwargs)
        self._is_within = True
        try:
            with torch_private.tracing.recording_nodes() as nodes:
                results = function(*args, **kwargs)
        finally:
            self._is_within = False
        self._number += 1
        leaves = [leaf for leaf in torch_private.trees.flatten(results)[0] if isinstance(leaf, Tensor)]
        kept = {torch_private.tracing.node_of(leaf) for leaf in (*leaves, *self._generators.states())}
        for node in nodes:
            result = {RESULT: node.name} if node in kept else {}
            node.meta["custom"] = node.meta.get("custom", {}) | {REGION: self._number} | result
        return results


# ---- sessions --------------------------------------------------------------------------------------------------------

LOSS_COLLECTIVE = "compiled_ddp.loss_collective"  # in a node's meta["custom"]: its number


@dataclass
class Session:
    """A step that is being traced by `compile`."""

    called: list[Communicator] = field(default_factory=list)  # of the gradient functions that have been called
    runs: list[Run] = field(default_factory=list)  # one for each operator in the graph, in order
    sums: list[Tensor] = field(default_factory=list)  # what each run makes of the leading riders
    parameters: list[dict[str, Node | Tensor]] = field(default_factory=list)  # of each run, see `origin_of`
    loss_launches: list[LossLaunch] = field(default_factory=list)  # as their nodes count them
    settled: list[Tensor] = field(default_factory=list)  # what its caller's tensors become, also where it is not sound
    departing: list[Tensor] = field(default_factory=list)  # what is gathered behind the step, and whether it is sound
    generators: TracedGenerators = field(default_factory=TracedGenerators)
    regions: RecomputedRegions = field(init=False)

    def __post_init__(self) -> None:
        self.regions = RecomputedRegions(self.generators)

    def note_call(self, communicator: Communicator) -> None:
        self.called.append(communicator)

    def note_run(self, run: Run, sums: Tensor, parameters: Mapping[str, Tensor]) -> None:
        """A reduction of gradients with respect to `parameters` has been traced."""
        self.runs.append(run)
        self.sums.append(sums)
        self.parameters.append({name: torch_private.tracing.origin_of(each) for name, each in parameters.items()})

    def gathers(self, dtypes: Iterable[torch.dtype]) -> None:
        """What departs of the gradients of the only run, or of their parameters, is gathered in these."""
        (run,) = self.runs
        self.runs = [replace(run, wanted=run.wanted.gathered_in(dtypes))]

    @property
    def sums_gradients(self) -> bool:
        """Whether any run has sums, and not what a communication hook makes of buckets."""
        return any(run.wanted.hook is None for run in self.runs)

    def are_sound(self) -> Tensor | None:
        """Whether all runs have summed what ranks were to send; None where there are none."""
        if not self.runs:
            return None
        pairs = zip(self.runs, self.sums, strict=True)
        sound = [are_sound(sums, run.communicator.world_size) for run, sums in pairs]
        return torch.stack([each.to(sound[0].device) for each in sound]).all()

    def first_parameters(self, values: Mapping[str, Tensor]) -> FirstParameters:
        """What ranks compare of the runs; `values` are those of the step's inputs, by the names of their nodes."""
        return FirstParameters(
            [
                {name: values.get(each.name) if isinstance(each, Node) else each for name, each in of_run.items()}
                for of_run in self.parameters
            ]
        )

    def note_loss_collective(self, group: LossGroup, collective: LossCollective, result: Tensor) -> None:
        """`result` comes of a collective that has just been traced."""
        torch_private.tracing.label_launch(result, LOSS_COLLECTIVE, len(self.loss_launches))
        self.loss_launches.append(LossLaunch(group, collective))

    def launches_in(self, graph: Graph) -> list[Launch]:
        """What this graph launches, in its order; collectives of losses that nobody reads have gone."""
        runs, found = iter(self.runs), list[Launch]()
        for node in graph.nodes:
            number = node.meta.get("custom", {}).get(LOSS_COLLECTIVE)
            if number is not None:
                found.append(self.loss_launches[number])
            elif node.target is sum_over_ranks:
                found.append(next(runs))
        return found


@dataclass
class LossCall:
    """A gradient function's call of its loss, which numbers the collectives in it."""

    process_group: dist.ProcessGroup | None  # the user's; None without torch.distributed
    function: str
    _collectives: int = 0

    def number_of_next(self) -> int:
        """The number of the next collective in the loss or in its derivative, from 1 on."""
        self._collectives += 1
        return self._collectives

    @property
    def has_collectives(self) -> bool:
        """Whether the loss has communicated so far."""
        return self._collectives > 0


_session: contextvars.ContextVar[Session | None] = contextvars.ContextVar("session", default=None)
_loss_call: contextvars.ContextVar[LossCall | None] = contextvars.ContextVar("loss_call", default=None)


def current_session() -> Session | None:
    return _session.get()


def note_settled(tensors: Iterable[Tensor]) -> None:
    """What these are to be written into may have them even where a rank has failed: they are what it had before."""
    session = _session.get()
    if session is not None:
        session.settled += tensors


def note_departing(shares: Iterable[Tensor], finite: Tensor | None = None) -> None:
    """These are gathered while the next step begins: `passes.gather_later`. What is not `finite` is of no use there."""
    session = _session.get()
    assert session is not None, "a step that leaves something under way is a compiled one"
    is_sound = session.are_sound()
    assert is_sound is not None
    session.departing += [*shares, is_sound if finite is None else is_sound & finite.to(is_sound.device)]


def current_loss_call() -> LossCall | None:
    """The innermost one; None outside of all."""
    return _loss_call.get()


@contextlib.contextmanager
def tracing(session: Session) -> Iterator[None]:
    token = _session.set(session)
    try:
        yield
    finally:
        _session.reset(token)


@contextlib.contextmanager
def calling_loss(call: LossCall) -> Iterator[None]:
    token = _loss_call.set(call)
    try:
        yield
    finally:
        _loss_call.reset(token)
