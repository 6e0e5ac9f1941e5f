"""The documents show what was measured: their tables come from benchmarks/results/."""

import re
from pathlib import Path

import pytest

from benchmarks.publish import (
    COMPARISONS,
    IMAGES,
    README_RUNS,
    RESULTS,
    ROOT,
    RUNS,
    SECTIONS,
    Section,
    fill,
    publish,
    read_runs,
    shown,
)
from compiled_ddp.tools.comparison.record import machine, ran_on

MEASURED = read_runs()
FILLED = [section for section in SECTIONS if all(name in MEASURED for name in section.of)]
_NAMES = [f"{section.document}, {section.name}" for section in FILLED]


@pytest.mark.parametrize("section", FILLED, ids=_NAMES)
def test_a_documents_figures_are_those_of_the_committed_results(section: Section) -> None:
    assert shown(ROOT / section.document, section.name) == section.text(MEASURED).strip()


@pytest.mark.parametrize("section", FILLED, ids=_NAMES)
def test_what_is_published_states_the_date_and_the_commit_of_every_run(section: Section) -> None:
    stated = re.findall(r"(\d{4}-\d\d-\d\d), commit ([0-9a-f]{7,}(?:-dirty)?); `[^`]+`", section.text(MEASURED))
    recipes = [MEASURED[name]["recipe"] for name in section.of]
    assert stated == [(recipe["date"][:10], recipe["commit"]) for recipe in recipes]


@pytest.mark.parametrize("name", COMPARISONS)
def test_the_pictures_of_the_documents_say_what_was_measured_and_when(name: str) -> None:
    recipe = MEASURED[name]["recipe"]
    where = ran_on(recipe, machine(recipe, "cpu"))
    assert f"Description\0{where}".encode() in (IMAGES / f"{name}.png").read_bytes(), "python -m benchmarks.publish"


def test_every_committed_result_is_published() -> None:
    assert {path.stem for path in RESULTS.glob("*.json")} <= {name for section in SECTIONS for name in section.of}


def test_a_section_without_its_runs_stays_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "docs" / "images").mkdir(parents=True)
    for document in {section.document for section in SECTIONS}:
        text = (ROOT / document).read_text()
        (tmp_path / document).write_text(
            re.sub(r"(<!-- [\w-]+:begin -->).*?(<!-- )", r"\1\nold\n\2", text, flags=re.DOTALL)
        )
    results = tmp_path / "results"
    results.mkdir()
    for name in (*RUNS, *README_RUNS):
        for file in RESULTS.glob(f"{name}.*"):
            (results / file.name).write_bytes(file.read_bytes())
    assert publish(results, tmp_path) == ["README.md (results)", "docs/benchmarks.md (results)"]
    assert shown(tmp_path / "docs" / "benchmarks.md", "training") == "old"
    assert (tmp_path / "docs" / "images" / "1gbit.png").read_bytes() == (RESULTS / "1gbit.png").read_bytes()


def test_filling_replaces_what_stands_between_the_markers_of_a_section(tmp_path: Path) -> None:
    document = tmp_path / "page.md"
    document.write_text("before\n<!-- a:begin -->\nold\n<!-- a:end -->\n<!-- b:begin -->\nold\n<!-- b:end -->\nafter\n")
    fill(document, "a", "new")
    fill(document, "a", "newer")
    kept = "<!-- b:begin -->\nold\n<!-- b:end -->"
    assert document.read_text() == f"before\n<!-- a:begin -->\nnewer\n<!-- a:end -->\n{kept}\nafter\n"
