"""Ranks' weights in a weighted mean: they travel as float32, are summed over ranks, and divided by."""

import math
import numbers

import torch

from compiled_ddp import torch_private

FLOAT32 = torch.finfo(torch.float32)


def as_weight(weight: object, *, taker: str, world_size: int) -> float:
    """A rank's weight in float32; `taker` says in errors who was given it, on which rank.

    Raises TypeError for what is no number, ValueError for one that float32 makes infinite or zero (one that is so large
    that the sum over ranks may be infinite, or so small that the inverse is), or that is negative or not finite itself.
    """
    number = _as_number(weight)
    if number is None:
        raise _no_number(weight, taker)
    if not (number == 0 or FLOAT32.tiny <= number <= FLOAT32.max / world_size):
        raise ValueError(
            f"{taker} takes 0, or a number between {FLOAT32.tiny:.2g} and {FLOAT32.max / world_size:.2g}, which can be "
            f"summed over {world_size} ranks in float32 and be divided by; found {weight!r}. A weight must be finite "
            "and not negative. Divide all ranks' weights by the same number if they are too large."
        )
    return float(torch.tensor(number, dtype=torch.float32, device="cpu"))


def weight_in_trace(weight: object, *, taker: str, world_size: int) -> float | torch.Tensor:
    """As `as_weight`, for what may be traced, batched or on another device; a tensor stays one, as losses depend on it.

    Where its value cannot be read in time, what is no weight becomes NaN, and so does what is divided by the sum.
    """
    if isinstance(weight, torch.SymInt | torch.SymFloat):
        weight = torch.scalar_tensor(weight, dtype=torch.float64, device="cpu")  # type: ignore[arg-type]
    if not isinstance(weight, torch.Tensor):
        return as_weight(weight, taker=taker, world_size=world_size)
    if weight.numel() != 1 or weight.dtype == torch.bool or weight.is_complex():
        raise _no_number(weight, taker)
    bare = torch_private.autograd.without_transforms(weight)
    if bare.is_cpu and not torch_private.tracing.is_tracing():
        with torch_private.tracing.outside_of_traces():
            values = bare.reshape(-1).tolist()
        for value in values:
            as_weight(value, taker=taker, world_size=world_size)
        return weight.reshape(()).to(torch.float32)
    exact = weight.reshape(()).to(torch.float64)
    fits = (exact >= FLOAT32.tiny) & (exact <= FLOAT32.max / world_size)
    return torch.where(fits | (exact == 0), exact, math.nan).to(torch.float32)


def _no_number(weight: object, taker: str) -> TypeError:
    return TypeError(
        f"{taker} takes a number, for example this rank's number of tokens, or a tensor of one element, "
        f"found {weight!r}."
    )


def _as_number(value: object) -> float | None:
    """As a Python number; None for anything else than one real number that is no truth value."""
    if isinstance(value, torch.Tensor):
        if value.numel() != 1 or value.dtype == torch.bool or value.is_complex():
            return None
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return None
    return as_float(value)


def as_float(number: numbers.Real) -> float:
    """Infinite for an int that no float can hold."""
    try:
        return float(number)
    except OverflowError:
        return math.inf
