"""What size costs: constructor, first and later steps and graph passes by the number of parameters.

    python -m benchmarks.scaling

Parameters have two elements, so that nearly all that is timed is paid for each parameter. Two ranks on loopback; each
variant and size in fresh processes with an empty compile cache. What compiles is measured several times, the variants
in turn, each time from another depth of calls; the table has medians.
"""

import argparse
import itertools
import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from types import SimpleNamespace

from tqdm import tqdm

from benchmarks import growth_chart, passes_by_size
from benchmarks.launch import REPOSITORY, run_job
from benchmarks.passes_by_size import SizedPasses
from benchmarks.steps_by_size import SizedSteps, median_of
from compiled_ddp.tools.comparison.record import recipe
from compiled_ddp.tools.comparison.table import tabulate_rows

RANKS = 2
EAGER = ("torch DDP", "EagerDDP")
COMPILED = ("no communication, compiled", "compile_ddp")
CONSTRUCTED = (*EAGER, "compile_ddp")
DEPTHS = (0, 45, 90)  # frames; what they take of Python's stack is a third of a chunk each: `compiled_ddp/frames.py`
REFERENCES = {"EagerDDP": EAGER[0], "compile_ddp": COMPILED[0]}  # what a variant's times are divided by

COLUMNS = {
    "variant": ("", "s"),
    "backend": ("backend", "s"),
    "parameters": ("para-\nmeters", "d"),
    "constructor_s": ("construc-\ntor s", ".3f"),
    "first_forward_s": ("first\nforward s", ".3f"),
    "first_backward_s": ("first\nbackward s", ".3f"),
    "second_backward_s": ("second\nbackward s", ".3f"),
    "later_forward_ms": ("later\nforward ms", ".2f"),
    "later_backward_ms": ("later\nbackward ms", ".2f"),
    "constructor_ratio": ("construc-\ntor x", ".2f"),
    "first_step_ratio": ("first\nstep x", ".2f"),
    "first_step_cpu_s": ("first\nstep CPU s", ".3f"),
    "first_step_cpu_ratio": ("first\nstep CPU x", ".2f"),
    "later_backward_ratio": ("later\nbackward x", ".2f"),
}


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scaling", description=__doc__)
    sizes = partial(parser.add_argument, type=int, nargs="*", metavar="PARAMETERS")
    sizes("--sizes", default=[100, 300, 1000, 3000, 10000], help=f"of {' and '.join(EAGER)}")
    sizes("--constructor-sizes", default=[100000], help=f"the constructor alone, of {', '.join(CONSTRUCTED)}")
    sizes("--compiled-sizes", default=[100, 300, 1000], help=f"of {' and '.join(COMPILED)}")
    sizes("--pass-sizes", default=[100, 300, 1000, 3000, 10000], help="of the graph passes alone")
    parser.add_argument("--compiled-repetitions", type=int, default=3, help="of what compiles, in turn")
    parser.add_argument("--backends", nargs="+", choices=("aot_eager", "inductor"), default=["aot_eager"])
    parser.add_argument("--steps", type=int, default=12, help="of each variant and size; two are its first ones")
    parser.add_argument("--repetitions", type=int, default=3, help="of the graph passes; the fastest counts")
    parser.add_argument("--json", type=Path, default=Path("benchmarks/out/scaling.json"))
    parser.add_argument("--png", type=Path, default=Path("benchmarks/out/scaling.png"))
    return parser.parse_args(arguments)


@dataclass(frozen=True)
class Case:
    """One variant at one size: what one job measures. Without steps it is the constructor alone."""

    variant: str
    parameters: int
    steps: int
    backend: str = "inductor"
    depth: int = 0


def cases(options: argparse.Namespace) -> list[Case]:
    """What is compared stands next to each other, so that it sees the same machine."""
    found = [Case(variant, size, options.steps) for size in options.sizes for variant in EAGER]
    found += [Case(variant, size, 0) for size in options.constructor_sizes for variant in CONSTRUCTED]
    depths = list(itertools.islice(itertools.cycle(DEPTHS), options.compiled_repetitions))
    for backend, size, depth in itertools.product(options.backends, options.compiled_sizes, depths):
        found += [Case(variant, size, options.steps, backend, depth) for variant in COMPILED]
    return found


def _measure(case: Case) -> SizedSteps:
    with tempfile.TemporaryDirectory(prefix="cddp-cache-") as cache:
        job = {**asdict(case), "device": "cpu"}
        answer = run_job("scaling", job, ranks=RANKS, environment={"TORCHINDUCTOR_CACHE_DIR": cache})
    return SizedSteps(**answer)


def _over(value: float | None, reference: float | None) -> float | None:
    return None if value is None or reference is None else value / reference


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else 1e3 * seconds


def _row(found: SizedSteps, reference: SizedSteps | None) -> SimpleNamespace:
    row = SimpleNamespace(**{field.name: getattr(found, field.name) for field in fields(found)})
    row.first_forward_s = found.forward_s[0] if found.forward_s else None
    row.first_backward_s, row.second_backward_s = found.first_backward_s, found.second_backward_s
    row.later_forward_ms = _milliseconds(found.later_forward_s)
    row.later_backward_ms = _milliseconds(found.later_backward_s)
    for quantity in ("constructor", "first_step", "first_step_cpu", "later_backward"):
        other = None if reference is None else getattr(reference, f"{quantity}_s")
        setattr(row, f"{quantity}_ratio", _over(getattr(found, f"{quantity}_s"), other))
    return row


def table_of_steps(found: Sequence[SizedSteps]) -> str:
    """Ratios are to torch DDP, of compile_ddp to plain torch.compile, at the same size and with the same backend."""
    by_case = {(steps.variant, steps.parameters, steps.backend): steps for steps in found}
    rows = []
    for steps in found:
        reference = REFERENCES.get(steps.variant)
        rows.append(_row(steps, reference and by_case.get((reference, steps.parameters, steps.backend))))
    return tabulate_rows(rows, COLUMNS, tablefmt="simple", missing="-")


def medians(found: Sequence[SizedSteps]) -> list[SizedSteps]:
    """Of what was measured several times."""
    repetitions: dict[tuple[str, int, str | None, bool], list[SizedSteps]] = {}
    for steps in found:
        kind = steps.variant, steps.parameters, steps.backend, bool(steps.forward_s)
        repetitions.setdefault(kind, []).append(steps)
    return [median_of(steps) for steps in repetitions.values()]


def table_of_passes(found: Sequence[SizedPasses]) -> str:
    names = list(found[0].seconds)
    columns = {"parameters": ("parameters", "d"), "nodes": ("nodes", "d")}
    columns |= {name: (name.replace("_", "_\n", 1) + " ms", ".1f") for name in names}
    rows = [
        SimpleNamespace(
            parameters=sized.parameters,
            nodes=sized.nodes,
            **{name: 1e3 * seconds for name, seconds in sized.seconds.items()},
        )
        for sized in found
    ]
    return tabulate_rows(rows, columns, tablefmt="simple", missing="-")


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    steps = [_measure(case) for case in tqdm(cases(options), desc="steps", leave=False)]
    passes = [
        SizedPasses(**passes_by_size.measure(size, options.repetitions))
        for size in tqdm(options.pass_sizes, desc="passes", leave=False)
    ]
    if steps:
        print(f"\n{table_of_steps(medians(steps))}")
    if passes:
        print(f"\n{table_of_passes(passes)}")
    data = {"steps": [asdict(sized) for sized in steps], "passes": [asdict(sized) for sized in passes]}
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps({"recipe": recipe(REPOSITORY), **data}))
    growth_chart.draw(medians(steps), passes, options.png)
    print(f"\nRaw samples and recipe: {options.json}\nChart: {options.png}")


if __name__ == "__main__":
    main()
