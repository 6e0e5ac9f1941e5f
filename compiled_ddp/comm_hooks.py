"""Communication hooks that become part of the backward graph: how a bucket is reduced, as a function of tensors.

A hook gets the gradients of one bucket, flat and undivided, and returns their mean over ranks, of the same shape and
dtype. Complex gradients are given to it as pairs of real numbers, one after the other. It is traced once for each
bucket, so it may not depend on values; everything in it is fused with the kernels around it, and its collectives are
launched and awaited where the backward's own would be:

    def in_bfloat16(gradients, ranks):
        return ranks.all_reduce((gradients / ranks.size).to(torch.bfloat16)).to(gradients.dtype)

    ddp = compile_ddp(model, comm_hook=in_bfloat16)

A hook that keeps something from step to step, such as the error of a lossy compression, is a `StatefulHook`.

In the spirit of torch.distributed.algorithms.ddp_comm_hooks, whose hooks work on futures and run between graphs.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch

from compiled_ddp.keywords import suggests_keywords
from compiled_ddp.passes.ops import add_in_order, all_gather, all_reduce, wait_tensor


@dataclass(frozen=True)
class Ranks:
    """The ranks that a hook reduces over, and its collectives. Each is awaited where its result is first read."""

    size: int
    group_name: str
    # This rank's place, where gathers are sums. torch's ProcessGroupGloo.allgather_into_tensor_coalesced with two in
    # flight corrupts memory (seen on torch 2.11 and 2.13 under load); its all-reduces do not.
    place: int | None = None

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum of `tensor` over ranks."""
        reduced: torch.Tensor = wait_tensor(all_reduce(tensor, "sum", self.group_name))
        return reduced

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Every rank's `tensor`, along the first dimension, in the order of ranks; of equal shape on all of them.

        On gloo it costs the bytes of an all-reduce of the result.
        """
        if self.place is not None:
            return self._sum_of_rows(tensor, self.place)
        gathered: torch.Tensor = wait_tensor(all_gather(tensor, self.size, self.group_name))
        return gathered

    def _sum_of_rows(self, tensor: torch.Tensor, place: int) -> torch.Tensor:
        """All zeros except this rank's row, summed over ranks."""
        row = tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor  # bool and float8 have no sum
        rows = torch.zeros((self.size, *row.shape), dtype=row.dtype, device=row.device)
        summed: torch.Tensor = wait_tensor(all_reduce(rows.select_scatter(row, 0, place), "sum", self.group_name))
        return summed.flatten(0, 1).view(tensor.dtype)


class StatefulHook(ABC):
    """A hook with tensors of its own for each bucket, which `comm_hook_state_dict()` of a wrapper or a step saves.

    Each bucket of a backward has a state of its own, also where two have the same parameters. A floating-point tensor
    that is as long as the bucket belongs to the gradients, element by element: what it holds of a parameter moves with
    the parameter to another bucket, and stays as it is in a step in which no rank uses the parameter. Other state
    is reset when the bucket gets other parameters. A new state is committed when the backward has ended on every rank,
    but not where the mean is not finite or the state would become infinite, as in a step that a GradScaler skips.

    `owed` names, by their places in the state, the tensors of the gradients that a compression has not sent yet: as
    long as the bucket, in the gradients' own unit (not divided by the number of ranks), another on every rank. For
    each parameter, the means so far plus the mean over ranks of what is owed should be the sum of the true means. A
    rank that does not use a parameter holds back what it owes to it, so that this takes no room from what is used.
    """

    owed: ClassVar[tuple[int, ...]] = ()

    @abstractmethod
    def initial_state(self, gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The state of a bucket before its first reduction; `gradients` has its size, dtype and device."""

    @abstractmethod
    def __call__(self, gradients: torch.Tensor, ranks: Ranks, *state: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The mean over ranks, followed by the new state, of the shapes and dtypes that it was given in."""


Hook = TypeVar("Hook", bound=type)


def _suggests_fields(hook: Hook) -> Hook:
    """A hook's class, whose TypeError for an unknown argument suggests one."""
    hook.__init__ = suggests_keywords(hook.__init__)  # type: ignore[misc]
    return hook


CommHook = Callable[..., Any]  # (gradients, ranks) -> mean, or a `StatefulHook`


def bf16_compress(gradients: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """Reduce in bfloat16: half of float32's bytes on the wire, 8 bits of precision."""
    return ranks.all_reduce((gradients / ranks.size).to(torch.bfloat16)).to(gradients.dtype)


def fp16_compress(gradients: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """Reduce in float16: half of float32's bytes on the wire, 11 bits of precision, and a largest value of 65504."""
    return ranks.all_reduce((gradients / ranks.size).to(torch.float16)).to(gradients.dtype)


def fp32_reduce(gradients: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """Reduce low-precision gradients in float32, so that the sum is rounded once: twice their bytes on the wire.

    float64 stays float64.
    """
    return ranks.all_reduce(_widened(gradients) / ranks.size).to(gradients.dtype)


def _widened(gradients: torch.Tensor) -> torch.Tensor:
    """Gradients of 16 bits in float32, others as they are."""
    return gradients.to(torch.promote_types(gradients.dtype, torch.float32))


def _saturated(values: torch.Tensor, dtype: torch.dtype, unit: float = 1.0) -> torch.Tensor:
    """`values` times `unit`, a power of two, in `dtype`: its largest number where they are beyond that.

    Else what is owed could grow beyond what can be sent, and no mean would be finite any more. What is not finite to
    begin with stays so.
    """
    most = torch.finfo(dtype).max / unit
    return (torch.where(values.isfinite(), values.clamp(-most, most), values) * unit).to(dtype)


def _unit_columns(matrix: torch.Tensor) -> torch.Tensor:
    """The columns, each with 1 as its largest magnitude; zeros as they are."""
    largest = matrix.abs().amax(0)
    return matrix / torch.where(largest == 0, torch.ones_like(largest), largest)


@_suggests_fields
@dataclass(frozen=True)
class TopK(StatefulHook):
    """Send the `fraction` of a bucket's gradients that is largest in magnitude, and keep the rest for the next step.

    What was not sent is added to the next step's gradients (error feedback; Stich, Cordonnier, Jaggi, "Sparsified SGD
    with Memory", 2018). Each rank sends values and indices of its own choice, 12 bytes for each in float32. What is
    kept of gradients of 16 bits is float32.

    `fraction` is above 0 and at most 1, which sends everything; at least one element of each bucket is sent. Raises
    ValueError for another one.
    """

    fraction: float = 0.01
    owed: ClassVar[tuple[int, ...]] = (0,)

    def __post_init__(self) -> None:
        fraction: object = self.fraction
        if isinstance(fraction, bool) or not isinstance(fraction, int | float) or not 0 < fraction <= 1:
            raise ValueError(
                f"TopK(fraction=...) must be a number above 0 and at most 1, found {fraction!r}: 0.01 sends the "
                "largest hundredth of each bucket, 1.0 all of it."
            )

    def initial_state(self, gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (torch.zeros_like(_widened(gradients)),)

    def __call__(self, gradients: torch.Tensor, ranks: Ranks, *state: torch.Tensor) -> tuple[torch.Tensor, ...]:
        (error,) = state
        wanted = gradients + error
        largest = wanted.abs().topk(max(1, int(self.fraction * wanted.numel()))).indices
        sent = _saturated(wanted[largest], gradients.dtype)
        values, indices = ranks.all_gather(sent), ranks.all_gather(largest)
        mean = add_in_order(torch.zeros_like(wanted), indices, values.to(wanted.dtype) / ranks.size)
        if wanted.dtype == gradients.dtype:
            return mean, wanted.index_fill(0, largest, 0.0)
        rounded = _saturated(mean, gradients.dtype)
        rest = wanted.index_add(0, largest, sent.to(wanted.dtype), alpha=-1)
        return rounded, rest + (mean - rounded)


@_suggests_fields
@dataclass(frozen=True)
class PowerSGD(StatefulHook):
    """Send a bucket as a matrix of low `rank`: about 2 rank sqrt(numel) elements instead of numel.

    One step of a power iteration from the last step's factor, with error feedback (Vogels, Karimireddy, Jaggi,
    "PowerSGD", 2019; torch's batched_powerSGD_hook). Its second collective needs the first one's result, so the
    buckets' collectives run one after the other. Gradients of 16 bits are compressed in float32.

    `rank` is 1 or more; above sqrt(numel) it is as that. Raises ValueError for another one.
    """

    rank: int = 2
    owed: ClassVar[tuple[int, ...]] = (0,)

    def __post_init__(self) -> None:
        rank: object = self.rank
        if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
            raise ValueError(
                f"PowerSGD(rank=...) must be the number of a matrix's columns, an int of 1 or more, found {rank!r}: "
                "a rank of 0 would send nothing, and leave every gradient zero."
            )

    def initial_state(self, gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        side, error = self._side(gradients), torch.zeros_like(_widened(gradients))
        generator = torch.Generator(device="cpu").manual_seed(side)  # the same factor on every rank
        factor = torch.randn(side, min(self.rank, side), generator=generator, dtype=torch.float32, device="cpu")
        return error, factor.to(error.device, error.dtype)

    def __call__(self, gradients: torch.Tensor, ranks: Ranks, *state: torch.Tensor) -> tuple[torch.Tensor, ...]:
        error, factor = state
        wanted, side = gradients + error, self._side(gradients)
        unit = 2.0 ** side.bit_length()  # in which no sum below is larger than the largest gradient
        matrix = torch.nn.functional.pad(wanted / unit, (0, side * side - wanted.numel())).view(side, side)
        left, _ = torch.linalg.qr(_unit_columns(ranks.all_reduce(matrix @ factor / ranks.size)))
        right = ranks.all_reduce(matrix.t() @ left / ranks.size)
        mean = _saturated((left @ right.t()).reshape(-1)[: wanted.numel()], gradients.dtype, unit)
        # A column that has found nothing would find nothing in the next step either; the old one may.
        next_factor = torch.where((right != 0).any(0), _unit_columns(right), factor)
        return mean, wanted - mean, next_factor

    @staticmethod
    def _side(gradients: torch.Tensor) -> int:
        side = int(gradients.numel() ** 0.5)
        return side if side * side >= gradients.numel() else side + 1
