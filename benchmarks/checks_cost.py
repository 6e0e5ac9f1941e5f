"""What the checks on gradients cost one process, where nothing is waited for: a later step, and the first backward.

    python -m benchmarks.checks_cost later --wrapper EagerDDP --parameters 802
    python -m benchmarks.checks_cost first --verify off --backend aot_eager

Each prints one line. For another commit's package run this file itself, `PYTHONPATH=OTHER_CHECKOUT python
benchmarks/checks_cost.py ...`, in turn with this one's: so it takes nothing from the other benchmarks.

`later` is the check of what a backward leaves, in CPU time of the main thread, median over steps; `first` is the
comparison by values, of 24 blocks of a linear layer, GELU and LayerNorm of 1,024 (97 MiB), with the growth of the
process's peak memory.
"""

import argparse
import resource
import time
from collections.abc import Sequence
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor, nn

from compiled_ddp import EagerDDP, compile_ddp

WARMUP = 10  # steps


class Many(nn.Module):
    """Parameters of four elements, so that nearly all is paid for each of them."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.parts = nn.ParameterList([nn.Parameter(torch.randn(4)) for _ in range(count)])

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack(list(self.parts)).mul(x).sum()


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.checks_cost",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("what", choices=("later", "first"))
    parser.add_argument("--wrapper", choices=("EagerDDP", "compile_ddp"), default="EagerDDP")
    parser.add_argument("--parameters", type=int, default=802)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--blocks", type=int, default=24)
    parser.add_argument("--verify", choices=("first", "off"), default="first")
    parser.add_argument("--backend", choices=("inductor", "aot_eager"), default="inductor")
    return parser.parse_args(arguments)


def later(options: argparse.Namespace) -> str:
    torch.set_num_threads(1)
    model = Many(options.parameters)
    if options.wrapper == "EagerDDP":
        wrapped: nn.Module = EagerDDP(model)
    else:
        wrapped = compile_ddp(model, backend="aot_eager", smallest_graph_mb=0)
    x, forwards, backwards = torch.randn(4), [], []
    for _ in range(WARMUP + options.steps):
        marks = [time.thread_time()]
        loss = wrapped(x)
        marks.append(time.thread_time())
        loss.backward()
        marks.append(time.thread_time())
        forwards.append(marks[1] - marks[0])
        backwards.append(marks[2] - marks[1])
        model.zero_grad()
    forward, backward = (1e6 * median(times[WARMUP:]) for times in (forwards, backwards))
    return f"{options.wrapper}, {options.parameters} parameters: forward {forward:.0f} us, backward {backward:.0f} us"


def first(options: argparse.Namespace) -> str:
    blocks = [nn.Sequential(nn.Linear(1024, 1024), nn.GELU(), nn.LayerNorm(1024)) for _ in range(options.blocks)]
    wrapped = compile_ddp(nn.Sequential(*blocks), backend=options.backend, verify=options.verify)
    loss = wrapped(torch.randn(256, 1024)).square().mean()
    before, begun = _peak_mib(), time.perf_counter()
    loss.backward()
    taken = time.perf_counter() - begun
    return f'verify="{options.verify}", {options.backend}: {taken:.2f} s, peak grew by {_peak_mib() - before:.0f} MiB'


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        print({"later": later, "first": first}[options.what](options))
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
