"""What it costs to ask before each backward whether anybody still holds a gradient of an earlier one.

    python -m benchmarks.kept

One process; the flat buffers of a wrapper of so many parameters, all on the CPU. Times are medians of the check alone.
"""

import statistics
from time import perf_counter

import torch
from tabulate import tabulate

from compiled_ddp.plan import GradientSpec, Section
from compiled_ddp.planning.assignment import assign_buckets
from compiled_ddp.step.buffers import SequenceBuffers

REPETITIONS = 200
PARAMETERS = (9, 77, 802, 5000)


def microseconds(count: int, *, in_place: bool) -> float:
    """Of one check for so many parameters of 16x16 in buckets of 25 MiB; with `in_place` each .grad lies in its own."""
    parameters = [torch.nn.Parameter(torch.zeros(16, 16)) for _ in range(count)]
    specs = [GradientSpec.of(index, parameter) for index, parameter in enumerate(parameters)]
    plan = assign_buckets(specs, capacities_bytes=[1 << 20, 25 << 20], world_size=2, reduction="mean", passengers=0)
    buffers = SequenceBuffers([Section(plan, "hooks")])
    for position, bucket in enumerate(plan.buckets):
        buffer = buffers[position]  # allocated by this
        if in_place:
            buffer.put_in_place(bucket.indices, parameters)
    samples = []
    for _ in range(REPETITIONS):
        begin = perf_counter()
        buffers.renew_held(gradient for p in parameters if (gradient := p.grad) is not None)
        samples.append(1e6 * (perf_counter() - begin))
    return statistics.median(samples)


def main() -> None:
    rows = [(n, microseconds(n, in_place=False), microseconds(n, in_place=True)) for n in PARAMETERS]
    heads = ["parameters", "us, .grad is None", "us, .grad in its bucket"]
    print(tabulate(rows, heads, tablefmt="github", floatfmt=".0f"))


if __name__ == "__main__":
    main()
