"""The GPT under JAX, beside this project's wrappers: `python -m benchmarks.beside_jax --jax PYTHON`.

PYTHON has JAX; it is best an environment of its own, outside of the tree:

    python -m venv ~/jax && ~/jax/bin/pip install -r benchmarks/requirements-jax.txt

JAX and torch train in two ranks each, of two processes: the same initial weights, batches and AdamW, all of them handed
over as files. A round is a few steps of every contender, in an order that rotates; the others' processes sleep
meanwhile. Each rank is pinned to a core and computes with one thread. The first step of a turn warms the caches: it is
not counted.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import IO, Any

import numpy as np
import torch

from benchmarks.launch import REPOSITORY
from benchmarks.tasks import GPT
from compiled_ddp.tools.comparison.record import recipe
from compiled_ddp.tools.comparison.table import tabulate_rows

RANKS = 2
OURS = ("torch DDP", "compile_ddp", "functional, compiled")
JAX = "JAX, jit of shard_map"
OPTIMIZER = {"lr": 3e-4, "decay": 0.1}


@dataclass
class Turns:
    """What a contender has done: for each turn the seconds of each step of the slower rank, and all losses."""

    seconds: list[list[float]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)  # means over ranks

    def add(self, of_ranks: Sequence[Sequence[tuple[float, float]]]) -> None:
        steps = list(zip(*of_ranks, strict=True))
        self.seconds.append([max(seconds for seconds, _ in step) for step in steps])
        self.losses += [fmean(loss for _, loss in step) for step in steps]

    @property
    def step_s(self) -> list[float]:
        """Of each turn, the median of all steps but the first."""
        return [median(turn[1:] or turn) for turn in self.seconds]


class Group:
    """Rank processes that take steps when they are asked to."""

    def __init__(self, command: Sequence[str], folder: Path, port: int) -> None:
        settings = {
            "WORLD_SIZE": str(RANKS),
            "LOCAL_WORLD_SIZE": str(RANKS),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(REPOSITORY),
        }
        self._processes = [
            subprocess.Popen(
                [*command, str(folder), json.dumps(OPTIMIZER)],
                env={**os.environ, **settings, "RANK": str(n), "LOCAL_RANK": str(n)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for n in range(RANKS)
        ]

    def take(self, name: str, steps: int) -> list[Any]:
        """Each rank's seconds and losses of so many steps. Raises RuntimeError where a rank has ended."""
        for process in self._processes:
            _given(process.stdin).write(f"{name} {steps}\n")
            _given(process.stdin).flush()
        return [self._answer(process) for process in self._processes]

    def _answer(self, process: subprocess.Popen[str]) -> Any:
        for line in _given(process.stdout):
            if line.startswith("@"):
                return json.loads(line[1:])
        raise RuntimeError(f"a rank has ended with status {process.wait()}; its error stands above")

    def end(self) -> None:
        """A rank ends with its input; one that still waits for another is killed, as JAX's do not end when asked to."""
        for process in self._processes:
            _given(process.stdin).close()
        for process in self._processes:
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _given(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None, "all pipes are asked for"
    return pipe


def _hand_over(folder: Path, steps: int) -> None:
    """Initial weights and every rank's batches, as numpy's files."""
    model = GPT.build_model("handed_over", torch.device("cpu"))
    np.savez(folder / "weights.npz", **{name: p.detach().numpy() for name, p in model.named_parameters()})
    for rank in range(RANKS):
        batches = GPT.batches(rank, RANKS)
        x, y = zip(*(next(batches) for _ in range(steps)), strict=True)
        np.savez(folder / f"batches{rank}.npz", x=torch.stack(x).numpy(), y=torch.stack(y).numpy())


def measure(options: argparse.Namespace) -> dict[str, Turns]:
    """Every contender's turns; the first one warms up."""
    found = {name: Turns() for name in (JAX, *OURS)}
    with tempfile.TemporaryDirectory(prefix="cddp-jax-") as directory:
        folder = Path(directory)
        _hand_over(folder, options.warmup + options.rounds * options.steps)
        groups: list[Group] = []
        try:
            groups.append(Group([options.jax, str(Path(__file__).with_name("jax_gpt.py"))], folder, options.port))
            groups.append(Group([sys.executable, "-m", "benchmarks.step_rank"], folder, options.port + 1))
            of_name = {name: groups[name != JAX] for name in found}
            names = list(found)
            for name in names:
                found[name].add(of_name[name].take(name, options.warmup))
            for number in range(options.rounds):
                for name in names[number % len(names) :] + names[: number % len(names)]:
                    found[name].add(of_name[name].take(name, options.steps))
        finally:
            for group in groups:
                group.end()
    return found


@dataclass(frozen=True)
class Row:
    """A contender's line; times in milliseconds."""

    name: str
    step_ms: float
    fastest_ms: float
    ratio: float
    first_loss: float
    last_loss: float
    distance: float


COLUMNS = {
    "name": ("", "s"),
    "step_ms": ("step ms", ".1f"),
    "fastest_ms": ("fastest", ".1f"),
    "ratio": ("x compile_ddp", ".3f"),
    "first_loss": ("first loss", ".4f"),
    "last_loss": ("last loss", ".4f"),
    "distance": ("losses apart by", ".0e"),
}


def _rows(found: dict[str, Turns]) -> list[Row]:
    reference = found["compile_ddp"]
    rows = []
    for name, turns in found.items():
        steps, compared = turns.step_s[1:], reference.step_s[1:]
        apart = max(abs(one - other) for one, other in zip(turns.losses, reference.losses, strict=True))
        ratio = median(one / other for one, other in zip(steps, compared, strict=True))
        rows.append(Row(name, 1e3 * median(steps), 1e3 * min(steps), ratio, turns.losses[0], turns.losses[-1], apart))
    return rows


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.beside_jax",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--jax", required=True, metavar="PYTHON", help="the interpreter that has JAX")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=3, help="of each contender in a round")
    parser.add_argument("--warmup", type=int, default=4, help="steps of each contender before the first round")
    parser.add_argument("--port", type=int, default=29611, help="this one and the next are used")
    parser.add_argument("--json", type=Path, default=Path("benchmarks/out/beside_jax.json"))
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    found = measure(options)
    version = subprocess.run(
        [options.jax, "-c", "import jax; print(jax.__version__)"], capture_output=True, text=True, check=True
    )
    print(tabulate_rows(_rows(found), COLUMNS, tablefmt="github", missing="-"))
    print(f"JAX {version.stdout.strip()}; losses are means over ranks, compared with compile_ddp's in each step")
    options.json.parent.mkdir(parents=True, exist_ok=True)
    samples = {name: {"seconds": turns.seconds, "losses": turns.losses} for name, turns in found.items()}
    options.json.write_text(
        json.dumps({"recipe": recipe(REPOSITORY), "jax": version.stdout.strip(), "samples": samples})
    )


if __name__ == "__main__":
    main()
