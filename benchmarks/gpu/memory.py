"""Peak memory of each variant in a fresh process: `max_memory_allocated` on CUDA, resident memory on the CPU."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from benchmarks.gpu.page import in_a_cell, markdown_table
from benchmarks.gpu.placement import CPU, alone
from benchmarks.gpu.settings import Settings
from benchmarks.gpu.workloads import of_size
from benchmarks.launch import run_job
from compiled_ddp.tools.comparison.probe import MALLOC_ENVIRONMENT

BASELINE = "torch DDP"
VARIANTS = (
    "no communication, eager",
    "no communication, compiled",
    BASELINE,
    "torch DDP, gradients copied",
    "torch.compile(DDP)",
    "EagerDDP",
    "compile_ddp",
)
MEASURED_STEPS = 5


def measure(settings: Settings) -> dict[str, Any]:
    """A row for each model and variant; one that fails has an error in place of its bytes."""
    rows = [
        _probe(workload, name, settings)
        for workload in settings.chosen_models(of_size(settings.size))
        for name in settings.chosen_variants(VARIANTS)
    ]
    failed = [f"{row['variant']} on {row['workload']}: {row['error']}" for row in rows if row["error"]]
    return {"rows": rows, "ranks": alone(settings.device).label, "device": settings.device, "failed": failed}


def _probe(workload: str, name: str, settings: Settings) -> dict[str, Any]:
    placement = alone(settings.device)
    job = {
        **placement.job(),
        "workload": workload,
        "variants": [name],
        "bucket_cap_mb": None,
        "backend": settings.backend,
        "warmup": settings.warmup,
        "steps": MEASURED_STEPS,
    }
    row = {"workload": workload, "variant": name, "peak_memory_bytes": None, "first_step_s": None, "error": None}
    try:
        environment = MALLOC_ENVIRONMENT if settings.device == CPU else None
        return {**row, **run_job("probe", job, ranks=placement.ranks, environment=environment)}
    except Exception as error:  # its traceback stands in the output of this section
        return {**row, "error": f"{type(error).__name__}: {error}"[:2000]}


def render(answer: dict[str, Any]) -> str:
    """A row for each variant, the models side by side, each over torch DDP."""
    rows: Sequence[dict[str, Any]] = answer["rows"]
    workloads = list(dict.fromkeys(row["workload"] for row in rows))
    of = {(row["workload"], row["variant"]): row for row in rows}
    columns, lines = {"name": ("", "s")}, []
    for number, workload in enumerate(workloads):
        columns[f"peak{number}"] = (f"{workload}: peak MiB", ".1f")
        columns[f"over{number}"] = ("x torch DDP", ".3f")
        columns[f"first{number}"] = ("first step s", ".1f")
    for name in dict.fromkeys(row["variant"] for row in rows):
        line = SimpleNamespace(name=name)
        for number, workload in enumerate(workloads):
            row, baseline = of[workload, name], of.get((workload, BASELINE), {}).get("peak_memory_bytes")
            peak = row["peak_memory_bytes"]
            setattr(line, f"peak{number}", None if peak is None else peak / 2**20)
            setattr(line, f"over{number}", None if peak is None or baseline is None else peak / baseline)
            setattr(line, f"first{number}", row["first_step_s"])
        lines.append(line)
    how = "resident memory" if answer["device"] == CPU else "`max_memory_allocated`"
    said = f"{how} over {MEASURED_STEPS} settled steps in a fresh process, {answer['ranks']}; *torch DDP* is with "
    parts = [f"{said}`gradient_as_bucket_view=True`, *gradients copied* without.", markdown_table(lines, columns)]
    parts += [f"- {row['variant']}, {row['workload']}: {in_a_cell(row['error'])}" for row in rows if row["error"]]
    return "\n\n".join(parts)
