"""Errors where people stumble who come from eager code, or from JAX: the line, why, and what to write instead."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

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
