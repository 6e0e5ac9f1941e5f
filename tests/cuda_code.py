"""The CUDA code of a backward that the passes have rewritten: see `compiled_ddp.torch_private.pretended_cuda`."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from bucket_memory import Expected, faults_of
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from compiled_ddp.comm_hooks import CommHook, Ranks
from compiled_ddp.passes.pipeline import Pipeline
from compiled_ddp.plan import Bucket, BucketPlan, GradientSpec
from compiled_ddp.planning.assignment import assign_buckets
from compiled_ddp.reducers.traced_hook import BucketHook
from compiled_ddp.torch_private import compiler_options, inductor, packing
from compiled_ddp.torch_private.groups import pretended
from compiled_ddp.torch_private.pretended_cuda import (
    CUDA,
    backward_graph,
    code_of,
    move_to_cuda,
    pretended_gpu,
    tracing_in,
)

WORLD_SIZE = 8


@dataclass(frozen=True)
class CudaCode:
    """The code that Inductor has written, and the plan by which the passes have rewritten the graph."""

    source: str
    plan: BucketPlan
    expected: tuple[tuple[int, tuple[Expected, ...]], ...] = ()  # what lies in each bucket, and how long that is
    mean: float = 1 / WORLD_SIZE

    def faults(self) -> list[str]:
        """Of what this code does to the memory of the buckets: see `bucket_memory`."""
        return faults_of(self.source, self.expected, mean=self.mean)


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
    options: Mapping[str, Any] | None = None,
    world_size: int = WORLD_SIZE,
    run: Callable[..., None] | None = None,
) -> CudaCode:
    """Of the backward of `model(*batch)`, a scalar, with the options that `compile_ddp(mode=...)` would give Inductor.

    `fold` is `Pipeline`'s, `hook` reduces the buckets, `templates` is as in `code_of`. `run` runs the passes, as
    `Pipeline.run` does after the pipeline itself; faults are planted by it.
    """
    patches: dict[str, Any] = compiler_options.inductor_options(mode, options, dynamic)
    graph_module, inputs = backward_graph(model, batch, dynamic, patches)
    positions = inductor.gradient_output_positions(graph_module.graph)
    with pretended(world_size) as group_name, pretended_gpu():
        fake_mode, inputs = move_to_cuda(graph_module, inputs)
        plan = _plan(graph_module, positions, capacity_bytes, hook, world_size)
        expected = _expected(graph_module.graph, plan, positions)
        pipeline = Pipeline(
            plan,
            group_name,
            fold=fold,
            hooks=() if hook is None else tuple(_programs(plan, BucketHook(hook, Ranks(world_size, group_name)))),
            replayed=compiler_options.uses_cuda_graphs(patches, CUDA),
        )
        packing.register_pack_lowering()
        passes = pipeline.run if run is None else functools.partial(run, pipeline)
        rewriting = inductor.rewriting_by(passes, pipeline.cache_identity, "synchronised")

        def compiling() -> object:
            return inductor.compile_rewritten(graph_module, inputs, rewriting, is_backward=True)

        with tracing_in(fake_mode):
            source = code_of(compiling, patches, templates=templates)
    return CudaCode(source, plan, expected, 1 / world_size)


def _expected(
    graph: Graph, plan: BucketPlan, positions: Mapping[int, int]
) -> tuple[tuple[int, tuple[Expected, ...]], ...]:
    """What the buckets are to hold, by the graph before the passes."""
    outputs = graph.output_node().args[0]
    assert isinstance(outputs, Sequence)
    return tuple(
        (
            bucket.numel,
            tuple(
                Expected(
                    name=f"gradient {gradient.index} of {gradient.size}",
                    size=gradient.size,
                    stride=gradient.stride,
                    offset_elements=gradient.offset_elements,
                    numel=gradient.numel,
                    output=positions[gradient.index],
                    inputs=_inputs_of(outputs[positions[gradient.index]]),
                )
                for gradient in bucket.gradients
            ),
        )
        for bucket in plan.buckets
    )


def _inputs_of(node: Node) -> frozenset[str]:
    """The tensors among a graph's inputs of which it computes a node."""
    seen, pending = {node}, [node]
    while pending:
        for read in pending.pop().all_input_nodes:
            if read not in seen:
                seen.add(read)
                pending.append(read)
    placeholders = (each for each in seen if each.op == "placeholder")
    return frozenset(str(each.target) for each in placeholders if isinstance(each.meta["val"], Tensor))


def _plan(
    graph_module: GraphModule, positions: dict[int, int], capacity_bytes: float, hook: CommHook | None, world_size: int
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
    return assign_buckets(specs, capacities_bytes=(capacity_bytes,), world_size=world_size, reduction=reduction)


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
