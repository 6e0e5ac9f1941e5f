"""A captured graph bound to the parameters that a wrapper calls it with."""

from collections.abc import Callable
from dataclasses import dataclass

from compiled_ddp.graph.program import Program
from compiled_ddp.plan import BucketPlan


@dataclass(frozen=True)
class Bound:
    """A program, bound to the parameters that a call runs it with."""

    program: Program
    plan: BucketPlan  # over parameters
    fingerprint: str
    index_of: dict[int, int]  # graph input -> parameter


class Binding:
    """What all calls of a graph with the same parameters are bound to."""

    def __init__(self, whole: Bound, bind_without: Callable[[frozenset[int]], Bound]) -> None:
        """`whole` has every parameter; `bind_without` leaves some graph inputs out."""
        self.whole, self._bind_without = whole, bind_without
        # The inputs that the latest backward brought no gradient: [Note: undefined gradients]
        self.left_out = frozenset[int]()

    def without(self, undefined: frozenset[int]) -> Bound:
        """The same without these graph inputs."""
        return self._bind_without(undefined) if undefined else self.whole

    def note_undefined(self, undefined: frozenset[int]) -> None:
        """A backward brings these graph inputs no gradient."""
        self.left_out = undefined
