"""Numbers of the user's that travel with the gradients, as float32: weights of ranks, and what is summed over them."""

import numbers
from collections.abc import Mapping, Sequence

import torch

from compiled_ddp.ranks.host_numbers import pinned_for
from compiled_ddp.reducers.weights import FLOAT32, as_float


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
    ready = [pinned_for(device, element) if element.is_cpu else element for element in elements]
    return torch.stack([element.to(device, non_blocking=True) for element in ready])


def _as_element(name: str, value: object, rank: int) -> torch.Tensor:
    """A float32 scalar, on the device that a tensor is on."""
    where = f"rank {rank}: piggyback({name}=...) takes"
    if isinstance(value, torch.Tensor):
        if value.numel() != 1 or value.is_complex() or value.layout != torch.strided or value.is_meta:
            shape = f"{value.dtype} tensor of shape {tuple(value.shape)}"
            raise TypeError(f"{where} a number or a tensor of one real element, found a {shape} on {value.device}.")
        given = value.detach().reshape(())
    elif isinstance(value, numbers.Real):
        given = torch.tensor(as_float(value), dtype=torch.float64, device="cpu")
    else:
        raise TypeError(f"{where} a number or a tensor of one real element, found {value!r}.")
    element = given.to(torch.float32)
    if element.is_cpu and element.isinf() and not (isinstance(value, float | torch.Tensor) and given.isinf()):
        raise ValueError(f"{where} what float32 can hold, up to {FLOAT32.max:.2g}, found {value!r}.")
    return element
