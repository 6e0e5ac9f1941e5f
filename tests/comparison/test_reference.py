"""The gradients that variants are compared with: a model alone, run again, has the same, unless it draws numbers."""

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from compiled_ddp.tools.comparison import contestant
from compiled_ddp.tools.comparison.measure import Contender
from compiled_ddp.tools.comparison.ranks import Rank, gloo_group
from compiled_ddp.tools.comparison.reference import Reference
from compiled_ddp.tools.comparison.users_task import UsersWorkload
from compiled_ddp.tools.comparison.variants import WrapperOptions, make_variants
from ranks import RankPool

SCRIPT = """
import random
import numpy, torch
from torch import nn

DRAWN = [random.random(), float(numpy.random.rand()), float(torch.rand(()))]

def steady(rank):
    model = nn.Linear(64, 4)
    model.register_buffer("drawn", torch.tensor(DRAWN))
    return model, nn.CrossEntropyLoss(), [(torch.randn(8, 64), torch.randint(4, (8,)))]

def drawing(rank):
    model, *others = steady(rank)
    return nn.Sequential(model, nn.Dropout(0.5)), *others
"""


class Running(nn.Module):
    """Changes its batch, and a buffer that its forward reads."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 2)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return self.linear(x.sub_(self.mean).div_(2.0)).square().mean()


def _contestant(rank: int, folder: str, function: str) -> contestant.Contestant:
    place = Rank(rank, 2, torch.device("cpu"), gloo_group())
    target, reference = f"{folder}/script.py:{function}", f"{folder}/reference-{rank}.pt"
    options = WrapperOptions()
    return contestant.Contestant(
        contestant.Instructions(target, "label", "torch DDP", options, "cpu", "gloo", 0, 60.0, reference), place
    )


def _of_the_model_alone(rank: int) -> float:
    def made() -> UsersWorkload:
        x = 3.0 + torch.randn(8, 4, generator=torch.Generator().manual_seed(rank))
        return UsersWorkload("running", lambda: (Running(), [x]), seed=0)

    place = Rank(rank, 2, torch.device("cpu"), gloo_group())
    reference = Reference.compute(made(), place)
    alone = make_variants(WrapperOptions())["no communication, eager"]
    return Contender(alone, made(), place).warm_up(reference, 5)


def test_a_model_that_changes_its_batch_and_its_buffers_has_the_same_gradients_again(ranks2: RankPool) -> None:
    assert max(ranks2.run(_of_the_model_alone)) < 1e-6


def _run_again(rank: int, folder: str) -> list[float]:
    made = [_contestant(rank, folder, name).answer("make reference", None) for name in ("steady", "drawing")]
    return [answer["own_difference"] for answer in made]


@pytest.fixture
def folder(tmp_path: Path) -> str:
    (tmp_path / "script.py").write_text(SCRIPT)
    return str(tmp_path)


def test_the_reference_tells_whether_the_forward_draws_random_numbers(ranks2: RankPool, folder: str) -> None:
    for steady, drawing in ranks2.run(_run_again, folder):
        assert steady < 1e-6 and drawing > 0.1


def _alive_at_the_peak(rank: int, folder: str) -> tuple[bool, list[float]]:
    made: list[weakref.ref[Any]] = []
    of_init = Reference.__init__

    def noted(reference: Reference, *args: Any) -> None:
        of_init(reference, *args)
        made.append(weakref.ref(reference))

    alive: list[bool] = []

    def peak(contender: Contender, **_: int) -> int:
        gc.collect()
        alive.append(any(reference() is not None for reference in made))
        return 1

    one = _contestant(rank, folder, "steady")
    one.answer("make reference", None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Reference, "__init__", noted)
        patch.setattr(contestant, "peak_memory", peak)
        one.answer("probe", 1)
    return alive[0], [one._call_function()._training.model.drawn.tolist() for _ in range(2)]


def test_no_reference_is_held_while_a_peak_is_read_and_what_a_script_draws_is_the_same_each_time(
    ranks2: RankPool, folder: str
) -> None:
    for alive, (first, second) in ranks2.run(_alive_at_the_peak, folder):
        assert not alive and first == second
