"""What one rank computes: of a transformer, of a file, of a function that is measured."""

from pathlib import Path

import pytest

from compiled_ddp.planning.cost_model import Readiness
from compiled_ddp.planning.step_model import Job
from compiled_ddp.tools.simulation import measured
from compiled_ddp.tools.simulation.jobs import load, ready_by_sizes, transformer


def test_a_transformer_has_four_matrices_a_layer_and_its_embedding_last() -> None:
    assert transformer(1200 * 2 + 500, 2, 4, 500) == (*([1600, 1600, 400, 1200] * 2), 2000)
    assert sum(transformer(124e6, 12, 2)) == pytest.approx(248e6, rel=1e-6)


def test_gradients_take_their_share_of_the_backward() -> None:
    assert ready_by_sizes([1, 3], 8.0).seconds == (2.0, 8.0)


def test_a_scaled_job_has_its_gradients_as_far_into_the_backward() -> None:
    job = Job((1, 1), Readiness((1.0, 3.0), 4.0, "by hand"), 2.0, 1.0)
    scaled = job.scaled(8.0)
    assert (scaled.readiness.seconds, scaled.readiness.source) == ((2.0, 6.0), "by hand, scaled")
    assert (job.compute_seconds, scaled.compute_seconds) == (7.0, 11.0)


def test_a_file_may_say_when_gradients_are_ready(tmp_path: Path) -> None:
    path = tmp_path / "sizes.json"
    path.write_text("[4, 12]")
    assert load(path, 1.0, 8.0, 0.0) == Job((4, 12), Readiness((2.0, 8.0), 8.0, "by the sizes of gradients"), 1.0)
    path.write_text('{"nbytes": [4, 12], "ready_ms": [20, 10]}')
    assert load(path, 1.0, 8.0, 0.0).readiness == Readiness((0.01, 0.02), 8.0, "from sizes.json")
    assert load(path, 1.0, 8.0, 0.0).nbytes == (12, 4)


@pytest.mark.parametrize("text", ["", "{}", "[]", "[0]", "[-1, 3]", '["x"]', '{"nbytes": [1, 2], "ready_ms": [1]}'])
def test_a_file_that_has_no_sizes_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "sizes.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"sizes.json must have a list of each gradient's bytes"):
        load(path, 1.0, 1.0, 0.0)


def test_a_gradient_behind_the_backward_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "sizes.json"
    path.write_text('{"nbytes": [4], "ready_ms": [20]}')
    with pytest.raises(ValueError, match="has a gradient at 20 ms, behind the end of the backward"):
        load(path, 1.0, 0.01, 0.0)


SCRIPT = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.unused = nn.Linear(6, 5), nn.Linear(5, 2), nn.Linear(3, 3)

    def forward(self, x):
        return self.second(self.first(x).tanh())

def net():
    return Net(), nn.MSELoss(), [(torch.ones(3, 6), torch.ones(3, 2))]

def frozen():
    return nn.Linear(2, 2).requires_grad_(False), [torch.ones(2)]
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "a_script_to_simulate.py"
    path.write_text(SCRIPT)
    monkeypatch.syspath_prepend(str(tmp_path))
    return path


def test_a_function_is_measured_from_the_last_layer_to_the_first(script: Path) -> None:
    job = measured.measure(f"{script}:net", steps=3)
    assert sorted(job.nbytes[:2]) == [8, 40] and sorted(job.nbytes[2:]) == [20, 120], "the unused layer is left out"
    assert job.readiness.seconds == tuple(sorted(job.readiness.seconds))
    assert 0 < job.readiness.seconds[0] <= job.readiness.seconds[-1] <= job.readiness.backward_seconds
    assert job.forward_seconds > 0 and job.optimizer_seconds > 0


def test_a_function_with_nothing_to_train_is_refused(script: Path) -> None:
    with pytest.raises(ValueError, match="nothing to train"):
        measured.measure(f"{script}:frozen", steps=1)
