"""Measure anew what the documents' tables come from, and publish it: `make results`, or `make results RUNS="loopback"`.

Each run writes NAME.json and NAME.png to benchmarks/out/results/, which git ignores, so that all recipes state a clean
commit. A run that is there, of this commit, is not repeated: the same command goes on where another one was broken off.
At the end all go to benchmarks/results/ and from there into the documents (`benchmarks.publish`). With `--into` neither
these nor the documents are touched: FOLDER gets both, as copies.
"""

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.link import LOOPBACK, unavailable_reason
from benchmarks.publish import PICTURES, RESULTS, ROOT, SECTIONS, publish
from compiled_ddp.tools.comparison.record import commit_of

MEASURED = ROOT / "benchmarks" / "out" / "results"
_PLAIN = ("no communication, eager", "no communication, compiled", "torch DDP", "torch.compile(DDP)")
_FLOAT16 = (*_PLAIN, "EagerDDP", "compile_ddp", "torch DDP, float16", "compile_ddp, float16")
_TORCH_ROWS = (
    *_PLAIN,
    "compile_ddp",
    "torch replicate",
    "torch.compile(replicate)",
    "functional all-reduces",
    "functional all-reduces, bucketed",
    "functional all-reduces, buckets of 25 MiB",
    "functional all-reduces, buckets per block",
    "functional all-reduces, overlap scheduling",
)
_SHORT_COMPARE = ("--model", "gpt", "--no-probe", "--warmup", "1", "--steps", "2")


@dataclass(frozen=True)
class Run:
    """One command, without where it writes. `short` are further arguments that only show that it works."""

    arguments: tuple[str, ...]  # of python
    minutes: int  # on two cores with nothing else running
    short: tuple[str, ...]
    environment: str = "own"  # whose Python: "models" has transformers, "newest" the newest torch
    link: str = LOOPBACK


def _compare(*arguments: str, minutes: int, link: str = LOOPBACK, environment: str = "own") -> Run:
    command = ("-m", "benchmarks.compare", "--link", link, *arguments)
    return Run(command, minutes, _SHORT_COMPARE, environment, link)


def _users_model(function: str, *, environment: str) -> Run:
    command = ("-m", "compiled_ddp", "compare", f"docs/examples/compare_models.py:{function}")
    return Run(command, 5, ("--no-probe", "--warmup", "1", "--rounds", "2"), environment)


RUNS = {
    "readme-1gbit": _compare("--full", "--model", "gpt", link="1gbit", minutes=12),
    "readme-loopback": _compare("--full", "--model", "gpt", minutes=12),
    "1gbit": _compare("--full", link="1gbit", minutes=55),
    "loopback": _compare("--full", minutes=50),
    "1gbit-float16": _compare("--model", "gpt", "--steps", "25", "--variants", *_FLOAT16, link="1gbit", minutes=8),
    "train": Run(("-m", "benchmarks.train", "--steps", "120"), 4, ("--steps", "3")),
    "compare-mlp": _users_model("mlp", environment="own"),
    "compare-gpt2": _users_model("gpt2", environment="models"),
    "torch-rows-1gbit": _compare(
        *("--model", "gpt", "--no-probe", "--steps", "15", "--variants", *_TORCH_ROWS),
        link="1gbit",
        minutes=8,
        environment="newest",
    ),
    "torch-rows-loopback": _compare(
        *("--model", "gpt", "linears", "--no-probe", "--variants", *_TORCH_ROWS), minutes=10, environment="newest"
    ),
}


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.remeasure", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("runs", nargs="*", metavar="RUN", help="default all: " + " ".join(RUNS))
    parser.add_argument("--list", action="store_true", help="say what would run, and for how long")
    parser.add_argument("--into", type=Path, metavar="FOLDER", help="results, and copies of the documents, go there")
    parser.add_argument(
        "--short", action="store_true", help="a few steps each, which only show that it works; needs --into"
    )
    parser.add_argument("--models-python", default=sys.executable, help="of an environment with transformers")
    parser.add_argument("--newest-python", default=sys.executable, help="of an environment with the newest torch")
    options = parser.parse_args(arguments)
    options.runs = options.runs or list(RUNS)
    if unknown := [name for name in options.runs if name not in RUNS]:
        parser.error(f"unknown runs {unknown}; known are {list(RUNS)}")
    if options.short and options.into is None:
        parser.error("--short measures nothing that could be published: name a folder, --into FOLDER")
    return options


def command(name: str, options: argparse.Namespace) -> list[str]:
    """What is run for it, with its Python."""
    run, folder = RUNS[name], _folder(options)
    python = {"own": sys.executable, "models": options.models_python, "newest": options.newest_python}[run.environment]
    files = ("--json", str(folder / f"{name}.json"), "--png", str(folder / f"{name}.png"))
    return [python, *run.arguments, *(run.short if options.short else ()), *files]


def stated(name: str, options: argparse.Namespace) -> str:
    """What its recipe calls the command."""
    _, *arguments = command(name, options)
    return shlex.join(["compiled-ddp", *arguments[2:]] if arguments[1] == "compiled_ddp" else ["python", *arguments])


def is_dirty(commit: str | None) -> bool:
    """Whether it does not tell what was measured."""
    return commit is None or commit.endswith("-dirty")


def is_measured(name: str, options: argparse.Namespace, commit: str | None) -> bool:
    """Whether its result is there, of this commit without changes, by the same command."""
    path = _folder(options) / f"{name}.json"
    if not path.exists() or is_dirty(commit):
        return False
    recipe = json.loads(path.read_text())["recipe"]
    return bool(recipe["commit"] == commit and recipe["command"] == stated(name, options))


def hindrance(names: Sequence[str], options: argparse.Namespace, commit: str | None) -> str:
    """Why these runs cannot be measured for publication, in one line; empty where they can."""
    if options.into is None and is_dirty(commit):
        return f"tables state the commit that was measured, and this is {commit}: commit the changes, or use --into"
    reason = unavailable_reason()
    if reason is not None and any(RUNS[name].link != LOOPBACK for name in names):
        others = " ".join(name for name in names if RUNS[name].link == LOOPBACK)
        return f"no link can be made: {reason}" + (f"; or measure RUNS='{others}'" if others else "")
    return ""


def plan(names: Sequence[str], done: Sequence[str], options: argparse.Namespace) -> str:
    """What is to be run, and for how long."""
    minutes = sum(RUNS[name].minutes for name in names)
    lines = [
        f"{len(names)} runs, a few steps each" if options.short else f"{len(names)} runs, about {minutes} minutes:"
    ]
    lines += [f"  {name}, {RUNS[name].minutes} min: {shlex.join(command(name, options))}" for name in names]
    lines += [f"  {name}: measured at this commit, {_folder(options) / name}.json" for name in done]
    return "\n".join([*lines, "Leave the machine alone meanwhile: what else runs is in the figures."])


def check(name: str, result: dict[str, Any]) -> None:
    """Raise RuntimeError where a run has measured something else, as where it fell back on loopback."""
    for comparison in result.get("comparisons", ()):
        if "benchmarks.compare" in RUNS[name].arguments and comparison["link"] != RUNS[name].link:
            raise RuntimeError(f"{name} was to be measured on {RUNS[name].link}, and was on {comparison['link']}")


def measure(name: str, options: argparse.Namespace) -> None:
    """Run it. Its JSON appears whole or not at all."""
    wanted, began = _folder(options) / f"{name}.json", time.monotonic()
    wanted.unlink(missing_ok=True)
    print(f"\n==> {name}", flush=True)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run(command(name, options), cwd=ROOT, env=environment, check=True)
    try:
        check(name, json.loads(wanted.read_text()))
    except RuntimeError:
        wanted.unlink()
        raise
    print(f"==> {name}: {(time.monotonic() - began) / 60:.0f} minutes", flush=True)


def _folder(options: argparse.Namespace) -> Path:
    return MEASURED if options.into is None else options.into.resolve()


def _publish(options: argparse.Namespace) -> None:
    results, root = RESULTS, ROOT
    if options.into is None:
        for name in options.runs:
            for suffix in (".json", ".png") if name in PICTURES else (".json",):
                shutil.copy(_folder(options) / f"{name}{suffix}", RESULTS)
    else:
        results, root = _folder(options), _folder(options) / "documents"
        (root / "docs" / "images").mkdir(parents=True, exist_ok=True)
        for document in {section.document for section in SECTIONS}:
            shutil.copy(ROOT / document, root / document)
    print(
        f"\nFilled in {', '.join(publish(results, root)) or 'nothing'}, in {root}. Look at `git diff`, and commit it."
    )


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    commit = commit_of(ROOT)
    done = [name for name in options.runs if is_measured(name, options, commit)]
    names = [name for name in options.runs if name not in done]
    print(plan(names, done, options), flush=True)
    if options.list:
        return
    if reason := hindrance(names, options, commit):
        sys.exit(f"error: {reason}")
    _folder(options).mkdir(parents=True, exist_ok=True)
    for name in names:
        measure(name, options)
    _publish(options)


if __name__ == "__main__":
    main()
