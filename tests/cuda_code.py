"""The CUDA code of a backward that the passes have rewritten: see `compiled_ddp.torch_private.pretended_cuda`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.fx import GraphModule

from compiled_ddp.passes.pipeline import Pipeline
from compiled_ddp.plan import BucketPlan, GradientSpec
from compiled_ddp.planning.assignment import assign_buckets
from compiled_ddp.torch_private import inductor, packing
from compiled_ddp.torch_private.pretended_cuda import (
    backward_graph,
    code_of,
    move_to_cuda,
    pretended_gpu,
    tracing_in,
    world,
)

WORLD_SIZE = 8


@dataclass(frozen=True)
class CudaCode:
    """The code that Inductor has written, and the plan by which the passes have rewritten the graph."""

    source: str
    plan: BucketPlan


def cuda_code(
    model: Callable[..., Tensor],
    batch: Sequence[Tensor],
    *,
    capacity_bytes: float,
    fold: bool = False,
    dynamic: bool | None = None,
    replayed: bool = False,
    options: dict[str, Any] | None = None,
) -> CudaCode:
    """Of the backward of `model(*batch)`, a scalar; `fold` and `replayed` are `Pipeline`'s, `options` Inductor's."""
    graph_module, inputs = backward_graph(model, batch, dynamic)
    positions = inductor.gradient_output_positions(graph_module.graph)
    with world(WORLD_SIZE) as group_name, pretended_gpu():
        mode, inputs = move_to_cuda(graph_module, inputs)
        plan = _plan(graph_module, positions, capacity_bytes)
        pipeline = Pipeline(plan, group_name, fold=fold, replayed=replayed)
        packing.register_pack_lowering()
        rewriting = inductor.rewriting_by(pipeline.run, pipeline.cache_identity, "synchronised")
        assert rewriting.rewrite is not None
        with tracing_in(mode):
            inputs = list(rewriting.rewrite(graph_module, inputs))
            graph_module.recompile()
            return CudaCode(code_of(graph_module, inputs, options or {}), plan)


def _plan(graph_module: GraphModule, positions: dict[int, int], capacity_bytes: float) -> BucketPlan:
    """Gradients of parameters alone, in the order in which the graph computes them."""
    outputs = graph_module.graph.output_node().args[0]
    assert isinstance(outputs, Sequence)
    places = {node: place for place, node in enumerate(graph_module.graph.nodes)}
    computed = {index: outputs[position] for index, position in positions.items() if outputs[position] is not None}
    specs = [
        GradientSpec.of(index, node.meta["val"])
        for index, node in sorted(computed.items(), key=lambda item: places[item[1]])
    ]
    return assign_buckets(specs, capacities_bytes=(capacity_bytes,), world_size=WORLD_SIZE)
