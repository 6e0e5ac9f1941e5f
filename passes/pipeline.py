"""The passes in the order in which they run on a backward graph.

1. `insert_all_reduces`    reduces every gradient on its own: the naive program, the meaning of all that follows
2. `place_mean`            moves the mean to the tangents where `prove_linearity` shows that nothing changes
3. `fold_into_products`    lets matrix products add what earlier backwards left, where the graph folds that in
4. `form_buckets`          merges the all-reduces of each bucket, or puts a communication hook in their place
5. `pack_buckets`          lets gradients be produced inside their bucket
6. `schedule_collectives`  launches early, waits late
7. `reduce_in_place`       lets a bucket's all-reduce overwrite it, for backends that do not do so by themselves
8. `infer_values`          computes how large the flat buffers have become, where the graph is compiled
9. `verify_collectives`    asserts that the graph launches what the plan says

With `naive`, steps 2, 3, 5, 6 and 7 are left out, and the plan has one bucket per gradient.

A new pass is a file of its own, a row of `PASSES`, and a row of the table in docs/how-it-works.md.
"""

import hashlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

from torch.fx import Graph, Node

from compiled_ddp.passes.fold_into_products import fold_into_products
from compiled_ddp.passes.form_buckets import form_buckets
from compiled_ddp.passes.infer_values import infer_values
from compiled_ddp.passes.inline_hook import TracedHook
from compiled_ddp.passes.insert_all_reduces import insert_all_reduces
from compiled_ddp.passes.pack_buckets import pack_buckets
from compiled_ddp.passes.place_mean import place_mean
from compiled_ddp.passes.reduce_in_place import reduce_in_place
from compiled_ddp.passes.schedule_collectives import schedule_collectives
from compiled_ddp.passes.verify_collectives import verify_collectives
from compiled_ddp.plan import BucketPlan, buckets, riders

Observer = Callable[[str, Graph], None]


@dataclass(frozen=True)
class Pipeline:
    """How the backward graphs of one plan are rewritten. Frozen data: the same on every rank and in every run.

    `group_name` is the name by which the graph calls the wrapper's communicator. With `fold`, gradients that earlier
    backwards left unreduced are inputs of the graph. `naive` keeps the reference program. `hooks` are the programs that
    reduce the buckets, one for each, or none at all. `in_place` is for a backend that runs the graph as it is. With
    `replayed` the graph runs as a CUDA graph.
    """

    plan: BucketPlan
    group_name: str
    fold: bool = False
    naive: bool = False
    hooks: tuple[TracedHook | None, ...] = ()
    in_place: bool = False
    replayed: bool = False

    @property
    def lent_buckets(self) -> list[int]:
        """The buckets, by place in the plan, whose flat buffers the graph is handed: its last inputs.

        Those that are kept from step to step; and the one with the riders, which must be found in memory where the
        graph breaks off. Not what a hook reduces, whose result is new memory.
        """
        if self.naive:
            return []
        hooks = self.hooks or (None,) * len(self.plan.buckets)
        return [
            number
            for number, (bucket, hook) in enumerate(zip(self.plan.buckets, hooks, strict=True))
            if hook is None and (bucket.kept or (bucket.riders is not None and not self.replayed))
        ]

    @property
    def cache_identity(self) -> str:
        """A hash of which passes run, of `SOURCES` and of everything they are given, for a compiler's cache key."""
        names = [pass_.name for pass_ in PASSES if pass_.when(self)]
        hooks = [hook and hook.identity for hook in self.hooks]
        given = f"{self.plan.fingerprint} {self.group_name} {self.fold} {self.naive} {hooks} "
        given += f"{self.in_place} {self.replayed} {names}"
        return hashlib.sha256((source_hash() + given).encode()).hexdigest()

    def run(self, graph: Graph, *, output_positions: Mapping[int, int], observe: Observer | None = None) -> None:
        """Rewrite a backward graph in place; `observe` is called with each pass's name after it has run.

        `output_positions` maps the plan's indices to places among the graph's outputs. Tangents are the inputs whose
        names begin with "tangents", as AOTAutograd names them.
        """
        given: Given = {
            "plan": self.plan,
            "group_name": self.group_name,
            "output_positions": output_positions,
            "tangents": [node for node in graph.find_nodes(op="placeholder") if node.name.startswith("tangents")],
            "fold": self.fold,
            "hooks": self.hooks,
            "lent": self.lent_buckets,
        }
        for pass_ in PASSES:
            if pass_.when(self):
                pass_.function(graph, **{name: value for name, value in given.items() if name in pass_.asks_for})
                if observe is not None:
                    observe(pass_.name, graph)


class Given(TypedDict):
    """What a pass may ask for, by the names of its arguments."""

    plan: BucketPlan
    group_name: str
    output_positions: Mapping[int, int]
    tangents: Sequence[Node]
    fold: bool
    hooks: Sequence[TracedHook | None]
    lent: Sequence[int]


@dataclass(frozen=True)
class Pass:
    """A row of `PASSES`: the function is in the file of the same name."""

    name: str
    function: Callable[..., object]
    when: Callable[[Pipeline], bool]

    @property
    def asks_for(self) -> set[str]:
        """The names in `Given` of what the function takes besides the graph."""
        _, *names = inspect.signature(self.function).parameters
        return set(names)


def _always(pipeline: Pipeline) -> bool:
    return True


def _unless_naive(pipeline: Pipeline) -> bool:
    return not pipeline.naive


def _folding(pipeline: Pipeline) -> bool:
    return pipeline.fold and not pipeline.naive


def _for_a_compiler(pipeline: Pipeline) -> bool:
    return not pipeline.in_place


def _in_place(pipeline: Pipeline) -> bool:
    return pipeline.in_place and not pipeline.naive


PASSES = (
    Pass("insert_all_reduces", insert_all_reduces, _always),
    Pass("place_mean", place_mean, _unless_naive),
    Pass("fold_into_products", fold_into_products, _folding),
    Pass("form_buckets", form_buckets, _always),
    Pass("pack_buckets", pack_buckets, _unless_naive),
    Pass("schedule_collectives", schedule_collectives, _unless_naive),
    Pass("reduce_in_place", reduce_in_place, _in_place),
    Pass("infer_values", infer_values, _for_a_compiler),
    Pass("verify_collectives", verify_collectives, _always),
)

# What the rewritten program depends on: the passes with what they share, and the nouns that they are given.
SOURCES = (*sorted(Path(__file__).parent.glob("*.py")), Path(buckets.__file__), Path(riders.__file__))


def source_hash() -> str:
    """What changes whenever a pass might rewrite otherwise."""
    return hashlib.sha256(b"".join(source.read_bytes() for source in SOURCES)).hexdigest()
