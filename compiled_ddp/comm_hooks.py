"""Communication hooks that become part of the backward graph: how a bucket is reduced, as a function of tensors.

A hook gets the gradients of one bucket, flat and undivided, and returns their mean over ranks, of the same shape and
dtype. It is traced once for each bucket, so it may not depend on values; everything in it is fused with the kernels
around it, and its collectives are launched and awaited where the backward's own would be:

    def in_bfloat16(gradients, ranks):
        return ranks.all_reduce((gradients / ranks.size).to(torch.bfloat16)).to(gradients.dtype)

    ddp = compile_ddp(model, comm_hook=in_bfloat16)

A hook that keeps something from step to step, such as the error of a lossy compression, is a `StatefulHook`.

In the spirit of torch.distributed.algorithms.ddp_comm_hooks, whose hooks work on futures and run between graphs.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from compiled_ddp.passes.ops import all_gather, all_reduce, wait_tensor


@dataclass(frozen=True)
class Ranks:
    """The ranks that a hook reduces over, and its collectives. Each is awaited where its result is first read."""

    size: int
    group_name: str

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum of `tensor` over ranks."""
        reduced: torch.Tensor = wait_tensor(all_reduce(tensor, "sum", self.group_name))
        return reduced

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Every rank's `tensor`, along the first dimension, in the order of ranks; of equal shape on all of them."""
        gathered: torch.Tensor = wait_tensor(all_gather(tensor, self.size, self.group_name))
        return gathered


class StatefulHook(ABC):
    """A hook with tensors of its own for each bucket, which `ddp.comm_hook_state_dict()` saves."""

    @abstractmethod
    def initial_state(self, gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The state of a bucket before its first reduction; `gradients` tells its size, dtype and device."""

    @abstractmethod
    def __call__(self, gradients: torch.Tensor, ranks: Ranks, *state: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The mean over ranks, followed by the new state."""


CommHook = Callable[..., Any]  # (gradients, ranks) -> mean, or a `StatefulHook`


def bf16_compress(gradients: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """Reduce in bfloat16: half of float32's bytes on the wire, 8 bits of precision."""
    return ranks.all_reduce((gradients / ranks.size).to(torch.bfloat16)).to(gradients.dtype)


def fp16_compress(gradients: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """Reduce in float16: half of float32's bytes on the wire, 11 bits of precision, and a largest value of 65504."""
    return ranks.all_reduce((gradients / ranks.size).to(torch.float16)).to(gradients.dtype)


def fp32_reduce(gradients: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """Reduce low-precision gradients in float32, so that the sum is rounded once: twice their bytes on the wire."""
    return ranks.all_reduce(gradients.float() / ranks.size).to(gradients.dtype)


@dataclass(frozen=True)
class TopK(StatefulHook):
    """Send the `fraction` of a bucket's gradients that is largest in magnitude, and keep the rest for the next step.

    What was not sent is added to the next step's gradients (error feedback; Stich, Cordonnier, Jaggi, "Sparsified SGD
    with Memory", 2018). Each rank sends values and indices of its own choice, 12 bytes for each in float32.
    """

    fraction: float = 0.01

    def initial_state(self, gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (torch.zeros_like(gradients),)

    def __call__(self, gradients: torch.Tensor, ranks: Ranks, *state: torch.Tensor) -> tuple[torch.Tensor, ...]:
        (error,) = state
        wanted = gradients + error
        largest = wanted.abs().topk(max(1, int(self.fraction * wanted.numel()))).indices
        values, indices = ranks.all_gather(wanted[largest]), ranks.all_gather(largest)
        mean = torch.zeros_like(wanted).index_add(0, indices, values / ranks.size)
        return mean, wanted.index_fill(0, largest, 0.0)


@dataclass(frozen=True)
class PowerSGD(StatefulHook):
    """Send a bucket as a matrix of low `rank`: about 2 rank sqrt(numel) elements instead of numel.

    One step of a power iteration from the last step's factor, with error feedback (Vogels, Karimireddy, Jaggi,
    "PowerSGD", 2019; torch's batched_powerSGD_hook). Its second collective needs the first one's result, so the
    buckets' collectives run one after the other.
    """

    rank: int = 2

    def initial_state(self, gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        side = self._side(gradients)
        generator = torch.Generator().manual_seed(side)  # the same factor on every rank
        factor = torch.randn(side, min(self.rank, side), generator=generator)
        return torch.zeros_like(gradients), factor.to(gradients.device, gradients.dtype)

    def __call__(self, gradients: torch.Tensor, ranks: Ranks, *state: torch.Tensor) -> tuple[torch.Tensor, ...]:
        error, factor = state
        wanted, side = gradients + error, self._side(gradients)
        matrix = torch.nn.functional.pad(wanted, (0, side * side - wanted.numel())).view(side, side)
        left, _ = torch.linalg.qr(ranks.all_reduce(matrix @ factor))
        right = ranks.all_reduce(matrix.t() @ left) / ranks.size
        mean = (left @ right.t()).reshape(-1)[: wanted.numel()]
        return mean, wanted - mean, right

    @staticmethod
    def _side(gradients: torch.Tensor) -> int:
        side = int(gradients.numel() ** 0.5)
        return side if side * side >= gradients.numel() else side + 1
