"""The page: what was run where, each section's outcome, and what the sections found."""

import importlib
import traceback
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from benchmarks.gpu.placement import CPU
from benchmarks.gpu.sections import Outcome, Section
from benchmarks.gpu.settings import Settings
from compiled_ddp.tools.comparison.table import tabulate_rows

CELL_CHARACTERS = 200


def markdown_table(rows: Sequence[object], columns: Mapping[str, tuple[str, str]]) -> str:
    """As `tabulate_rows`, in Markdown, with a dash for what is None."""
    return tabulate_rows(rows, columns, tablefmt="github", missing="-")


def in_a_cell(text: str) -> str:
    """`text` on one line of a table, shortened."""
    line = " ".join(text.split()).replace("|", "\\|")
    return line if len(line) <= CELL_CHARACTERS else f"{line[: CELL_CHARACTERS - 1]}…"


def write_page(
    recipe: Mapping[str, Any], settings: Settings, outcomes: Sequence[Outcome], sections: Sequence[Section]
) -> str:
    """The whole page as Markdown."""
    modules = {section.name: section.module for section in sections}
    rows = [
        SimpleNamespace(
            section=outcome.title, status=outcome.status, seconds=outcome.seconds, why=in_a_cell(outcome.reason or "")
        )
        for outcome in outcomes
    ]
    columns = {"section": ("section", "s"), "status": ("outcome", "s"), "seconds": ("s", ".0f"), "why": ("", "s")}
    parts = [
        "# compiled_ddp on the CPU, without what needs a GPU" if settings.device == CPU else "# compiled_ddp on a GPU",
        f"{recipe['date']}, commit {recipe['commit']}, `{recipe['command']}`. "
        "All that was measured stands in the JSON file beside this page.",
        markdown_table(rows, columns),
    ]
    for outcome in outcomes:
        parts += [f"## {outcome.title}", _body(outcome, modules[outcome.name])]
    return "\n\n".join(parts) + "\n"


def _body(outcome: Outcome, module: str) -> str:
    if outcome.answer is None:
        said = f"{outcome.status}: {outcome.reason}"
        return said if outcome.output_tail is None else f"{said}\n\n```text\n{outcome.output_tail}\n```"
    try:
        return str(importlib.import_module(module).render(outcome.answer))
    except Exception:  # what was measured is in the JSON file; the other sections are still shown
        return f"This section cannot be shown:\n\n```text\n{traceback.format_exc()}```"
