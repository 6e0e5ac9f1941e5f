"""`compiled-ddp compare SCRIPT:FUNCTION`."""

import argparse
import json
import os
import shlex
import signal
import sys
from collections.abc import Mapping
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from compiled_ddp.tools.command_line.own_ranks import run_on_own_ranks
from compiled_ddp.tools.command_line.target import NoSuchTarget, check_target
from compiled_ddp.tools.comparison import chart, contest, record, table
from compiled_ddp.tools.comparison.advice import advise
from compiled_ddp.tools.comparison.contest import ComparisonFailed, Order
from compiled_ddp.tools.comparison.remote import agreed
from compiled_ddp.tools.comparison.result import Comparison
from compiled_ddp.tools.comparison.variants import WrapperOptions

LEFT_OUT = ("p10_ms", "p90_ms", "ratio_to_limit", "first_step_warm_s")
PACKAGES = ("torch", "compiled-ddp", "numpy", "transformers")


def run(options: argparse.Namespace) -> int:
    """Compare on torchrun's ranks, or on own ones; returns the exit status."""
    if "RANK" in os.environ:
        if "LOCAL_WORLD_SIZE" not in os.environ:  # which cores and which GPU are this rank's goes by it
            told = "RANK is set, and nothing says how many ranks this machine has"
            sys.stderr.write(f"compare: {told}: start with torchrun, or set LOCAL_WORLD_SIZE\n")
            return 2
        return _compare_on_this_rank(options, sys.argv[1:], every_rank_tells=True)
    try:
        check_target(options.target)
    except NoSuchTarget as error:
        sys.stderr.write(f"compare: {error}\n")
        return 2
    statuses = run_on_own_ranks(options.ranks, _compare_on_this_rank, options, sys.argv[1:], False, environment={})
    return int(statuses[0])


def _compare_on_this_rank(options: argparse.Namespace, arguments: list[str], every_rank_tells: bool) -> int:
    """1 where every wrapper has failed.

    2 where there was nothing to compare, with the reason on stderr: of every rank, as machines have their own.
    """
    # While ranks meet, in C++, no handler of a signal runs, and there is nothing to remove: it ends the process.
    dist.init_process_group("gloo", timeout=timedelta(seconds=2 * options.timeout))
    # The launcher's, when it is told to end itself, or another rank has failed.
    before = signal.signal(signal.SIGTERM, _leave)
    try:
        _check_before(options)
        comparison = contest.compare(_order(options))
    except ComparisonFailed as error:
        if every_rank_tells or dist.get_rank() == 0:
            whose = f", rank {dist.get_rank()}" if every_rank_tells else ""
            sys.stderr.write(f"compare{whose}: {options.target} cannot be compared. {error}\n")
        return 2
    else:
        if dist.get_rank() == 0:
            _report(options, comparison, arguments)
        return int(all(result.error is not None for result in comparison.variants if result.communicates))
    finally:
        dist.destroy_process_group()
        signal.signal(signal.SIGTERM, before)


def _leave(number: int, _: object) -> None:
    """End the process by an exception, so that its own processes are ended and its folder is removed."""
    signal.signal(number, signal.SIG_IGN)  # which comes to a process, and to its group
    sys.exit(128 + number)


def _check_before(options: argparse.Namespace) -> None:
    """Raise ComparisonFailed, on every rank, for what would only fail when much has been measured."""
    problems = agreed(
        _no_gpu(options) or (_not_writable(options) if dist.get_rank() == 0 else None), dist.get_world_size()
    )
    for rank, problem in enumerate(problems):
        if problem is not None:
            raise ComparisonFailed(f"rank {rank}: {problem}")


def _ranks_here() -> int:
    return int(os.environ["LOCAL_WORLD_SIZE"])


def _no_gpu(options: argparse.Namespace) -> str | None:
    found, needed = torch.cuda.device_count(), _ranks_here()
    if options.device != "cuda" or found >= needed:
        return None
    return f"--device cuda needs a GPU for each of {needed} ranks on this machine, found {found}: pass --device cpu"


def _not_writable(options: argparse.Namespace) -> str | None:
    """Which of the results could not be written, and why; nothing of the attempt is left."""
    results = _results(options, options.target.rpartition(":")[2])
    unknown = chart.problem_of(results[1])
    if unknown is not None:
        return unknown
    for argument, path in zip(("--json", "--png"), results, strict=True):
        is_new = not path.exists()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.open("ab").close()
        except OSError as error:
            return f"{path} cannot be written ({error.strerror}): name another file by {argument}"
        if is_new:
            path.unlink()
    return None


def _results(options: argparse.Namespace, workload: str) -> tuple[Path, Path]:
    """Where the samples and the picture go."""
    return options.json or Path(f"compare-{workload}.json"), options.png or Path(f"compare-{workload}.png")


def _order(options: argparse.Namespace) -> Order:
    ranks_here = _ranks_here()
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
    samples, picture = _results(options, comparison.workload)
    script = Path(options.target.rpartition(":")[0]).resolve()
    sources = script.parent if script.is_file() else Path.cwd()
    recipe = record.recipe(sources, PACKAGES, shlex.join(["compiled-ddp", *arguments]))
    data = {"recipe": recipe, "comparisons": [comparison.to_json()], "advice": asdict(advice)}
    samples.parent.mkdir(parents=True, exist_ok=True)
    samples.write_text(json.dumps(data, allow_nan=False))
    sys.stdout.write(f"\nRaw samples and recipe: {samples}\n{_picture(comparison, picture, recipe)}\n")


def table_of(comparison: Comparison, tablefmt: str = "simple") -> str:
    """The table as the command prints it; `tablefmt` is tabulate's."""
    left_out = [*LEFT_OUT, *table.fields_without_values(comparison)]
    return table.render(comparison, tablefmt, left_out=left_out)


def _picture(comparison: Comparison, path: Path, recipe: Mapping[str, Any]) -> str:
    """A line that says where it is, or why it is not."""
    try:
        chart.draw([comparison], path, recipe)
    except ImportError:
        return "No picture: it needs matplotlib (pip install 'compiled-ddp[compare]')."
    return f"Picture: {path}"
