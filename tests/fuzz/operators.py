"""What the sources of random models call."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed.nn.functional as differentiable
from models import SumOverRanks
from torch import Tensor

# Constants are multiples of three, so that gradients stay divisible by both world sizes.


class AddsConstant(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient + 6


class Clamps(AddsConstant):
    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.clamp(-12, 12)


class TakesAbsolute(AddsConstant):
    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.abs()


def clamp_gradient(gradient: Tensor | None) -> Tensor | None:
    """None where a compiled graph leaves a gradient undefined: autograd runs a parameter's hooks even so."""
    return None if gradient is None else gradient.clamp(-18, 18)


# ---- sums over ranks -------------------------------------------------------------------------------------------------


def sum_captured(x: Tensor) -> Tensor:
    """Functional collectives in a graph."""
    return SumOverRanks.apply(x)  # type: ignore[no-any-return, no-untyped-call]


@torch.compiler.disable
def sum_apart(x: Tensor) -> Tensor:
    """A graph break."""
    return SumOverRanks.apply(x)  # type: ignore[no-any-return, no-untyped-call]


@torch.compiler.disable
def sum_of_torch(x: Tensor) -> Tensor:
    """torch's own function, which Dynamo does not capture."""
    return differentiable.all_reduce(x.contiguous())  # type: ignore[no-any-return, no-untyped-call]


# torch 2.11 silently loses a captured one's backward: docs/limits.md, "Versions of torch".
SUMS: tuple[Callable[[Tensor], Tensor], ...] = (
    sum_captured if torch.__version__ >= (2, 12) else sum_apart,
    sum_apart,
    sum_of_torch,
)

# ---- exceptions ------------------------------------------------------------------------------------------------------

ARMED: dict[str, type[BaseException]] = {}  # "forward" or "backward", and what the next trap that runs it raises
PLANTED = "planted"  # the message


def spring(where: str) -> None:
    error = ARMED.pop(where, None)
    if error is not None:
        raise error(PLANTED)


@torch.library.custom_op("compiled_ddp_fuzz::trap", mutates_args=())
def trap(x: Tensor) -> Tensor:
    spring("forward")
    return x.clone()


@torch.library.custom_op("compiled_ddp_fuzz::trap_backward", mutates_args=())
def trap_backward(gradient: Tensor) -> Tensor:
    spring("backward")
    return gradient.clone()


trap.register_fake(torch.empty_like)
trap_backward.register_fake(torch.empty_like)
trap.register_autograd(lambda ctx, gradient: trap_backward(gradient))

FUNCTIONS = (AddsConstant, Clamps, TakesAbsolute)
EVERY = {
    function.__name__: function for function in (*FUNCTIONS, clamp_gradient, sum_captured, sum_apart, sum_of_torch)
} | {"trap": trap}
