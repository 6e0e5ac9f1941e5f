"""What the passes add to the time that Inductor takes for a backward, on the CPU and for a GPU that is pretended.

    python -m benchmarks.compile_time --layers 48 --device cpu cuda

The backward of a GPT is traced once, and compiled in turn as plain torch.compile has it and with the passes, up to the
written code, which is neither loaded nor run: what compilers of C++ and Triton's take is in neither. Of both times,
wall and CPU, the medians; their ratio is of the CPU's, which other processes disturb less. "cuda" needs triton.
"""

import argparse
import contextlib
import copy
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule

from benchmarks.launch import REPOSITORY
from compiled_ddp.passes.pipeline import Pipeline
from compiled_ddp.plan import BucketPlan, GradientSpec
from compiled_ddp.planning.assignment import assign_buckets
from compiled_ddp.tools.comparison.record import recipe
from compiled_ddp.tools.comparison.table import tabulate_rows
from compiled_ddp.torch_private import groups, inductor, packing, pretended_cuda
from compiled_ddp.torch_private.inductor import Rewriting

WORLD_SIZE = 8
WIDTH, HEADS, BATCH, TOKENS = 64, 4, 2, 8  # small: what is timed depends on the number of operators
BUCKET_BYTES = 500_000.0
COLUMNS = {
    "layers": ("layers", "d"),
    "device": ("device", "s"),
    "parameters": ("para-\nmeters", "d"),
    "buckets": ("buckets", "d"),
    "plain_s": ("plain\nwall s", ".1f"),
    "ours_s": ("ours\nwall s", ".1f"),
    "plain_cpu_s": ("plain\nCPU s", ".1f"),
    "ours_cpu_s": ("ours\nCPU s", ".1f"),
    "ratio": ("ours\nx", ".2f"),
}


class Block(nn.Module):
    """Of a GPT. Attention is written out, as the CPU's fused kernel exists on no other device."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.project = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.widen, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(self.before(x)).chunk(3, -1))
        weights = (q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5).softmax(-1)
        x = x + self.project((weights @ v).transpose(1, 2).flatten(2))
        return x + self.narrow(F.gelu(self.widen(self.after(x))))


class Gpt(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(layers)))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x).square().mean()


@dataclass(frozen=True)
class CompileTime:
    """Medians of a backward of so many layers on one kind of device."""

    layers: int
    device: str
    parameters: int
    buckets: int
    plain_s: float
    ours_s: float
    plain_cpu_s: float
    ours_cpu_s: float

    @property
    def ratio(self) -> float:
        return self.ours_cpu_s / self.plain_cpu_s


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compile_time", description=__doc__)
    parser.add_argument("--layers", type=int, nargs="+", default=[48])
    parser.add_argument("--device", nargs="+", choices=("cpu", "cuda"), default=["cpu"])
    parser.add_argument(
        "--repetitions", type=int, default=3, help="of each variant, in turn, behind one that is not timed"
    )
    parser.add_argument("--json", type=Path, default=Path("benchmarks/out/compile_time.json"))
    return parser.parse_args(arguments)


def measure(layers: int, device: str, repetitions: int) -> CompileTime:
    graph_module, inputs = pretended_cuda.backward_graph(Gpt(layers), [torch.randn(BATCH, TOKENS, WIDTH)], False, {})
    packing.register_pack_lowering()
    with contextlib.ExitStack() as stack:
        group_name = stack.enter_context(groups.pretended(WORLD_SIZE))
        mode = next(value.fake_mode for value in inputs if isinstance(value, Tensor))
        if device == "cuda":
            stack.enter_context(pretended_cuda.pretended_gpu())
            mode, inputs = pretended_cuda.move_to_cuda(graph_module, inputs)
        plan = _plan_of(graph_module)
        pipeline = Pipeline(plan, group_name)
        ours = inductor.rewriting_by(pipeline.run, pipeline.cache_identity, "synchronised")
        stack.enter_context(pretended_cuda.tracing_in(mode))
        for rewriting in (Rewriting(), ours):
            _seconds(graph_module, inputs, rewriting)  # what is set up once is no part of either
        rounds = [[_seconds(graph_module, inputs, each) for each in (Rewriting(), ours)] for _ in range(repetitions)]
    plain, rewritten = zip(*rounds, strict=True)
    return CompileTime(
        layers,
        device,
        len(plan.indices),
        len(plan.buckets),
        *_medians(plain, rewritten, 0),
        *_medians(plain, rewritten, 1),
    )


def _plan_of(graph_module: GraphModule) -> BucketPlan:
    """Gradients in the order in which backward produces them, or nearly so: the captured graph's in reverse."""
    outputs: Sequence[Any] = graph_module.graph.output_node().args[0]  # type: ignore[assignment]
    positions = inductor.gradient_output_positions(graph_module.graph)
    specs = [
        GradientSpec.of(index, outputs[position].meta["val"])
        for index, position in sorted(positions.items(), reverse=True)
        if outputs[position] is not None
    ]
    return assign_buckets(specs, capacities_bytes=(BUCKET_BYTES,), world_size=WORLD_SIZE)


def _seconds(graph_module: GraphModule, inputs: Sequence[Any], rewriting: Rewriting) -> tuple[float, float]:
    """Of the wall clock and of the CPU, of compiling a copy of the graph."""
    copied = copy.deepcopy(graph_module)
    begin, cpu_begin = time.perf_counter(), time.process_time()
    pretended_cuda.code_of(
        lambda: inductor.compile_rewritten(copied, list(inputs), rewriting, is_backward=True), options={}
    )
    return time.perf_counter() - begin, time.process_time() - cpu_begin


def _medians(plain: Sequence[tuple[float, float]], ours: Sequence[tuple[float, float]], clock: int) -> Iterator[float]:
    for runs in (plain, ours):
        yield statistics.median(run[clock] for run in runs)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    found = [measure(layers, device, options.repetitions) for layers in options.layers for device in options.device]
    print(tabulate_rows(found, COLUMNS, tablefmt="github", missing="-"))
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(
        json.dumps({"recipe": recipe(REPOSITORY), "compile_times": [asdict(times) for times in found]})
    )


if __name__ == "__main__":
    main()
