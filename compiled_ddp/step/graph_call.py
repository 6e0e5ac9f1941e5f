"""What a step knows of one call of a captured graph."""

import operator
from collections.abc import Callable, Set
from typing import Any, Protocol

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
fingerprint_of: Callable[[GraphCall], str] = operator.attrgetter("fingerprint")
