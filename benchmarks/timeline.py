"""The picture of a backward, as predicted and as measured: `ddp.timeline` of a GPT on two ranks.

    python -m benchmarks.timeline docs/images/timeline.png --link 1gbit

The GPT and the batch of `benchmarks.compare`: 47 MiB of gradients. With a name that ends in .json it writes the trace
instead, and it prints what `ddp.explain()` says in any case.
"""

import argparse
from collections.abc import Sequence
from typing import Any

from benchmarks.launch import run_job
from benchmarks.link import link_or_loopback
from compiled_ddp import EagerDDP, compile_ddp
from compiled_ddp.tools.comparison.ranks import Rank

RANKS, WARMUP_STEPS, STEPS, LOCAL_STEPS = 2, 5, 12, 5


def measure(path: str, wrapper: str, batch: int, rank: Rank) -> str:
    """On each rank; rank 0 writes the file. What it explains."""
    import torch

    from benchmarks.data import byte_batches
    from benchmarks.models import GPT

    torch.manual_seed(0)
    model = GPT()
    ddp = EagerDDP(model) if wrapper == "EagerDDP" else compile_ddp(model)
    batches = byte_batches(rank.index, rank.world_size, batch=batch, context=128)
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
    if rank.index == 0:
        ddp.timeline(path)
    return str(ddp.explain())


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.timeline", description=__doc__)
    parser.add_argument("path", help="the picture, .png, or the trace, .json")
    parser.add_argument("--link", default="1gbit", help="'loopback', or a rate such as 1gbit")
    parser.add_argument("--wrapper", default="compile_ddp", choices=["compile_ddp", "EagerDDP"])
    parser.add_argument("--batch", type=int, default=4, help="samples of each rank")
    options = parser.parse_args(arguments)
    what: dict[str, Any] = {"path": options.path, "wrapper": options.wrapper, "batch": options.batch, "device": "cpu"}
    with link_or_loopback(options.link) as link:
        print(run_job("timeline", what, ranks=RANKS, link=link))


if __name__ == "__main__":
    main()
