"""The table of benchmarks/compare.py with all ranks of this machine: every variant, step by step in turn."""

from typing import Any

from benchmarks.gpu.overhead import LARGEST_DIFFERENCE
from benchmarks.gpu.placement import together
from benchmarks.gpu.settings import Settings
from benchmarks.gpu.workloads import of_size, of_table
from benchmarks.launch import run_job
from benchmarks.variants import make_variants
from compiled_ddp.tools.comparison import table
from compiled_ddp.tools.comparison.result import Comparison


def measure(settings: Settings) -> dict[str, Any]:
    """A comparison for each model; the large GPT too where each rank has a GPU of its own."""
    placement = together(settings.device)
    workloads = of_table(settings.size) + (of_size(settings.size) if placement.process_group != "gloo" else [])
    variants = settings.chosen_variants([name for name, variant in make_variants().items() if variant.by_default])
    job = {
        **placement.job(),
        "variants": variants,
        "bucket_cap_mb": None,
        "backend": settings.backend,
        "warmup": settings.warmup,
        "rounds": settings.rounds,
        "link": placement.label,
    }
    found = [
        run_job("compare", {**job, "workload": workload}, ranks=placement.ranks)
        for workload in settings.chosen_models(workloads)
    ]
    return {"comparisons": found, "failed": [wrong for one in found for wrong in _wrong(Comparison.from_json(one))]}


def _wrong(comparison: Comparison) -> list[str]:
    return [
        f"{result.name} on {comparison.workload}: gradients differ by {result.gradient_difference:.1g}"
        for result in comparison.variants
        if result.gradient_difference is not None and not result.gradient_difference <= LARGEST_DIFFERENCE
    ]


def render(answer: dict[str, Any]) -> str:
    """The tables, without the columns that are not measured here."""
    comparisons = [Comparison.from_json(one) for one in answer["comparisons"]]
    return "\n\n".join(
        table.render(comparison, "github", left_out=table.fields_without_values(comparison))
        for comparison in comparisons
    )
