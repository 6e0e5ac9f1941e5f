"""What forward and loss read and keep in Python, whole steps against loops without a compiler: followed, or refused."""

import copy
import functools
import random
import types
import warnings
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from plain_steps import batch, plain_step, square
from torch import Tensor, nn

from compiled_ddp import compile_step

Loss = Callable[..., Tensor]
FACTOR = {"of": 1.0, "static": 1.0}  # globals of forward's
STEPS = 4

pytestmark = pytest.mark.usefixtures("alone")


def step_of(model: nn.Module, loss: Loss = square) -> Callable[..., Tensor]:
    return compile_step(model, torch.optim.SGD(model.parameters(), lr=0.1), loss, backend="aot_eager")


def losses(
    make: Callable[[], nn.Module], change: Callable[[nn.Module], object], loss: Loss, *, is_compiled: bool
) -> tuple[list[float], int]:
    """Those of some steps, with a change before the third; and how many graphs there are."""
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    compiled = compile_step(model, optimizer, loss, backend="aot_eager") if is_compiled else None
    step = compiled or plain_step(model, optimizer, loss)
    found = []
    for number in range(STEPS):
        if number == 2:
            change(model)
        found.append(step(batch(number)).item())
    return found, 0 if compiled is None else sum(known.graphs for every in compiled._known.values() for known in every)


# ---- what is read ----------------------------------------------------------------------------------------------------


class Inner(nn.Module):
    """Called by a method of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.settings = {"t": 1.0}

    def scale(self) -> float:
        return self.settings["t"]


class Base(nn.Module):
    """Reads what the class has, and what an object has that is no module."""

    of_class: ClassVar[dict[str, float]] = {"t": 1.0}

    def __init__(self) -> None:
        super().__init__()
        self.beside = {"t": 1.0}

    def forward(self, x: Tensor) -> Tensor:
        return x * self.beside["t"] * self.of_class["t"]

    @staticmethod
    def factor() -> float:
        return FACTOR["static"]


class Reads(Base):
    """With a number in each place where a forward may read one."""

    by_class = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.activation, self.tensor = nn.Linear(4, 2), torch.sin, torch.tensor(1.0)
        self.settings, self.sizes, self.pair = {"t": 1.0}, [1.0], (1.0, 1.0)
        self.config, self.inner = types.SimpleNamespace(t=1.0, inner=types.SimpleNamespace(t=1.0)), Inner()

    def _scale(self) -> float:
        return self.config.inner.t * self.by_class * self.inner.scale()

    def forward(self, x: Tensor) -> Tensor:
        numbers = self.settings["t"] * self.sizes[0] * self.pair[0] * self.config.t * self._scale() * FACTOR["of"]
        return super().forward(self.activation(self.layer(x)) * self.tensor * numbers * self.factor())


class Focal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gamma = 1.0

    def forward(self, y: Tensor) -> Tensor:
        return y.abs().pow(self.gamma).mean()


class LossObject:
    """Called as a function, and with a criterion of its own."""

    def __init__(self) -> None:
        self.weight, self.criterion, self.smoothed = 1.0, Focal(), nn.CrossEntropyLoss()

    def __call__(self, model: nn.Module, x: Tensor) -> Tensor:
        y = model(x)
        return self.criterion(y) * self.weight + self.smoothed(y, torch.tensor([0, 1, 0]))


def _replace_forward(model: Any) -> None:
    before = model.layer.forward
    model.layer.forward = lambda x: 3 * before(x)


READ: dict[str, Callable[[Any], object]] = {
    "a function": lambda model: setattr(model, "activation", torch.cos),
    "a tensor": lambda model: setattr(model, "tensor", torch.tensor(3.0)),
    "in a dict": lambda model: model.settings.update(t=3.0),
    "in a list": lambda model: model.sizes.__setitem__(0, 3.0),
    "in a tuple": lambda model: setattr(model, "pair", (3.0, 1.0)),
    "of a config": lambda model: setattr(model.config, "t", 3.0),
    "of a config's part, by a method": lambda model: setattr(model.config.inner, "t", 3.0),
    "of a part, by a method": lambda model: model.inner.settings.update(t=3.0),
    "of the class": lambda model: setattr(type(model), "by_class", 3.0),
    "a global": lambda model: FACTOR.update(of=3.0),
    "a global, by a static method": lambda model: FACTOR.update(static=3.0),
    "in a dict, by what is overridden": lambda model: model.beside.update(t=3.0),
    "in a dict of the class": lambda model: Base.of_class.update(t=3.0),
    "the forward of a part": _replace_forward,
    "a hook": lambda model: model.layer.register_forward_hook(lambda module, args, out: 3 * out),
}


@pytest.mark.parametrize("what", READ)
def test_what_forward_reads_is_followed(what: str) -> None:
    found = []
    for is_compiled in (False, True):
        found.append(losses(Reads, READ[what], square, is_compiled=is_compiled))
        Reads.by_class = Base.of_class["t"] = 1.0
        FACTOR.update(of=1.0, static=1.0)
    (expected, _), (ours, graphs) = found
    assert ours == pytest.approx(expected, rel=1e-4) and graphs == 2


@pytest.mark.parametrize(
    "change",
    [
        lambda loss: setattr(loss, "weight", 3.0),
        lambda loss: setattr(loss.criterion, "gamma", 3.0),
        lambda loss: setattr(loss.smoothed, "label_smoothing", 0.5),
    ],
    ids=["its own", "a module's", "torch's"],
)
def test_what_a_loss_object_reads_is_followed(change: Callable[[LossObject], object]) -> None:
    found = []
    for is_compiled in (False, True):
        loss = LossObject()
        found.append(losses(lambda: nn.Linear(4, 2), lambda _, loss=loss: change(loss), loss, is_compiled=is_compiled))
    (expected, _), (ours, graphs) = found
    assert ours == pytest.approx(expected, rel=1e-4) and graphs == 2


def test_settings_of_torchs_own_parts_are_followed() -> None:
    def change(model: Any) -> None:
        model[1].output_size = 2
        model[2].negative_slope = 0.5

    expected, (ours, graphs) = (
        losses(
            lambda: nn.Sequential(nn.Linear(4, 4), nn.AdaptiveAvgPool1d((1,)), nn.LeakyReLU()),
            change,
            square,
            is_compiled=each,
        )
        for each in (False, True)
    )
    assert ours == pytest.approx(expected[0], rel=1e-4) and graphs == 2


def test_what_a_forward_sets_first_is_no_setting() -> None:
    """An evaluation in between leaves another tensor there; that is no reason to compile once more."""

    class Expert(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.aux = nn.Linear(4, 2), None

        def forward(self, x: Tensor) -> Tensor:
            y = self.layer(x)
            self.aux = y.abs().mean()
            return y

    class Parent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.expert = Expert()

        def forward(self, x: Tensor) -> Tensor:
            return self.expert(x) + self.expert.aux

    def evaluate(model: nn.Module) -> None:
        with torch.no_grad():
            model(batch(9))

    (expected, _), (ours, graphs) = (losses(Parent, evaluate, square, is_compiled=each) for each in (False, True))
    assert ours == pytest.approx(expected, rel=1e-4) and graphs == 1


def test_attributes_are_compared_by_their_names() -> None:
    class Shifted(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * getattr(self, "scale", 1.0) + getattr(self, "shift", 0.0)

    def make() -> nn.Module:
        model = Shifted(4, 2)
        model.scale = 3.0
        return model

    def change(model: Any) -> None:
        del model.scale
        model.shift = 3.0

    expected, ours = (losses(make, change, square, is_compiled=each)[0] for each in (False, True))
    assert ours == pytest.approx(expected, rel=1e-4)


# ---- what is kept ----------------------------------------------------------------------------------------------------


class Keeps(nn.Module):
    """What `how` does with the attribute `kept` in each forward."""

    def __init__(self, begin: object, how: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.kept, self._how = nn.Linear(4, 2), begin, how

    def forward(self, x: Tensor) -> Tensor:
        return self._how(self, self.layer(x))


def _recurrent(model: Any, y: Tensor) -> Tensor:
    y = y if model.kept is None else y + model.kept
    model.kept = y.detach().mean(0)
    return y


def _cached(model: Any, y: Tensor) -> Tensor:
    if model.kept is None:
        model.kept = torch.arange(2.0)
    return y + model.kept


def _average(model: Any, y: Tensor) -> Tensor:
    model.kept = 0.9 * model.kept + 0.1 * y.detach().mean(0)
    return y - model.kept


def _of_two(model: Any, y: Tensor) -> Tensor:
    y = y if model.kept is None else y + model.kept[0][0]
    model.kept = [(y.detach().mean(0), y.detach().sum(0))]
    return y


def _if_there_is_one(model: Any, y: Tensor) -> Tensor:
    y = y + getattr(model, "other", 0.0)
    model.other = y.detach().mean(0)
    return y


KEPT: dict[str, tuple[object, Callable[[Any, Tensor], Tensor], str]] = {
    "state": (None, _recurrent, "kept"),
    "cache": (None, _cached, "kept"),
    "mean": (torch.zeros(2), _average, "kept"),
    "in a list of tuples": (None, _of_two, "kept"),
    "by getattr": (None, _if_there_is_one, "other"),
}


@pytest.mark.parametrize("what", KEPT)
def test_a_tensor_that_forward_keeps_is_refused_and_the_model_is_as_it_was(what: str) -> None:
    begin, how, name = KEPT[what]
    model = Keeps(begin, how)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    step = step_of(model)
    with pytest.raises(
        RuntimeError, match=rf"forward of a Keeps keeps a tensor in '{name}'.*register_buffer\('{name}'"
    ):
        step(batch(0))
    assert model.kept is begin and not hasattr(model, "other")
    torch.testing.assert_close(dict(model.state_dict()), before)
    assert type(model(batch(0)).detach()) is Tensor


def test_what_forward_sets_before_it_is_read_is_right_and_leaves_nothing_of_the_trace() -> None:
    """As a loss of experts, which the loss of the step adds."""

    def how(model: Any, y: Tensor) -> Tensor:
        model.kept = y.abs().mean()
        return y

    def loss(model: Any, x: Tensor) -> Tensor:
        return square(model, x) + model.kept

    expected, ours = (
        losses(lambda: Keeps(None, how), lambda model: None, loss, is_compiled=each)[0] for each in (False, True)
    )
    assert ours == pytest.approx(expected, rel=1e-4)
    model = Keeps(None, how)
    step_of(model, loss)(batch(0))
    assert model.kept is None


def test_a_tensor_that_the_loss_keeps_in_a_variable_is_refused() -> None:
    hidden: Tensor | None = None

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        nonlocal hidden
        y = model(x) if hidden is None else model(x) + hidden
        hidden = y.detach().mean(0)
        return y.pow(2).mean()

    model = nn.Linear(4, 2)
    step = step_of(model, loss)
    with pytest.raises(RuntimeError, match="leaves a tensor in a global, or a variable of a function around it"):
        step(batch(0))


def _accumulated(model: Any, y: Tensor) -> Tensor:
    for each in (y.abs().mean(), y.pow(2).mean()):
        model.kept = each if model.kept is None else model.kept + each
    return y


def _reset_and_added(model: Any, x: Tensor) -> Tensor:
    model.kept = None
    return square(model, x) + model.kept


def _refilled(model: Any, y: Tensor) -> Tensor:
    model.kept.clear()
    model.kept.append(y.abs().mean())
    return y


@pytest.mark.parametrize(
    ("begin", "how", "loss"),
    [
        (None, _accumulated, _reset_and_added),
        ([], _refilled, lambda model, x: square(model, x) + sum(model.kept)),
    ],
    ids=["reset to what it was", "a list that is cleared"],
)
def test_what_is_begun_anew_in_each_call_is_right(begin: Any, how: Callable[..., Tensor], loss: Loss) -> None:
    model: Any = None

    def make() -> nn.Module:
        nonlocal model
        model = Keeps(copy.copy(begin), how)
        return model

    expected, ours = (losses(make, lambda model: None, loss, is_compiled=each)[0] for each in (False, True))
    assert ours == pytest.approx(expected, rel=1e-4) and model.kept == begin


def test_a_forward_that_raises_leaves_nothing_of_the_trace() -> None:
    def how(model: Any, y: Tensor) -> Tensor:
        model.kept = y.abs().mean()
        raise KeyError("of the user's")

    model = Keeps(None, how)
    step = step_of(model)
    with pytest.raises(KeyError, match="of the user's"):
        step(batch(0))
    assert model.kept is None


@pytest.mark.parametrize("begin", [0, {"n": 0}], ids=["a number", "in a dict"])
def test_a_number_that_forward_changes_is_told_of(begin: Any) -> None:
    def how(model: Any, y: Tensor) -> Tensor:
        if isinstance(model.kept, dict):
            model.kept["n"] += 1
        else:
            model.kept += 1
        return y

    model = Keeps(begin, how)
    step = step_of(model)
    with pytest.warns(UserWarning, match="forward of a Keeps reads 'kept' and changes it"):
        step(batch(0))


@functools.lru_cache
def mask(rows: int) -> Tensor:
    return torch.ones(rows, 2).tril()


class Masks(Keeps):
    @functools.lru_cache  # noqa: B019
    def mask(self, rows: int) -> Tensor:
        return torch.ones(rows, 2).tril()

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return y * mask(len(y)) * self.mask(len(y))


def test_cached_functions_remember_no_tensors_of_a_trace() -> None:
    mask.cache_clear()
    model = Masks(None, lambda model, y: y)
    step = step_of(model)
    assert all(type(step(batch(0, rows)).detach()) is Tensor for rows in (3, 2, 3))
    assert all(type(each) is Tensor for rows in (2, 3) for each in (mask(rows), model.mask(rows)))


@pytest.mark.parametrize("draw", [random.random, lambda: float(np.random.beta(1.0, 1.0))], ids=["random", "numpy"])
def test_draws_of_python_are_refused(draw: Callable[[], float]) -> None:
    model = nn.Linear(4, 2)
    step = step_of(model, lambda m, x: square(m, x) * draw())
    with pytest.raises(RuntimeError, match=r"draws numbers from `random` or `numpy.random`.*torch.rand"):
        step(batch(0))


# ---- buffers, batches, losses ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("of", [torch.zeros(3), torch.zeros(2, dtype=torch.int64)], ids=["shape", "dtype"])
def test_a_buffer_that_becomes_another_is_refused_by_name(of: Tensor) -> None:
    class Replaces(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 2)
            self.register_buffer("seen", of)

        def forward(self, x: Tensor) -> Tensor:
            y = self.layer(x)
            self.seen = y.detach().mean(0)
            return y

    model = Replaces()
    step = step_of(model)
    with pytest.raises(RuntimeError, match="forward of Replaces replaces the buffer seen, of shape"):
        step(batch(0))


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.inductor)])
def test_a_batch_may_be_a_lazy_negative(backend: str) -> None:
    z = torch.randn(3, 4, dtype=torch.complex64, generator=torch.Generator().manual_seed(0))
    assert z.conj().imag.is_neg()
    model = nn.Linear(4, 2)
    step = compile_step(model, torch.optim.SGD(model.parameters(), lr=0.0), square, backend=backend)
    for x in (z.imag, z.conj().imag, z.imag.contiguous()):
        torch.testing.assert_close(step(x), square(model, x).detach())


def _on_the_cpu(model: nn.Module, x: Tensor) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        return square(model, x)


LOSSES: dict[str, tuple[Loss | Any, str]] = {
    "a pair": (lambda model, x: (square(model, x), x), "has_aux=True"),
    "a dict": (lambda model, x: {"loss": square(model, x)}, r"\.loss"),
    "none": (lambda model, x: None, "returns None"),
    "many numbers": (lambda model, x: model(x), r"of shape \(3, 2\).*mean\(\)"),
    "backward": (lambda model, x: square(model, x).backward(), "without calling backward"),
    "saved tensors": (_on_the_cpu, "save_on_cpu"),
    "autograd.grad": (lambda model, x: torch.autograd.grad(model(x.requires_grad_()).sum(), x)[0].sum(), "torch.func"),
}


@pytest.mark.parametrize("what", LOSSES)
def test_what_is_no_loss_is_refused_with_what_to_do(what: str) -> None:
    loss, remedy = LOSSES[what]
    model = nn.Linear(4, 2)
    step = step_of(model, loss)
    with pytest.raises((RuntimeError, TypeError, ValueError), match=remedy):
        step(batch(0))


def test_a_loss_may_be_a_tensor_of_one_element() -> None:
    expected, ours = (
        losses(lambda: nn.Linear(4, 2), lambda model: None, lambda m, x: square(m, x).reshape(1), is_compiled=each)[0]
        for each in (False, True)
    )
    assert ours == pytest.approx(expected, rel=1e-4)


def test_a_part_that_is_compiled_by_itself_is_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(4, 2), torch.compile(nn.Linear(2, 2), backend="aot_eager"))
    with pytest.raises(TypeError, match="1 is compiled by itself"):
        compile_step(model, torch.optim.SGD(model.parameters(), lr=0.1), square)


def test_parameters_that_the_optimizer_has_not_are_told_of() -> None:
    model = nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 2))
    with pytest.warns(UserWarning, match=r"1\.weight, 1\.bias of the model require gradients"):
        compile_step(model, torch.optim.SGD(model[0].parameters(), lr=0.1), square, backend="aot_eager")
    model[1].requires_grad_(False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compile_step(model, torch.optim.SGD(model[0].parameters(), lr=0.1), square, backend="aot_eager")


def test_inference_mode_around_some_steps_changes_nothing() -> None:
    found = []
    for modes in ([False] * STEPS, [False, True, True, False]):
        torch.manual_seed(0)
        model = nn.Linear(4, 2)
        step = step_of(model)
        for number, mode in enumerate(modes):
            with torch.inference_mode(mode):
                found.append(step(batch(number)).item())
    assert found[:STEPS] == found[STEPS:]
