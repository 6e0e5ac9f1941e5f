"""Gradients against plain autograd averaged by hand: the reference that no wrapper and no compiler has touched."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.ranks import Rank
from benchmarks.workload import Workload


def trainable(module: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


@dataclass(frozen=True)
class Reference:
    """Initial weights, one batch of this rank, and the mean over ranks of the gradients they give."""

    weights: list[Tensor]
    batch: tuple[Tensor, ...]
    gradients: list[Tensor]  # float32, on the CPU

    @staticmethod
    def compute(workload: Workload, rank: Rank) -> "Reference":
        model = workload.build_model("reference", rank.device)
        batch = tuple(tensor.to(rank.device) for tensor in next(workload.batches(rank.index, rank.world_size)))
        model(*batch).backward()
        gradients = []
        for parameter in trainable(model):
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            mean = gradient.to("cpu", torch.float32, copy=True)
            dist.all_reduce(mean, group=rank.control)
            gradients.append(mean / rank.world_size)
        return Reference([parameter.detach() for parameter in trainable(model)], batch, gradients)

    def restore(self, module: nn.Module) -> None:
        """Give `module` the initial weights, in place."""
        with torch.no_grad():
            for parameter, weight in zip(trainable(module), self.weights, strict=True):
                parameter.copy_(weight)

    def difference(self, module: nn.Module, rank: Rank) -> float:
        """Largest |gradient - reference| over the largest |reference|, on the worst rank. Clears the gradients."""
        self.restore(module)
        module(*self.batch).backward()
        largest = max(float(expected.abs().max()) for expected in self.gradients)
        worst = 0.0
        for parameter, expected in zip(trainable(module), self.gradients, strict=True):
            if parameter.grad is None:
                worst = max(worst, float(expected.abs().max()))
            else:
                worst = max(worst, float((parameter.grad.to("cpu", torch.float32) - expected).abs().max()))
        module.zero_grad(set_to_none=True)
        return max(rank.gather(worst / largest))
