"""A random program as plain data: a model, and what every rank does with it step by step.

Small, immutable and printable, so that hypothesis can shrink it and a failure can be pasted into a test.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from fuzz.readable import Readable

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
    "all_reduce",  # a sum over ranks, which all-reduces in backward too: `variant` names how, see operators.py
    "trap",  # an operator that raises where a step's failure says so
    "aside",  # what `inner` makes of the activation is a further output, which only some losses read
]
WITH_INNER = ("branch", "sometimes", "checkpoint", "eager")  # anywhere; "aside" stands in no other operation
WITH_LAYER = ("linear", "transposed", "select", "detached")
WITH_VECTOR = ("scale", "in_place")


Reads = Literal["all", "main", "asides"]  # of a model's outputs; all of a model without asides
OTHER_WRAPPER = {"EagerDDP": "compile_ddp", "compile_ddp": "EagerDDP", "inductor": "EagerDDP"}

Ranks = tuple[int, ...]


@dataclass(frozen=True, repr=False)
class Op(Readable):
    """One operation on the activation, of shape (rows, 3)."""

    kind: Kind
    key: int = 0  # which layer, vector or block: equal keys share parameters
    variant: int = 0  # which of several functions
    ranks: tuple[int, ...] = ()
    inner: "tuple[Op, ...]" = ()


@dataclass(frozen=True, repr=False)
class Model(Readable):
    ops: tuple[Op, ...]
    dtypes: tuple[str, ...] = ()  # of layer `key`; float32 beyond the end
    unused: int = 0  # parameters that nothing reads
    frozen: tuple[int, ...] = ()  # keys of layers that are frozen when the model is wrapped
    hooked: tuple[int, ...] = ()  # keys of layers whose weight has a clamping tensor hook ...
    hooked_on: tuple[int, ...] = ()  # ... on these ranks

    def dtype_of(self, key: int) -> str:
        return self.dtypes[key] if key < len(self.dtypes) else "float32"


@dataclass(frozen=True, repr=False)
class Change(Readable):
    """What the user does to the module or to `.grad` at some moment of a step."""

    kind: str  # a key of conversion.CONVERSIONS or users_gradients.CHANGES
    every: int = 1  # every how many-th parameter
    on: Ranks = (0, 1, 2)  # ranks that do it; conversions are everyone's


@dataclass(frozen=True, repr=False)
class Failure(Readable):
    """An exception on one rank."""

    place: Literal[
        "forward",  # at a trap of the model
        "backward",  # at a trap of the model
        "loss hook",  # before the backward has reached the wrapper's outputs
        "weight hook",  # a tensor hook of a parameter
        "accumulate hook",  # a post-accumulate hook of a parameter: an optimizer in backward
        "input hook",  # when all parameters have got their gradients
        "optimizer",  # after the backward
    ]
    rank: int = 0
    error: str = "ValueError"
    then: Literal["abandon", "zero_grad", "evaluate"] = "abandon"  # what the rank does where it is caught


@dataclass(frozen=True, repr=False)
class Step(Readable):
    """From one zero_grad to the next, with one synchronised backward. Tuples over ranks are repeated to the world."""

    zero: Literal["none", "zeros", "keep"] = "none"  # what becomes of .grad before it
    local: tuple[int, ...] = (0,)  # per rank: backwards under no_sync
    forwards: int = 1  # of the synchronised backward
    rows: tuple[int, ...] = (2,)  # per rank: batch size
    eager_on: Ranks = ()  # ranks under torch.compiler.set_stance("force_eager")
    skipped_on: Ranks = ()  # ranks that call skip_step() in place of backward
    skip_after_forward: bool = True  # whether these run their forwards
    active_on: Ranks = (0, 1, 2)  # ranks on which the "sometimes" with variant 0 run, the others elsewhere
    weights: tuple[float, ...] = (1.0,)  # per rank, where the reduction is weighted
    nan_on: Ranks = ()  # ranks whose weight is 0 and whose loss is NaN
    reads: tuple[Reads, ...] = ("all",)  # what the loss of forward n reads on rank r: entry 2 * r + n, repeated
    keeps: str = ""  # what the user keeps of each gradient afterwards: a key of kept.WAYS
    before: tuple[Change, ...] = ()  # the first forward
    between: tuple[Change, ...] = ()  # the local backwards and the synchronised one
    failure: Failure | None = None
    compiled_around: bool = False  # whether torch.compile(backend="eager") is around forward and backward


@dataclass(frozen=True, repr=False)
class Join(Readable):
    """`with ddp.join():`, each rank with batches of its own. Tuples over ranks are repeated to the world."""

    batches: tuple[int, ...] = (1, 2)  # per rank
    by_all: bool = True  # divide_by_initial_world_size
    throws: bool = False  # throw_on_early_termination
    zero: Literal["none", "zeros", "keep"] = "none"  # before each batch
    weights: tuple[float, ...] = (1.0,)


@dataclass(frozen=True, repr=False)
class Setting(Readable):
    """What holds for all steps of a program."""

    reduction: Literal["mean", "sum", "weighted"] = "mean"
    hook: str = ""  # a key of reducing_hooks.TRACED or reducing_hooks.TORCH
    bucket_cap_mb: float = 1e-4
    bucket_view: bool = True  # gradient_as_bucket_view
    by_rows: bool = False  # matrices are summed as large embeddings are; nothing of it shows in what comes out
    verify: str = "first"
    smallest_graph_mb: float = 0.5  # that of compile_ddp: of several graphs here, each is smaller
    default_dtype: str = "float32"
    default_device: str = ""


@dataclass(frozen=True, repr=False)
class Other(Readable):
    """A further model, wrapped by itself, in the same backward."""

    model: Model
    swapped: bool = False  # wrapped by the other of the two wrappers
    chained: bool = False  # reads what the model before it returns, and not the batch


@dataclass(frozen=True, repr=False)
class Program(Readable):
    model: Model
    steps: tuple[Step | Join, ...] = field(default=(Step(),))
    setting: Setting = Setting()
    others: tuple[Other, ...] = ()

    @property
    def models(self) -> tuple[Model, ...]:
        return (self.model, *(other.model for other in self.others))

    @property
    def plain_steps(self) -> tuple[Step, ...]:
        """Without the joins."""
        return tuple(step for step in self.steps if isinstance(step, Step))


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
