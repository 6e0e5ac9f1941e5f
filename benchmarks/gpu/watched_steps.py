"""A few steps of a wrapper under torch's stream sanitizer, on every rank of a job.

What the sanitizer finds it writes to stderr, and raises. It sees operators that go through the dispatcher: eager code,
the wrapper's own and collectives, and with `aot_eager` every operator of a captured backward.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from benchmarks.gpu.workloads import ALL
from compiled_ddp import EagerDDP, compile_ddp, torch_private
from compiled_ddp.tools.comparison.ranks import Rank
from compiled_ddp.tools.comparison.workload import on_device

PLANTED = "a planted race"
UNWATCHED_STEPS = 3  # in which Dynamo and AOTAutograd compile, which they do not under a dispatch mode
WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "EagerDDP": lambda model: EagerDDP(model, bucket_cap_mb=0.01),
    "compile_ddp": lambda model: compile_ddp(model, backend="aot_eager", bucket_cap_mb=0.01, smallest_graph_mb=0),
}
WORKLOAD = "tiny gpt"

Watch = Callable[[], AbstractContextManager[None]]


def run(what: str, steps: int, rank: Rank, watch: Watch = torch_private.for_tests.stream_sanitizer) -> dict[str, int]:
    """`what` is the name of a wrapper, or PLANTED; raises where the sanitizer has found a race."""
    if what == PLANTED:
        plant_a_race(rank.device, watch)
        return {"steps": 0}
    workload = ALL[WORKLOAD]
    ddp, batches = (
        WRAPPERS[what](workload.build_model("watched", rank.device)),
        workload.batches(rank.index, rank.world_size),
    )
    optimizer = workload.optimizer(ddp.parameters())
    graphs_run = what == "compile_ddp"
    for step in range(UNWATCHED_STEPS + steps):
        batch = on_device(next(batches), rank.device)
        watching = watch if step >= UNWATCHED_STEPS else nullcontext
        with nullcontext() if graphs_run else watching():
            loss = workload.loss(ddp, batch)
        with watching():
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    rank.synchronize()
    return {"steps": steps}


def plant_a_race(device: torch.device, watch: Watch) -> None:
    """One stream fills memory, another one changes it without waiting: if this is not reported, nothing is."""
    with watch():
        written = torch.zeros(1024, device=device)
        with torch.Stream(device):
            written.add_(1)
