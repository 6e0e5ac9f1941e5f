"""A random program as plain data: a model, and what every rank does with it step by step.

Small, immutable and printable, so that hypothesis can shrink it and a failure can be pasted into a test.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal[
    "linear",  # a Linear layer
    "scale",  # a vector times the activation
    "transposed",  # a Linear's weight through views
    "select",  # one row of a Linear's weight
    "detached",  # a Linear without gradient
    "reshaped",  # views of the activation
    "in_place",  # in-place ops on a copy of the activation, one of them with a vector
    "nonlinear",  # a Function whose backward is not linear
    "activation_hook",  # a clamping tensor hook on the activation
    "break",  # a graph break, on `ranks` alone unless that is empty
    "block",  # a module with a graph break in it, of the same code as every other block
    "branch",  # the activation plus what `inner` makes of it
    "sometimes",  # `inner`, on the ranks that a step names
    "checkpoint",  # `inner`, recomputed in backward; `variant` 1 is reentrant
    "eager",  # `inner`, outside of any graph
]
WITH_INNER = ("branch", "sometimes", "checkpoint", "eager")
WITH_LAYER = ("linear", "transposed", "select", "detached")
WITH_VECTOR = ("scale", "in_place")


@dataclass(frozen=True)
class Op:
    """One operation on the activation, of shape (rows, 3)."""

    kind: Kind
    key: int = 0  # which layer, vector or block: equal keys share parameters
    variant: int = 0  # which of several functions
    ranks: tuple[int, ...] = ()
    inner: "tuple[Op, ...]" = ()


@dataclass(frozen=True)
class Model:
    ops: tuple[Op, ...]
    dtypes: tuple[str, ...] = ()  # of layer `key`; float32 beyond the end
    unused: int = 0  # parameters that nothing reads
    frozen: tuple[int, ...] = ()  # keys of layers that are frozen when the model is wrapped
    hooked: tuple[int, ...] = ()  # keys of layers whose weight has a clamping tensor hook ...
    hooked_on: tuple[int, ...] = ()  # ... on these ranks

    def dtype_of(self, key: int) -> str:
        return self.dtypes[key] if key < len(self.dtypes) else "float32"


@dataclass(frozen=True)
class Step:
    """From one zero_grad to the next, with one synchronised backward. Tuples over ranks are repeated to the world."""

    zero: Literal["none", "zeros", "keep"] = "none"  # what becomes of .grad before it
    local: tuple[int, ...] = (0,)  # per rank: backwards under no_sync
    forwards: int = 1  # of the synchronised backward
    rows: tuple[int, ...] = (2,)  # per rank: batch size
    eager_on: tuple[int, ...] = ()  # ranks under torch.compiler.set_stance("force_eager")
    skipped_on: tuple[int, ...] = ()  # ranks that call skip_step() in place of backward
    skip_after_forward: bool = True  # whether these run their forwards
    active_on: tuple[int, ...] = (0, 1, 2)  # ranks on which the "sometimes" with variant 0 run, the others elsewhere


@dataclass(frozen=True)
class Program:
    model: Model
    steps: tuple[Step, ...] = field(default=(Step(),))


def walk(ops: tuple[Op, ...], within: tuple[Op, ...] = ()) -> Iterator[tuple[Op, tuple[Op, ...]]]:
    """Every operation with those that it stands in, outermost first."""
    for op in ops:
        yield op, within
        yield from walk(op.inner, (*within, op))


def parameters_of(op: Op) -> tuple[str, int] | None:
    """What the operation reads itself; None without parameters."""
    for name, kinds in {"linear": WITH_LAYER, "vector": WITH_VECTOR, "block": ("block",)}.items():
        if op.kind in kinds:
            return name, op.key
    return None


def is_legal(program: Program) -> bool:
    """Whether the program stays clear of what docs/limits.md lists as refused or as not detected."""
    uses: dict[tuple[str, int], list[tuple[str, ...]]] = {}
    for op, within in walk(program.model.ops):
        if op.kind == "checkpoint" and op.variant == 1 and any(step.forwards > 1 for step in program.steps):
            return False  # a second gradient after its bucket has gone out
        read = parameters_of(op)
        if read is not None and _in_some_steps_only_and_reentrant(within):
            return False  # a first gradient from inside a reentrant checkpoint
        if read is not None:
            uses.setdefault(read, []).append(tuple(outer.kind for outer in within))
    trained = [read for read in uses if read[0] != "linear" or read[1] not in program.model.frozen]
    return bool(trained) and all(_may_be_shared(places) for places in uses.values())


def _in_some_steps_only_and_reentrant(within: tuple[Op, ...]) -> bool:
    reentrant = any(op.kind == "checkpoint" and op.variant == 1 for op in within)
    return reentrant and any(op.kind == "sometimes" for op in within)


def _may_be_shared(places: list[tuple[str, ...]]) -> bool:
    """`places` holds, for each reader of a parameter, the kinds of the operations that it stands in."""
    if len(places) == 1:
        return True
    in_eager_code = [place for place in places if "eager" in place]
    if any("checkpoint" in place for place in places):
        return False  # a second gradient after its bucket has gone out
    if not in_eager_code or len(in_eager_code) == len(places):
        return True
    return not any("sometimes" in place for place in places)
