"""The passes in the order in which they run on a backward graph.

1. `insert_all_reduces`    reduces every gradient on its own: the naive program, the meaning of all that follows
2. `place_mean`            moves the mean to the tangents where `prove_linearity` shows that nothing changes
3. `form_buckets`          merges the all-reduces of each bucket, or puts a communication hook in their place
4. `pack_buckets`          lets gradients be produced inside their bucket
5. `schedule_collectives`  launches early, waits late
6. `reduce_in_place`       lets a bucket's all-reduce overwrite it, for backends that do not do so by themselves
7. `verify_collectives`    asserts that the graph launches what the plan says

With `naive`, steps 2, 4, 5 and 6 are left out, and the plan has one bucket per gradient.
"""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch.fx import Graph

from compiled_ddp import plan
from compiled_ddp.passes.form_buckets import form_buckets
from compiled_ddp.passes.inline_hook import TracedHook
from compiled_ddp.passes.insert_all_reduces import insert_all_reduces
from compiled_ddp.passes.pack_buckets import pack_buckets
from compiled_ddp.passes.place_mean import place_mean
from compiled_ddp.passes.reduce_in_place import reduce_in_place
from compiled_ddp.passes.schedule_collectives import schedule_collectives
from compiled_ddp.passes.verify_collectives import verify_collectives
from compiled_ddp.plan import BucketPlan

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
        """A hash of the passes' sources and of everything they are given, for a compiler's cache key."""
        hooks = [hook and hook.identity for hook in self.hooks]
        given = f"{self.plan.fingerprint} {self.group_name} {self.fold} {self.naive} {hooks} "
        given += f"{self.in_place} {self.replayed}"
        return hashlib.sha256((_source_hash() + given).encode()).hexdigest()

    def run(self, graph: Graph, *, output_positions: Mapping[int, int], observe: Observer | None = None) -> None:
        """Rewrite a backward graph in place; `observe` is called with each pass's name after it has run.

        `output_positions` maps the plan's indices to places among the graph's outputs. Tangents are the inputs whose
        names begin with "tangents", as AOTAutograd names them.
        """
        tangents = [node for node in graph.nodes if node.op == "placeholder" and node.name.startswith("tangents")]
        seen = observe or (lambda name, graph: None)
        group, positions = self.group_name, output_positions
        insert_all_reduces(graph, self.plan, group_name=group, output_positions=positions, fold=self.fold)
        seen("insert_all_reduces", graph)
        if not self.naive:
            place_mean(graph, self.plan, group_name=group, tangents=tangents, output_positions=positions)
            seen("place_mean", graph)
        form_buckets(graph, self.plan, group_name=group, output_positions=positions, hooks=self.hooks)
        seen("form_buckets", graph)
        if not self.naive:
            pack_buckets(graph, self.plan, lent=self.lent_buckets)
            seen("pack_buckets", graph)
            schedule_collectives(graph, group_name=group)
            seen("schedule_collectives", graph)
        if self.in_place and not self.naive:
            reduce_in_place(graph, group_name=group)
            seen("reduce_in_place", graph)
        verify_collectives(graph, self.plan, group_name=group, output_positions=positions, hooks=self.hooks)
        seen("verify_collectives", graph)


def _source_hash() -> str:
    sources = [*sorted(Path(__file__).parent.glob("*.py")), Path(plan.__file__)]
    return hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()
