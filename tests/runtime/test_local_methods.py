"""A method of the model that is not forward, called through the wrapper: its backward stays local, and that is said."""

import copy
import inspect
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from models import Mlp, assert_step, gradient_copies, local_gradients, row_batch, wrappers
from torch import Tensor, nn

from compiled_ddp.compat.bert import DistributedDataParallel as BertDDP
from ranks import RankPool

BOTH = ("compile_ddp", "EagerDDP")


def wrap(wrapper: str, model: nn.Module, **options: Any) -> Any:
    return wrappers([wrapper])[wrapper](model, **options)


@dataclass
class Output:
    loss: Tensor
    parts: list[Tensor]


class WithMethods(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.wrapper: Any = ()
        self.everything: Any = None

    def loss(self, x: Tensor, scale: float = 1.0) -> Tensor:
        """The sum of squares."""
        self.calls.append("loss")
        return scale * self(x).square().sum()

    def both(self, x: Tensor) -> Output:
        return Output(loss=self.loss(x), parts=[self(x)])

    def penalty(self) -> Tensor:
        return sum(parameter.square().sum() for parameter in self.parameters())

    def through_the_wrapper(self, x: Tensor) -> Tensor:
        (wrapper,) = self.wrapper
        return wrapper(x).square().sum()

    def describe(self) -> str:
        return "a model"

    def huge(self) -> list[Any]:
        return [self.everything] * 3

    @staticmethod
    def twice(x: Tensor) -> Tensor:
        return 2 * x


def said(do: Callable[[], object]) -> list[str]:
    """The names of the methods that warnings are about."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        do()
    found = [warning for warning in caught if "which the wrapper does not watch" in str(warning.message)]
    assert all(warning.filename == __file__ for warning in found)
    return [str(warning.message).partition("() runs")[0].rpartition(".")[2] for warning in found]


def _stays_local(rank: int, wrapper: str) -> None:
    ddp = wrap(wrapper, WithMethods())
    x = row_batch(rank)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        local = local_gradients(copy.deepcopy(ddp.module), lambda module: module.loss(x))
        ddp.loss(x).backward()
    (message,) = [str(warning.message) for warning in caught]
    name = {"compile_ddp": "CompiledDDP", "EagerDDP": "EagerDDP"}[wrapper]
    assert message.startswith(f"{name}.loss() runs the model's own method, which the wrapper does not watch: the grad")
    assert (
        "Call the wrapper itself, with a forward that does what loss() does, or call loss() under no_sync()" in message
    )
    for name, gradient in gradient_copies(ddp.module).items():
        torch.testing.assert_close(gradient, local[name])
    ddp.zero_grad()
    assert said(lambda: ddp.loss(x).backward()) == [], "once for each method"
    assert said(lambda: ddp.both(x).loss.backward()) == ["both"]
    assert said(lambda: ddp.penalty().backward()) == ["penalty"]
    for _ in range(2):
        assert_step(ddp, lambda module: module(x).square().sum())


@pytest.mark.parametrize("wrapper", BOTH)
def test_a_backward_that_stays_local_is_said_once_with_the_methods_name(ranks2: RankPool, wrapper: str) -> None:
    ranks2.run(_stays_local, wrapper)


def _not_said(rank: int, wrapper: str) -> None:
    ddp = wrap(wrapper, WithMethods())
    x = row_batch(rank)

    def evaluates() -> None:
        with torch.no_grad():
            ddp.loss(x)
        with torch.inference_mode():
            ddp.both(x)
        ddp.loss(x)  # no backward follows

    def under_no_sync() -> None:
        with ddp.no_sync():
            loss = ddp.loss(x)
        loss.backward()
        ddp.require_backward_grad_sync = False
        ddp.loss(x).backward()
        ddp.require_backward_grad_sync = True

    def synchronised() -> None:
        (ddp(x).square().sum() + ddp.loss(x)).backward()
        (ddp.penalty() + ddp(x).square().sum()).backward()
        ddp.module.wrapper = (ddp,)
        ddp.through_the_wrapper(x).backward()
        ddp.module.wrapper = ()

    def of_inputs() -> None:
        rows = x.clone().requires_grad_()
        torch.autograd.grad(ddp.loss(rows), rows)

    def of_the_module() -> None:
        ddp.module.loss(x).backward()

    def of_others() -> None:
        weight = torch.ones(3, requires_grad=True)
        ddp.twice(weight).sum().backward()

    for do in (evaluates, under_no_sync, synchronised, of_inputs, of_the_module, of_others):
        assert said(do) == [], do.__name__
        ddp.zero_grad()
    bert = BertDDP(WithMethods())
    assert said(lambda: bert.loss(x).backward()) == [], "nobody asked for a reduction"
    copied = copy.deepcopy(ddp)
    assert said(lambda: copied.loss(x).backward()) == []
    for _ in range(2):
        assert_step(ddp, lambda module: module(x).square().sum())
    assert said(lambda: torch.autograd.grad(ddp.loss(x), ddp.module.head.weight)) == ["loss"]


@pytest.mark.filterwarnings("ignore:gradients of")
@pytest.mark.parametrize("wrapper", BOTH)
def test_nothing_is_said_where_no_gradient_stays_local_against_the_users_will(ranks2: RankPool, wrapper: str) -> None:
    ranks2.run(_not_said, wrapper)


def _as_the_models(rank: int, wrapper: str) -> None:
    """What the wrapper hands out is called, looked at and compared like the model's own method."""
    model = WithMethods()
    ddp = wrap(wrapper, model)
    assert ddp.describe() == "a model" and ddp.twice(3) == 6
    assert ddp.loss.__doc__ == "The sum of squares." and ddp.loss.__name__ == "loss"
    assert inspect.signature(ddp.loss) == inspect.signature(model.loss)
    assert ddp.loss.__self__ is model and ddp.loss == ddp.loss
    x = row_batch(rank)
    torch.testing.assert_close(ddp.loss(x, scale=2.0), model.loss(x, scale=2.0))
    model.everything = list(range(1_000_000))
    ddp.huge()
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: ddp.loss(x) * 2, backend="eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model.loss(x) * 2)
    model.calls.clear()
    WithMethods.loss, before = WithMethods.describe, WithMethods.loss
    try:
        assert ddp.loss() == "a model", "the method of now"
    finally:
        WithMethods.loss = before
    ddp.loss(x)
    assert model.calls == ["loss"]


@pytest.mark.parametrize("wrapper", BOTH)
def test_methods_are_otherwise_the_models_own(ranks2: RankPool, wrapper: str) -> None:
    ranks2.run(_as_the_models, wrapper)
