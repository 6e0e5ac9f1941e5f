"""What an embedding's rows save: bytes on the wire, and steps. `sudo python -m benchmarks.embedding_rows --link 1gbit`.

A language model with a vocabulary of 50,000 words, whose embedding and last layer are not tied. Every variant takes a
step in turn. Bytes are those that a rank's interface has sent meanwhile, with all headers.
"""

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tabulate import tabulate

from benchmarks.launch import REPOSITORY, run_job
from benchmarks.link import LOOPBACK, link_or_loopback, sent_bytes
from benchmarks.tasks import WORDS
from benchmarks.workload import Workload
from compiled_ddp.tools.comparison.measure import warm_up
from compiled_ddp.tools.comparison.ranks import Rank
from compiled_ddp.tools.comparison.record import recipe
from compiled_ddp.tools.comparison.variants import Variant

OUTPUT = Path("benchmarks/out/embedding-rows.json")
WHOLE = "whole embeddings"  # what variants are called that send them as they are
VARIANTS = (
    *("no communication, compiled", "torch DDP", "torch.compile(DDP)"),
    *(f"{wrapper}{rest}" for wrapper in ("EagerDDP", "compile_ddp") for rest in (f", {WHOLE}", ", embeddings by rows")),
)


@dataclass(frozen=True)
class Row:
    """One variant: each number is the median of its steps, the mean over ranks."""

    name: str
    step_ms: float
    sent_mb: float
    gradient_difference: float  # to plain autograd's mean, over the largest element


def measure(
    workload: Workload, variants: Sequence[Variant], *, warmup: int, rounds: int, rank: Rank
) -> list[list[dict[str, Any]]]:
    """Each variant's seconds and sent bytes of each round, by rank."""
    contenders, differences = warm_up(variants, workload, warmup, rank)
    found: list[dict[str, Any]] = [
        {"name": each.variant.name, "difference": difference, "seconds": [], "sent": []}
        for each, difference in zip(contenders, differences, strict=True)
    ]
    for _ in range(rounds):
        for contender, row in zip(contenders, found, strict=True):
            batch = contender.next_batch()
            rank.barrier()
            before = sent_bytes()
            row["seconds"].append(sum(contender.step(batch)))
            rank.barrier()
            row["sent"].append(sent_bytes() - before)
    return rank.gather(found)


def rows_of(by_rank: Sequence[Sequence[dict[str, Any]]]) -> list[Row]:
    rows = []
    for found in zip(*by_rank, strict=True):
        step_ms = 1e3 * statistics.mean(statistics.median(each["seconds"]) for each in found)
        sent_mb = statistics.mean(statistics.median(each["sent"]) for each in found) / 1e6
        rows.append(Row(found[0]["name"], step_ms, sent_mb, max(each["difference"] for each in found)))
    return rows


def table(rows: Sequence[Row]) -> str:
    baseline = next(row for row in rows if row.name == "torch DDP")
    cells = [
        (row.name, row.step_ms, row.step_ms / baseline.step_ms, row.sent_mb, row.sent_mb / baseline.sent_mb)
        for row in rows
    ]
    headers = ("", "step ms", "x torch DDP", "sent MB", "x torch DDP")
    return str(tabulate(cells, headers=headers, floatfmt=("s", ".1f", ".3f", ".1f", ".3f"), tablefmt="simple"))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.embedding_rows",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--link", nargs="+", default=[LOOPBACK], help="loopback, or rates like 1gbit 300mbit (root)")
    parser.add_argument("--rounds", type=int, default=8, help="each one step of every variant")
    parser.add_argument("--warmup", type=int, default=3, help="steps of each variant before the first round")
    parser.add_argument("--json", type=Path, default=OUTPUT)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    what = {"workload": WORDS.name, "variants": list(VARIANTS), "bucket_cap_mb": None, "device": "cpu"}
    results = {}
    for rate in options.link:
        with link_or_loopback(rate) as link:
            job = {**what, "warmup": options.warmup, "rounds": options.rounds}
            results[rate] = run_job("embedding_rows", job, ranks=2, link=link)
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({"recipe": recipe(REPOSITORY), "results": results}))
        print(f"{WORDS.name} on {rate}\n\n{table(rows_of(results[rate]))}\n", flush=True)


if __name__ == "__main__":
    main()
