"""Graphs that others have traced, by make_fx or AOTAutograd: their reductions launched early and awaited late."""

from collections.abc import Sequence

import torch.distributed as dist
from torch.fx import GraphModule, Node

from compiled_ddp.functional.operator import plan_of, spec_of
from compiled_ddp.keywords import check_switches, suggests_keywords
from compiled_ddp.passes.step_pipeline import StepPipeline, prepare_step
from compiled_ddp.passes.unfold_sums import find_sums
from compiled_ddp.plan import BucketPlan


@suggests_keywords
def overlap(graph_module: GraphModule, *, in_place: bool = False) -> GraphModule:
    """Rewrite `graph_module` to launch an all-reduce for each bucket in place of each reduction; returns it.

    Each is launched behind the last gradient of its bucket, and awaited where its sum is first read. The graph is that
    of a function which calls `grad` or `grad_and_value`: what make_fx returns, or what AOTAutograd hands to its
    compiler. A graph in which something is written to in place before its end keeps its order.

    Args:
        in_place: let an all-reduce overwrite its bucket, which saves a copy: for a graph that is run as it is. A
            compiler that does so by itself, as Inductor, needs the default.

    Raises TypeError for what is no graph, ValueError for a graph without a reduction; where there is one rank, it has
    none, and stays as it is.
    """
    check_switches(in_place=in_place)
    if not isinstance(graph_module, GraphModule):
        raise TypeError(f"graph_module must be a torch.fx.GraphModule, as make_fx returns, found {graph_module!r}.")
    sums = find_sums(graph_module.graph)
    if not sums and not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return graph_module
    if not sums:
        raise ValueError(
            "overlap() found no reduction in this graph: give it the graph of a function that calls "
            "compiled_ddp.functional.grad or grad_and_value, before any other pass has taken it apart."
        )
    prepare_step(graph_module.graph)
    StepPipeline(tuple(map(_planned, sums)), in_place=in_place).run(graph_module.graph)
    graph_module.recompile()
    return graph_module


def _planned(reduction: Node) -> tuple[BucketPlan, str]:
    """The plan of a reduction as it is traced, and the group that it is launched on."""
    gradients, passengers, _, order, capacities_bytes, world_size, group_name = reduction.args
    values = [node.meta["val"] for node in _nodes(gradients)]
    specs = tuple(spec_of(index, tuple(g.shape), g.dtype, g.device) for index, g in enumerate(values))
    ridden = sum(node.meta["val"].numel() for node in _nodes(passengers))
    assert isinstance(order, Sequence) and isinstance(capacities_bytes, Sequence)
    assert isinstance(world_size, int) and isinstance(group_name, str)
    return plan_of(specs, tuple(order), tuple(capacities_bytes), world_size, ridden), group_name


def _nodes(values: object) -> list[Node]:
    assert isinstance(values, Sequence)
    return [value for value in values if isinstance(value, Node)]
