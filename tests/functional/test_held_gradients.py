"""What changes while gradients of an update's first micro-batches are held: each sum stays its parameter's."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from plain_steps import batch, plain_step, square
from torch import Tensor, nn

from compiled_ddp import compile_step

pytestmark = pytest.mark.usefixtures("alone")


class Net(nn.Module):
    """Of which the second micro-batch leaves out a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head, self.other = nn.Linear(4, 4), nn.Linear(4, 1), nn.Linear(4, 1)
        self.skips = False

    def forward(self, x: Tensor) -> Tensor:
        hidden = x if self.skips else self.first(x)
        return self.head(hidden) + self.other(hidden)  # type: ignore[no-any-return]


def _another_head(model: Any, optimizer: torch.optim.Optimizer, outputs: int) -> None:
    torch.manual_seed(1)
    before, model.head = [*model.head.parameters()], nn.Linear(4, outputs)
    instead = dict(zip(map(id, before), model.head.parameters(), strict=True))
    group = optimizer.param_groups[0]
    group["params"] = [instead.get(id(each), each) for each in group["params"]]


def _skips(model: Any, _: object) -> None:
    model.skips = True
    model.other.requires_grad_(not model.other.weight.requires_grad)


# What is done before a call, by its number; every second call updates.
CHANGES: dict[str, tuple[int, Callable[[Any, torch.optim.Optimizer], object]]] = {
    "another parameter is trained again": (1, _skips),
    "another head": (1, lambda model, optimizer: _another_head(model, optimizer, 1)),
    "a head of another size": (2, lambda model, optimizer: _another_head(model, optimizer, 3)),
    "another dtype": (2, lambda model, _: model.double()),
    "another dtype within": (1, lambda model, _: model.double()),
    "frozen behind an update": (2, lambda model, _: model.first.requires_grad_(False)),
}


@pytest.mark.parametrize("pipelines", [False, True])
@pytest.mark.parametrize("what", CHANGES)
def test_gradients_that_are_held_stay_those_of_their_parameters(what: str, pipelines: bool) -> None:
    when, change = CHANGES[what]
    torch.manual_seed(0)
    model = Net()
    model.other.requires_grad_("trained again" not in what)
    loop = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, loop)]
    options = {"accumulate": 2, "backend": "aot_eager", "pipeline_updates": pipelines}
    step: Any = compile_step(model, optimizers[0], square, **options)  # type: ignore[arg-type]
    plain = plain_step(loop, optimizers[1], square, accumulate=2)
    for number in range(6):
        if number == when:
            change(model, optimizers[0]), change(loop, optimizers[1])
        given = batch(number).to(loop.first.weight.dtype)
        torch.testing.assert_close(step(given), plain(given))
    for name, value in loop.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value)


def test_one_that_is_frozen_within_an_update_is_an_error() -> None:
    """As what it has been given would be lost; the next call begins an update."""
    model = Net()
    step = compile_step(model, torch.optim.SGD(model.parameters(), lr=0.1), square, accumulate=2, backend="aot_eager")
    step(batch(0))
    model.first.requires_grad_(False)
    with pytest.raises(RuntimeError, match=r"first.weight was frozen within an update of 2 micro-batches, of which 1"):
        step(batch(1))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    step(batch(2))
    assert torch.equal(model.head.weight, before["head.weight"])
    step(batch(3))
    assert not torch.equal(model.head.weight, before["head.weight"])
    assert torch.equal(model.first.weight, before["first.weight"])
