"""Write the results of benchmarks/results/ into README.md and docs/benchmarks.md: `python -m benchmarks.publish`.

A figure is measured once and stands in its JSON; the documents are filled in from there, between their
`<!-- results:begin -->` and `<!-- results:end -->` lines.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.result import Comparison
from benchmarks.table import derive, render, tabulate_rows

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
RUNS = {"1gbit": "a 1 Gbit/s link", "loopback": "loopback"}
BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"

_SUMMARY = {
    "name": ("", "s"),
    "step_ms": ("step ms", ".0f"),
    "ratio_to_baseline": ("x torch DDP", ".3f"),
    "ratio_to_limit": ("x limit 1", ".3f"),
    "exposed_ms": ("exposed ms", ".0f"),
    "peak_memory_mb": ("peak MiB", ".0f"),
    "first_step_cold_s": ("first step cold s", ".1f"),
    "first_step_warm_s": ("warm s", ".1f"),
}


def summary(comparison: Comparison) -> str:
    """The columns that a reader of the README looks for, as a Markdown table."""
    table = derive(comparison)
    rows = [*table.variants, replace(table.limits[0], name="limit 1")]
    return tabulate_rows(rows, _SUMMARY, tablefmt="github", missing="")


def provenance(recipe: dict[str, Any]) -> str:
    """One sentence: hardware, versions, date, commit and command."""
    hardware, versions = recipe["hardware"], recipe["versions"]
    return (
        f"{hardware['cpu']}, {hardware['cores']} cores, one rank pinned to each, gloo; torch {versions['torch']}, "
        f"Python {versions['python']}; {recipe['date'][:10]}, commit {recipe['commit']}; `{recipe['command']}`."
    )


def readme_text(runs: dict[str, dict[str, Any]]) -> str:
    """The GPT on every link, in short."""
    parts = []
    for name, where in RUNS.items():
        comparison = _comparisons(runs[name])["gpt"]
        parts.append(f"GPT, {comparison.parameters / 1e6:.1f} M parameters, 2 ranks, {where}:\n\n{summary(comparison)}")
    note = (
        "Limit 1 is forward + max(backward, communication) + optimizer of the compiled floor: the best that overlap\n"
        "inside the backward can reach. Peak memory is without the interpreter and torch."
    )
    return "\n\n".join([*parts, note, provenance(runs["1gbit"]["recipe"])])


def page_text(runs: dict[str, dict[str, Any]]) -> str:
    """Every table of every run, with its recipe and its picture."""
    parts = []
    for name, where in RUNS.items():
        parts.append(f"### On {where}\n\n{provenance(runs[name]['recipe'])}")
        parts += [render(comparison, "github") for comparison in _comparisons(runs[name]).values()]
        parts.append(f"![One bar per variant, on {where}](images/{name}.png)")
    return "\n\n".join(parts)


def fill(document: Path, text: str) -> None:
    """Replace what stands between the document's markers."""
    before, rest = document.read_text().split(BEGIN)
    _, after = rest.split(END)
    document.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}")


def _comparisons(run: dict[str, Any]) -> dict[str, Comparison]:
    comparisons = [Comparison.from_json(data) for data in run["comparisons"]]
    return {comparison.workload: comparison for comparison in comparisons}


def main() -> None:
    runs = {name: json.loads((RESULTS / f"{name}.json").read_text()) for name in RUNS}
    fill(ROOT / "README.md", readme_text(runs))
    fill(ROOT / "docs" / "benchmarks.md", page_text(runs))
    for name in RUNS:
        (ROOT / "docs" / "images" / f"{name}.png").write_bytes((RESULTS / f"{name}.png").read_bytes())
    print("Filled in README.md and docs/benchmarks.md")


if __name__ == "__main__":
    main()
