"""`compiled-ddp compare SCRIPT:FUNCTION`."""

import argparse
import json
import os
import shlex
import sys
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from compiled_ddp.command_line.own_ranks import run_on_own_ranks
from compiled_ddp.comparison import chart, contest, record, table
from compiled_ddp.comparison.advice import advise
from compiled_ddp.comparison.contest import ComparisonFailed, Order
from compiled_ddp.comparison.result import Comparison
from compiled_ddp.comparison.variants import WrapperOptions

LEFT_OUT = ("p10_ms", "ratio_to_limit", "first_step_warm_s")
PACKAGES = ("torch", "compiled-ddp", "numpy", "transformers")


def run(options: argparse.Namespace) -> int:
    """Compare on torchrun's ranks, or on own ones; returns the exit status."""
    if "RANK" in os.environ:
        return _compare_on_this_rank(options, sys.argv[1:])
    statuses = run_on_own_ranks(options.ranks, _compare_on_this_rank, options, sys.argv[1:], environment={})
    return int(statuses[0])


def _compare_on_this_rank(options: argparse.Namespace, arguments: list[str]) -> int:
    """2 where there was nothing to compare, with the reason on stderr of every rank."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=2 * options.timeout))
    try:
        comparison = contest.compare(_order(options))
    except ComparisonFailed as error:
        sys.stderr.write(f"compare, rank {dist.get_rank()}: {options.target} cannot be compared. {error}\n")
        return 2
    else:
        if dist.get_rank() == 0:
            _report(options, comparison, arguments)
        return 0
    finally:
        dist.destroy_process_group()


def _order(options: argparse.Namespace) -> Order:
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    device = options.device or ("cuda" if torch.cuda.device_count() >= ranks_here else "cpu")
    return Order(
        users_function=options.target,
        variants=list(dict.fromkeys(options.variants)),
        wrapper_options=WrapperOptions(options.bucket_cap_mb, options.find_unused_parameters, options.backend),
        warmup=options.warmup,
        rounds=options.rounds,
        probes=options.probe,
        device=device,
        process_group=options.process_group or ("nccl" if device == "cuda" else "gloo"),
        seed=options.seed,
        timeout_s=options.timeout,
    )


def _report(options: argparse.Namespace, comparison: Comparison, arguments: list[str]) -> None:
    advice = advise(comparison)
    sys.stdout.write(f"\n{table_of(comparison)}\n\n{advice}\n")
    samples = options.json or Path(f"compare-{comparison.workload}.json")
    picture = options.png or Path(f"compare-{comparison.workload}.png")
    script = Path(options.target.rpartition(":")[0]).resolve()
    sources = script.parent if script.is_file() else Path.cwd()
    data = {
        "recipe": record.recipe(sources, PACKAGES, shlex.join(["compiled-ddp", *arguments])),
        "comparisons": [comparison.to_json()],
        "advice": asdict(advice),
    }
    samples.parent.mkdir(parents=True, exist_ok=True)
    samples.write_text(json.dumps(data))
    sys.stdout.write(f"\nRaw samples and recipe: {samples}\n{_picture(comparison, picture)}\n")


def table_of(comparison: Comparison, tablefmt: str = "simple") -> str:
    """The table as the command prints it; `tablefmt` is tabulate's."""
    left_out = [*LEFT_OUT, *table.fields_without_values(comparison)]
    return table.render(comparison, tablefmt, left_out=left_out)


def _picture(comparison: Comparison, path: Path) -> str:
    """A line that says where it is, or why it is not."""
    try:
        chart.draw([comparison], path)
    except ImportError:
        return "No picture: it needs matplotlib (pip install 'compiled-ddp[compare]')."
    return f"Picture: {path}"
