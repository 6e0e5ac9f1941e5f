"""What a whole backward launches: sections, each a plan and who launches it, and their sequence."""

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from compiled_ddp.plan.buckets import Bucket, BucketPlan, fingerprint_of

Origin = Literal["graph", "hooks", "unused"]

# Why parameters are the hooks'.
NOT_CAPTURED = "not in a captured graph: used in eager code, or unused"
NOT_CALLED = (
    "the captured graphs of the first backward that hold them were not called in this forward (eager code: Dynamo's "
    "recompile limit, a stance, or switched off; or other control flow)"
)
AMONG_COLLECTIVES = (
    "the model communicates by itself, and a rank does not run the graphs of the others, which would wait for it there "
    "while it waits in the model's own collectives"
)
MIXED = "used both inside a captured graph and outside of it"
ADMITTED = "not used in the first backward"
TOO_SMALL = "in captured graphs too small for an all-reduce of their own"
TENSOR_HOOK = "a tensor hook on the parameter must see its local gradient"
BESIDE_TENSOR_HOOK = "in a captured graph with a parameter that has a tensor hook"


@dataclass(frozen=True)
class Section:
    """One stretch of the sequence: a plan over the wrapper's parameters and what launches it where all goes well.

    `origin` is "graph" where a captured segment's backward graph launches the buckets and "hooks" where gradient
    hooks do. A rank that cannot follow a "graph" section in a graph launches the same buckets by hooks. The buckets of
    an "unused" section, whose parameters no rank has used, are not launched until one of them is.
    """

    plan: BucketPlan
    origin: Origin
    reason: str = ""  # why hooks, in words; empty for a graph

    @property
    def reduces_again(self) -> bool:
        """Whether its parameters stand in a graph's section too, whose result is averaged together with the rest.

        The mean of a mean is that mean, so reducing all of .grad again is right.
        """
        return self.reason == MIXED

    @property
    def falls_back(self) -> bool:
        """Whether hooks reduce what a graph was wanted for."""
        return self.origin == "hooks" and self.reason != TOO_SMALL


SAVED_VERSION = 1  # of the files that `ReductionSequence.save` writes


def described(size: tuple[int, ...], dtype: torch.dtype) -> str:
    """What a file says of a gradient."""
    return f"{str(dtype).removeprefix('torch.')} {list(size)}"


def write_plan(
    path: str | Path,
    parameters: Mapping[str, str],
    buckets: Sequence[Sequence[str]],
    world_size: int,
    by_rows: Sequence[str],
) -> None:
    """Write what `SavedPlan.load` reads: `parameters` as they are `described`, and their names by bucket.

    Those `by_rows` are sent without zeros.
    """
    document = {
        "plan": SAVED_VERSION,
        "world_size": world_size,
        "buckets": [[*bucket] for bucket in buckets if bucket],
        **({"by_rows": [*by_rows]} if by_rows else {}),
        "parameters": dict(parameters),
    }
    Path(path).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def _specs_of(plan: BucketPlan) -> dict[int, str]:
    return {gradient.index: described(gradient.size, bucket.dtype) for bucket, gradient in plan.gradients}


@dataclass(frozen=True)
class ReductionSequence:
    """Every launch of a synchronised backward, in the order that all ranks keep.

    A parameter that several captured segments use stands once in each of their sections; the sum of its means is the
    mean of its sum. Every trainable parameter stands in at least one section (asserted).

    Sections of parameters that no rank has used come last.
    """

    sections: tuple[Section, ...]
    parameter_names: tuple[str, ...]

    def __post_init__(self) -> None:
        planned = {index for section in self.sections for index in section.plan.indices}
        expected = set(range(len(self.parameter_names)))
        assert planned == expected, f"parameters without a bucket or unknown: {sorted(planned ^ expected)}"
        assert self.sections == (*self.launched, *self.unused), "unused sections do not come last"

    @functools.cached_property
    def launched(self) -> tuple[Section, ...]:
        """The sections that every backward launches."""
        return tuple(section for section in self.sections if section.origin != "unused")

    @functools.cached_property
    def unused(self) -> tuple[Section, ...]:
        """The sections that are launched only in a backward in which a rank has used one of their parameters."""
        return tuple(section for section in self.sections if section.origin == "unused")

    @functools.cached_property
    def in_graphs(self) -> frozenset[int]:
        """The parameters of graphs' sections."""
        return frozenset(i for section in self.launched if section.origin == "graph" for i in section.plan.indices)

    @functools.cached_property
    def left_for_tensor_hooks(self) -> frozenset[int]:
        """The parameters of captured graphs that are the hooks' while a tensor hook is on one of these."""
        reasons = TENSOR_HOOK, BESIDE_TENSOR_HOOK
        return frozenset(i for section in self.launched if section.reason in reasons for i in section.plan.indices)

    @functools.cached_property
    def buckets(self) -> tuple[Bucket, ...]:
        """Every bucket that a backward launches, in launch order."""
        return tuple(bucket for section in self.launched for bucket in section.plan.buckets)

    @property
    def nbytes(self) -> int:
        return sum(bucket.nbytes for bucket in self.buckets)

    def save(self, path: str | Path) -> None:
        """Write which parameters share a bucket, in launch order, as JSON: `SavedPlan.load` reads it."""
        sections = [section for section in self.sections if not section.reduces_again]
        specs = {i: spec for section in sections for i, spec in _specs_of(section.plan).items()}
        name = self.parameter_names.__getitem__
        buckets = [[*map(name, bucket.indices)] for section in sections for bucket in section.plan.buckets]
        world_size = self.sections[0].plan.world_size if self.sections else 1
        by_rows = [name(index) for bucket in self.buckets if bucket.row is not None for index in bucket.indices]
        write_plan(path, {name(index): specs[index] for index in sorted(specs)}, buckets, world_size, by_rows)

    @functools.cached_property
    def fingerprint(self) -> str:
        """A hash of everything in the sequence, the same on every rank and in every process."""
        return fingerprint_of(self)
