"""Steps of both wrappers under torch's stream sanitizer: how many races it reports."""

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.gpu.page import in_a_cell, markdown_table
from benchmarks.gpu.placement import Placement, alone, together
from benchmarks.gpu.settings import Settings
from benchmarks.gpu.watched_steps import PLANTED, WRAPPERS
from benchmarks.launch import run_job

REPORT = "CSAN detected a possible data race"  # how torch/cuda/_sanitizer.py begins each
STEPS = 5


def measure(settings: Settings) -> dict[str, Any]:
    """A row for each wrapper and placement, and one for a race that must be reported."""
    placements = [alone(settings.device), together(settings.device)]
    rows = [watched(PLANTED, placements[0])]
    rows += [watched(name, placement) for placement in placements for name in WRAPPERS]
    planted, *others = rows
    failed = [] if planted["reports"] else ["the planted race is not reported, so none would be"]
    for row in others:
        if row["reports"]:
            failed.append(f"{row['what']}, {row['ranks']}: {row['reports']} races reported")
        elif row["error"]:
            failed.append(f"{row['what']}, {row['ranks']}: {row['error']}")
    return {"rows": rows, "failed": failed}


def watched(what: str, placement: Placement) -> dict[str, Any]:
    """The races that are reported while ranks of their own run `what`, and how it ended if it did."""
    error = None
    with captured_stderr() as written:
        try:
            run_job("watched_steps", {**placement.job(), "what": what, "steps": STEPS}, ranks=placement.ranks)
        except (
            Exception
        ) as failure:  # the sanitizer raises at the first race; what else failed is told apart by its report
            error = f"{type(failure).__name__}: {failure}"[:2000]
    text = written.read_text(errors="replace")
    sys.stderr.write(text)
    written.unlink()
    report = text[text.index(REPORT) :][:4000] if REPORT in text else None
    return {
        "what": what,
        "ranks": placement.label,
        "steps": 0 if what == PLANTED else STEPS,
        "reports": text.count(REPORT),
        "report": report,
        "error": error,
    }


@contextmanager
def captured_stderr() -> Iterator[Path]:
    """What this process and the ranks that it starts write to stderr goes to a file, which the caller removes."""
    number, path = tempfile.mkstemp(prefix="cddp-stderr-")
    sys.stderr.flush()
    before = os.dup(2)
    os.dup2(number, 2)
    try:
        yield Path(path)
    finally:
        sys.stderr.flush()
        os.dup2(before, 2)
        os.close(before)
        os.close(number)


def render(answer: dict[str, Any]) -> str:
    """The rows, and what zero reports do not say."""
    rows = [
        SimpleNamespace(**{**row, "ended": in_a_cell(row["error"] or "") if row["what"] != PLANTED else "as it must"})
        for row in answer["rows"]
    ]
    columns = {
        "what": ("", "s"),
        "ranks": ("ranks", "s"),
        "steps": ("steps watched", "d"),
        "reports": ("races reported", "d"),
        "ended": ("error", "s"),
    }
    note = (
        "The sanitizer (`torch.cuda._sanitizer`) knows tensors by their data pointer: it misses a race between a whole "
        "bucket and a gradient that is a view of it, unless the view is the bucket's first. It sees no kernels of "
        "Inductor's; `compile_ddp` runs here with `aot_eager`, and of its steps the backward and the optimizer are "
        "watched, as Dynamo runs no captured graph under a dispatch mode. `tests/runtime/test_stream_races.py` "
        "looks for races by storage, on a device of the tests' own."
    )
    reports = [f"```text\n{row['report']}\n```" for row in answer["rows"] if row["report"] and row["what"] != PLANTED]
    return "\n\n".join([markdown_table(rows, columns), note, *reports])
