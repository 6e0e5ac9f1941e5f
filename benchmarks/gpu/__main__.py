"""The command: `make gpu`, or python -m benchmarks.gpu. It writes benchmarks/out/gpu.json and benchmarks/out/gpu.md."""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from benchmarks.gpu.page import write_page
from benchmarks.gpu.placement import CPU, why_missing
from benchmarks.gpu.sections import SECTIONS, Outcome, run_all
from benchmarks.gpu.settings import Settings
from benchmarks.gpu.workloads import ALL, SIZES
from benchmarks.launch import REPOSITORY
from benchmarks.variants import make_variants
from compiled_ddp.tools.comparison.record import recipe

OUTPUT = Path("benchmarks/out")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    names = [section.name for section in SECTIONS]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--device", choices=("cuda", CPU), default="cuda", help="cpu: the same code in small, no GPU")
    parser.add_argument("--sections", nargs="+", choices=names, default=names, metavar="NAME", help=" ".join(names))
    parser.add_argument("--size", choices=SIZES, help="of the models; default large on CUDA, tiny on the CPU")
    parser.add_argument("--models", nargs="+", choices=ALL, default=[], metavar="NAME", help="these, of any size")
    parser.add_argument(
        "--variants", nargs="+", choices=make_variants(), default=[], metavar="NAME", help="these alone"
    )
    parser.add_argument("--backend", choices=("inductor", "aot_eager"), default="inductor")
    parser.add_argument("--rounds", type=int, help="each one timed step of every variant; default 50, on the CPU 5")
    parser.add_argument("--warmup", type=int, help="steps of each variant before; default 10, on the CPU 3")
    parser.add_argument("--timeout", type=float, metavar="SECONDS", help="of each section, in place of its own")
    parser.add_argument("--tests", nargs="+", default=["tests"], metavar="PATH", help="where tests are looked for")
    parser.add_argument("--json", type=Path, default=OUTPUT / "gpu.json")
    parser.add_argument("--markdown", type=Path, default=OUTPUT / "gpu.md")
    options = parser.parse_args(arguments)
    small = options.device == CPU
    options.size = options.size or ("tiny" if small else "large")
    options.rounds = options.rounds or (5 if small else 50)
    options.warmup = options.warmup or (3 if small else 10)
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status: 0 where every section that can run has passed."""
    options = parse(arguments)
    if reason := why_missing(options.device):
        print(f"error: {reason}", file=sys.stderr)
        return 2
    settings = Settings.from_json({field.name: getattr(options, field.name) for field in fields(Settings)})
    chosen = [section for section in SECTIONS if section.name in options.sections]
    outcomes: list[Outcome] = []
    for outcome in run_all(chosen, settings, options.timeout):
        print(f"{outcome.title}: {outcome.status} after {outcome.seconds:.0f} s. {outcome.reason or ''}", flush=True)
        outcomes.append(outcome)
        _write(options, settings, outcomes)  # after each, so that what is there outlives whatever comes
    print(f"To attach to a report: {options.markdown} and {options.json}")
    return 0 if all(outcome.is_good for outcome in outcomes) else 1


def _write(options: argparse.Namespace, settings: Settings, outcomes: Sequence[Outcome]) -> None:
    made = recipe(REPOSITORY)
    found = {"recipe": made, "settings": settings.to_json(), "sections": [outcome.to_json() for outcome in outcomes]}
    for path, text in (
        (options.json, json.dumps(found, indent=1)),
        (options.markdown, write_page(made, settings, outcomes, SECTIONS)),
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


if __name__ == "__main__":
    sys.exit(main())
