"""What is known while a step is traced: its reductions, and what its loss communicates with."""

import contextlib
import contextvars
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch.distributed as dist
from torch import Tensor

from compiled_ddp.functional.communicator import Communicator
from compiled_ddp.functional.random_state import TracedGenerators
from compiled_ddp.functional.recomputation import RecomputedRegions
from compiled_ddp.functional.unit import Run


@dataclass
class Session:
    """A step that is being traced by `compile`."""

    called: list[Communicator] = field(default_factory=list)  # of the gradient functions that have been called
    runs: list[Run] = field(default_factory=list)  # one for each operator in the graph, in order
    sums: list[Tensor] = field(default_factory=list)  # what each run makes of the leading riders
    generators: TracedGenerators = field(default_factory=TracedGenerators)
    regions: RecomputedRegions = field(init=False)

    def __post_init__(self) -> None:
        self.regions = RecomputedRegions(self.generators)

    def note_call(self, communicator: Communicator) -> None:
        self.called.append(communicator)

    def note_run(self, run: Run, sums: Tensor) -> None:
        self.runs.append(run)
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
