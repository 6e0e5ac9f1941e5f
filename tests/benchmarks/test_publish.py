"""The documents show what was measured: their tables come from benchmarks/results/."""

import json
from pathlib import Path

import pytest

from benchmarks.publish import (
    BEGIN,
    END,
    IMAGES,
    RESULTS,
    ROOT,
    RUNS,
    compare_text,
    fill,
    page_text,
    read_compared,
    readme_text,
)
from compiled_ddp.comparison.record import machine, ran_on

DOCUMENTS = {"README.md": readme_text, "docs/benchmarks.md": page_text}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_a_documents_figures_are_those_of_the_committed_results(document: str) -> None:
    runs = {name: json.loads((RESULTS / f"{name}.json").read_text()) for name in RUNS}
    shown = (ROOT / document).read_text().split(BEGIN)[1].split(END)[0].strip()
    assert shown == DOCUMENTS[document](runs).strip()


def test_the_figures_of_compare_are_those_of_the_committed_results() -> None:
    shown = (ROOT / "docs" / "compare.md").read_text().split(BEGIN)[1].split(END)[0].strip()
    assert shown == compare_text(read_compared()).strip()


def test_the_pictures_of_the_documents_say_what_was_measured_and_when() -> None:
    compared = {f"compare-{name}": run for name, run in read_compared().items()}
    runs = {name: json.loads((RESULTS / f"{name}.json").read_text()) for name in RUNS} | compared
    for name, run in runs.items():
        where = ran_on(run["recipe"], machine(run["recipe"], "cpu"))
        assert f"Description\0{where}".encode() in (IMAGES / f"{name}.png").read_bytes(), "python -m benchmarks.publish"


def test_filling_replaces_what_stands_between_the_markers(tmp_path: Path) -> None:
    document = tmp_path / "page.md"
    document.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    fill(document, "new")
    fill(document, "newer")
    assert document.read_text() == f"before\n{BEGIN}\nnewer\n{END}\nafter\n"
