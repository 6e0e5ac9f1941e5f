"""What a launched rank runs: `python -m benchmarks.worker JOB`, JOB being the file that launch.py wrote."""

import json
import sys
from pathlib import Path
from typing import Any

from benchmarks import (
    cpu_rounds,
    embedding_rows,
    exchanges,
    expected_steps,
    real_model_rank,
    steps_by_size,
    timeline,
    whole_step,
)
from benchmarks.gpu import alone, deadline, watched_steps
from benchmarks.gpu.workloads import ALL
from benchmarks.train import train
from benchmarks.variants import make_variants
from compiled_ddp.tools.comparison.measure import compare
from compiled_ddp.tools.comparison.probe import probe
from compiled_ddp.tools.comparison.ranks import Rank, joined_rank


def run(kind: str, arguments: dict[str, Any], rank: Rank) -> Any:
    """The job's answer as a JSON value, the same on every rank."""
    if kind == "real_model":
        what = {name: arguments[name] for name in ("size", "backend", "only", "rounds", "warmup")}
        return real_model_rank.measure(arguments["model"], **what, rank=rank)
    if kind == "watched_steps":
        return watched_steps.run(arguments["what"], arguments["steps"], rank)
    if kind == "timeline":
        return timeline.measure(arguments["path"], arguments["of"], arguments["batch"], rank)
    if kind == "exchanges":
        return exchanges.measure(arguments["turns"], rank)
    return _scaling(arguments, rank) if kind == "scaling" else _of_workload(kind, arguments, rank)


def _scaling(arguments: dict[str, Any], rank: Rank) -> Any:
    variant = make_variants(backend=arguments["backend"])[arguments["variant"]]
    what = {name: arguments[name] for name in ("parameters", "steps", "backend", "depth")}
    return steps_by_size.measure(variant, **what, rank=rank)


def _of_workload(kind: str, arguments: dict[str, Any], rank: Rank) -> Any:
    workload = ALL[arguments["workload"]]
    if kind == "expect":
        return expected_steps.expect(workload, arguments["sizes_mb"], warmup=arguments["warmup"], rank=rank)
    backend = {"backend": arguments["backend"]} if "backend" in arguments else {}
    known = make_variants(arguments["bucket_cap_mb"], find_unused_parameters=workload.find_unused_parameters, **backend)
    variants = [known[name] for name in arguments["variants"]]
    match kind:
        case "compare":
            link, warmup, rounds = arguments["link"], arguments["warmup"], arguments["rounds"]
            return compare(workload, variants, warmup=warmup, rounds=rounds, link=link, rank=rank).to_json()
        case "alone":
            return alone.measure(workload, variants, arguments["warmup"], arguments["rounds"], rank)
        case "probe":
            return probe(workload, variants[0], warmup=arguments["warmup"], steps=arguments["steps"], rank=rank)
        case "train":
            return train(workload, variants, whole=arguments["whole"], steps=arguments["steps"], rank=rank)
        case "embedding_rows":
            times = {name: arguments[name] for name in ("warmup", "rounds")}
            return embedding_rows.measure(workload, variants, **times, rank=rank)
        case "whole_step":
            given = {name: arguments[name] for name in ("whole", "warmup", "rounds")}
            return whole_step.measure(workload, variants, **given, rank=rank)
        case "cpu_time":
            return cpu_rounds.measure(
                workload,
                variants,
                warmup=arguments["warmup"],
                rounds=arguments["rounds"],
                with_perf=arguments["with_perf"],
                rank=rank,
            )
    raise ValueError(
        f"Unknown kind of job '{kind}'; expected compare, expect, alone, probe, train, cpu_time, "
        "embedding_rows, whole_step, scaling, real_model, watched_steps, timeline or exchanges"
    )


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    deadline.write_stacks_before_it()
    with joined_rank(job["arguments"]["device"], job["arguments"].get("process_group")) as rank:
        answer = run(job["kind"], job["arguments"], rank)
        if rank.index == 0:
            Path(job["answer"]).write_text(json.dumps(answer))


if __name__ == "__main__":
    main()
