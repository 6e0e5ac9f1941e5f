"""The models of `benchmarks.zoo` under every wrapper: what is captured, what graphs reduce, and steps side by side.

    python -m benchmarks.real_models                       # all models, two ranks on loopback
    python -m benchmarks.real_models --model GPT-2 Switch  # these
    python -m benchmarks.real_models --list

Each model runs in processes of its own, so that one that fails costs its own row. What has been measured is in the JSON
file after each model; `--keep` leaves the models alone that are in it already.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.launch import REPOSITORY, run_job
from benchmarks.zoo import SIZES, ZOO
from compiled_ddp.tools.comparison.record import PACKAGES, recipe
from compiled_ddp.tools.comparison.table import tabulate_rows

RANKS = 2
LIBRARIES = (*PACKAGES, "transformers", "diffusers", "peft", "torch-geometric")
OURS, PLAIN_EAGER, PLAIN_COMPILED = "compile_ddp", "plain eager", "plain compiled"

COLUMNS_CAPTURED = {
    "model": ("", "s"),
    "parameters": ("parameters\nmillion", ".2f"),
    "graphs": ("graphs", "d"),
    "breaks": ("breaks", "d"),
    "breaks_plain": ("of them\nthe model's", "d"),
    "share": ("reduced in\ngraphs", ".0%"),
    "again": ("captures in\nsteps 2-10", "d"),
    "again_plain": ("torch.compile's", "d"),
    "why": ("by hooks", "s"),
}
COLUMNS_STEPS = {
    "model": ("", "s"),
    "ddp_ms": ("torch DDP\nms", ".1f"),
    "ours": (OURS, ".2f"),
    "eager": ("EagerDDP", ".2f"),
    "compiled_ddp": ("torch.compile\n(DDP)", ".2f"),
    "plain": (PLAIN_EAGER, ".2f"),
    "plain_compiled": (PLAIN_COMPILED, ".2f"),
    "floor": ("compile_ddp x\nbetter floor", ".2f"),
    "note": ("", "s"),
}


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.real_models",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", nargs="+", choices=ZOO, default=list(ZOO), metavar="NAME")
    parser.add_argument("--list", action="store_true", help="print the names of the models and whether they can run")
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--backend", choices=("inductor", "aot_eager"), default="inductor")
    parser.add_argument("--rounds", type=int, default=20, help="each one timed step of every variant")
    parser.add_argument("--only", nargs="*", default=[], metavar="VARIANT", help="these variants alone")
    parser.add_argument("--warmup", action="store_true", help="call ddp.warmup(*batch) before the first step")
    parser.add_argument("--keep", action="store_true", help="leave out models that the JSON file has already")
    parser.add_argument("--format", default="simple", help='of the tables; "github" for a document')
    parser.add_argument("--json", type=Path, default=Path("benchmarks/out/real-models.json"))
    return parser.parse_args(arguments)


def _measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    job = {"model": name, "device": "cpu", "size": options.size, "backend": options.backend}
    job |= {"only": options.only, "rounds": options.rounds, "warmup": options.warmup}
    answer: dict[str, Any] = run_job("real_model", job, ranks=RANKS)
    return answer


def _ratio(samples: Mapping[str, Sequence[float]], name: str, reference: str) -> float | None:
    """The median over rounds of a step of one over a step of the other in the same round."""
    if not samples.get(name) or not samples.get(reference):
        return None
    return statistics.median(a / b for a, b in zip(samples[name], samples[reference], strict=True))


def row_of_captures(found: Mapping[str, Any]) -> SimpleNamespace:
    ours, plain = found["captured"].get(OURS), found["captured"].get(PLAIN_COMPILED)
    reduced = found["reduced"] or {}
    why = [*reduced.get("by_hooks", [])]
    why += [f"sparse: {', '.join(reduced['sparse'])}"] if reduced.get("sparse") else []
    return SimpleNamespace(
        model=found["model"],
        parameters=found["parameters"] / 1e6,
        graphs=ours and ours["graphs"],
        breaks=ours and ours["breaks"],
        breaks_plain=plain and plain["breaks"],
        share=reduced.get("share_run"),
        again=ours and ours["recompilations"],
        again_plain=plain and plain["recompilations"],
        why="; ".join(why),
    )


def row_of_steps(found: Mapping[str, Any]) -> SimpleNamespace:
    samples, ddp = found["samples_s"], "torch DDP"
    to_floors = [_ratio(samples, OURS, floor) for floor in (PLAIN_EAGER, PLAIN_COMPILED)]
    notes = [f"{name}: {error}" for name, error in found["failed"].items()]
    notes += [found["choice"]] if found["choice"] else []
    return SimpleNamespace(
        model=found["model"],
        ddp_ms=1e3 * statistics.median(samples[ddp]) if samples.get(ddp) else None,
        ours=_ratio(samples, OURS, ddp),
        eager=_ratio(samples, "EagerDDP", ddp),
        compiled_ddp=_ratio(samples, "torch.compile(DDP)", ddp),
        plain=_ratio(samples, PLAIN_EAGER, ddp),
        plain_compiled=_ratio(samples, PLAIN_COMPILED, ddp),
        floor=max((ratio for ratio in to_floors if ratio is not None), default=None),
        note="; ".join(notes)[:160],
    )


def tables(found: Sequence[Mapping[str, Any]], tablefmt: str = "simple") -> str:
    captured = tabulate_rows([row_of_captures(m) for m in found], COLUMNS_CAPTURED, tablefmt=tablefmt, missing="-")
    steps = tabulate_rows([row_of_steps(m) for m in found], COLUMNS_STEPS, tablefmt=tablefmt, missing="-")
    return f"{captured}\n\nWarm steps, as ratios to torch DDP's of the same round:\n\n{steps}"


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    if options.list:
        for name, model in ZOO.items():
            print(name if model.is_installed else f"{name} (needs {model.package})")
        return
    kept = json.loads(options.json.read_text())["models"] if options.keep and options.json.exists() else []
    found = {measured["model"]: measured for measured in kept}
    options.json.parent.mkdir(parents=True, exist_ok=True)
    for name in options.model:
        if name in found or not ZOO[name].is_installed:
            continue
        try:
            found[name] = _measure(name, options)
        except Exception as error:
            print(f"{name} failed: {error}", file=sys.stderr)
            continue
        data = {"recipe": recipe(REPOSITORY, LIBRARIES), "models": list(found.values())}
        options.json.write_text(json.dumps(data, indent=1))
        print(f"\n{tables([found[name]])}", flush=True)
    print(f"\n{tables(list(found.values()), options.format)}\n\nRaw samples and recipe: {options.json}")


if __name__ == "__main__":
    main()
