"""What `set_weight` and `piggyback` are given: sent as float32, or refused by what it is and on which rank."""

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from models import Mlp, row_batch, wrappers

from ranks import RankPool

LARGEST = float(torch.finfo(torch.float32).max)

# A weight, and the beginning of what is said of it (None: it is taken).
WEIGHTS: list[tuple[Any, type[Exception] | None]] = [
    (0, None),
    (0.0, None),
    (-0.0, None),
    (3, None),
    (2.5, None),
    (Fraction(1, 3), None),
    (np.int64(7), None),
    (np.float32(0.5), None),
    (torch.tensor(3), None),
    (torch.tensor([2.5], dtype=torch.float64), None),
    (LARGEST / 2, None),
    (1.2e-38, None),
    (-1, ValueError),
    (-1e-50, ValueError),
    (math.nan, ValueError),
    (math.inf, ValueError),
    (1e39, ValueError),  # infinite in float32
    (LARGEST, ValueError),  # the sum over two ranks is
    (10**400, ValueError),  # no float at all
    (1e-50, ValueError),  # zero in float32
    (1e-40, ValueError),  # its inverse is infinite in float32
    (torch.tensor(math.nan), ValueError),
    (torch.tensor(1e39, dtype=torch.float64), ValueError),
    ("3", TypeError),
    (None, TypeError),
    (True, TypeError),
    (1j, TypeError),
    ([3.0], TypeError),
    (torch.tensor([1.0, 2.0]), TypeError),
    (torch.tensor(1j), TypeError),
    (torch.tensor(True), TypeError),
]


def _weights(rank: int) -> None:
    ddp = wrappers(["EagerDDP"])["EagerDDP"](Mlp(), reduction="weighted")
    for weight, error in WEIGHTS:
        if error is None:
            ddp.set_weight(weight)
            assert ddp._runtime.reduction.carried.weight == pytest.approx(float(weight), rel=1e-6)
            ddp.zero_grad()
            ddp(row_batch(0)).sum().backward()
            bare = Mlp()
            bare.load_state_dict(ddp.state_dict())
            bare(row_batch(0)).sum().backward()
            share = 1.0 if weight else 0.0  # ranks are alike: the weighted mean is the gradient of each
            sent = ddp._runtime.reduction.carried.weight
            if 1e-30 < sent < 1e30 or not weight:  # gradients times others leave float32 themselves
                torch.testing.assert_close(ddp.module.head.bias.grad, share * bare.head.bias.grad)
        else:
            before = ddp._runtime.reduction.carried.weight
            with pytest.raises(error, match=rf"^rank {rank}: set_weight\(\) takes .*found"):
                ddp.set_weight(weight)
            assert ddp._runtime.reduction.carried.weight == before


def test_weights_that_float32_cannot_hold_and_what_is_no_number_are_refused(ranks2: RankPool) -> None:
    ranks2.run(_weights)


NUMBERS: list[tuple[Any, type[Exception] | None]] = [
    (3, None),
    (-2.5, None),
    (1e-50, None),
    (True, None),
    (math.nan, None),
    (math.inf, None),
    (np.float64(0.5), None),
    (torch.tensor([[4]]), None),
    (torch.tensor(2.0, requires_grad=True), None),
    (torch.tensor(True), None),
    (1e39, ValueError),
    (10**400, ValueError),
    (torch.tensor(1e39, dtype=torch.float64), ValueError),
    ("3", TypeError),
    (None, TypeError),
    (1j, TypeError),
    ([3.0], TypeError),
    (torch.tensor([1.0, 2.0]), TypeError),
    (torch.tensor(1j), TypeError),
    (torch.tensor(1.0, device="meta"), TypeError),
]


def _numbers(rank: int) -> None:
    ddp = wrappers(["EagerDDP"])["EagerDDP"](Mlp(), piggyback=("loss", "tokens"))
    for number, error in NUMBERS:
        if error is None:
            ddp.piggyback(loss=number)
            ddp(row_batch(rank)).sum().backward()
            found = ddp.piggybacked
            torch.testing.assert_close(found["loss"], torch.tensor(2.0 * float(number)), equal_nan=True)
            assert found["tokens"] == 0
        else:
            with pytest.raises(error, match=rf"^rank {rank}: piggyback\(loss=...\) takes .*found"):
                ddp.piggyback(loss=number)
    with pytest.raises(ValueError, match=rf"^rank {rank}: 'lost' is not among the names"):
        ddp.piggyback(lost=3.0)
    ddp(row_batch(rank)).sum().backward()
    assert ddp.piggybacked["loss"] == 0, "something that was refused was sent"


def test_numbers_that_float32_cannot_hold_and_what_is_no_number_are_refused(ranks2: RankPool) -> None:
    ranks2.run(_numbers)


def _wrong_arguments(rank: int) -> None:
    ddp = wrappers(["EagerDDP"])["EagerDDP"](Mlp())
    with pytest.raises(TypeError, match=r"skip_step\(\) takes further wrappers of this package, found Mlp"):
        ddp.skip_step(ddp.module)
    with pytest.raises(TypeError, match=r"load_state_dict\(\) takes what state_dict\(\) has returned, found None"):
        ddp.load_state_dict(None)
    ddp(row_batch(rank)).sum().backward()


def test_methods_say_what_they_take(ranks2: RankPool) -> None:
    ranks2.run(_wrong_arguments)
