"""Every Python snippet of the README and of docs/ runs, and every file and test that a page names exists.

The blocks of a page run in order, in one namespace, in one process of its own that is rank 0 of 1 by its environment. A
block opened by ```{.python notest} does not run, and an HTML comment directly above it says why. (The README may also
write ```python notest, which MkDocs does not render.) A page that imports what the extra `trainers` brings is skipped
where that is not installed: `make trainers` runs it.
"""

import ast
import functools
import importlib.util
import inspect
import os
import re
import textwrap
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest
import torchrun
from torch.nn.parallel import DistributedDataParallel

from compiled_ddp.passes.pipeline import PASSES
from compiled_ddp.step.runtime import Phase
from ranks import RankError, RankPool

ROOT = Path(__file__).resolve().parent.parent
PAGES = [path for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))) if path.exists()]
WRITTEN = [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", ROOT / "benchmarks" / "README.md"]
PAGE_SECONDS = 240.0

CELL_CHARACTERS = 300
README_LINES = 130

FENCE = re.compile(r"^ *(?P<fence>`{3,}|~{3,}) *(?:\{ *\.)?python\b(?P<options>[^}\n]*)\}?$")


@dataclass(frozen=True)
class Snippet:
    """A fenced Python block: its code, and where the code begins in the page."""

    code: str
    first_line: int  # counted from 1
    runs: bool
    reason: str | None  # why it does not run


def snippets(text: str) -> list[Snippet]:
    """The fenced Python blocks of a Markdown page, those inside tabs and admonitions too."""
    found = []
    lines = text.splitlines()
    number = 0
    while number < len(lines):
        opening = FENCE.match(lines[number])
        number += 1
        if opening is None:
            continue
        first = number
        while number < len(lines) and lines[number].strip() != opening["fence"]:
            number += 1
        comment = re.fullmatch(r"\s*<!--\s*(.*?\S)\s*-->\s*", lines[first - 2]) if first >= 2 else None
        found.append(
            Snippet(
                code=textwrap.dedent("\n".join(lines[first:number])),
                first_line=first + 1,
                runs="notest" not in opening["options"].split(),
                reason=comment[1] if comment else None,
            )
        )
        number += 1
    return found


def run_page(rank: int, page: str, blocks: list[Snippet], directory: str) -> None:
    """Run `blocks` one after the other, as torchrun would run them with one process."""
    os.chdir(directory)  # what a snippet saves goes there
    namespace: dict[str, object] = {"__name__": "__main__"}
    with torchrun.environment(rank, 1, torchrun.free_port()):
        for block in blocks:
            run_snippet(page, block, namespace)


def run_snippet(page: str, block: Snippet, namespace: dict[str, object]) -> None:
    # Blank lines in front: a traceback then names the line of the page, and shows it.
    code = "\n" * (block.first_line - 1) + block.code
    exec(compile(code, page, "exec"), namespace)


def trainers() -> set[str]:
    """The modules that the extra `trainers` brings."""
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["trainers"]
    return {re.split(r"[\[<>=]", requirement)[0].removeprefix("pytorch-") for requirement in extra}


def trainers_imported(blocks: list[Snippet], known: set[str]) -> set[str]:
    """Those of `known` that `blocks` import, or whose adapter they do."""
    nodes = [node for block in blocks for node in ast.walk(ast.parse(block.code))]
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module]
    parts = [name.removeprefix("compiled_ddp.integrations.").partition(".")[0] for name in names]
    return known & {*parts}


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


@functools.cache
def text_of(file: Path) -> str:
    return file.read_text() if file.is_file() else ""


def exists(path: Path, function: str | None) -> bool:
    return path.exists() and (function is None or f"def {function}(" in text_of(path))


@pytest.mark.inductor
@pytest.mark.parametrize("page", [page for page in PAGES if snippets(page.read_text())], ids=relative)
def test_snippets_of_page_run(page: Path, tmp_path: Path) -> None:
    blocks = [snippet for snippet in snippets(page.read_text()) if snippet.runs]
    missing = {name for name in trainers_imported(blocks, trainers()) if importlib.util.find_spec(name) is None}
    if missing:
        pytest.skip(f"`make trainers` installs {', '.join(sorted(missing))}")
    with RankPool(1) as pool:
        pool.run(run_page, str(page), blocks, str(tmp_path), process_group=False, timeout_seconds=PAGE_SECONDS)


def test_snippets_that_do_not_run_have_a_reason() -> None:
    bare = [
        f"{relative(page)}:{block.first_line}"
        for page in PAGES
        for block in snippets(page.read_text())
        if not block.runs and block.reason is None
    ]
    assert not bare, f"put <!-- why it cannot run --> directly above the blocks at {bare}"


def test_snippets_that_do_not_run_render() -> None:
    pages = [page for page in PAGES if page.name != "README.md"]
    assert pages
    unseen = re.compile(r"^ *[`~]{3,} *python\b.* notest", flags=re.MULTILINE)
    found = [relative(page) for page in pages if unseen.search(page.read_text())]
    assert not found, f"{found}: write ```{{.python notest}}, MkDocs does not render ```python notest"


def test_migration_page_names_every_ddp_argument() -> None:
    page = (ROOT / "docs" / "migration.md").read_text()
    first_cells = re.findall(r"^\| `(\w+)`(?: \(torch 2\.\d+\))? \|", page, flags=re.MULTILINE)
    arguments = set(inspect.signature(DistributedDataParallel).parameters)
    assert not arguments - set(first_cells), "docs/migration.md lists every argument of DistributedDataParallel"


def test_how_it_works_lists_every_pass_in_run_order() -> None:
    page = (ROOT / "docs" / "how-it-works.md").read_text()
    table = page[page.index("| pass | what it does |") :].split("\n\n", maxsplit=1)[0]
    listed = re.findall(r"^\| `(\w+)` \|", table, flags=re.MULTILINE)
    assert listed == [pass_.name for pass_ in PASSES], "docs/how-it-works.md lists the passes as the pipeline runs them"


# In a table's row: `path.py`, `path.py::test_name`, and `::test_name` or, on apex's page, `test_name` alone.
NAMED = re.compile(r"`(?P<path>[\w./]*\btest_\w+\.py)?(?:(?:::)?(?P<test>test_\w+))?`")


def named_tests(page: Path) -> list[tuple[int, Path, str | None]]:
    """The tests that the rows of a page's tables name: line, file, and function if one is named."""
    is_apex = page.name == "apex.md"
    directory = ROOT / "tests" / ("compat" if is_apex else "")
    found = []
    for number, line in enumerate(page.read_text().splitlines(), start=1):
        file = directory / "test_apex.py" if is_apex else None
        for name in NAMED.finditer(line) if line.startswith("|") else ():
            if name["path"]:
                file = (directory / name["path"]).resolve()
            if name["path"] or name["test"]:
                assert file is not None, f"{relative(page)}:{number}: {name[0]} follows no path"
                found.append((number, file, name["test"]))
            if is_apex:
                file = directory / "test_apex.py"
    return found


def test_tests_that_a_table_names_exist() -> None:
    missing = [
        f"{relative(page)}:{number}: {file.name}::{test}"
        for page in PAGES
        for number, file, test in named_tests(page)
        if not exists(file, test)
    ]
    assert not missing, missing


def test_each_feature_has_its_tests_below_its_table() -> None:
    page = (ROOT / "docs" / "features.md").read_text()
    tables = [table.splitlines() for table in re.findall(r"^\| feature \|.*\n(?:\|.*\n)+", page, flags=re.MULTILINE)]
    features, tests = tables[::2], tables[1::2]
    assert len(features) == len(tests) == page.count("\n## ")
    for of_features, of_tests in zip(features, tests, strict=True):
        assert of_features[0].startswith("| feature | compiled_ddp | DDP |") and of_tests[0] == "| feature | test |"
        first = [[row.split(" | ")[0] for row in table] for table in (of_features, of_tests)]
        assert first[0][2:] == first[1][2:], "the rows are not those of the table above"
        assert len(set(first[0])) == len(first[0]), "a feature stands there twice"


def test_names_of_tests_are_found_in_tables(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("`a/test_x.py::test_0`\n| a | `a/test_x.py::test_1`, `::test_2`, `b/test_y.py` | `test.py` |\n")
    a, b = ROOT / "tests/a/test_x.py", ROOT / "tests/b/test_y.py"
    assert named_tests(page) == [(2, a, "test_1"), (2, a, "test_2"), (2, b, None)]


# A source or test, as `compiled_ddp/plan.py`, `passes/pipeline.py`, `tests/ranks.py::name`; in braces or not.
SOURCE = re.compile(r"(?<![\w./-])((?:compiled_ddp|passes|tests|benchmarks|docs)/[\w./-]*\w\.\w+)(?:::(\w+))?")


def named_files(text: str) -> list[tuple[str, str | None]]:
    """The files of the repository that `text` names, each with the function that stands behind `::`, if any."""
    return [(name[1], name[2]) for name in SOURCE.finditer(text)]


def test_files_that_a_page_names_exist() -> None:
    missing = [
        f"{relative(page)} names {name}" + (f"::{function}" if function else "")
        for page in WRITTEN
        for name, function in named_files(page.read_text())
        if not exists(ROOT / name, function)
    ]
    assert not missing, missing


def test_names_of_files_are_found() -> None:
    text = "`compiled_ddp/plan.py`, tests/ranks.py::run; not x/tests/a.py, tests/fuzz/ or benchmarks.kept"
    assert named_files(text) == [("compiled_ddp/plan.py", None), ("tests/ranks.py", "run")]


def cells(text: str) -> list[tuple[int, str]]:
    """The cells of a page's tables, each with its line."""
    return [
        (number, cell.strip())
        for number, line in enumerate(text.splitlines(), start=1)
        if line.lstrip().startswith("|")
        for cell in re.split(r"(?<!\\)\|", line.strip().strip("|"))
    ]


def test_no_cell_of_a_table_is_a_wall_of_text() -> None:
    long = [
        f"{relative(page)}:{number}: {len(cell)} characters"
        for page in WRITTEN
        for number, cell in cells(page.read_text())
        if len(cell) > CELL_CHARACTERS
    ]
    assert not long, f"write these cells as prose below the table: {long}"


def test_cells_are_found_with_their_lines() -> None:
    assert cells("a | b\n| one | two \\| three |\n") == [(2, "one"), (2, "two \\| three")]


def test_the_readme_stays_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= README_LINES


def test_snippets_are_found_with_their_lines() -> None:
    page = """text
```python title="a.py"
one = 1
```
<!-- needs two ranks -->
```python notest
two = 2
```
=== "Tab"

    ```python
    if one:
        three = 3
    ```

```console
$ python
```
```{.python notest}
```
"""
    assert snippets(page) == [
        Snippet("one = 1", 3, True, None),
        Snippet("two = 2", 7, False, "needs two ranks"),
        Snippet("if one:\n    three = 3", 12, True, None),
        Snippet("", 20, False, None),
    ]


def test_trainers_that_a_page_needs_are_found() -> None:
    assert trainers() == {"accelerate", "transformers", "lightning", "ignite", "ray", "trl", "torchft"}
    code = (
        "import lightning.pytorch\nfrom compiled_ddp.integrations.accelerate import Accelerator\nimport torch, missing"
    )
    blocks = snippets(f"```python\n{code}\n```\n```python\nfrom transformers import Trainer\n```\n")
    assert trainers_imported(blocks, trainers()) == {"accelerate", "lightning", "transformers"}
    assert not trainers_imported(snippets("```python\nfrom compiled_ddp.integrations.torch import x\n```"), trainers())


def test_failing_snippet_names_the_line_of_its_page(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A page\n\n```python\nvalue = 1\n```\n\n```python\nvalue / 0\n```\n")
    with RankPool(1) as pool, pytest.raises(RankError, match="ZeroDivisionError") as failure:
        pool.run(run_page, str(page), snippets(page.read_text()), str(tmp_path), process_group=False)
    assert f'"{page}", line 8' in str(failure.value)


def test_how_it_works_tells_the_phases_as_they_are() -> None:
    page = (ROOT / "docs" / "how-it-works.md").read_text()
    rows = re.findall(
        r"^\| (\w+) \| (.+) \|$", page.partition("| phase | meaning |")[2].partition("\n\n")[0], re.MULTILINE
    )
    assert rows == [(phase.name.lower(), phase.value) for phase in Phase]
