"""The passes that run on a whole functional step, in order.

On the step as it was traced, before a compiler has it:

   `scale_seeds`           takes the mean where derivatives begin, where that is the same
   `finish_gradients`      does what is done to each gradient before it is summed where it is produced

For the whole of it, as the compiler hands it on:

0. `recompute_regions`     computes again, for derivatives, what is not to be kept for them

For each reduction of the step, on a group name of its own:

1. `unfold_sum`            reduces every gradient on its own: the naive program, the meaning of all that follows
2. `form_buckets`          merges the all-reduces of each bucket
3. `pack_buckets`          lets gradients be produced inside their bucket
4. `verify_collectives`    asserts that the graph launches what the plan says

where a communication hook's programs may stand in place of the buckets' all-reduces,

or, where each rank gets its share of the sums, `scatter_buckets`, which does all of that.

Then, for all of them:

5. `schedule_step`         launches early, waits where the sums are read
6. `arrive_in_place`       lets what the step before has left under way be put into parameters (`gather_later`)
7. `update_in_place`       lets a step's update write into its inputs
8. `lend_rows`             lets what is scattered and gathered be sent from, and come into, memory that is kept
9. `reduce_in_place`       lets a bucket's all-reduce overwrite it, for backends that do not do so by themselves
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torch.fx import Graph, Node

from compiled_ddp.passes.finish_gradients import finish_gradients
from compiled_ddp.passes.form_buckets import form_buckets, form_buckets_of_hooks
from compiled_ddp.passes.gather_later import arrive_in_place
from compiled_ddp.passes.inline_hook import HOOKS_GROUP, TracedHook, rounds
from compiled_ddp.passes.lend_rows import lend_rows, lent_memory
from compiled_ddp.passes.ops import is_launch, pack_into
from compiled_ddp.passes.pack_buckets import pack_buckets
from compiled_ddp.passes.pipeline import source_hash
from compiled_ddp.passes.recompute_regions import recompute_regions
from compiled_ddp.passes.reduce_in_place import reduce_in_place
from compiled_ddp.passes.scale_seeds import scale_seeds
from compiled_ddp.passes.scatter_buckets import scatter_buckets
from compiled_ddp.passes.schedule_step import schedule_step
from compiled_ddp.passes.unfold_sums import drop_outputs, find_sums, unfold_kept, unfold_sum
from compiled_ddp.passes.update_in_place import update_in_place
from compiled_ddp.passes.verify_collectives import verify_collectives
from compiled_ddp.plan import BucketPlan

Observer = Callable[[str, Graph], None]


def prepare_step(graph: Graph) -> None:
    """What is done to a step as it was traced."""
    scale_seeds(graph)
    finish_gradients(graph)


@dataclass(frozen=True)
class StepPipeline:
    """How a step is rewritten: the plan of each of its reductions, in order, and the group that it is launched on.

    `hooks` has for some, by their places, the programs that reduce their buckets, None for the riders.

    `in_place` is for a backend that runs the graph as it is. With `lent` the graph's last inputs are memory: that of
    scattered plans, `lent_memory`, and behind it for the buckets of others, one for each, but of those that hooks
    reduce; both in the order of the reductions and of their plans. Without `lends_rows` there is none for scattered
    ones.
    """

    reductions: tuple[tuple[BucketPlan, str], ...]
    in_place: bool = False
    lent: bool = False
    lends_rows: bool = True
    hooks: Mapping[int, Sequence[TracedHook | None]] = field(default_factory=dict)

    @property
    def cache_identity(self) -> str:
        """A hash of the passes' sources and of everything they are given, for a compiler's cache key."""
        given = " ".join(f"{plan.fingerprint} {group_name}" for plan, group_name in self.reductions)
        given += "".join(f" {place} {[hook and hook.identity for hook in own]}" for place, own in self.hooks.items())
        return hashlib.sha256(
            f"{source_hash()} step {given} {self.in_place} {self.lent} {self.lends_rows}".encode()
        ).hexdigest()

    def run(self, graph: Graph, *, observe: Observer | None = None) -> None:
        """Rewrite a step in place; `observe` is called with each pass's name after it has run."""
        tell = observe or _nobody
        recompute_regions(graph)
        tell("recompute_regions", graph)
        sums = find_sums(graph)
        assert len(sums) == len(self.reductions), f"{len(sums)} reductions in the graph, {len(self.reductions)} planned"
        names = [f"{group_name}#{number}" for number, (_, group_name) in enumerate(self.reductions)]
        following = list[Node]()
        for place, (reduction, (plan, group_name), name) in enumerate(zip(sums, self.reductions, names, strict=True)):
            if plan.is_scattered:
                following += scatter_buckets(graph, plan, reduction=reduction, group_name=name)
                following += [node for node in graph.nodes if is_launch(node, group_name)]  # of `gather_later`
                tell("scatter_buckets", graph)
                continue
            hooks = self.hooks.get(place, ())
            kept = unfold_kept(graph, reduction) if hooks else []
            positions = unfold_sum(graph, plan, reduction=reduction, group_name=name)
            tell("unfold_sum", graph)
            if hooks:
                form_buckets_of_hooks(graph, plan, group_name=name, output_positions=positions, hooks=hooks, kept=kept)
                _rename(graph, HOOKS_GROUP, name)
            else:
                form_buckets(graph, plan, group_name=name, output_positions=positions)
            tell("form_buckets", graph)
            pack_buckets(graph, plan, lent=())
            tell("pack_buckets", graph)
            verify_collectives(graph, plan, group_name=name, output_positions=positions, hooks=hooks)
            drop_outputs(graph, len(positions) + 1)
            following += _in_further_rounds([node for node in graph.nodes if is_launch(node, name)])
        if self.lent:
            planned = zip(self.reductions, names, strict=True)
            _pack_into_last_inputs(graph, [name for (plan, _), name in planned if plan.is_summed])
        graph.eliminate_dead_code()
        schedule_step(graph, group_names=names, following=following)
        tell("schedule_step", graph)
        arrive_in_place(graph)
        tell("arrive_in_place", graph)
        update_in_place(graph)
        tell("update_in_place", graph)
        if self.lent and self.lends_rows:
            self._lend_rows(graph, names)
            tell("lend_rows", graph)
        for name, (_, group_name) in zip(names, self.reductions, strict=True):
            _rename(graph, name, group_name)
        if self.in_place:
            for group_name in dict.fromkeys(group_name for _, group_name in self.reductions):
                reduce_in_place(graph, group_name=group_name)
            tell("reduce_in_place", graph)
        graph.lint()

    def _lend_rows(self, graph: Graph, names: Sequence[str]) -> None:
        others = sum(len(plan.buckets) for plan, _ in self.reductions if plan.is_summed)
        end = len(graph.find_nodes(op="placeholder")) - others
        for (plan, group_name), name in reversed([*zip(self.reductions, names, strict=True)]):
            lent = lent_memory(plan) if plan.is_scattered else ()
            begin = end - len(lent)
            if lent:
                inputs = graph.find_nodes(op="placeholder")[begin:end]
                lend_rows(graph, plan, lent=dict(zip(lent, inputs, strict=True)), group_names=(name, group_name))
            end = begin


def _in_further_rounds(launches: Sequence[Node]) -> list[Node]:
    """What needs results of other launches, and last the riders, which tell whether all is sound; none in one round."""
    _, later = rounds(launches)
    return [*later, launches[-1]] if later else []


def _nobody(_: str, __: Graph) -> None:
    """Observes nothing."""


def _pack_into_last_inputs(graph: Graph, names: Sequence[str]) -> None:
    launches = [node for name in names for node in graph.nodes if is_launch(node, name)]
    memory = graph.find_nodes(op="placeholder")[-len(launches) :] if launches else []
    for launch, into in zip(launches, memory, strict=True):
        packed: Node = launch.args[0]
        packed.target = pack_into
        packed.args = (packed.args[0], into)


def _rename(graph: Graph, name: str, group_name: str) -> None:
    """Launch on the group itself, or on what sums by rows for it, what stood under the name of one reduction."""
    for node in graph.nodes:
        if is_launch(node, name):
            node.args = (*node.args[:-1], group_name + str(node.args[-1]).removeprefix(name))
