"""Where the host's time of a warm step goes: what each wrapper adds to it, and which of its parts.

    python -m benchmarks.host_time --model linears

One process, so that nothing is waited for: forward and backward in CPU time of the main thread, the variants in turn.
Then Python's profiler on the project's own wrappers, which makes each call some tenths of a microsecond dearer.
"""

import argparse
import cProfile
import os
import pstats
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from types import SimpleNamespace

import torch

import compiled_ddp
from benchmarks.tasks import WORKLOADS
from benchmarks.variants import make_variants
from compiled_ddp.tools.comparison.measure import Contender
from compiled_ddp.tools.comparison.ranks import Rank, joined_rank
from compiled_ddp.tools.comparison.table import tabulate_rows

PACKAGE = Path(compiled_ddp.__file__).parent
OURS = ("EagerDDP", "compile_ddp")
ALONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.host_time", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=WORKLOADS, default="linears")
    default = [name for name, variant in make_variants().items() if variant.by_default]
    parser.add_argument("--variants", nargs="+", choices=make_variants(), default=default, metavar="NAME")
    parser.add_argument("--rounds", type=int, default=500, help="each one step of every variant")
    parser.add_argument("--warmup", type=int, default=80, help="steps of each variant before the first round")
    return parser.parse_args(arguments)


def step_times(contender: Contender) -> tuple[float, float]:
    """Microseconds of CPU time of this thread, in one forward and in its backward."""
    batch = contender.next_batch()
    marks = [time.thread_time()]
    loss = contender.module(*batch)
    marks.append(time.thread_time())
    loss.backward()
    marks.append(time.thread_time())
    contender.optimizer.step()
    contender.optimizer.zero_grad()
    begin, middle, end = (1e6 * mark for mark in marks)
    return middle - begin, end - middle


def own_time(contender: Contender, steps: int) -> pstats.Stats:
    """What Python's profiler finds of so many forwards and backwards."""
    profiler = cProfile.Profile(builtins=False)
    for _ in range(steps):
        batch = contender.next_batch()
        profiler.enable()
        contender.module(*batch).backward()
        profiler.disable()
        contender.optimizer.step()
        contender.optimizer.zero_grad()
    return pstats.Stats(profiler)


def by_room(functions: Mapping[tuple[str, int, str], tuple], steps: int) -> Iterator[SimpleNamespace]:
    """Calls and microseconds per step of the package's own functions, without those that they call: for each room.

    `functions` are those of `pstats.Stats`: (file, line, name) -> (_, calls, seconds, ...).
    """
    calls: defaultdict[str, int] = defaultdict(int)
    seconds: defaultdict[str, float] = defaultdict(float)
    for (file, _, _), (_, number, own_s, *_) in functions.items():
        if Path(file).is_relative_to(PACKAGE):
            room = Path(file).relative_to(PACKAGE).parts[0]
            calls[room] += number
            seconds[room] += own_s
    for room in sorted(seconds, key=seconds.__getitem__, reverse=True):
        yield SimpleNamespace(room=room, calls=calls[room] / steps, own=1e6 * seconds[room] / steps)
    yield SimpleNamespace(room="all", calls=sum(calls.values()) / steps, own=1e6 * sum(seconds.values()) / steps)


def _row(name: str, samples: Sequence[tuple[float, float]], floors: Mapping[str, float], floor: str) -> SimpleNamespace:
    forward, backward = (median(of_phase) for of_phase in zip(*samples, strict=True))
    added = forward + backward - floors[floor] if floor in floors else None
    return SimpleNamespace(name=name, forward=forward, backward=backward, added=added)


def measure(options: argparse.Namespace, rank: Rank, show: Callable[[str], object] = print) -> None:
    workload = WORKLOADS[options.model]
    known = make_variants(find_unused_parameters=workload.find_unused_parameters)
    contenders = {name: Contender(known[name], workload, rank) for name in options.variants}
    for _ in range(options.warmup):
        for contender in contenders.values():
            step_times(contender)
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
    for _ in range(options.rounds):
        for name, contender in contenders.items():
            samples[name].append(step_times(contender))
    floors = {
        known[name].floor: sum(map(median, zip(*of_one, strict=True)))
        for name, of_one in samples.items()
        if not known[name].communicates
    }
    rows = [_row(name, of_one, floors, known[name].floor) for name, of_one in samples.items()]
    columns = {
        "name": (f"{options.model}: us of CPU time", "s"),
        "forward": ("forward", ".0f"),
        "backward": ("backward", ".0f"),
        "added": ("above its floor", ".0f"),
    }
    show(tabulate_rows(rows, columns, tablefmt="simple", missing="-"))
    for name in filter(contenders.__contains__, OURS):
        steps = max(1, options.rounds // 5)
        found = by_room(own_time(contenders[name], steps).stats, steps)  # type: ignore[attr-defined]
        columns = {"room": (f"{name}, by room", "s"), "calls": ("Python calls a step", ".1f"), "own": ("own us", ".0f")}
        show("\n" + tabulate_rows([*found], columns, tablefmt="simple", missing="-"))


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    os.environ.update(ALONE)
    torch.set_num_threads(1)
    with joined_rank("cpu") as rank:
        measure(options, rank)


if __name__ == "__main__":
    main()
