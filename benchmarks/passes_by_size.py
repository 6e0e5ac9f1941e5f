"""Seconds of each graph pass on a backward of so many parameters, without ranks and without a compiler."""

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph
from torch.fx.experimental.proxy_tensor import make_fx

from compiled_ddp.passes.pipeline import Pipeline
from compiled_ddp.plan import GradientSpec
from compiled_ddp.planning.assignment import assign_buckets

WORLD_SIZE = 2
BUCKET_BYTES = 800  # a hundred gradients, so that there are more buckets where there are more gradients


@dataclass(frozen=True)
class SizedPasses:
    """`seconds` of each pass by name, in run order: of the fastest repetition."""

    parameters: int
    nodes: int  # of the graph before the passes
    seconds: dict[str, float]


def backward_of_chain(parameters: int) -> Graph:
    """The backward of `benchmarks.models.Chain` as AOTAutograd has it: outputs are the gradients in order."""

    def backward(tangents_1: Tensor, *saved: Tensor) -> list[Tensor]:
        factors, inputs = saved[:parameters], saved[parameters:]
        gradients = []
        for factor, entered in zip(reversed(factors), reversed(inputs), strict=True):
            gradients.append(tangents_1 * entered)
            tangents_1 = tangents_1 * factor
        return gradients[::-1]

    graph: Graph = make_fx(backward, tracing_mode="fake")(*[torch.ones(2) for _ in range(1 + 2 * parameters)]).graph
    tangent = next(iter(graph.nodes))
    tangent.name = tangent.target = "tangents_1"  # by its name the passes know it
    return graph


def measure(parameters: int, repetitions: int) -> dict[str, Any]:
    """A `SizedPasses` as a JSON value."""
    specs = [GradientSpec.of(index, torch.empty(2)) for index in range(parameters)]
    plan = assign_buckets(specs[::-1], capacities_bytes=(BUCKET_BYTES,), world_size=WORLD_SIZE)
    pipeline = Pipeline(plan, "compiled_ddp/graph")  # as for Inductor
    traced = backward_of_chain(parameters)
    runs = [dict(_seconds_of_passes(pipeline, traced)) for _ in range(repetitions)]
    fastest = {name: min(run[name] for run in runs) for name in runs[0]}
    return asdict(SizedPasses(parameters, len(traced.nodes), fastest))


def _seconds_of_passes(pipeline: Pipeline, traced: Graph) -> Iterator[tuple[str, float]]:
    graph = Graph()
    graph.output(graph.graph_copy(traced, {}))
    ends: list[tuple[str, float]] = []
    begin = time.perf_counter()
    pipeline.run(
        graph,
        output_positions={index: index for index in pipeline.plan.indices},
        observe=lambda name, _: ends.append((name, time.perf_counter())),
    )
    for name, end in ends:
        yield name, end - begin
        begin = end
