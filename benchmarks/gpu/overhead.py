"""What a step costs with one rank: every variant beside plain eager code and plain torch.compile."""

import statistics
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from benchmarks.gpu.page import in_a_cell, markdown_table
from benchmarks.gpu.placement import alone
from benchmarks.gpu.settings import Settings
from benchmarks.gpu.workloads import of_size
from benchmarks.launch import run_job
from compiled_ddp.tools.comparison.derived import ratios

EAGER, COMPILED = "no communication, eager", "no communication, compiled"
VARIANTS = (EAGER, COMPILED, "torch DDP", "torch.compile(DDP)", "EagerDDP", "compile_ddp")
LARGEST_DIFFERENCE = 1e-3  # of a gradient, over the largest one: float32 in another order is far below it


def measure(settings: Settings) -> dict[str, Any]:
    """`alone.measure`'s answer for an MLP and a GPT."""
    found = [in_turn(workload, VARIANTS, settings) for workload in settings.chosen_models(of_size(settings.size))]
    return {"workloads": found, "failed": [wrong for of_one in found for wrong in what_is_wrong(of_one)]}


def in_turn(
    workload: str, variants: Sequence[str], settings: Settings, environment: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Steps of these variants in turn, in a rank of their own."""
    placement = alone(settings.device)
    job = {
        **placement.job(),
        "workload": workload,
        "variants": settings.chosen_variants(variants),
        "bucket_cap_mb": None,
        "backend": settings.backend,
        "warmup": settings.warmup,
        "rounds": settings.rounds,
    }
    answer: dict[str, Any] = run_job("alone", job, ranks=placement.ranks, environment=environment)
    return {**answer, "ranks": placement.label}


def what_is_wrong(found: Mapping[str, Any]) -> list[str]:
    """Variants that failed, and gradients that are not those of autograd."""
    wrong = [f"{name} on {found['workload']}: {error}" for name, error in found["errors"].items()]
    for name, of_one in found["variants"].items():
        difference = of_one["gradient_difference"]
        if not difference <= LARGEST_DIFFERENCE:  # true of nan too
            wrong.append(f"{name} on {found['workload']}: gradients differ by {difference:.1g} from autograd's")
    return wrong


def row(name: str, found: Mapping[str, Any], floors: Sequence[str]) -> SimpleNamespace:
    """A variant's medians: the step, over each of the floors, and the host's part of it."""
    of_one = found["variants"].get(name)
    if of_one is None:
        return SimpleNamespace(name=f"{name}: {in_a_cell(found['errors'][name])}", **dict.fromkeys(NUMBERS, None))
    host, steps = ([1e3 * part for part in parts] for parts in zip(*of_one["samples"], strict=True))
    over = []
    for floor in floors:
        of_floor = found["variants"].get(floor)
        samples = [] if of_floor is None else [1e3 * step for _, step in of_floor["samples"]]
        over.append(statistics.median(ratios(steps, samples)) if samples else None)
    return SimpleNamespace(
        name=name,
        step=statistics.median(steps),
        over_first=over[0],
        over_second=over[1],
        host=statistics.median(host),
        launches=of_one["launches"].get("kernel launches", 0) + of_one["launches"].get("graph launches", 0),
        difference=of_one["gradient_difference"],
    )


NUMBERS = ("step", "over_first", "over_second", "host", "launches", "difference")


def render(answer: dict[str, Any]) -> str:
    """A table for each model."""
    columns = {
        "name": ("", "s"),
        "step": ("step ms", ".3f"),
        "over_first": ("x plain eager", ".3f"),
        "over_second": ("x plain torch.compile", ".3f"),
        "host": ("host ms", ".3f"),
        "launches": ("launches", "d"),
        "difference": ("max grad. difference", ".1g"),
    }
    parts = [
        "Medians over rounds of one timed step of each, ratios round by round. *host* is when the host has launched "
        "the step, without waiting for the device; *launches* are kernels and CUDA graphs in a step, by the profiler."
    ]
    for found in answer["workloads"]:
        names = [name for name in VARIANTS if name in found["variants"] or name in found["errors"]]
        rounds = max((len(of_one["samples"]) for of_one in found["variants"].values()), default=0)
        parts.append(
            f"{found['workload']}, {found['parameters'] / 1e6:.2f} M parameters, {found['ranks']}, {rounds} rounds:"
        )
        parts.append(markdown_table([row(name, found, (EAGER, COMPILED)) for name in names], columns))
    return "\n\n".join(parts)
