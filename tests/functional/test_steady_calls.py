"""Calls of compiled steps that are as the one before ask nothing anew; whatever has changed is asked in full."""

import array
import collections
import functools
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from plain_steps import batch, plain_step
from torch import Tensor, nn

import compiled_ddp.functional as ddp
from compiled_ddp import compile_step
from compiled_ddp.functional.compiled import CompiledStep
from compiled_ddp.functional.reached import MOST_ITEMS, Reached

pytestmark = pytest.mark.usefixtures("alone")


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Grows with each call that asks in full which graph it runs."""
    calls: list[object] = []
    choose = CompiledStep._choose

    def counted(self: CompiledStep, *args: Any) -> Any:
        calls.append(self)
        return choose(self, *args)

    monkeypatch.setattr(CompiledStep, "_choose", counted)
    return calls


FACTOR = 1.0


class Scaled(nn.Linear):
    by_class = 1.0

    def __init__(self) -> None:
        super().__init__(4, 2)
        self.factor, self.factors, self.named = 1.0, [1.0, 1.0], {"of": 1.0}
        self.beside, self.latest = types.SimpleNamespace(factor=1.0), collections.deque([1.0], maxlen=1)
        self.single = np.array(1.0)
        self.numbers, self.of_python, self.many = np.ones(2), array.array("d", [1.0]), [1.0] * 1000

    def forward(self, x: Tensor) -> Tensor:
        by_all = self.factor * self.by_class * self.factors[0] * self.named["of"] * self.beside.factor * FACTOR
        by_numbers = float(self.numbers[0]) * float(self.single) * self.of_python[0] * torch.tensor(self.many).mean()
        return super().forward(x) * by_all * by_numbers * self.latest[0]


class Doubled(Scaled):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def loss_in_a_cell() -> tuple[Callable[..., Tensor], types.CellType]:
    weight = 1.0

    def loss(model: nn.Module, x: Tensor, *, power: int = 2) -> Tensor:
        return weight * model(x).pow(power).mean()

    assert loss.__closure__ is not None
    return loss, loss.__closure__[0]


Change = Callable[[Scaled, Any, types.CellType], object]


CHANGES: dict[str, Change] = {
    "an attribute": lambda model, *_: setattr(model, "factor", 2.0),
    "an attribute of what is no module": lambda model, *_: setattr(model.beside, "factor", 2.0),
    "an item of a list": lambda model, *_: model.factors.__setitem__(0, 2.0),
    "a longer list": lambda model, *_: model.factors.append(2.0),
    "an item of a long list": lambda model, *_: model.many.__setitem__(7, 1001.0),
    "a deque": lambda model, *_: model.latest.append(2.0),
    "a number of an array of numpy's": lambda model, *_: model.numbers.__setitem__(0, 2.0),
    "the number of an array without dimensions": lambda model, *_: model.single.__setitem__((), 2.0),
    "a number of an array of Python's": lambda model, *_: model.of_python.__setitem__(0, 2.0),
    "an item of a dict": lambda model, *_: model.named.update(of=2.0),
    "a list in place of another": lambda model, *_: setattr(model, "factors", [2.0, 1.0]),
    "a list that is too long to be looked into": lambda model, *_: model.factors.extend([1.0] * MOST_ITEMS),
    "the class": lambda model, *_: setattr(model, "__class__", Doubled),
    "a forward of its own": lambda model, *_: setattr(
        model, "forward", lambda x: nn.functional.linear(x, model.weight * 2, model.bias)
    ),
    "a hook": lambda model, *_: model.register_forward_hook(lambda *_: None),
    "a cell": lambda _model, _loss, cell: setattr(cell, "cell_contents", 2.0),
    "a default": lambda _model, loss, _cell: setattr(loss, "__kwdefaults__", {"power": 4}),
    "a default in place": lambda _model, loss, _cell: loss.__kwdefaults__.update(power=4),
    "evaluation": lambda model, *_: model.eval(),
}


def step_of(model: nn.Module, optimizer: Any, loss: Any, *, is_compiled: bool) -> Callable[..., Tensor]:
    if not is_compiled:
        return plain_step(model, optimizer, loss)
    return compile_step(model, optimizer, loss, backend="aot_eager")


def steps(change: Change | None, *, is_compiled: bool) -> list[float]:
    """Losses of six steps, with a change before the fifth."""
    torch.manual_seed(0)
    model, (loss, cell) = Scaled(), loss_in_a_cell()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = step_of(model, optimizer, loss, is_compiled=is_compiled)
    found = []
    for number in range(6):
        if change is not None and number == 4:
            change(model, loss, cell)
        found.append(step(batch(number)).item())
    return found


def test_ordinary_calls_ask_nothing_anew(chosen: list[object]) -> None:
    steps(None, is_compiled=True)
    assert len(chosen) == 2  # the first, which compiles, and the one behind it


@pytest.mark.parametrize("in_inference_mode", [False, True])  # which is another ambience
def test_nor_do_those_of_a_scheduler(chosen: list[object], in_inference_mode: bool) -> None:
    losses = []
    for is_compiled in (True, False):
        torch.manual_seed(0)
        model, (loss, _) = Scaled(), loss_in_a_cell()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
        step = step_of(model, optimizer, loss, is_compiled=is_compiled)
        for number in range(5):
            with torch.inference_mode(is_compiled and in_inference_mode and number in (0, 3)):
                losses.append(step(batch(number)).item())
            scheduler.step()
    assert losses[:5] == pytest.approx(losses[5:], rel=1e-6)
    assert len(chosen) == 2 or in_inference_mode


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_changes_is_asked_for_and_followed(chosen: list[object], change: Change) -> None:
    assert steps(change, is_compiled=True) == pytest.approx(steps(change, is_compiled=False), rel=1e-6)
    assert len(chosen) >= 3


def test_a_class_a_global_and_hooks_of_all_modules_are_asked_for(
    chosen: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Scaled()
    step = compile_step(model, torch.optim.SGD(model.parameters(), lr=0.0), loss_in_a_cell()[0], backend="aot_eager")
    first = step(batch(0)).item()
    step(batch(0))
    known = len(chosen)
    monkeypatch.setattr(Scaled, "by_class", 2.0)
    assert step(batch(0)).item() == pytest.approx(4 * first)
    monkeypatch.setitem(globals(), "FACTOR", 2.0)
    assert step(batch(0)).item() == pytest.approx(16 * first)
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, out: out * 2)
    try:
        assert step(batch(0)).item() == pytest.approx(64 * first)
    finally:
        handle.remove()
    assert step(batch(0)).item() == pytest.approx(16 * first)
    with torch.autocast("cpu", torch.bfloat16):
        assert step(batch(0)).item() == pytest.approx(16 * first, rel=0.05)
    assert len(chosen) >= known + 5


def test_batches_of_two_shapes_in_turns_and_one_batch_twice(chosen: list[object]) -> None:
    model = Scaled()
    step = compile_step(
        model,
        torch.optim.SGD(model.parameters(), lr=0.0),
        lambda model, x, y: (model(x) - model(y)).pow(2).mean(),
        backend="aot_eager",
    )
    apart = [(batch(0), batch(1)), (batch(2, rows=1), batch(3, rows=1))]
    for _ in range(2):
        assert [step(*pair).item() > 0 for pair in apart] == [True, True]
    same = batch(0)
    assert step(same, same).item() == 0  # which share memory, and have another graph
    assert step(*apart[0]).item() > 0


def test_generators_are_asked_for_where_they_are_others(chosen: list[object]) -> None:
    @ddp.compile(backend="aot_eager")
    def step(x: Tensor, first: torch.Generator, second: torch.Generator) -> Tensor:
        return x + torch.rand(3, generator=first) - torch.rand(3, generator=second)

    def made(*seeds: int) -> list[torch.Generator]:
        return [torch.Generator().manual_seed(seed) for seed in seeds]

    of_one, of_two = made(1), made(1, 2)
    for _ in range(3):
        step(torch.zeros(3), *of_two)
    assert len(chosen) == 2
    expected = torch.rand(3, generator=of_one[0]) - torch.rand(3, generator=of_one[0])
    assert torch.equal(step(torch.zeros(3), *made(1) * 2), expected)  # one generator, which is drawn from twice
    assert len(chosen) == 3


def test_everything_that_is_read_is_remembered() -> None:
    class Outer:
        def __init__(self) -> None:
            self.factor = 1.0

        def __call__(self, x: Tensor) -> Tensor:
            return x * self.factor

    def inner(x: Tensor) -> Tensor:
        return x

    @functools.wraps(inner)
    def wrapper(x: Tensor) -> Tensor:
        return inner(x)

    outer = Outer()
    function: Callable[..., Any] = lambda x: outer(wrapper(x))  # noqa: E731
    changes: list[Callable[[], object]] = [
        lambda: setattr(outer, "factor", 2.0),
        lambda: setattr(outer, "__dict__", {"factor": 1.0}),
        lambda: delattr(outer, "factor"),
        lambda: setattr(wrapper, "__wrapped__", outer),
        lambda: setattr(Outer, "__call__", lambda self, x: x),
        lambda: setattr(inner, "__code__", (lambda x: 2 * x).__code__),
    ]
    for change in changes:
        by = Reached(function)
        assert len([*by]) > 3
        assert by.reads.are_as_they_were()
        change()
        assert not by.reads.are_as_they_were()
