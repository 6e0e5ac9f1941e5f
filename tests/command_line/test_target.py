"""SCRIPT:FUNCTION: what is found, and what is said where there is nothing."""

import sys
from pathlib import Path

import pytest

from compiled_ddp.tools.command_line.target import find_function

RETURNS = "a model"


@pytest.fixture(autouse=True)
def imports_as_before(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "modules", {**sys.modules})
    monkeypatch.chdir(tmp_path)
    (tmp_path / "of_a_user.py").write_text("from beside import width\n\ndef make():\n    return width\n\nmade = 3\n")
    (tmp_path / "beside.py").write_text("width = 7\n")
    (tmp_path / "needs_another.py").write_text("import not_installed_at_all\n")


@pytest.mark.parametrize("target", ["of_a_user.py:make", "of_a_user:make", "./of_a_user.py:make"])
def test_a_function_is_found_in_a_file_and_in_a_module_with_what_stands_beside_it(target: str) -> None:
    assert find_function(target, returns=RETURNS)() == 7


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("other.py:make", r"there is no file other.py \(seen from .*\): name a Python file, as in train.py:make"),
        ("other:make", r"there is no module 'other' \(looked for from .*\): name a Python file"),
        ("other.inner:make", "there is no module 'other.inner' "),
        ("of_a_user.py:nothing", "of_a_user.py has no function 'nothing': name one that returns a model."),
        ("of_a_user:made", "of_a_user has no function 'made': name one that returns a model."),
    ],
)
def test_what_is_not_there_is_named(target: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        find_function(target, returns=RETURNS)


def test_what_a_module_itself_lacks_is_its_own_error() -> None:
    with pytest.raises(ModuleNotFoundError, match="not_installed_at_all"):
        find_function("needs_another:make", returns=RETURNS)
