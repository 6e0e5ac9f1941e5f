"""What a loss comes to otherwise than by its model: parameters elsewhere, memory in common, iterators."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from plain_steps import batch, plain_step
from torch import Tensor, nn

from compiled_ddp import compile_step

pytestmark = pytest.mark.usefixtures("alone")


Make = Callable[[], tuple[nn.Module, torch.optim.Optimizer, Callable[..., Tensor]]]


def trained(make: Make, *, is_compiled: bool, **options: Any) -> list[Tensor]:
    """Losses of four steps, and parameters and buffers behind them."""
    torch.manual_seed(0)
    model, optimizer, loss = make()
    if is_compiled:
        step: Callable[..., Tensor] = compile_step(model, optimizer, loss, **{"backend": "aot_eager", **options})
    else:
        step = plain_step(model, optimizer, loss, accumulate=options.get("accumulate", 1))
    found = [step(batch(number)) for number in range(4)]
    return [*found, *(each.detach().clone() for each in (*model.parameters(), *model.buffers()))]


def assert_as_the_loop(make: Make, **options: Any) -> None:
    torch.testing.assert_close(trained(make, is_compiled=True, **options), trained(make, is_compiled=False, **options))


# ---- parameters, however a loss comes to them ------------------------------------------------------------------------


class Held(nn.Sequential):
    """Has its weights, and a buffer, in a list of Python's too."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
        self.register_buffer("seen", torch.zeros(2))
        self.held = [self[0].weight, self[2].weight, self.seen]


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def mean(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).pow(2).mean()


def in_a_list_of_the_loss(model: Held, optimizer: Any) -> Callable[..., Tensor]:
    weights = [each for name, each in model.named_parameters() if "weight" in name]
    return lambda model, x: mean(model, x) + 0.1 * sum(each.abs().sum() for each in weights)


def in_the_optimizers_groups(model: Held, optimizer: Any) -> Callable[..., Tensor]:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        flat = torch.cat([each.flatten() for group in optimizer.param_groups for each in group["params"]])
        return mean(model, x) + 0.1 * flat.pow(2).sum()

    return loss


def in_an_attribute(model: Held, optimizer: Any) -> Callable[..., Tensor]:
    def loss(model: Any, x: Tensor) -> Tensor:
        first, second, seen = model.held
        with torch.no_grad():
            seen += x.mean()
        return mean(model, x) + 0.1 * torch.linalg.norm(first @ first.T) + second.pow(2).sum() * seen.mean()

    return loss


KINDS: list[Callable[..., torch.optim.Optimizer]] = [
    lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
    lambda parameters: torch.optim.RMSprop(parameters, lr=0.1),  # whose update is outside of the graph
]
LOSSES = [in_a_list_of_the_loss, in_the_optimizers_groups, in_an_attribute]


@pytest.mark.parametrize("optimizer_of", KINDS, ids=["inside", "outside"])
@pytest.mark.parametrize("loss_of", LOSSES)
def test_parameters_have_their_gradients_however_a_loss_comes_to_them(loss_of: Any, optimizer_of: Any) -> None:
    def make() -> Any:
        model = Held()
        optimizer = optimizer_of(model.parameters())
        return model, optimizer, loss_of(model, optimizer)

    assert_as_the_loop(make)


def test_so_they_have_in_micro_batches() -> None:
    def make() -> Any:
        model = Held()
        optimizer = sgd(model)
        return model, optimizer, in_a_list_of_the_loss(model, optimizer)

    assert_as_the_loop(make, accumulate=2)


@pytest.mark.parametrize("optimizer_of", KINDS, ids=["inside", "outside"])
def test_a_parameter_in_the_batch_is_refused(optimizer_of: Any) -> None:
    model = nn.Linear(4, 2)
    step = compile_step(
        model, optimizer_of(model.parameters()), lambda model, x, w: mean(model, x) + w.sum(), backend="aot_eager"
    )
    with pytest.raises(ValueError, match=r"params\['weight'\] shares memory with given.batch\[1\]"):
        step(batch(0), model.weight)
    assert step(batch(0), torch.ones(1)).item() > 0


# ---- memory in common ------------------------------------------------------------------------------------------------


class Rotary(nn.Linear):
    """Its buffers are slices of one table, and forward writes into one of them."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        table = torch.arange(8.0)
        self.register_buffer("sine", table[:4])
        self.register_buffer("cosine", table[4:])

    def forward(self, x: Tensor) -> Tensor:
        self.sine.mul_(0.9)
        return super().forward(x) * self.sine + self.cosine


def _flat(model: nn.Module) -> nn.Module:
    """With all parameters in one piece of memory."""
    parameters = [*model.parameters()]
    memory = torch.cat([each.detach().flatten() for each in parameters])
    for each, part in zip(parameters, memory.split([each.numel() for each in parameters]), strict=True):
        each.data = part.view_as(each)
    return model


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("model_of", [Rotary, lambda: _flat(Held())], ids=["buffers", "parameters"])
def test_tensors_that_lie_beside_each_other_in_one_piece_of_memory_are_trained(model_of: Any, backend: Any) -> None:
    def make() -> Any:
        model = model_of()
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), mean

    assert_as_the_loop(make, backend=backend)


def test_buffers_that_overlap_are_refused_by_name() -> None:
    model, table = nn.Linear(4, 2), torch.arange(8.0)
    model.register_buffer("first", table[:5])
    model.register_buffer("second", table[4:])
    step = compile_step(model, sgd(model), mean, backend="aot_eager")
    with pytest.raises(ValueError, match=r"buffers\['first'\] shares memory with written.buffers\['second'\]"):
        step(batch(0))


def test_what_is_no_part_of_the_model_and_is_written_is_refused_with_what_to_do() -> None:
    model, teacher = nn.Linear(4, 2), nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2))

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = teacher(x)
        return (model(x) - wanted).pow(2).mean()

    step = compile_step(model, sgd(model), loss, backend="aot_eager")
    with pytest.raises(RuntimeError, match=r"`wanted = teacher\(x\)`.*put a teacher into eval"):
        step(batch(0))
    teacher.eval()
    assert step(batch(0)).item() > 0


# ---- gradients that are there, numbers that are not equal to themselves, iterators -----------------------------------


@pytest.mark.parametrize("optimizer_of", KINDS, ids=["inside", "outside"])
def test_a_gradient_that_is_there_is_left_there(optimizer_of: Any) -> None:
    model = nn.Linear(4, 2)
    model.weight.grad = kept = torch.ones(2, 4)
    compile_step(model, optimizer_of(model.parameters()), mean, backend="aot_eager")(batch(0))
    assert model.weight.grad is kept
    assert model.bias.grad is None


def test_nan_in_a_batch_is_one_number() -> None:
    model = nn.Linear(4, 2)
    step = compile_step(model, sgd(model), lambda model, x, n: mean(model, x) * n, backend="aot_eager")
    for _ in range(3):
        assert step(batch(0), float("nan")).isnan()
    assert sum(known.graphs for every in step._known.values() for known in every) == 1


@pytest.mark.parametrize("numbers", [lambda: iter([1.0, 2.0]), lambda: (float(n) for n in range(9)), itertools.count])
def test_an_iterator_that_a_loss_advances_is_refused(numbers: Callable[[], Iterator[float]]) -> None:
    model, given = nn.Linear(4, 2), numbers()
    step = compile_step(
        model,
        sgd(model),
        lambda model, x: mean(model, x) * next(given),
        backend="aot_eager",
    )
    with pytest.raises(RuntimeError, match=r"calls next\(\) of a .*: what comes in its first call"):
        step(batch(0))


def _under_way() -> Iterator[tuple[float]]:
    numbers = ((float(n),) for n in range(9))
    next(numbers)  # from here on it stands at the same place each time
    return numbers


@pytest.mark.parametrize("numbers", [lambda: zip([1.0, 2.0], strict=True), _under_way])
def test_of_an_iterator_that_does_not_tell_where_it_is_users_are_warned(numbers: Any) -> None:
    model, given = nn.Linear(4, 2), numbers()
    step = compile_step(
        model,
        sgd(model),
        lambda model, x: mean(model, x) * next(given)[0],
        backend="aot_eager",
    )
    with pytest.warns(UserWarning, match=r"If it does so at all, a compiled step calls next\(\) of a (zip|generator)"):
        step(batch(0))
