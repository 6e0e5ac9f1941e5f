"""Write benchmarks/results/ into the documents: `python -m benchmarks.publish`; `make results` measures them anew.

A figure is measured once and stands in its JSON. Each section of a document is filled in from there, between its lines
`<!-- NAME:begin -->` and `<!-- NAME:end -->`, with the date, the commit and the command of the run.
"""

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from compiled_ddp.tools.comparison import chart
from compiled_ddp.tools.comparison.advice import advise
from compiled_ddp.tools.comparison.command import table_of
from compiled_ddp.tools.comparison.derived import derive
from compiled_ddp.tools.comparison.record import machine, ran_on
from compiled_ddp.tools.comparison.result import Comparison
from compiled_ddp.tools.comparison.table import fields_without_values, overview, render, tabulate_rows

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
IMAGES = ROOT / "docs" / "images"
RUNS = {"1gbit": "a 1 Gbit/s link", "loopback": "loopback"}
README_RUNS = {f"readme-{name}": where for name, where in RUNS.items()}  # of the GPT alone
COMPARED = {"compare-mlp": "An MLP", "compare-gpt2": "A small GPT-2 from transformers"}  # by compiled-ddp compare
_ON_LOOPBACK = ("torch.compile(DDP)", "EagerDDP", "compile_ddp")
TORCH_ROWS = {"torch-rows-1gbit": "1 Gbit/s", "torch-rows-loopback": "loopback"}
FLOAT16, TRAINING = "1gbit-float16", "train"
COMPARISONS = (*RUNS, *COMPARED)  # their pictures are drawn from the JSON
PICTURES = (*COMPARISONS, TRAINING)  # runs whose picture a document shows

Runs = Mapping[str, dict[str, Any]]  # by name, what is in NAME.json

_IN_README = {
    "name": ("", "s"),
    "step_ms": ("step ms", ".0f"),
    "ratio_to_baseline": ("x torch DDP", ".3f"),
    "ratio_to_limit": ("x limit", ".3f"),
    "peak_memory_mb": ("peak MiB", ".0f"),
}
_IN_SHORT = {
    "name": ("", "s"),
    "step_ms": ("step ms", ".1f"),
    "ratio_to_baseline": ("x torch DDP", ".3f"),
    "ratio_spread": ("p10-p90 of that", "s"),
    "exposed_ms": ("exposed ms", ".1f"),
    "collectives": ("collectives", "s"),
    "gradient_difference": ("max grad. difference", ".1g"),
}


@dataclass(frozen=True)
class Section:
    """What stands between the markers `name` of a document, and the runs that its text is made of."""

    document: str
    name: str
    text: Callable[[Runs], str]
    of: tuple[str, ...]


def provenance(recipe: dict[str, Any]) -> str:
    """One sentence: hardware, versions, date, commit and command."""
    where = ran_on(recipe, f"{machine(recipe, 'cpu')}, one rank pinned to each, gloo")
    return f"{where}, commit {recipe['commit']}; `{recipe['command']}`."


def readme_text(runs: Runs) -> str:
    """The GPT on the link in a table that fits a screen, and in a sentence how it compares on loopback."""
    link, loopback = (_comparisons(runs[name])["gpt"] for name in README_RUNS)
    table, other = derive(link), derive(loopback)
    rows = [*table.variants, replace(table.limits[0], name="limit")]
    caption = (
        f"GPT, {link.parameters / 1e6:.1f} M parameters, 2 ranks, on {README_RUNS['readme-1gbit']}.\n"
        "The limit is the best step that overlap inside the backward allows: compiled forward + max(backward,\n"
        "communication) + optimizer."
    )
    shown_rows = [row for row in other.variants if row.name in _ON_LOOPBACK]
    ratios = ", ".join(f"{row.name} {row.ratio_to_baseline:.3f}" for row in shown_rows)
    limit = f"the limit {other.limits[0].ratio_to_baseline:.3f}"
    recipe = runs["readme-loopback"]["recipe"]
    below = (
        f"{provenance(runs['readme-1gbit']['recipe'])}\n\n"
        f"On loopback, of torch DDP's step: {ratios}, {limit} "
        f"({recipe['date'][:10]}, commit {recipe['commit']}; `{recipe['command']}`).\n"
        "[All models, rows and columns](docs/benchmarks.md#results)."
    )
    return "\n\n".join([caption, tabulate_rows(rows, _IN_README, tablefmt="github", missing=""), below])


def page_text(runs: Runs) -> str:
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


def torch_rows_text(runs: Runs, name: str) -> str:
    """Each model on a link under what torch offers, in short."""
    parts = [provenance(runs[name]["recipe"])]
    for workload, comparison in _comparisons(runs[name]).items():
        rounds = len(comparison.communication_samples)
        parts.append(f"{workload}, {TORCH_ROWS[name]}, {rounds} rounds:\n\n{_short(comparison)}")
    return "\n\n".join(parts)


def float16_text(runs: Runs) -> str:
    """The GPT on the link, with halved bytes and without."""
    (comparison,) = _comparisons(runs[FLOAT16]).values()
    return f"{_short(comparison)}\n\n{provenance(runs[FLOAT16]['recipe'])}"


def training_text(runs: Runs) -> str:
    """Where the loss curves begin and end, and how far they lie apart."""
    run = runs[TRAINING]
    ends = [f"from {curve[0]:.4f} to {curve[-1]:.4f} under {name}" for name, curve in run["losses"].items()]
    return (
        f"The losses go {' and '.join(ends)}, and never differ by more than {run['largest_difference']:.1e}.\n"
        f"{provenance(run['recipe'])}\n\n![Both loss curves, and their distance](images/{TRAINING}.png)"
    )


def compare_text(runs: Runs) -> str:
    """What `compiled-ddp compare` printed for each model, with its recipe and its picture."""
    parts = []
    for name, title in COMPARED.items():
        (comparison,) = _comparisons(runs[name]).values()
        recipe = runs[name]["recipe"]
        transformers = recipe["versions"]["transformers"]
        versions = provenance(recipe) + (f" transformers {transformers}." if transformers else "")
        advice = str(advise(comparison)).replace("\n", "\n\n", 1)  # a list begins behind an empty line
        picture = f"![One bar per variant](images/{name}.png)"
        parts += [f"### {title}", versions, table_of(comparison, "github"), advice, picture]
    return "\n\n".join(parts)


SECTIONS = (
    Section("README.md", "results", readme_text, tuple(README_RUNS)),
    Section("docs/benchmarks.md", "results", page_text, tuple(RUNS)),
    *(Section("docs/benchmarks.md", name, partial(torch_rows_text, name=name), (name,)) for name in TORCH_ROWS),
    Section("docs/benchmarks.md", "training", training_text, (TRAINING,)),
    Section("docs/compare.md", "results", compare_text, tuple(COMPARED)),
    Section("docs/reduction.md", "float16", float16_text, (FLOAT16,)),
)


def read_runs(results: Path = RESULTS) -> dict[str, dict[str, Any]]:
    """By name, all that have been measured."""
    names = dict.fromkeys(name for section in SECTIONS for name in section.of)
    paths = {name: results / f"{name}.json" for name in names}
    return {name: json.loads(path.read_text()) for name, path in paths.items() if path.exists()}


def shown(document: Path, section: str) -> str:
    """What stands between the document's markers of this name."""
    return document.read_text().split(f"<!-- {section}:begin -->")[1].split(f"<!-- {section}:end -->")[0].strip()


def fill(document: Path, section: str, text: str) -> None:
    """Replace what stands between the document's markers of this name."""
    begin, end = f"<!-- {section}:begin -->", f"<!-- {section}:end -->"
    before, rest = document.read_text().split(begin)
    _, after = rest.split(end)
    document.write_text(f"{before}{begin}\n{text}\n{end}{after}")


def publish(results: Path = RESULTS, root: Path = ROOT) -> list[str]:
    """Fill in all sections of `root`'s documents whose runs are in `results`, and their pictures; returns which."""
    runs = read_runs(results)
    filled = [section for section in SECTIONS if all(name in runs for name in section.of)]
    for section in filled:
        fill(root / section.document, section.name, section.text(runs))
        for name in section.of:
            picture = results / f"{name}.png"
            if name in COMPARISONS:
                chart.draw([*_comparisons(runs[name]).values()], picture, runs[name]["recipe"])
            if name in PICTURES:
                (root / "docs" / "images" / picture.name).write_bytes(picture.read_bytes())
    return [f"{section.document} ({section.name})" for section in filled]


def _short(comparison: Comparison) -> str:
    return tabulate_rows(derive(comparison).variants, _IN_SHORT, tablefmt="github", missing="")


def _comparisons(run: dict[str, Any]) -> dict[str, Comparison]:
    comparisons = [Comparison.from_json(data) for data in run["comparisons"]]
    return {comparison.workload: comparison for comparison in comparisons}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.publish", description=__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS, help="default benchmarks/results")
    print(f"Filled in {', '.join(publish(parser.parse_args(arguments).results))}")


if __name__ == "__main__":
    main()
