"""`mode="reduce-overhead"`: whether CUDA graphs are recorded and replayed, with what gradients, and how fast."""

import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.gpu import overhead
from benchmarks.gpu.page import in_a_cell, markdown_table
from benchmarks.gpu.settings import Settings
from benchmarks.gpu.workloads import of_size

PLAIN, OURS = "no communication, CUDA graphs", "compile_ddp, CUDA graphs"
# Before CUDA 12.6 a graph that is replayed after the profiler has let go of CUPTI ends the process.
PROFILED = {"DISABLE_CUPTI_LAZY_REINIT": "1", "TEARDOWN_CUPTI": "0"}
VARIANTS = ("no communication, compiled", PLAIN, "compile_ddp", OURS)


def measure(settings: Settings) -> dict[str, Any]:
    """`alone.measure`'s answer, with the reasons for which Inductor has left CUDA graphs out."""
    found = [_of_workload(workload, settings) for workload in settings.chosen_models(of_size(settings.size))]
    failed = [wrong for of_one in found for wrong in [*overhead.what_is_wrong(of_one), *_not_replayed(of_one)]]
    return {"workloads": found, "failed": failed}


def _of_workload(workload: str, settings: Settings) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="cddp-logs-") as folder:
        logs = Path(folder, "logs.txt")
        environment = PROFILED | {"TORCH_LOGS": "cudagraphs,perf_hints", "TORCH_LOGS_OUT": str(logs)}
        found = overhead.in_turn(workload, VARIANTS, settings, environment)
        text = logs.read_text() if logs.exists() else ""
    return {**found, "skip_reasons": skip_reasons(text)}


def skip_reasons(logs: str) -> list[str]:
    """Why graphs were left out, in Inductor's words, each once."""
    found = [
        line[line.index("skipping cudagraph") :].strip() for line in logs.splitlines() if "skipping cudagraph" in line
    ]
    return list(dict.fromkeys(found))


def _not_replayed(found: dict[str, Any]) -> list[str]:
    """A step that is to be CUDA graphs and launches none."""
    of_ours = found["variants"].get(OURS)
    if of_ours is None or of_ours["launches"].get("graph launches"):
        return []
    return [f"{OURS} on {found['workload']}: a step launches no CUDA graph; {'; '.join(found['skip_reasons'])}"]


def render(answer: dict[str, Any]) -> str:
    """A table for each model, and why graphs were left out."""
    columns = {
        "name": ("", "s"),
        "step": ("step ms", ".3f"),
        "over_first": ("x compiled", ".3f"),
        "over_second": ("x compile_ddp", ".3f"),
        "host": ("host ms", ".3f"),
        "graph_launches": ("graph launches", "d"),
        "kernel_launches": ("kernel launches", "d"),
        "recorded": ("recorded", "d"),
        "skipped": ("skipped", "d"),
        "difference": ("max grad. difference", ".1g"),
    }
    parts = [
        "*launches* are those of one step after the warm-up, by torch's profiler; *recorded* are the CUDA graphs that "
        "the warm-up has added, *skipped* the graphs that Inductor compiled without one."
    ]
    for found in answer["workloads"]:
        rows = [_row(name, found) for name in VARIANTS if name in found["variants"] or name in found["errors"]]
        parts.append(f"{found['workload']}, {found['parameters'] / 1e6:.2f} M parameters, {found['ranks']}:")
        parts.append(markdown_table(rows, columns))
        parts += [f"- {in_a_cell(reason)}" for reason in found["skip_reasons"]]
    return "\n\n".join(parts)


def _row(name: str, found: dict[str, Any]) -> SimpleNamespace:
    row = overhead.row(name, found, (VARIANTS[0], "compile_ddp"))
    of_one = found["variants"].get(name, {"launches": {}, "recorded": None, "skipped": None})
    launches = of_one["launches"]
    row.graph_launches, row.kernel_launches = (launches.get(f"{kind} launches") for kind in ("graph", "kernel"))
    row.recorded, row.skipped = of_one["recorded"], of_one["skipped"]
    return row
