"""Write benchmarks/results/ into README.md, docs/benchmarks.md and docs/compare.md: `python -m benchmarks.publish`.

A figure is measured once and stands in its JSON; the documents are filled in from there, between their
`<!-- results:begin -->` and `<!-- results:end -->` lines, and the pictures are drawn from there.
"""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from compiled_ddp.comparison import chart
from compiled_ddp.comparison.advice import advise
from compiled_ddp.comparison.command import table_of
from compiled_ddp.comparison.derived import derive
from compiled_ddp.comparison.record import machine, ran_on
from compiled_ddp.comparison.result import Comparison
from compiled_ddp.comparison.table import fields_without_values, overview, render, tabulate_rows

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
IMAGES = ROOT / "docs" / "images"
RUNS = {"1gbit": "a 1 Gbit/s link", "loopback": "loopback"}
_SHORT = {"1gbit": "1 Gbit/s", "loopback": "loopback"}
COMPARED = {"mlp": "An MLP", "gpt2": "A small GPT-2 from transformers"}  # by compiled-ddp compare
BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"

_OF_EACH_RUN = {
    "step_ms": ("step ms", ".0f"),
    "ratio_to_baseline": ("x torch DDP", ".3f"),
    "ratio_to_limit": ("x limit 1", ".3f"),
    "exposed_ms": ("exposed ms", ".0f"),
}
_OF_THE_FIRST_RUN = {
    "peak_memory_mb": ("peak MiB", ".0f"),
    "first_step_cold_s": ("first step cold s", ".1f"),
    "first_step_warm_s": ("warm s", ".1f"),
}


def summary(comparisons: dict[str, Comparison]) -> str:
    """The columns that a reader of the README looks for, one comparison beside the other, as a Markdown table."""
    tables = [derive(comparison) for comparison in comparisons.values()]
    rows = [[*table.variants, replace(table.limits[0], name="limit 1")] for table in tables]
    columns = {"name": ("", "s")}
    for run, name in enumerate(comparisons):
        columns |= {f"{field} {run}": (f"{name}: {title}", spec) for field, (title, spec) in _OF_EACH_RUN.items()}
    columns |= {f"{field} 0": title_and_spec for field, title_and_spec in _OF_THE_FIRST_RUN.items()}
    joined = []
    for same_row in zip(*rows, strict=True):
        (name,) = {row.name for row in same_row}
        fields = {f"{field} {run}": value for run, row in enumerate(same_row) for field, value in vars(row).items()}
        joined.append(SimpleNamespace(name=name, **fields))
    return tabulate_rows(joined, columns, tablefmt="github", missing="")


def provenance(recipe: dict[str, Any]) -> str:
    """One sentence: hardware, versions, date, commit and command."""
    where = ran_on(recipe, f"{machine(recipe, 'cpu')}, one rank pinned to each, gloo")
    return f"{where}, commit {recipe['commit']}; `{recipe['command']}`."


def readme_text(runs: dict[str, dict[str, Any]]) -> str:
    """The GPT on every link, in short."""
    gpt = {_SHORT[name]: _comparisons(runs[name])["gpt"] for name in RUNS}
    caption = (
        f"GPT, {gpt['loopback'].parameters / 1e6:.1f} M parameters, 2 ranks, on {' and on '.join(RUNS.values())}.\n"
        "Limit 1 is forward + max(backward, communication) + optimizer of the compiled floor: the best that overlap\n"
        "inside the backward can reach. Peak memory (without the interpreter and torch) and first steps are those\n"
        "on the link."
    )
    link, loopback = (runs[name]["recipe"] for name in RUNS)
    ran = f"{loopback['date'][:10]}, commit {loopback['commit']}; `{loopback['command']}`"
    recipe = f"{provenance(link)}\nOn loopback: {ran}. [How it is measured](docs/benchmarks.md)."
    return "\n\n".join([caption, summary(gpt), recipe])


def page_text(runs: dict[str, dict[str, Any]]) -> str:
    """Every table of every run, with its recipe and its picture."""
    parts = []
    for name, where in RUNS.items():
        parts.append(f"### On {where}\n\n{provenance(runs[name]['recipe'])}")
        comparisons = list(_comparisons(runs[name]).values())
        if len(comparisons) > 1:
            parts.append(f"All models in short:\n\n{overview(comparisons, 'github')}")
        parts += [
            render(comparison, "github", left_out=fields_without_values(comparison)) for comparison in comparisons
        ]
        parts.append(f"![One bar per variant, on {where}](images/{name}.png)")
    return "\n\n".join(parts)


def read_compared() -> dict[str, dict[str, Any]]:
    """By model, those that have been run: `compiled-ddp compare ... --json benchmarks/results/compare-MODEL.json`."""
    paths = {name: RESULTS / f"compare-{name}.json" for name in COMPARED}
    return {name: json.loads(path.read_text()) for name, path in paths.items() if path.exists()}


def compare_text(runs: dict[str, dict[str, Any]]) -> str:
    """What `compiled-ddp compare` printed for each model, with its recipe and its picture."""
    parts = []
    for name in runs:
        title = COMPARED[name]
        (comparison,) = _comparisons(runs[name]).values()
        recipe = runs[name]["recipe"]
        versions = f"{provenance(recipe)} transformers {recipe['versions']['transformers']}."
        advice = str(advise(comparison)).replace("\n", "\n\n", 1)  # a list begins behind an empty line
        picture = f"![One bar per variant](images/compare-{name}.png)"
        parts += [f"### {title}", versions, table_of(comparison, "github"), advice, picture]
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
    compared = read_compared()
    fill(ROOT / "docs" / "compare.md", compare_text(compared))
    for name, run in (runs | {f"compare-{name}": run for name, run in compared.items()}).items():
        picture = RESULTS / f"{name}.png"
        chart.draw([*_comparisons(run).values()], picture, run["recipe"])
        (IMAGES / f"{name}.png").write_bytes(picture.read_bytes())
    print("Filled in README.md, docs/benchmarks.md and docs/compare.md")


if __name__ == "__main__":
    main()
