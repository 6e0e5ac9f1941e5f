"""Sums with random signs, which tell whether a reduction has added up what it was to add up.

[Note: proof by random signs] The sum of a tensor's elements, each with a random sign that is the same on all ranks, is
linear in it: that of the sum over ranks is the sum of those of the ranks, to rounding. One number for each gradient is
enough, as an error that does not know the signs is found unless it is as small as rounding.
"""

import functools

import torch
from torch import Tensor

from compiled_ddp import torch_private

CHUNK = 2**20  # elements that are looked at together
SIGMAS = 8.0  # how far rounding goes


@functools.lru_cache(maxsize=8)
def signs(device: torch.device) -> Tensor:
    """Those of `CHUNK` elements in a row: float64, the same on every rank."""
    with torch_private.tracing.outside_of_traces():
        generator = torch.Generator().manual_seed(16)
        drawn = torch.randint(0, 2, (CHUNK,), generator=generator, dtype=torch.int64, device="cpu")
        return (2 * drawn - 1).to(device=device, dtype=torch.float64)


def as_reals(tensor: Tensor) -> Tensor:
    """The elements in a row, of a complex tensor both parts."""
    values = tensor.detach().contiguous()
    return (torch.view_as_real(values) if values.is_complex() else values).reshape(-1)


def signed_sum(row: Tensor) -> Tensor:
    """The sum with random signs of the elements in `row`, and that of their squares: float64, shape (2,)."""
    sums = torch.zeros(2, dtype=torch.float64, device=row.device)
    for chunk in as_reals(row).split(CHUNK):
        if chunk.numel():
            exact = chunk.double()
            sums += torch.stack((torch.dot(exact, signs(exact.device)[: exact.numel()]), torch.dot(exact, exact)))
    return sums


def rounding(dtype: torch.dtype, world_size: int) -> float:
    """What a sum over ranks may be off, as a part of the root of the sum of all squares."""
    return SIGMAS * torch.finfo(dtype).eps * world_size


def smallest(dtype: torch.dtype) -> float:
    """What may become of a number that is denormal in this dtype: products in float16 keep it, others may drop it."""
    kind = torch.finfo(dtype)
    return float(kind.smallest_normal) * (float(kind.eps) if dtype == torch.float16 else 1.0)
