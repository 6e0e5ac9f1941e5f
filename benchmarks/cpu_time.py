"""Where the time of a step goes: CPU time of each rank by what consumes it.

    python -m benchmarks.cpu_time              # by thread, from /proc
    sudo python -m benchmarks.cpu_time --perf  # by function too, from Linux's perf

Two ranks on loopback, one core each, so that gloo's threads run where the model computes. Milliseconds per step, means
over rounds and ranks.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean, median
from types import SimpleNamespace

from benchmarks.cpu_rounds import CpuTime
from benchmarks.launch import REPOSITORY, run_job
from benchmarks.perf_samples import CONSUMERS, SAMPLES_PER_SECOND, why_no_perf
from benchmarks.tasks import WORKLOADS
from benchmarks.threads import MAIN, THREAD_GROUPS, ThreadTime
from benchmarks.variants import make_variants
from compiled_ddp.tools.comparison.record import recipe
from compiled_ddp.tools.comparison.table import tabulate_rows

VARIANTS = ("no communication, eager", "no communication, compiled", "torch DDP", "torch.compile(DDP)", "compile_ddp")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cpu_time", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=WORKLOADS, default="gpt")
    parser.add_argument("--variants", nargs="+", choices=make_variants(), default=list(VARIANTS), metavar="NAME")
    parser.add_argument("--rounds", type=int, default=30, help="each one step of every variant")
    parser.add_argument("--warmup", type=int, default=5, help="steps of each variant before the first round")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--bucket-cap-mb", type=float, help="for every wrapper, torch's too; default each one's own")
    parser.add_argument(
        "--perf", action="store_true", help=f"sample functions, {SAMPLES_PER_SECOND} times a second; needs root"
    )
    parser.add_argument("--json", type=Path, default=Path("benchmarks/out/cpu_time.json"))
    options = parser.parse_args(arguments)
    if options.perf and (reason := why_no_perf()):
        parser.error(f"--perf: {reason}")
    return options


def _mean_ms(found: Sequence[CpuTime], of_step: Callable[[float, dict[str, ThreadTime]], float]) -> float:
    """Over the ranks and steps of one variant; `of_step` takes the step's seconds and those of its threads."""
    return 1e3 * fmean(of_step(*step) for rank in found for step in zip(rank.step_s, rank.threads_s, strict=True))


def _run_s(threads: dict[str, ThreadTime]) -> float:
    return sum(time.run_s for time in threads.values())


def lines_of_threads(found: Sequence[CpuTime]) -> dict[str, float]:
    """One variant's milliseconds per step. The main thread's user, kernel, ready and waiting make up the mean step."""
    lines = {
        "step, median": 1e3 * median(seconds for rank in found for seconds in rank.step_s),
        "step, mean": _mean_ms(found, lambda step_s, _: step_s),
    }
    for group in THREAD_GROUPS:
        lines[f"{group}: user"] = _mean_ms(found, lambda _, threads, group=group: threads[group].user_s)
        lines[f"{group}: kernel"] = _mean_ms(found, lambda _, threads, group=group: threads[group].system_s)
    lines["main thread: ready, core taken"] = _mean_ms(found, lambda _, threads: threads[MAIN].ready_s)
    lines["main thread: waiting"] = _mean_ms(
        found, lambda step_s, threads: step_s - threads[MAIN].run_s - threads[MAIN].ready_s
    )
    lines["all threads: CPU"] = _mean_ms(found, lambda _, threads: _run_s(threads))
    lines["core left to others, or idle"] = _mean_ms(found, lambda step_s, threads: step_s - _run_s(threads))
    return lines


def lines_of_samples(found: Sequence[CpuTime]) -> dict[str, float]:
    """One variant's milliseconds per step by consumer."""
    measured = [rank.consumers_s for rank in found if rank.consumers_s is not None]
    return {name: 1e3 * fmean(seconds.get(name, 0.0) for seconds in measured) for name in CONSUMERS}


def table(found: Sequence[CpuTime], lines_of: Callable[[Sequence[CpuTime]], dict[str, float]]) -> str:
    """One column per variant."""
    names = list(dict.fromkeys(cpu_time.variant for cpu_time in found))
    columns = {"line": ("ms per step", "s")} | {name: (name.replace(" ", "\n"), ".1f") for name in names}
    by_variant = {name: lines_of([cpu_time for cpu_time in found if cpu_time.variant == name]) for name in names}
    rows = [
        SimpleNamespace(line=line, **{name: by_variant[name][line] for name in names}) for line in by_variant[names[0]]
    ]
    return tabulate_rows(rows, columns, tablefmt="simple", missing="-")


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    job = {
        "workload": options.model,
        "variants": options.variants,
        "bucket_cap_mb": options.bucket_cap_mb,
        "device": "cpu",
        "warmup": options.warmup,
        "rounds": options.rounds,
        "with_perf": options.perf,
    }
    found = [CpuTime.from_json(answer) for answer in run_job("cpu_time", job, ranks=options.ranks)]
    print(f"\n{options.model}, {options.ranks} ranks, {options.rounds} rounds\n\n{table(found, lines_of_threads)}")
    if options.perf:
        print(f"\n{table(found, lines_of_samples)}")
    options.json.parent.mkdir(parents=True, exist_ok=True)
    data = {"recipe": recipe(REPOSITORY), "model": options.model, "cpu_times": [asdict(cpu_time) for cpu_time in found]}
    options.json.write_text(json.dumps(data))
    print(f"\nRaw samples and recipe: {options.json}")


if __name__ == "__main__":
    main()
