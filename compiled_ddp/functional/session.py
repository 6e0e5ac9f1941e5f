"""What is known while a step is traced: its reductions, and what its loss communicates with."""

import contextlib
import contextvars
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from compiled_ddp.functional.random_state import TracedGenerators
from compiled_ddp.functional.recomputation import RecomputedRegions

if TYPE_CHECKING:
    from compiled_ddp.functional.reduction import GradientReduction


Leaves = tuple[tuple[str, tuple[int, ...], torch.dtype, torch.device], ...]  # what is reduced: name, shape, ...


@dataclass(frozen=True)
class TracedReduction:
    """A reduction that a traced step asks for; where its result is differentiated, it runs several times."""

    reduction: "GradientReduction"
    leaves: Leaves
    leading: Tensor  # what the graph reads its leading riders from


@dataclass
class Session:
    """A step that is being traced by `compile`."""

    reductions: list[TracedReduction] = field(default_factory=list)
    runs: list[TracedReduction] = field(default_factory=list)  # one for each operator in the graph, in order
    sums: list[Tensor] = field(default_factory=list)  # what each run makes of the leading riders
    generators: TracedGenerators = field(default_factory=TracedGenerators)
    regions: RecomputedRegions = field(init=False)

    def __post_init__(self) -> None:
        self.regions = RecomputedRegions(self.generators)

    def note_run(self, traced: TracedReduction, sums: Tensor) -> None:
        self.runs.append(traced)
        self.sums.append(sums)


_session: contextvars.ContextVar[Session | None] = contextvars.ContextVar("session", default=None)
_loss_group: contextvars.ContextVar[dist.ProcessGroup | None] = contextvars.ContextVar("loss_group", default=None)


def current_session() -> Session | None:
    return _session.get()


def current_loss_group() -> dist.ProcessGroup | None:
    """The user's group of the innermost gradient function that calls its loss; None outside of all."""
    return _loss_group.get()


@contextlib.contextmanager
def tracing(session: Session) -> Iterator[None]:
    token = _session.set(session)
    try:
        yield
    finally:
        _session.reset(token)


@contextlib.contextmanager
def calling_loss(group: dist.ProcessGroup | None) -> Iterator[None]:
    token = _loss_group.set(group)
    try:
        yield
    finally:
        _loss_group.reset(token)
