"""What each plan of a model will make of its step, said before any such step is taken: see `benchmarks.plan_sizes`.

Fitted are the numbers of the link and the device (calibration) and the three phases of the step without communication.
Nothing is taken from the steps that are predicted.
"""

import copy
import json
import statistics
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import torch
from torch.fx import GraphModule

from benchmarks.workload import Workload
from compiled_ddp import calibrate
from compiled_ddp.graph.backward_work import count_backward
from compiled_ddp.graph.capture import gradient_order
from compiled_ddp.plan import GradientSpec
from compiled_ddp.planning.cost_model import BackwardWork, Link, Readiness
from compiled_ddp.planning.optimal import lower_bound, predict_plan
from compiled_ddp.planning.planners import MEBIBYTE, OptimalBuckets, Planner, SizedBuckets
from compiled_ddp.tools.comparison.ranks import Rank

PLANNED = "compile_ddp"
_CALIBRATION_SECONDS, _FIRST_BUCKET_MB = 3.0, 1.0
_ROUNDS = 5  # of steps without communication, in each of which every model takes one
_OTHERS = 3  # what is measured beside the plans


def name_of(size_mb: float) -> str:
    """The variant with buckets of this size."""
    return f"{PLANNED}, {size_mb:g} MiB"


def expect(workload: Workload, sizes_mb: Sequence[float], *, warmup: int, rank: Rank) -> dict[str, Any]:
    """What each plan will make of a step, in milliseconds, and what that comes from."""
    calibration = calibrate(seconds=_CALIBRATION_SECONDS)
    model = workload.build_model("expected", rank.device)
    gradients, work = _captured(workload, model, rank)
    models = [model, *(copy.deepcopy(model) for _ in range(len(sizes_mb) + _OTHERS))]
    forward, backward, optimizer = _phases(workload, models, rank, warmup)
    planners: dict[str, Planner] = {PLANNED: OptimalBuckets.of(calibration)}
    for size in sizes_mb:
        capacities = min(_FIRST_BUCKET_MB, size) * MEBIBYTE, size * MEBIBYTE
        planners[name_of(size)] = SizedBuckets(capacities)
    counted = work.readiness(calibration.compute)
    scale = backward / counted.backward_seconds
    readiness = Readiness(tuple(at * scale for at in counted.seconds), backward, "scaled to the measured backward")
    rows = {}
    for name, planner in planners.items():
        ends, buckets = _backward_end(planner, gradients, work, readiness, calibration.link)
        rows[name] = {"step_ms": 1e3 * (forward + ends + optimizer), "buckets": buckets}
    nbytes = [gradient.nbytes for gradient in gradients]
    bound = lower_bound(nbytes, readiness.beside(calibration.link, sum(nbytes)), calibration.link)
    return {
        "said_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "calibration": json.loads(calibration.to_json()),
        "phases_ms": [1e3 * forward, 1e3 * backward, 1e3 * optimizer],
        "backward_by_operations_ms": 1e3 * counted.backward_seconds,
        "bound_ms": 1e3 * (forward + bound + optimizer),
        "plans": rows,
    }


def _backward_end(
    planner: Planner, gradients: Sequence[GradientSpec], work: BackwardWork, readiness: Readiness, link: Link
) -> tuple[float, int]:
    filled = planner.fill(gradients, (), work)
    place = {gradient.index: position for position, gradient in enumerate(gradients)}
    order = [place[gradient.index] for bucket in filled for gradient in bucket]
    nbytes = [gradients[position].nbytes for position in order]
    beside = readiness.only(order).beside(link, sum(nbytes))
    return predict_plan([len(bucket) for bucket in filled], nbytes, beside, link).seconds, len(filled)


def _captured(workload: Workload, model: torch.nn.Module, rank: Rank) -> tuple[list[GradientSpec], BackwardWork]:
    """The gradients in the order in which they are ready, and what the backward computes until then."""
    found = list[tuple[list[GradientSpec], BackwardWork]]()

    def keep(graph_module: GraphModule, inputs: Sequence[Any]) -> Any:
        trained = [i for i, value in enumerate(inputs) if isinstance(value, torch.nn.Parameter) and value.requires_grad]
        order = gradient_order(graph_module.graph, trained)
        specs = [GradientSpec.of(index, inputs[index]) for index in order]
        found.append((specs, count_backward(graph_module.graph, order)))
        return graph_module.forward

    batch = next(workload.batches(rank.index, rank.world_size))
    torch.compile(model, backend=keep)(*batch)
    torch.compiler.reset()
    if len(found) != 1:
        raise ValueError(
            f"{workload.name} is captured in {len(found)} graphs: only a model that is one can be foreseen"
        )
    return found[0]


def _phases(workload: Workload, models: Sequence[torch.nn.Module], rank: Rank, warmup: int) -> list[float]:
    """Forward, backward and optimizer without communication: medians over steps, of the rank that is last in each.

    Ranks that reduce wait for the last one. The models, all alike, take their steps in turn, as the plans will: what a
    step finds in caches and in the allocator is what the others have left there.
    """
    parts = [(torch.compile(model), workload.optimizer(model.parameters())) for model in models]
    batches, taken = workload.batches(rank.index, rank.world_size), list[tuple[float, float, float]]()
    for number in range((warmup + _ROUNDS) * len(parts)):
        compiled, optimizer = parts[number % len(parts)]
        batch = next(batches)
        rank.barrier()
        times = [time.perf_counter()]
        loss = workload.loss(compiled, batch)
        times.append(time.perf_counter())
        loss.backward()
        times.append(time.perf_counter())
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter())
        taken.append((times[1] - times[0], times[2] - times[1], times[3] - times[2]))
    kept = torch.tensor(taken[warmup * len(parts) :], dtype=torch.float64)
    by_rank = torch.stack(rank.gather(kept))  # (ranks, steps, phases)
    last = by_rank[:, :, :2].sum(2).argmax(0)
    of_last = by_rank[last, torch.arange(len(last))]
    torch.compiler.reset()
    return [statistics.median(phase) for phase in of_last.T.tolist()]
