"""`torch_private.vector_checks`: what one process has seen of vector instructions, others need not look for."""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from compiled_ddp.torch_private import vector_checks

KIND = SimpleNamespace(build_arch_flags=lambda: "-mavx2")


class Checks:
    """Inductor's own, and which it has been asked for."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.succeed = True

    def __call__(self, kind: object, code: str) -> bool:
        self.asked.append(code)
        return self.succeed


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    return tmp_path


def of_another_process(checks: Checks) -> Callable[[object, str], bool]:
    return vector_checks._remembering(checks)


def test_a_check_that_has_succeeded_is_not_made_again(folder: Path) -> None:
    checks = Checks()
    assert all(of_another_process(checks)(KIND, code) for code in ("exp", "exp", "tile", "exp"))
    assert checks.asked == ["exp", "tile"]


def test_one_that_has_failed_is_made_in_every_process(folder: Path) -> None:
    checks = Checks()
    checks.succeed = False
    assert not any(of_another_process(checks)(KIND, "exp") for _ in range(2))
    assert checks.asked == 2 * ["exp"]


@pytest.mark.parametrize("what", ["flags", "compiler", "compiler's date", "host", "torch"])
def test_it_is_made_again_where_anything_is_different(folder: Path, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    checks, kind, compiler = Checks(), SimpleNamespace(**vars(KIND)), folder / "g++"
    compiler.touch(mode=0o755)
    monkeypatch.setattr(vector_checks, "_compiler", lambda: str(compiler))
    of_another_process(checks)(kind, "exp")
    if what == "flags":
        kind.build_arch_flags = lambda: "-mavx2 -mavx512bf16"
    elif what == "compiler":
        monkeypatch.setattr(vector_checks, "_compiler", lambda: "gcc")
    elif what == "compiler's date":
        compiler.write_text("another one")
    elif what == "host":
        monkeypatch.setattr(vector_checks.platform, "node", lambda: "another")
    else:
        monkeypatch.setattr(vector_checks.torch, "__version__", "2.99")
    of_another_process(checks)(kind, "exp")
    assert checks.asked == 2 * ["exp"]


def test_a_cache_that_cannot_be_written_costs_the_check_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "compiled_ddp").touch()  # in place of the folder
    checks = Checks()
    assert all(of_another_process(checks)(KIND, "exp") for _ in range(2))
    assert len(checks.asked) == 2
