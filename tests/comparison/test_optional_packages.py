"""Without matplotlib there is no picture, which is no error, and nothing else is needed."""

import subprocess
import sys
from pathlib import Path

import pytest

from compiled_ddp.tools.comparison.command import _picture
from compiled_ddp.tools.comparison.record import recipe
from compiled_ddp.tools.comparison.result import Comparison, VariantResult

ALONE = VariantResult("torch DDP", "eager", True, [[[1, 1, 1]]])
FOUND = Comparison("toy", "cpu", "loopback", 1, 10, [40], [[0.01]], [ALONE])


def test_without_matplotlib_the_command_says_how_to_get_the_picture(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert _picture(FOUND, tmp_path / "picture.png", recipe(tmp_path)) == (
        "No picture: it needs matplotlib (pip install 'compiled-ddp[compare]')."
    )
    assert not (tmp_path / "picture.png").exists()


def test_with_matplotlib_the_command_says_where_the_picture_is(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "picture.png"
    assert _picture(FOUND, path, recipe(tmp_path)) == f"Picture: {path}"
    assert path.stat().st_size > 10_000


@pytest.mark.slow
def test_the_command_needs_torch_and_tabulate_alone() -> None:
    code = """
import sys
sys.modules.update(dict.fromkeys(("matplotlib", "tqdm", "psutil", "sklearn", "transformers")))
import compiled_ddp.tools.comparison.command, compiled_ddp.tools.comparison.contestant
print(any(name.partition('.')[0] == 'benchmarks' for name in sys.modules))"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "False"
