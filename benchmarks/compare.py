"""Compare data-parallel wrappers on real data: `python -m benchmarks.compare`, or the same under torchrun.

Without a launcher the command starts its own ranks. Under torchrun it takes part as the rank it was started as; then
there is no shaped link, and the columns that need fresh processes (peak memory, first step) stay empty.
"""

import argparse
import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.launch import REPOSITORY, run_job
from benchmarks.link import LOOPBACK, ShapedLink, link_or_loopback, parse_rate
from benchmarks.tasks import EXTENTS, WORKLOADS
from benchmarks.torch_rows import NEEDS_TORCH_ON_CPU, why_not
from benchmarks.variants import make_variants
from benchmarks.worker import run
from compiled_ddp.tools.comparison import chart, table
from compiled_ddp.tools.comparison.probe import MALLOC_ENVIRONMENT
from compiled_ddp.tools.comparison.ranks import joined_rank
from compiled_ddp.tools.comparison.record import recipe
from compiled_ddp.tools.comparison.result import Comparison, FirstStep

OUTPUT = Path("benchmarks/out")
QUICK = ("gpt", "linears")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare", description=__doc__)
    extent = parser.add_mutually_exclusive_group()
    extent.add_argument(
        "--quick", action="store_true", help=f"{' and '.join(QUICK)}, few rounds: within 5 minutes (default)"
    )
    extent.add_argument("--full", action="store_true", help="all models, more rounds, peak memory and first step")
    parser.add_argument("--model", nargs="+", choices=WORKLOADS, help=f"default {' '.join(QUICK)}, with --full all")
    parser.add_argument("--steps", type=int, help="rounds, each one timed step of every variant")
    parser.add_argument("--warmup", type=int, help="steps of each variant before the first round")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--link", default=LOOPBACK, help="loopback, or a rate like 1gbit or 600mbit (needs root)")
    parser.add_argument("--variants", nargs="+", metavar="NAME", help="some of: " + "; ".join(make_variants()))
    parser.add_argument("--bucket-cap-mb", type=float, help="for every wrapper, torch's too; default each one's own")
    parser.add_argument(
        "--probe",
        action=argparse.BooleanOptionalAction,
        help="measure peak memory and first steps in fresh processes; default with --full only",
    )
    parser.add_argument("--json", type=Path, help="recipe and raw samples; default benchmarks/out/compare-LINK.json")
    parser.add_argument("--png", type=Path, help="the chart; default benchmarks/out/compare-LINK.png")
    options = parser.parse_args(arguments)
    options.variants = options.variants or [name for name, variant in make_variants().items() if variant.by_default]
    if unknown := set(options.variants) - set(make_variants()) - set(NEEDS_TORCH_ON_CPU):
        parser.error(f"unknown variants {sorted(unknown)}; known are {list(make_variants())}")
    if options.link != LOOPBACK:
        try:
            parse_rate(options.link)
        except ValueError as error:
            parser.error(str(error))
    options.probe = options.full if options.probe is None else options.probe
    options.model = options.model or (list(WORKLOADS) if options.full else list(QUICK))
    for name, workload in product(options.variants, options.model):
        if reason := why_not(name, find_unused_parameters=WORKLOADS[workload].find_unused_parameters):
            parser.error(f"{workload}: {reason}")
    return options


def _job(options: argparse.Namespace, workload: str, link: str) -> dict[str, Any]:
    extent = EXTENTS[workload]
    return {
        "workload": workload,
        "variants": options.variants,
        "bucket_cap_mb": options.bucket_cap_mb,
        "device": options.device,
        "warmup": options.warmup or extent.warmup,
        "rounds": options.steps or (extent.full if options.full else extent.quick),
        "link": link,
    }


def _probe_all(job: dict[str, Any], ranks: int, link: ShapedLink | None, cache: Path) -> dict[str, dict[str, Any]]:
    """First step cold and warm and peak memory of each variant: two fresh starts on an Inductor cache of its own.

    What they compile is gathered in `cache`, so that the timed run need not compile it again.
    """
    probes = {}
    for name in tqdm(job["variants"], desc=f"{job['workload']}: fresh processes", leave=False):
        with tempfile.TemporaryDirectory(prefix="cddp-cache-") as own_cache:
            environment = {**MALLOC_ENVIRONMENT, "TORCHINDUCTOR_CACHE_DIR": own_cache}
            probe = {**job, "variants": [name], "steps": 5}
            cold = run_job("probe", probe, ranks=ranks, link=link, environment=environment)
            warm = run_job("probe", probe, ranks=ranks, link=link, environment=environment)
            shutil.copytree(own_cache, cache, dirs_exist_ok=True)
        probes[name] = {
            "first_step_cold_s": cold["first_step_s"],
            "first_step_parts": FirstStep(**cold["first_step_parts"]),
            "first_step_warm_s": warm["first_step_s"],
            "peak_memory_bytes": warm["peak_memory_bytes"],
        }
    return probes


def _report(options: argparse.Namespace, comparisons: Sequence[Comparison]) -> None:
    for comparison in comparisons:
        print(f"\n{table.render(comparison)}")
    if len(comparisons) > 1:
        print(f"\n{table.overview(comparisons)}")
    link = comparisons[0].link
    samples = options.json or OUTPUT / f"compare-{link}.json"
    picture = options.png or OUTPUT / f"compare-{link}.png"
    samples.parent.mkdir(parents=True, exist_ok=True)
    how = recipe(REPOSITORY)
    data = {"recipe": how, "comparisons": [comparison.to_json() for comparison in comparisons]}
    samples.write_text(json.dumps(data))
    chart.draw(comparisons, picture, how)
    print(f"\nRaw samples and recipe: {samples}\nChart: {picture}")


def _run_as_rank(options: argparse.Namespace, workloads: Sequence[str]) -> None:
    with joined_rank(options.device) as rank:
        answers = [run("compare", _job(options, workload, LOOPBACK), rank) for workload in workloads]
        if rank.index == 0:
            _report(options, [Comparison.from_json(answer) for answer in answers])


def _run_as_launcher(options: argparse.Namespace, workload: str, link: ShapedLink | None) -> Comparison:
    job = _job(options, workload, LOOPBACK if link is None else link.rate)
    if not options.probe:
        return Comparison.from_json(run_job("compare", job, ranks=options.ranks, link=link))
    with tempfile.TemporaryDirectory(prefix="cddp-cache-") as cache:
        probes = _probe_all(job, options.ranks, link, Path(cache))
        environment = {"TORCHINDUCTOR_CACHE_DIR": cache}
        answer = run_job("compare", job, ranks=options.ranks, link=link, environment=environment)
    comparison = Comparison.from_json(answer)
    return replace(comparison, variants=[replace(result, **probes[result.name]) for result in comparison.variants])


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    if "RANK" in os.environ:
        _run_as_rank(options, options.model)
        return
    with link_or_loopback(options.link) as link:
        comparisons = [_run_as_launcher(options, workload, link) for workload in options.model]
    _report(options, comparisons)


if __name__ == "__main__":
    main()
