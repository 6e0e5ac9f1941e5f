"""A job as this machine has it: the user's function, trained for a few steps without any other rank."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import median

import torch
from torch import nn

from compiled_ddp.plan import GradientSpec
from compiled_ddp.planning.cost_model import Readiness
from compiled_ddp.planning.step_model import Job
from compiled_ddp.tools.command_line.target import find_function
from compiled_ddp.tools.comparison.reference import trainable
from compiled_ddp.tools.comparison.users_task import RETURNS, UsersWorkload

_WARMUP = 2  # steps, which allocate what later ones find


def measure(target: str, steps: int) -> Job:
    """The job of the function that `target` names, of what `compiled-ddp compare` takes: medians of so many steps.

    On the CPU, in float32 unless the model says otherwise, and not compiled. A parameter without a gradient in the last
    step is left out. Raises what `find_function` and the function raise, and TypeError or ValueError for what cannot be
    trained.
    """
    function = find_function(target, returns=RETURNS)
    device = torch.device("cpu")
    workload = UsersWorkload(target, function, seed=0, rank=0, world_size=1, device=device)
    model = workload.build_model("", device)
    parameters = trainable(model)
    optimizer = workload.optimizer(parameters)
    batches = workload.batches(0, 1)
    took, ready = list[tuple[float, float, float]](), list[dict[int, float]]()
    with _noting_gradients(parameters) as noted:
        for _ in range(_WARMUP + steps):
            batch = next(batches)
            noted.clear()
            begin = time.perf_counter()
            loss = workload.loss(model, batch)
            backward = time.perf_counter()
            loss.backward()
            update = time.perf_counter()
            optimizer.step()
            optimizer.zero_grad()
            took.append((backward - begin, update - backward, time.perf_counter() - update))
            ready.append({index: at - backward for index, at in noted.items()})
    forward, backward, update = (median(phase) for phase in zip(*took[_WARMUP:], strict=True))
    return _job(parameters, ready[_WARMUP:], forward, backward, update)


def _job(
    parameters: Sequence[nn.Parameter],
    ready: Sequence[dict[int, float]],
    forward: float,
    backward: float,
    update: float,
) -> Job:
    if not ready[-1]:
        raise ValueError("no parameter has a gradient after the backward: there is nothing to reduce")
    times = {index: median(each[index] for each in ready if index in each) for index in ready[-1]}
    order = sorted(times, key=times.__getitem__)
    nbytes = tuple(GradientSpec.of(index, parameters[index]).nbytes for index in order)
    seconds = tuple(min(times[index], backward) for index in order)
    return Job(nbytes, Readiness(seconds, backward, "by the hooks of a local backward"), forward, update)


@contextmanager
def _noting_gradients(parameters: Sequence[nn.Parameter]) -> Iterator[dict[int, float]]:
    """By its index, when the gradient of each parameter was accumulated last."""
    noted: dict[int, float] = {}

    def note(index: int) -> None:
        noted[index] = time.perf_counter()

    handles = [
        parameter.register_post_accumulate_grad_hook(lambda _, index=index: note(index))
        for index, parameter in enumerate(parameters)
    ]
    try:
        yield noted
    finally:
        for handle in handles:
            handle.remove()
