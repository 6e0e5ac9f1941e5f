"""What a user of torch alone can write: gradients averaged by functional collectives in the backward that it compiles.

Nothing decides on buckets or places but Inductor: torch 2.14 moves launches earlier and waits later by default
(`aten_distributed_optimizations.enable_simple_overlap`), older ones wait where a gradient is computed.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

BUCKETED = {"bucket_all_reduces_fx": "all", "reorder_for_compute_comm_overlap": True}  # Inductor's own options


class FunctionalAllReduces(nn.Module):
    """`model`, whose gradients are averaged over all ranks one by one. Ranks begin with the same parameters."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.module = model

    def forward(self, *batch: Tensor) -> Any:
        averaged = {name: _Averaged.apply(parameter) for name, parameter in self.module.named_parameters()}
        return torch.func.functional_call(self.module, averaged, batch)


class _Averaged(torch.autograd.Function):
    """Its argument, the gradient of which is the mean over all ranks."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor) -> Tensor:
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        group = dist.group.WORLD
        assert group is not None
        reduced = torch.ops._c10d_functional.all_reduce(gradient / group.size(), "sum", group.group_name)
        return torch.ops._c10d_functional.wait_tensor(reduced)
