"""What a step knows of one call of a captured graph, and what the graph keeps of the step."""

import operator
import weakref
from collections.abc import Callable, Set
from typing import Any, Generic, Protocol, TypeVar

from compiled_ddp import torch_private
from compiled_ddp.plan import BucketPlan


class Bound(Protocol):
    """A graph with the parameters that it is to reduce."""

    @property
    def plan(self) -> BucketPlan:
        """The plan over the wrapper's parameters."""

    @property
    def fingerprint(self) -> str:
        """The plan's fingerprint."""


class GraphCall(Protocol):
    """One call of a captured segment in a forward: a graph and the parameters it was called with."""

    plan: BucketPlan  # over parameters
    fingerprint: str
    synchronise: bool  # whether its forward was called outside of no_sync
    index_of: dict[int, int]  # graph input -> parameter
    undefined: frozenset[int]  # graph inputs that the running backward brings no gradient
    may_leave_out: bool  # whether there can be any
    ran_locally_in: int | None  # the task of autograd that has evaluated its node outside of the wrapper's backwards

    @property
    def leaves_out(self) -> bool:
        """Whether it is bound to less than every parameter."""

    def will_run(self) -> bool:
        """Whether the backward that this thread runs will evaluate the call's node."""

    def compile(self, *, folds: bool) -> str | None:
        """Compile the backward that reduces in the graph; returns how the compiler has failed, if it has.

        `folds` tells whether gradients of earlier backwards are to go into it.
        """

    def every_parameter(self) -> Bound:
        """What the call is bound to with all of its parameters, also those without gradient."""

    def note_local_run(self) -> None:
        """The backward that this thread runs evaluates the call's node while none of the wrapper's is under way."""

    def has_run_locally(self) -> bool:
        """Whether this thread's backward has evaluated the node while none of the wrapper's was under way."""

    def is_still_to_run(self) -> bool:
        """Whether the backward that this thread runs will evaluate the node, and has not done so locally."""

    def note_defined(self, indices: Set[int]) -> None:
        """The running backward brings these parameters a gradient, through other calls if not through this one."""

    def take_all_in(self, whole: bool = True) -> None:
        """In the backward that begins: be bound to every parameter, whichever of them get no gradient."""

    def when_reached(self, tell: Callable[[Any], None]) -> None:
        """Let `tell` be called, with what runs the wrapper's backwards, before a backward evaluates the call's node.

        Even before its saved tensors are looked at.
        """


# Asked in C, of every call in every step.
may_leave_out: Callable[[GraphCall], bool] = operator.attrgetter("may_leave_out")


Kept = TypeVar("Kept")


class UntilBackward(Generic[Kept]):
    """Keeps what runs a wrapper's backwards, and so the wrapper, alive for a graph until a backward has freed that.

    All ranks must run the backward alike, also where the wrapper was dropped before it. Afterwards the outputs, which
    users hold on to, keep nothing.
    """

    def __init__(self, kept: Kept) -> None:
        self._held: Kept | None = kept
        self.is_over = False  # whether a backward has come here that has freed the graph
        self._kept: Callable[[], Kept | None] = weakref.ref(kept)

    def take(self) -> Kept | None:
        """What is kept, for the backward that this thread runs; None once it is gone."""
        if not torch_private.autograd.keeps_graph():
            self._held, self.is_over = None, True
        return self._kept()

    @torch_private.dynamo.untraced
    def tell(self, reached: Callable[[Kept], None], _: object = None) -> None:
        """As a hook of autograd: let what is kept know that a backward has come here."""
        kept = self.take()
        if kept is not None:
            reached(kept)
