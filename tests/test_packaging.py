"""What pyproject.toml says of the package is true of the README and of the sources."""

import ast
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from compiled_ddp.torch_private.versions import NEWEST, OLDEST

ROOT = Path(__file__).resolve().parent.parent
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
README = (ROOT / "README.md").read_text()


@pytest.mark.parametrize("extra", PROJECT["optional-dependencies"])
def test_the_readme_names_every_extra(extra: str) -> None:
    assert f"[{extra}]" in README, f"README.md does not say what pip install '.[{extra}]' is for"


@pytest.mark.parametrize("name", re.findall(r"pip install[^\n#]*\.\[([\w,]+)\]", README))
def test_every_extra_that_the_readme_installs_is_one(name: str) -> None:
    assert set(name.split(",")) <= PROJECT["optional-dependencies"].keys()


def test_the_classifiers_name_the_oldest_python_and_none_that_is_too_old() -> None:
    (oldest,) = re.findall(r">=3\.(\d+)$", PROJECT["requires-python"])
    versions = re.findall(r"Python :: 3\.(\d+)$", "\n".join(PROJECT["classifiers"]), flags=re.MULTILINE)
    assert min(map(int, versions)) == int(oldest)
    assert sys.version_info[:2] >= (3, int(oldest))


def test_the_classifiers_and_the_limits_page_name_the_same_pythons() -> None:
    page = (ROOT / "docs" / "limits.md").read_text().partition("## Versions of Python")[2].partition("\n## ")[0]
    run = re.findall(r"^\| 3\.(\d+)", page, flags=re.MULTILINE)
    versions = re.findall(r"Python :: 3\.(\d+)$", "\n".join(PROJECT["classifiers"]), flags=re.MULTILINE)
    assert run == versions


def test_rounds_of_versions_cover_all_that_the_metadata_admits() -> None:
    """Without nox, which the environments of its own rounds have no need of."""
    assigned = {
        target.id: node.value
        for node in ast.parse((ROOT / "noxfile.py").read_text()).body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    torches, pythons = (ast.literal_eval(assigned[name]) for name in ("TORCH", "PYTHON"))
    (major, oldest), (_, newest) = OLDEST, NEWEST
    assert [version.rpartition(".")[0] for version in torches] == [f"{major}.{n}" for n in range(oldest, newest + 1)]
    assert f"\ntorch=={torches[-1]}\n" in (ROOT / "constraints-newest.txt").read_text()
    classified = re.findall(r"Python :: (3\.\d+)$", "\n".join(PROJECT["classifiers"]), flags=re.MULTILINE)
    assert ["3.11", *pythons][: len(classified)] == classified
    makefile = (ROOT / "Makefile").read_text()
    for name, versions in ("VERSIONS", torches), ("PYTHONS", pythons):
        assert re.findall(rf"^{name} \?= (.*)$", makefile, flags=re.MULTILINE) == [" ".join(versions)]
