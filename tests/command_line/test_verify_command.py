"""`compiled-ddp verify`: its exit statuses, and what it makes of a script."""

import contextlib
import functools
import io
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torchrun import environment, free_ports

from compiled_ddp import ParityReport
from compiled_ddp.__main__ import main, parse
from compiled_ddp.tools.command_line import own_ranks
from compiled_ddp.tools.parity import command_line
from compiled_ddp.tools.parity.verify import ParameterDifference
from ranks import RankPool

SCRIPT = """
import random, sys
import numpy, torch
from torch import nn

assert len(sys.argv) == 1 and sys.argv[0].endswith("script.py"), sys.argv
DRAWN = [random.random(), float(numpy.random.rand()), float(torch.rand(()))]

def make():
    drawn = [random.random(), float(numpy.random.rand()), float(torch.rand(()))]
    assert drawn == DRAWN, "the seeds are set before the script and before the call"
    return nn.Linear(4, 2), torch.randn(3, 4), lambda output, _: output.square().mean()

def same():
    return nn.Linear(4, 2), torch.ones(3, 4), lambda output, _: output.square().mean()

def breaks():
    raise RuntimeError("no data here")
"""
ENDS = "import sys\n\ndef make():\n    pass\n\nsys.exit(0)\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "ends.py").write_text(ENDS)
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _statuses(rank: int, folder: str, ports: list[int]) -> dict[str, tuple[int, str]]:
    os.chdir(folder)
    found = {}
    targets = ("script.py:make", "script.py:same", "script.py:breaks", "ends.py:make", "none.py:make", "script.py:none")
    for target, port in zip(targets, ports, strict=True):
        errors = io.StringIO()
        with environment(rank, 2, port), contextlib.redirect_stderr(errors):
            found[target] = main(["verify", target, "--wrapper", "EagerDDP", "--steps", "1"]), errors.getvalue()
    return found


def test_a_status_says_whether_anything_was_verified(ranks2: RankPool, folder: Path) -> None:
    first, other = ranks2.run(_statuses, str(folder), free_ports(6), process_group=False)
    assert [status for status, _ in first.values()] == [0, 2, 2, 2, 2, 2]
    assert [status for status, _ in other.values()] == [0, 2, 2, 2, 2, 2]
    assert "RuntimeError: no data here" in first["script.py:breaks"][1]
    told = {name: error.strip() for name, (_, error) in first.items()}
    assert told["ends.py:make"] == (
        "verify: rank 0: ends.py: the script ended itself: put what it runs behind if __name__ == '__main__'."
    )
    assert told["none.py:make"].startswith("verify: rank 0: there is no file none.py")
    assert told["script.py:none"].startswith("verify: rank 0: script.py has no function 'none'")
    assert [other[name][1] for name in ("ends.py:make", "none.py:make", "script.py:none")] == [""] * 3


def test_a_file_that_is_not_there_is_one_line_before_any_rank_is_started(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command_line, "run_on_own_ranks", None)
    assert main(["verify", "none.py:make"]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("verify: there is no file none.py")


def _run_with(monkeypatch: pytest.MonkeyPatch, *arguments: str, **of_difference: Any) -> int:
    numbers = {"absolute": 1e-3, "relative": 1e-3, **of_difference}
    report = ParityReport((ParameterDifference("a", (1,), step=0, **numbers),), 1, 2)
    monkeypatch.setattr(command_line, "run_on_own_ranks", lambda *_, **__: {0: report})
    return main(["verify", "script.py:make", *arguments])


def test_a_status_goes_by_the_tolerance_that_was_asked_for_or_the_gradients_own(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _run_with(monkeypatch) == 1
    assert _run_with(monkeypatch, tolerance=0.03) == 0
    assert _run_with(monkeypatch, "--tolerance", "1e-4", tolerance=0.03) == 1
    assert _run_with(monkeypatch, "--tolerance", "1e-2") == 0
    assert _run_with(monkeypatch, "--tolerance", "1e-2", ranks_differed=False) == 2


def test_own_ranks_are_started_where_only_a_world_size_is_left_in_the_environment(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert _run_with(monkeypatch, tolerance=0.03) == 0


def test_inductor_draws_the_random_numbers_of_eager_code() -> None:
    wrap = command_line._wrap(parse(["verify", "script.py:make"]))
    assert isinstance(wrap, functools.partial)
    assert wrap.keywords == {"backend": "inductor", "options": {"fallback_random": True}}
    eager = command_line._wrap(parse(["verify", "script.py:make", "--backend", "aot_eager"]))
    assert isinstance(eager, functools.partial) and eager.keywords["options"] is None


def test_own_ranks_meet_at_localhost(monkeypatch: pytest.MonkeyPatch) -> None:
    def launch(config: Any, _: object) -> Any:
        return lambda: SimpleNamespace(address=config.local_addr)

    monkeypatch.setattr(own_ranks, "elastic_launch", launch)
    found: Any = own_ranks.run_on_own_ranks(1, "true", environment={})
    assert found.address == "localhost"
