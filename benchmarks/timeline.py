"""The picture of a backward, or a whole step, as predicted and as measured: `timeline()` of a GPT on two ranks.

    python -m benchmarks.timeline docs/images/timeline.png --link 1gbit
    python -m benchmarks.timeline docs/images/whole-step.png --link 300mbit --of pipelined

The GPT and the batch of `benchmarks.compare`: 47 MiB of gradients. With a name that ends in .json it writes the trace
instead, and it prints what `explain()` says in any case.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from benchmarks import tasks
from benchmarks.launch import run_job
from benchmarks.link import link_or_loopback
from benchmarks.whole_step import PROVEN, WHOLE
from compiled_ddp import EagerDDP, compile_ddp, compile_step
from compiled_ddp.tools.comparison.ranks import Rank

RANKS, WARMUP_STEPS, STEPS, LOCAL_STEPS = 2, 5, 12, 5
WRAPPERS = {"compile_ddp": compile_ddp, "EagerDDP": EagerDDP}
WHOLE_STEPS = {name.removeprefix("compile_step, "): options for name, options in WHOLE.items()}


def measure(path: str, of: str, batch: int, rank: Rank) -> str:
    """On each rank; rank 0 writes the file. What it explains."""
    import torch

    from benchmarks.data import byte_batches
    from benchmarks.models import GPT

    torch.manual_seed(0)
    model = GPT()
    batches = byte_batches(rank.index, rank.world_size, batch=batch, context=128)
    if of in WHOLE_STEPS:
        measured = _step(model, batches, WHOLE_STEPS[of])
    else:
        measured = _backward(model, batches, rank, WRAPPERS[of])
    if rank.index == 0:
        measured.timeline(path)
    return str(measured.explain())


def _step(model: Any, batches: Iterator[Any], options: dict[str, Any]) -> Any:
    """A whole step, with that workload's optimizer, once its graph has been proven."""
    step = compile_step(model, tasks.GPT.optimizer(model.parameters()), **options)
    for _ in range(PROVEN):
        step(*next(batches))
    recorder = step.profile(STEPS)
    while recorder.remaining:
        step(*next(batches))
    return step


def _backward(model: Any, batches: Iterator[Any], rank: Rank, wrap: Callable[..., Any]) -> Any:
    import torch

    ddp = wrap(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-2)

    def step() -> None:
        ddp(*next(batches)).backward()
        optimizer.step()
        optimizer.zero_grad()

    def local_step() -> None:
        with ddp.no_sync():
            ddp(*next(batches)).backward()
        optimizer.zero_grad()

    for _ in range(WARMUP_STEPS):
        step()
    local_step()  # compiles its backward
    recorder = ddp.profile(STEPS)
    for _ in range(LOCAL_STEPS):
        rank.barrier()
        local_step()
    while recorder.remaining:
        rank.barrier()
        step()
    return ddp


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.timeline", description=__doc__)
    parser.add_argument("path", help="the picture, .png, or the trace, .json")
    parser.add_argument("--link", default="1gbit", help="'loopback', or a rate such as 1gbit")
    parser.add_argument("--of", default="compile_ddp", choices=[*WRAPPERS, *WHOLE_STEPS])
    parser.add_argument("--batch", type=int, default=4, help="samples of each rank")
    options = parser.parse_args(arguments)
    what: dict[str, Any] = {"path": options.path, "of": options.of, "batch": options.batch, "device": "cpu"}
    with link_or_loopback(options.link) as link:
        print(run_job("timeline", what, ranks=RANKS, link=link))


if __name__ == "__main__":
    main()
