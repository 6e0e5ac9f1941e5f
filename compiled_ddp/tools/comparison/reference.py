"""Gradients against plain autograd averaged by hand: the reference that no wrapper and no compiler has touched."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from compiled_ddp.tools.command_line.batches import fresh_copy
from compiled_ddp.tools.comparison.ranks import Rank
from compiled_ddp.tools.comparison.workload import Workload, on_device


def trainable(module: nn.Module) -> list[nn.Parameter]:
    """The module's parameters that are trained, in its order."""
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def largest_of(values: Sequence[float]) -> float:
    """The largest of these; nan if one of them is."""
    return math.nan if any(map(math.isnan, values)) else max(values)


def copies_of_buffers(module: nn.Module) -> list[Tensor]:
    """The module's buffers as they are now, in its order."""
    return [buffer.detach().clone() for buffer in module.buffers()]


def _local(tensor: Tensor) -> Tensor:
    """The tensor itself; of a DTensor, as `replicate` makes of parameters and gradients, what this rank holds."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _on_cpu(parameter: nn.Parameter) -> Tensor:
    """A float32 copy of the gradient; zeros where there is none."""
    gradient = _local(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    if gradient.layout != torch.strided:
        gradient = gradient.to_dense()
    return gradient.to("cpu", torch.float32, copy=True)


def _means(module: nn.Module, rank: Rank) -> list[Tensor]:
    """The mean over ranks of each gradient, taken by hand on the control group."""
    gradients = [_on_cpu(parameter) for parameter in trainable(module)]
    for gradient in gradients:
        dist.all_reduce(gradient, group=rank.control)
    return [gradient / rank.world_size for gradient in gradients]


@dataclass(frozen=True)
class Reference:
    """Initial weights and buffers, one batch of this rank, and the mean over ranks of the gradients they give."""

    weights: list[Tensor]
    buffers: list[Tensor]
    batch: Any  # on this rank's device
    gradients: list[Tensor]  # float32, on the CPU

    @staticmethod
    def compute(workload: Workload, rank: Rank) -> "Reference":
        """Train the bare model on this rank's first batch."""
        model = workload.build_model("reference", rank.device)
        batch = on_device(next(workload.batches(rank.index, rank.world_size)), rank.device)
        buffers = copies_of_buffers(model)
        workload.loss(model, fresh_copy(batch)).backward()
        gradients = _means(model, rank)
        model.zero_grad(set_to_none=True)
        return Reference([parameter.detach() for parameter in trainable(model)], buffers, batch, gradients)

    def restore(self, module: nn.Module) -> None:
        """Give `module` the initial weights and buffers, in place; buffers that it had not then are left."""
        with torch.no_grad():
            for parameter, weight in zip(trainable(module), self.weights, strict=True):
                _local(parameter).copy_(weight)
            for buffer, initial in zip(module.buffers(), self.buffers, strict=False):
                if buffer.shape == initial.shape:
                    _local(buffer).copy_(initial)

    def difference(self, workload: Workload, module: nn.Module, rank: Rank, *, communicates: bool) -> float:
        """Largest |gradient - reference| over the largest |reference|, on the worst rank; nan if one is not a number.

        Clears the gradients. Those of a module that does not communicate are averaged by hand: what is left is the
        compiler's rounding.
        """
        self.restore(module)
        workload.loss(module, fresh_copy(self.batch)).backward()
        found = _means(module, rank) if not communicates else [_on_cpu(parameter) for parameter in trainable(module)]
        module.zero_grad(set_to_none=True)
        largest = largest_of([float(expected.abs().max()) for expected in self.gradients])
        differences = zip(found, self.gradients, strict=True)
        worst = largest_of([float((gradient - expected).abs().max()) for gradient, expected in differences])
        return largest_of(rank.gather(worst / largest if largest else worst))
