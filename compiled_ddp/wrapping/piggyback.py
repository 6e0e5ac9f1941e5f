"""Numbers of the user's that travel with the gradients, as float32: which of them can be sent."""

import math
import numbers
from collections.abc import Mapping, Sequence

import torch

_FLOAT32 = torch.finfo(torch.float32)


def as_weight(weight: object, *, rank: int, world_size: int) -> float:
    """What `set_weight` was given, as a rank's weight in float32; `rank` is named in errors.

    Raises TypeError for what is no number, ValueError for one that float32 makes infinite or zero (one that is so large
    that the sum over ranks may be infinite, or so small that the inverse is), or that is negative or not finite itself.
    """
    where = f"rank {rank}: set_weight() takes"
    number = _as_number(weight)
    if number is None:
        raise TypeError(
            f"{where} a number, for example this rank's number of tokens, or a tensor of one element, found {weight!r}."
        )
    if not (number == 0 or _FLOAT32.tiny <= number <= _FLOAT32.max / world_size):
        raise ValueError(
            f"{where} 0, or a number between {_FLOAT32.tiny:.2g} and {_FLOAT32.max / world_size:.2g}, which can be "
            f"summed over {world_size} ranks in float32 and be divided by; found {weight!r}. A weight must be finite "
            "and not negative. Divide all ranks' weights by the same number if they are too large."
        )
    return float(torch.tensor(number, dtype=torch.float32, device="cpu"))


def _as_number(value: object) -> float | None:
    """As a Python number; None for anything else than one real number that is no truth value."""
    if isinstance(value, torch.Tensor):
        if value.numel() != 1 or value.dtype == torch.bool or value.is_complex():
            return None
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return None
    return _as_float(value)


def as_passengers(
    values: Mapping[str, object], names: Sequence[str], *, device: torch.device, rank: int
) -> torch.Tensor:
    """What `piggyback` was given, shape (len(names),) on `device`; zero for a name that is not given.

    Raises ValueError for a name that is none of `names`, or a number that float32 makes infinite, TypeError for what is
    no number. A tensor is looked at on the CPU alone.
    """
    unknown = [name for name in values if name not in names]
    if unknown:
        raise ValueError(
            f"rank {rank}: {unknown[0]!r} is not among the names that the wrapper was made with: piggyback={names}."
        )
    elements = [_as_element(name, values.get(name, 0.0), rank) for name in names]
    return torch.stack([element.to(device, non_blocking=True) for element in elements])


def _as_element(name: str, value: object, rank: int) -> torch.Tensor:
    """A float32 scalar, on the device that a tensor is on."""
    where = f"rank {rank}: piggyback({name}=...) takes"
    if isinstance(value, torch.Tensor):
        if value.numel() != 1 or value.is_complex() or value.layout != torch.strided or value.is_meta:
            shape = f"{value.dtype} tensor of shape {tuple(value.shape)}"
            raise TypeError(f"{where} a number or a tensor of one real element, found a {shape} on {value.device}.")
        given = value.detach().reshape(())
    elif isinstance(value, numbers.Real):
        given = torch.tensor(_as_float(value), dtype=torch.float64, device="cpu")
    else:
        raise TypeError(f"{where} a number or a tensor of one real element, found {value!r}.")
    element = given.to(torch.float32)
    if element.is_cpu and element.isinf() and not (isinstance(value, float | torch.Tensor) and given.isinf()):
        raise ValueError(f"{where} what float32 can hold, up to {_FLOAT32.max:.2g}, found {value!r}.")
    return element


def _as_float(number: numbers.Real) -> float:
    """Infinite for an int that no float can hold."""
    try:
        return float(number)
    except OverflowError:
        return math.inf
