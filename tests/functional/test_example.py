"""docs/examples/functional_gpt.py on a tiny model: it learns, and a resumed run equals an uninterrupted one."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

import torch

from ranks import RankPool

SCRIPT = Path(__file__).parents[2] / "docs" / "examples" / "functional_gpt.py"
TINY = ["--batch", "2", "--context", "16", "--width", "16", "--layers", "1", "--heads", "2", "--backend", "aot_eager"]


def _example() -> Any:
    spec = importlib.util.spec_from_file_location("functional_gpt", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["functional_gpt"] = module
    spec.loader.exec_module(module)
    return module


def _trains(rank: int, directory: str) -> list[float]:
    example, folder = _example(), Path(directory)

    def train(steps: int, file: str) -> float:
        options = example.parse([*TINY, "--steps", str(steps), "--checkpoint", str(folder / file)])
        value: float = example.train(options)
        torch.distributed.barrier()
        return value

    first, through = train(1, "resumed.pt"), train(12, "through.pt")
    resumed = train(12, "resumed.pt")
    saved = [torch.load(folder / file, weights_only=True) for file in ("through.pt", "resumed.pt")]
    for name, value in saved[0]["params"].items():
        assert torch.equal(value, saved[1]["params"][name]), name
    return [first, through, resumed]


def test_example_learns_and_resumes_to_the_last_bit(ranks2: RankPool, tmp_path: Path) -> None:
    (first, through, resumed), other = ranks2.run(_trains, str(tmp_path))
    assert through == resumed < first
    assert [first, through, resumed] == other
