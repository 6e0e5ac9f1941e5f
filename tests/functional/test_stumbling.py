"""Errors where people stumble who come from eager code, or from JAX: the line, why, and what to write instead."""

import dataclasses
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from compiled_ddp import functional as ddp
from ranks import RankPool


def loss(weight: Tensor, x: Tensor) -> Tensor:
    return (x @ weight).square().mean()


def _decides(weight: Tensor, x: Tensor) -> Tensor:
    gradient, value = ddp.grad_and_value(loss)(weight, x)
    if value > 1:  # an `if` on what is computed
        gradient = gradient / 2
    return weight - gradient


def _reads(weight: Tensor, x: Tensor) -> Tensor:
    gradient, value = ddp.grad_and_value(loss)(weight, x)
    return weight - gradient * value.item()


def _selects(weight: Tensor, x: Tensor) -> Tensor:
    return weight - ddp.grad(loss)(weight, x[x[:, 0] > 0])


def _asks(rank: int) -> None:
    """The same error on every rank; the next step trains."""
    steps: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "if value > 1:  # an `if` on what is computed": _decides,
        "return weight - gradient * value.item()": _reads,
        "return weight - ddp.grad(loss)(weight, x[x[:, 0] > 0])": _selects,
    }
    weight, x = torch.ones(8, 4), torch.ones(6, 8) * (rank + 1)
    for line, step in steps.items():
        with pytest.raises(RuntimeError) as caught:
            ddp.compile(step, backend="aot_eager")(weight, x)
        message = str(caught.value)
        assert f"asks at {Path(__file__)}:" in message and f"(`{line}`) for a value" in message, message
        assert "torch.where(...) in place of `if`" in message
        assert caught.value.__suppress_context__
    step = ddp.compile(lambda weight, x: weight - ddp.grad(loss)(weight, x), backend="aot_eager")
    torch.testing.assert_close(step(weight, x), weight - ddp.grad(loss)(weight, x))


def test_a_compiled_step_that_asks_for_a_value_is_told_the_line_and_what_to_write(ranks2: RankPool) -> None:
    ranks2.run(_asks, timeout_seconds=120.0)


# ---- state that Python keeps -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_an_optimizer_in_a_compiled_step_is_refused_before_it_has_state(optimizer: type[torch.optim.Optimizer]) -> None:
    model = nn.Linear(4, 2)
    optimizing = optimizer(model.parameters(), lr=0.1)

    def step(x: Tensor) -> Tensor:
        for parameter in model.parameters():
            parameter.grad = x.sum() * torch.ones_like(parameter)
        optimizing.step()
        return x

    with pytest.raises(RuntimeError, match=rf"calls step\(\) of torch.optim's {optimizer.__name__}.*compile_ddp"):
        ddp.compile(step, backend="aot_eager")(torch.ones(2))
    assert not optimizing.state and all(parameter.grad is None for parameter in model.parameters())
    step(torch.ones(2))  # eagerly it goes on
    optimizing.step()


class Keeps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = x.mean()
        return x


class Holder:
    latest: Tensor | None = None


def test_a_tensor_that_a_compiled_step_leaves_behind_is_refused_by_its_place() -> None:
    kept, by_name, holder, model, keeps = list[Tensor](), dict[str, Tensor](), Holder(), nn.Linear(2, 2), Keeps()
    places: dict[str, Callable[[Tensor], Any]] = {
        "[0] of a list": lambda x: kept.append(x.sum()),
        "['loss'] of a dict": lambda x: by_name.update(loss=x.sum()),
        "latest of the Holder": lambda x: setattr(holder, "latest", x + 1),
        "the buffer 'mean' of a Keeps": keeps,
        ".grad of the parameter 'weight' of a Linear": lambda x: setattr(model.weight, "grad", x + torch.ones(2, 2)),
    }
    for place, leave in places.items():
        with pytest.raises(RuntimeError) as caught:
            ddp.compile(lambda x: (leave(x), x + 1)[1], backend="aot_eager")(torch.ones(2))  # noqa: B023
        assert f"a compiled step leaves a tensor in {place}" in str(caught.value)


@dataclasses.dataclass
class State:
    weight: Tensor


@dataclasses.dataclass(frozen=True)
class Settings:
    rate: float


def test_an_argument_whose_changes_no_graph_can_see_is_refused_by_its_name() -> None:
    def step(state: Any, x: Tensor) -> Tensor:
        return 2 * x

    run = ddp.compile(step, backend="aot_eager")
    for state, kind, remedy in (
        (State(torch.ones(2)), "State", "register its class"),
        (SimpleNamespace(rate=1.0), "SimpleNamespace", "NamedTuple"),
        (Holder(), "Holder", "NamedTuple"),
        (numpy.ones(2), "ndarray", "torch.as_tensor"),
    ):
        with pytest.raises(TypeError, match=rf"state\['a'\] of the compiled step .*step is a .*{kind}.*{remedy}"):
            run({"a": state}, torch.ones(2))
    for state in (nn.Linear(2, 2), Settings(1.0), len, torch.float32, numpy.float32(1), "text", None):
        assert torch.equal(run({"a": state}, torch.ones(2)), torch.full((2,), 2.0))


def test_compile_with_options_alone_is_a_decorator() -> None:
    @ddp.compile(donate="weight", backend="aot_eager")
    def step(weight: Tensor, x: Tensor) -> Tensor:
        return weight - x

    weight = torch.ones(2)
    assert step(weight, weight / 2).data_ptr() == weight.data_ptr()
    assert step.__name__ == "step"


def test_a_loss_that_uses_none_of_its_parameters_says_so_once() -> None:
    module = nn.Linear(4, 1)
    gradient = ddp.grad(lambda params, x: module(x).sum())
    params = {name: parameter.detach() for name, parameter in module.named_parameters()}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            gradient(params, torch.ones(2, 4))
        ddp.grad(lambda p, x: (p * x).sum().detach() + p[0])(torch.ones(2), torch.ones(2))
    (message,) = [str(each.message) for each in caught if "returns zeros" in str(each.message)]
    assert "its loss does not depend on argument 0" in message


@pytest.mark.parametrize(
    ("name", "here"),
    [
        ("value_and_grad", "grad_and_value, which returns the gradients first"),
        ("jit", "compile"),
        ("psum", "all_reduce"),
    ],
)
def test_names_of_other_libraries_say_what_is_meant(name: str, here: str) -> None:
    with pytest.raises(AttributeError, match=f"'compiled_ddp.functional' has no attribute '{name}': here it is {here}"):
        getattr(ddp, name)
    assert not hasattr(ddp, "nothing_of_this_name")
