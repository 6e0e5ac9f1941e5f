"""Is the planned step the best one, and was it foreseen? `python -m benchmarks.plan_sizes --model gpt --link 1gbit`.

First the ranks calibrate the link, time the model without communication, and say what each plan will make of its step
(`benchmarks.expected_steps`). Then all of it is measured, in turn: the planned buckets, and those of eight sizes. What
was said beforehand is written down, with its time, before the second part begins.
"""

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tabulate import tabulate

from benchmarks.expected_steps import PLANNED, name_of
from benchmarks.launch import REPOSITORY, run_job
from benchmarks.link import LOOPBACK, link_or_loopback
from benchmarks.tasks import EXTENTS, FORESEEN
from benchmarks.variants import SIZES_MB
from compiled_ddp import Calibration
from compiled_ddp.tools.comparison.derived import derive
from compiled_ddp.tools.comparison.record import recipe
from compiled_ddp.tools.comparison.result import Comparison

OUTPUT = Path("benchmarks/out")
_FLOOR = "no communication, compiled"


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.plan_sizes",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", nargs="+", choices=FORESEEN, default=["gpt"])
    parser.add_argument("--link", nargs="+", default=[LOOPBACK], help="loopback, or rates like 1gbit 300mbit (root)")
    parser.add_argument("--sizes", nargs="+", type=float, default=[*SIZES_MB], choices=SIZES_MB, metavar="MIB")
    parser.add_argument("--steps", type=int, help="rounds, each one timed step of every plan")
    parser.add_argument("--json", type=Path, default=OUTPUT / "plan-sizes.json")
    return parser.parse_args(arguments)


def _measure(options: argparse.Namespace, workload: str, rate: str, before: list[dict[str, Any]]) -> dict[str, Any]:
    """What was said and what came; `before` are the results there are."""
    extent = EXTENTS[workload]
    with link_or_loopback(rate) as link:
        rounds = options.steps or extent.quick
        what = {"workload": workload, "bucket_cap_mb": None, "device": "cpu", "warmup": extent.warmup}
        expected = run_job("expect", {**what, "sizes_mb": options.sizes}, ranks=2, link=link)
        _write(options, [*before, {"model": workload, "link": rate, "expected": expected}])
        variants = [_FLOOR, "torch DDP", "torch.compile(DDP)", PLANNED, *map(name_of, options.sizes)]
        job = {**what, "variants": variants, "rounds": rounds, "link": rate}
        comparison = Comparison.from_json(run_job("compare", job, ranks=2, link=link))
    return {"model": workload, "link": rate, "expected": expected, "measured": comparison.to_json()}


def _write(options: argparse.Namespace, results: list[dict[str, Any]]) -> None:
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
            results.append(_measure(options, workload, rate, results))
            _write(options, results)
            print(table(results[-1]), flush=True)


if __name__ == "__main__":
    main()
