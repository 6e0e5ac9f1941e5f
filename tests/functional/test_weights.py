"""Weights of ranks that no mean can be taken with: refused by name on every rank, or NaN on every rank; never zeros."""

import math
from typing import Any

import pytest
import torch
from test_grad import assert_same, by_hand, loss, parameters, rows
from test_losses_that_raise import refused
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from compiled_ddp import functional as ddp
from ranks import RankPool

NO_WEIGHTS = {
    "zero tokens divided by zero on all ranks": (math.nan, math.nan),
    "on one": (1.0, math.nan),
    "negative, of a negative sum": (-1.0, -1.0),
    "negative, of a positive sum": (2.0, -1.0),
    "negative, of a sum of zero": (1.0, -1.0),
    "infinite": (math.inf, 1.0),
    "infinite in float32": (1e300, 1.0),
    "infinite as the sum in float32": (3e38, 3e38),
    "zero in float32": (1e-46, 1e-46),
    "of an inverse that is infinite in float32": (1e-40, 1e-40),
}
WEIGHTS = [(3.0, 1.0), (0.0, 2.0), (1e-38 * 2, 1e-38 * 6), (1e30, 3e30), (2**40, 2**40)]


def is_weight(weight: float) -> bool:
    return weight == 0 or torch.finfo(torch.float32).tiny <= weight <= torch.finfo(torch.float32).max / 2


def _refused_where_it_can_be_read(rank: int) -> None:
    step = ddp.grad(loss, reduction="weighted")
    compiled = ddp.compile(lambda p, x, w: step(p, x, weight=w), backend="aot_eager")  # a number is read as it traces
    for name, weights in NO_WEIGHTS.items():
        as_given = [weights[rank], torch.tensor([weights[rank]], dtype=torch.float64)]
        for call, weight in ((step, as_given[0]), (step, as_given[1]), (compiled, as_given[0])):
            arguments = {"w" if call is compiled else "weight": weight}
            message = refused(lambda: call(parameters(), rows(rank), **arguments))  # noqa: B023
            here = f"ValueError: rank {rank}: weight= of grad(loss) takes 0, or a number between"
            there = (
                f"- rank {1 - rank}: ValueError: rank {1 - rank}: weight= of grad(loss) takes 0, or a number between"
            )
            assert message.startswith(here) if not is_weight(weights[rank]) else there in message, (name, message)
    for no_number in ("1", None, True, 1j, torch.ones(2), torch.tensor(True), [1.0]):
        weight = no_number if rank == 1 else 1.0
        message = refused(lambda: step(parameters(), rows(rank), weight=weight))  # noqa: B023
        kind = "TypeError: rank 1: weight= of grad(loss) takes a number"
        assert message.startswith(kind) if rank == 1 else f"- rank 1: {kind}" in message, message
    for weights in WEIGHTS:
        shares = [weight / sum(weights) for weight in weights]
        assert_same(step(parameters(), rows(rank), weight=weights[rank]), by_hand(loss, 2, weights=shares))


def test_what_is_no_weight_is_refused_by_name_on_every_rank(ranks2: RankPool) -> None:
    ranks2.run(_refused_where_it_can_be_read)


def _not_a_number(rank: int, arguments: dict[str, Any]) -> None:
    step = ddp.grad_and_value(loss, reduction="weighted", reduce_value=True)

    def call(params: dict[str, Tensor], x: Tensor, w: Tensor) -> Any:
        return step(params, x, weight=w)

    if arguments:
        run = ddp.compile(call, **arguments)
    else:
        example = torch.ones((), dtype=torch.float64)
        run = make_fx(call)(parameters(), rows(rank), example)
    for name, weights in NO_WEIGHTS.items():
        gradients, value = run(parameters(), rows(rank), torch.tensor(weights[rank], dtype=torch.float64))
        for of, gradient in gradients.items():
            assert gradient.isnan().all(), (name, of, gradient)
        assert value.isnan(), name
    for weights in WEIGHTS:
        gradients, _ = run(parameters(), rows(rank), torch.tensor(weights[rank], dtype=torch.float64))
        assert_same(gradients, by_hand(loss, 2, weights=[weight / sum(weights) for weight in weights]))
    gradients, value = run(parameters(), rows(rank), torch.zeros((), dtype=torch.float64))  # no rank has a weight
    assert value == 0 and not any(gradient.any() for gradient in gradients.values())


@pytest.mark.parametrize(
    "arguments",
    [{}, {"backend": "aot_eager"}, pytest.param({"backend": "inductor"}, marks=pytest.mark.inductor)],
    ids=["traced by others", "aot_eager", "inductor"],
)
def test_what_is_no_weight_is_nan_in_every_gradient_where_it_is_not_read(
    ranks2: RankPool, arguments: dict[str, Any]
) -> None:
    ranks2.run(_not_a_number, arguments)


def _in_half_precision(rank: int, dtype: torch.dtype, arguments: dict[str, Any]) -> None:
    """Numbers of tokens: times one of them a gradient is no float16 number, and 1025 is none of bfloat16."""
    tokens = (4096.0, 1025.0)
    of_ranks = [torch.full((3, 4), value, dtype=dtype) for value in (4.0, 2.0)]
    params = {"w": torch.ones(4, dtype=dtype), "b": torch.zeros(())}

    def square(p: dict[str, Tensor], x: Tensor) -> Tensor:
        return (x @ p["w"]).square().mean() + p["b"]

    def with_collective(p: dict[str, Tensor], x: Tensor) -> Tensor:
        return square(p, x) / 4096 + 0 * ddp.all_reduce(p["b"])

    for f, scale in ((square, 1.0), (with_collective, 4096.0)):
        step = ddp.grad_and_value(f, reduction="weighted", reduce_value=True)
        run = ddp.compile(lambda p, x, w: step(p, x, weight=w), **arguments) if arguments else step  # noqa: B023
        weight = {"w" if arguments else "weight": tokens[rank]}
        found, _ = run(params, of_ranks[rank], **weight)
        each = [torch.func.grad(square)({n: p.double() for n, p in params.items()}, x.double()) for x in of_ranks]
        for name, value in found.items():
            expected = sum(w * g[name] for w, g in zip(tokens, each, strict=True)) / sum(tokens) / scale
            assert value.dtype == params[name].dtype
            torch.testing.assert_close(value.double(), expected, rtol=2 * torch.finfo(dtype).eps, atol=0)


@pytest.mark.parametrize("arguments", [{}, {"backend": "aot_eager"}], ids=["eager", "aot_eager"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_weights_are_numbers_of_tokens_in_half_precision_too(
    ranks2: RankPool, dtype: torch.dtype, arguments: dict[str, Any]
) -> None:
    ranks2.run(_in_half_precision, dtype, arguments)


def test_a_rank_that_is_alone_has_a_weight_too() -> None:
    step = ddp.grad_and_value(loss, reduction="weighted", reduce_value=True)
    with pytest.warns(UserWarning, match="own gradients"):
        step(parameters(), rows(0), weight=1.0)
    expected, value = torch.func.grad_and_value(loss)(parameters(), rows(0))
    gradients, own_value = step(parameters(), rows(0), weight=3.0)
    assert own_value == value and all(torch.equal(gradients[name], expected[name]) for name in expected)
    gradients, own_value = step(parameters(), rows(0) * math.nan, weight=0.0)
    assert own_value == 0 and not any(gradient.any() for gradient in gradients.values())
    with pytest.raises(ValueError, match=r"rank 0: weight= of grad_and_value\(loss\) takes 0, or a number"):
        step(parameters(), rows(0), weight=math.nan)
    traced = make_fx(lambda p, x, w: step(p, x, weight=w))(parameters(), rows(0), torch.tensor(1.0))
    gradients, own_value = traced(parameters(), rows(0), torch.tensor(-1.0))
    assert own_value.isnan() and all(gradient.isnan().all() for gradient in gradients.values())
