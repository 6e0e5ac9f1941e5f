"""`compiled-ddp explain`: the buckets of a user's model, predicted and measured, on ranks that the command starts."""

import json
from pathlib import Path

import pytest
import torch
from calibrations import calibration

from compiled_ddp import SavedPlan
from compiled_ddp.__main__ import main

SCRIPT = """
import torch
from torch import nn

def make(rank):
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2))
    return model, nn.functional.mse_loss, [(torch.randn(3, 6), torch.randn(3, 2))]

def nothing():
    return None

def on_one_rank(rank):
    if rank == 1:
        raise ValueError("no data here")
    return make(rank)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def test_a_model_is_trained_and_explained_with_its_timeline_and_its_plan(
    script: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    link, plan, trace = tmp_path / "link.json", tmp_path / "plan.json", tmp_path / "step.json"
    calibration().save(link)
    files = ["--calibration", str(link), "--save-plan", str(plan), "--timeline", str(trace)]
    assert main(["explain", f"{script}:make", "--backend", "aot_eager", "--steps", "3", "--json", *files]) == 0
    explained = json.loads(capfd.readouterr().out)
    assert "an all-reduce takes 122 us + bytes / 1,074 MB/s" in explained["bucket_size"]
    assert explained["predicted"] is not None
    assert explained["measured"]["backwards"] == 2
    assert SavedPlan.load(plan).buckets == (("2.bias", "2.weight", "0.bias", "0.weight"),)
    assert json.loads(trace.read_text())["traceEvents"]


@pytest.mark.parametrize(
    ("function", "arguments", "why"),
    [
        ("nothing", [], "rank 0: the function returned None: return (model, batches)"),
        ("on_one_rank", [], "rank 1: no data here"),
        ("make", ["--plan", "missing.json"], "No such file or directory: 'missing.json'"),
    ],
)
def test_what_cannot_be_trained_is_told_once(
    function: str,
    arguments: list[str],
    why: str,
    script: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In this process, as the only rank or as one of two whose other one has a problem."""
    from compiled_ddp.tools.explanation import command

    class Alone:
        """A world of one rank, of the number that the problem has."""

        rank = 1 if "rank 1" in why else 0

    monkeypatch.setattr(command.dist, "init_process_group", lambda backend: None)
    monkeypatch.setattr(command.dist, "destroy_process_group", lambda: None)
    monkeypatch.setattr(command.dist, "get_rank", lambda: Alone.rank)
    monkeypatch.setattr(command.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(command.dist, "all_gather_object", lambda into, own: into.__setitem__(Alone.rank, own))
    monkeypatch.setattr(command, "run_on_own_ranks", lambda ranks, entry, *given, environment: {0: entry(*given)})
    threads = torch.get_num_threads()
    assert main(["explain", f"{script}:{function}", *arguments]) == 2
    assert torch.get_num_threads() == threads
    told = capsys.readouterr()
    assert why in told.err and told.err.count("\n") == 1 and not told.out


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["train.py"], "has no colon"),
        (["train.py:make", "--ranks", "0"], "--ranks must be at least 1, found 0"),
        (["train.py:make", "--steps", "1"], "--steps must be at least 2"),
        (["train.py:make", "--bucket-cap-mb", "0"], "--bucket-cap-mb must be positive, found 0"),
        (["train.py:make", "--timeline", "step.gif"], "--timeline writes a picture, .png, or a trace"),
    ],
)
def test_arguments_are_checked(arguments: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["explain", *arguments])
    assert ended.value.code == 2
    assert why in capsys.readouterr().err


def test_a_file_that_does_not_exist_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", f"{tmp_path / 'missing.py'}:make"]) == 2
    assert "missing.py" in capsys.readouterr().err
