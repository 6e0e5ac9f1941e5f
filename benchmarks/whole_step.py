"""A whole step in one graph beside the loops that it stands for: `python -m benchmarks.whole_step --model linears`.

Variants take turns: one step that is not timed, then some in a row that are. A step with `pipeline_updates` leaves
collectives under way, which belong to the step behind it and not to the next variant's; behind a turn they are awaited.

A step is everything: forward, backward, the optimizer's update and clearing of gradients. `compile_step` has the
workload's optimizer in its graph; the loops call it as it is (fused or foreach). `--loops` are those that run beside.
"""

import argparse
import functools
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tabulate import tabulate
from torch import Tensor

from benchmarks.embedding_rows import WHOLE as WHOLE_EMBEDDINGS
from benchmarks.launch import REPOSITORY, run_job
from benchmarks.link import LOOPBACK, link_or_loopback, sent_bytes
from benchmarks.tasks import EXTENTS, WORDS, WORKLOADS
from benchmarks.variants import make_variants
from benchmarks.workload import Workload
from compiled_ddp import compile_step
from compiled_ddp.comm_hooks import PowerSGD, TopK, bf16_compress
from compiled_ddp.tools.comparison.measure import Contender, warm_up
from compiled_ddp.tools.comparison.probe import peak_within
from compiled_ddp.tools.comparison.ranks import Rank
from compiled_ddp.tools.comparison.record import recipe
from compiled_ddp.tools.comparison.variants import Variant

IN_A_ROW = 3  # timed steps in a turn
PROVEN = 9  # steps of a graph, some of which are proven, which takes collectives more
OUTPUT = Path("benchmarks/out/whole-step.json")
LOOPS = ("torch DDP", "torch.compile(DDP)", "EagerDDP", "compile_ddp")
WHOLE: dict[str, dict[str, Any]] = {
    "compile_step": {},
    "compile_step, sharded": {"shard_optimizer": True},
    "compile_step, pipelined": {"shard_optimizer": True, "pipeline_updates": True},
    "compile_step, deferred": {"pipeline_updates": True},
    "compile_step, bf16_compress": {"comm_hook": bf16_compress},
    "compile_step, bf16_compress, deferred": {"comm_hook": bf16_compress, "pipeline_updates": True},
    "compile_step, PowerSGD": {"comm_hook": PowerSGD()},
    "compile_step, TopK": {"comm_hook": TopK()},
    f"compile_step, {WHOLE_EMBEDDINGS}": {"embedding_rows": False},
}


class Whole:
    """`compile_step` in training: its own model, optimizer and pass through the data."""

    def __init__(self, workload: Workload, rank: Rank, **options: Any) -> None:
        model = workload.build_model("whole_step", rank.device)
        self._optimizer = workload.optimizer(model.parameters())
        self._step = compile_step(model, self._optimizer, lambda model, *batch: workload.loss(model, batch), **options)
        self._batches = workload.batches(rank.index, rank.world_size)

    def next_batch(self) -> Any:
        return next(self._batches)

    @property
    def bytes_of_state(self) -> int:
        """What this rank keeps of the optimizer's state."""
        tensors = [each for own in self._optimizer.state.values() for each in own.values() if isinstance(each, Tensor)]
        return sum(each.untyped_storage().nbytes() for each in tensors)

    def rest(self) -> None:
        """Await what is under way."""
        self._step.flush()

    def loss(self, batch: Any) -> Tensor:
        """That of a step."""
        loss: Tensor = self._step(*batch)
        return loss

    def step(self, batch: Any) -> list[float]:
        """Its seconds, as one number."""
        begin = time.perf_counter()
        self.loss(batch)
        return [time.perf_counter() - begin]


def measure(
    workload: Workload, variants: Sequence[Variant], *, whole: Sequence[str], warmup: int, rounds: int, rank: Rank
) -> list[dict[str, dict[str, list[float]]]]:
    """By rank, for each variant: seconds of its steps, those of the main thread's CPU, MB that are sent, and MiB.

    These are what a step needs meanwhile, and the optimizer's state, of which only whole steps tell.
    """
    contenders, _ = warm_up(variants, workload, warmup, rank)
    wholes = {name: Whole(workload, rank, **WHOLE[name]) for name in whole}
    for each in wholes.values():
        for _ in range(max(warmup, PROVEN)):
            each.step(each.next_batch())
        each.rest()
    loops = {variant.name: contender for variant, contender in zip(variants, contenders, strict=True)}
    every: dict[str, Contender | Whole] = {**loops, **wholes}
    turns = {name: list[tuple[float, float, float]]() for name in every}
    for _ in range(rounds):
        for name, each in every.items():
            turns[name].append(_turn(each, rank))
    found = {
        kind: {name: [turn[place] for turn in own] for name, own in turns.items()}
        for place, kind in enumerate(("seconds", "of CPU", "MB sent"))
    }
    within = dict[str, list[float]]()
    for name, each in every.items():
        batch = each.next_batch()
        rank.barrier()
        within[name] = [peak_within(functools.partial(each.step, batch)) / 2**20]
        _rest(each)
    state = {name: [own.bytes_of_state / 2**20] for name, own in wholes.items()}
    return rank.gather({**found, "MiB within": within, "MiB of state": state})


def _turn(each: Contender | Whole, rank: Rank) -> tuple[float, float, float]:
    """The seconds of a step, of several in a row, those in which this thread computes, and the MB that are sent.

    On a CPU its kernels are among these seconds; on loopback both ranks send those bytes.
    """
    batches = [each.next_batch() for _ in range(1 + IN_A_ROW)]
    rank.barrier()
    sent_before = sent_bytes()
    each.step(batches[0])
    begin = time.thread_time()
    seconds = sum(sum(each.step(batch)) for batch in batches[1:])
    of_cpu = time.thread_time() - begin
    _rest(each)
    sent = (sent_bytes() - sent_before) / 1e6
    return seconds / IN_A_ROW, of_cpu / IN_A_ROW, sent / len(batches)


def _rest(each: Contender | Whole) -> None:
    if isinstance(each, Whole):
        each.rest()


def table(by_rank: Sequence[dict[str, dict[str, list[float]]]]) -> str:
    def means(kind: str) -> dict[str, float]:
        names = by_rank[0][kind]
        return {name: statistics.mean(statistics.median(each[kind][name]) for each in by_rank) for name in names}

    kinds = ("seconds", "of CPU", "MB sent", "MiB within", "MiB of state")
    seconds, on_cpu, sent, within, state = map(means, kinds)
    rows = [
        (name, 1e3 * each, each / seconds["torch DDP"], 1e3 * on_cpu[name], sent[name], within[name], state.get(name))
        for name, each in seconds.items()
    ]
    headers = ("", "step ms", "x torch DDP", "main thread's CPU ms", "MB sent", "MiB within a step", "MiB of state")
    formats = ("s", ".3f", ".3f", ".3f", ".1f", ".1f", ".1f")
    return str(tabulate(rows, headers=headers, floatfmt=formats, tablefmt="simple"))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.whole_step",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", nargs="+", choices=[*WORKLOADS, WORDS.name], default=["linears"])
    parser.add_argument("--link", default=LOOPBACK, help="loopback, or a rate like 1gbit (root)")
    parser.add_argument("--loops", nargs="+", choices=make_variants(), default=LOOPS, metavar="NAME")
    by_default = [name for name in WHOLE if WHOLE_EMBEDDINGS not in name]
    parser.add_argument("--whole", nargs="+", choices=WHOLE, default=by_default, metavar="NAME", help="whole steps")
    parser.add_argument("--steps", type=int, help="rounds, each one turn of every variant")
    parser.add_argument("--json", type=Path, default=OUTPUT)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    options, results = parse(arguments), dict[str, Any]()
    for workload in options.model:
        extent = EXTENTS[workload]
        what = {"workload": workload, "variants": list(options.loops), "bucket_cap_mb": None, "device": "cpu"}
        with link_or_loopback(options.link) as link:
            job = {**what, "whole": options.whole, "warmup": extent.warmup, "rounds": options.steps or extent.quick}
            results[workload] = run_job("whole_step", job, ranks=2, link=link)
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({"recipe": recipe(REPOSITORY), "results": results}))
        print(f"{workload} on {options.link}\n\n{table(results[workload])}\n", flush=True)


if __name__ == "__main__":
    main()
