"""Is the planned step the best one, and was it foreseen? `python -m benchmarks.plan_sizes --model gpt --link 1gbit`.

First the ranks calibrate the link, time the model without communication, and say what each plan will make of its step.
Then all of it is measured, in turn: the planned buckets, and those of eight sizes. What was said beforehand is written
down, with its time, before the second part begins. Fitted are four numbers of the link and the device (calibration) and
the three phases of the step without communication; nothing is taken from the steps that are predicted.
"""

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch.fx import GraphModule

from benchmarks.compare import EXTENTS
from benchmarks.launch import REPOSITORY, run_job
from benchmarks.link import LOOPBACK, link_or_loopback
from benchmarks.tasks import WORKLOADS
from benchmarks.variants import SIZES_MB
from benchmarks.workload import Workload
from compiled_ddp import Calibration, calibrate
from compiled_ddp.comparison.derived import derive
from compiled_ddp.comparison.ranks import Rank
from compiled_ddp.comparison.record import recipe
from compiled_ddp.comparison.result import Comparison
from compiled_ddp.graph.backward_work import count_backward
from compiled_ddp.graph.capture import gradient_order
from compiled_ddp.plan import GradientSpec
from compiled_ddp.planning.cost_model import BackwardWork, Link, Readiness
from compiled_ddp.planning.optimal import lower_bound, predict_plan
from compiled_ddp.planning.planners import MEBIBYTE, OptimalBuckets, Planner, SizedBuckets

OUTPUT = Path("benchmarks/out")
PLANNED = "compile_ddp"
_FLOOR = "no communication, compiled"
_CALIBRATION_SECONDS, _FIRST_BUCKET_MB = 3.0, 1.0


def name_of(size_mb: float) -> str:
    return f"{PLANNED}, {size_mb:g} MiB"


# ---- beforehand, on each rank ----------------------------------------------------------------------------------------


def expect(workload: Workload, sizes_mb: Sequence[float], *, warmup: int, steps: int, rank: Rank) -> dict[str, Any]:
    """What each plan will make of a step, in milliseconds, and what that comes from."""
    calibration = calibrate(seconds=_CALIBRATION_SECONDS)
    model = workload.build_model("expected", rank.device)
    gradients, work = _captured(workload, model, rank)
    forward, backward, optimizer = _phases(workload, model, rank, warmup, steps)
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


def _phases(workload: Workload, model: torch.nn.Module, rank: Rank, warmup: int, steps: int) -> list[float]:
    """Forward, backward and optimizer without communication: each the mean over ranks of a rank's median."""
    compiled, optimizer = torch.compile(model), workload.optimizer(model.parameters())
    batches, taken = workload.batches(rank.index, rank.world_size), list[tuple[float, float, float]]()
    for _ in range(warmup + steps):
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
    medians = torch.tensor([statistics.median(each) for each in zip(*taken[warmup:], strict=True)])
    gathered: list[float] = (torch.stack(rank.gather(medians)).mean(0)).tolist()
    torch.compiler.reset()
    return gathered


# ---- the command -----------------------------------------------------------------------------------------------------


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.plan_sizes",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", nargs="+", choices=WORKLOADS, default=["gpt"])
    parser.add_argument("--link", nargs="+", default=[LOOPBACK], help="loopback, or rates like 1gbit 300mbit (root)")
    parser.add_argument("--sizes", nargs="+", type=float, default=[*SIZES_MB], choices=SIZES_MB, metavar="MIB")
    parser.add_argument("--steps", type=int, help="rounds, each one timed step of every plan")
    parser.add_argument("--json", type=Path, default=OUTPUT / "plan-sizes.json")
    return parser.parse_args(arguments)


def _measure(options: argparse.Namespace, workload: str, rate: str) -> dict[str, Any]:
    extent = EXTENTS[workload]
    with link_or_loopback(rate) as link:
        rounds = options.steps or extent.quick
        what = {"workload": workload, "bucket_cap_mb": None, "device": "cpu", "warmup": extent.warmup}
        expected = run_job("expect", {**what, "sizes_mb": options.sizes, "steps": rounds}, ranks=2, link=link)
        _write(options, {"model": workload, "link": rate, "expected": expected})
        variants = [_FLOOR, "torch DDP", "torch.compile(DDP)", PLANNED, *map(name_of, options.sizes)]
        job = {**what, "variants": variants, "rounds": rounds, "link": rate}
        comparison = Comparison.from_json(run_job("compare", job, ranks=2, link=link))
    return {"model": workload, "link": rate, "expected": expected, "measured": comparison.to_json()}


def _write(options: argparse.Namespace, *results: dict[str, Any]) -> None:
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps({"recipe": recipe(REPOSITORY), "results": results}))


def table(result: dict[str, Any]) -> str:
    """What was said and what came, a plan a row."""
    measured = {row.name: row for row in derive(Comparison.from_json(result["measured"])).variants}
    plans = result["expected"]["plans"]
    steps = {name: measured[name].step_ms or 0.0 for name in plans}
    best, rows = min(steps.values()), []
    for name, said in plans.items():
        error = said["step_ms"] / steps[name] - 1
        ratio = measured[name].ratio_to_baseline
        rows.append((name, said["buckets"], said["step_ms"], steps[name], 100 * error, steps[name] / best, ratio))
    headers = ("", "buckets", "predicted ms", "measured ms", "error %", "x best", "x torch DDP")
    formats = ("s", "d", ".1f", ".1f", "+.1f", ".3f", ".3f")
    mean = statistics.mean(abs(row[4]) for row in rows)
    link = Calibration.from_json(json.dumps(result["expected"]["calibration"])).link
    told = f"{result['model']} on {result['link']}: an all-reduce takes {link}; mean of the errors {mean:.1f} %"
    return f"{told}\n\n{tabulate(rows, headers=headers, floatfmt=formats, tablefmt='simple')}\n"


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    results = []
    for workload in options.model:
        for rate in options.link:
            results.append(_measure(options, workload, rate))
            _write(options, *results)
            print(table(results[-1]), flush=True)


if __name__ == "__main__":
    main()
