"""The CUDA code of a backward that the passes have rewritten: see `compiled_ddp.torch_private.pretended_cuda`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule

from compiled_ddp.comm_hooks import CommHook, Ranks
from compiled_ddp.passes.pipeline import Pipeline
from compiled_ddp.plan import Bucket, BucketPlan, GradientSpec
from compiled_ddp.planning.assignment import assign_buckets
from compiled_ddp.reducers.hook_state import BucketHook
from compiled_ddp.torch_private import compiler_options, inductor, packing
from compiled_ddp.torch_private.pretended_cuda import (
    CUDA,
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


@dataclass(frozen=True)
class _HookOnCuda:
    """A `TracedHook` whose program is for CUDA."""

    graph: Graph
    identity: str


def cuda_code(
    model: Callable[..., Tensor],
    batch: Sequence[Tensor],
    *,
    capacity_bytes: float,
    fold: bool = False,
    dynamic: bool | None = None,
    hook: CommHook | None = None,
    mode: str | None = None,
    templates: bool = False,
) -> CudaCode:
    """Of the backward of `model(*batch)`, a scalar, with the options that `compile_ddp(mode=...)` would give Inductor.

    `fold` is `Pipeline`'s, `hook` reduces the buckets, `templates` is as in `code_of`.
    """
    options: dict[str, Any] = compiler_options.inductor_options(mode, None, dynamic)
    graph_module, inputs = backward_graph(model, batch, dynamic, options)
    positions = inductor.gradient_output_positions(graph_module.graph)
    with world(WORLD_SIZE) as group_name, pretended_gpu():
        fake_mode, inputs = move_to_cuda(graph_module, inputs)
        plan = _plan(graph_module, positions, capacity_bytes, hook)
        pipeline = Pipeline(
            plan,
            group_name,
            fold=fold,
            hooks=() if hook is None else tuple(_programs(plan, BucketHook(hook, Ranks(WORLD_SIZE, group_name)))),
            replayed=compiler_options.uses_cuda_graphs(options, CUDA),
        )
        packing.register_pack_lowering()
        rewriting = inductor.rewriting_by(pipeline.run, pipeline.cache_identity, "synchronised")

        def compiling() -> object:
            return inductor.compile_rewritten(graph_module, inputs, rewriting, is_backward=True)

        with tracing_in(fake_mode):
            return CudaCode(code_of(compiling, options, templates=templates), plan)


def _plan(
    graph_module: GraphModule, positions: dict[int, int], capacity_bytes: float, hook: CommHook | None
) -> BucketPlan:
    """Gradients of parameters alone, in the order in which the graph computes them."""
    outputs = graph_module.graph.output_node().args[0]
    assert isinstance(outputs, Sequence)
    places = {node: place for place, node in enumerate(graph_module.graph.nodes)}
    computed = {index: outputs[position] for index, position in positions.items() if outputs[position] is not None}
    specs = [
        GradientSpec.of(index, node.meta["val"])
        for index, node in sorted(computed.items(), key=lambda item: places[item[1]])
    ]
    reduction = "mean" if hook is None else "hook"
    return assign_buckets(specs, capacities_bytes=(capacity_bytes,), world_size=WORLD_SIZE, reduction=reduction)


def _programs(plan: BucketPlan, hook: BucketHook) -> list[_HookOnCuda | None]:
    """The hook's program for each bucket, traced on the CPU as it runs there and moved; none for the riders alone."""
    return [_program(bucket, hook) for bucket in plan.buckets]


def _program(bucket: Bucket, hook: BucketHook) -> _HookOnCuda | None:
    program = hook.program(replace(bucket, device=torch.device("cpu")))
    if program is None:
        return None
    inputs = [node.meta["val"] for node in program.graph.find_nodes(op="placeholder")]
    move_to_cuda(GraphModule(nn.Module(), program.graph), inputs)
    return _HookOnCuda(program.graph, program.identity)
