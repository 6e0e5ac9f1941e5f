"""What a user of torch alone can write: gradients averaged by functional collectives in the backward that it compiles.

As torchtitan's SimpleFSDP does where it replicates: each parameter is read through a function whose backward is an
all-reduce and its wait, which so stand where the module's gradients are computed. Nothing else decides on buckets or
places but Inductor: torch 2.14 moves launches earlier and waits later by default
(`aten_distributed_optimizations.enable_simple_overlap`), older ones leave them where they are.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


class FunctionalAllReduces(nn.Module):
    """`model`, whose gradients are averaged over all ranks one by one. Ranks begin with the same parameters.

    Changes the classes of the modules that have parameters of their own.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.module = model
        for module in model.modules():
            _read_averaged(module)

    def forward(self, *batch: Any, **named: Any) -> Any:
        return self.module(*batch, **named)


def _read_averaged(module: nn.Module) -> None:
    """Let the module's own parameters be read as those whose gradients are averaged."""
    names = list(module._parameters)
    if names:
        read = {name: property(lambda self, name=name: _averaged(self._parameters[name])) for name in names}
        module.__class__ = type(f"Averaged{type(module).__name__}", (type(module),), read)


def _averaged(parameter: Tensor | None) -> Tensor | None:
    return None if parameter is None else _Averaged.apply(parameter)


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
