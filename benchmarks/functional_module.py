"""A module whose forward computes its gradients by `compiled_ddp.functional`, and whose backward hands them out."""

from typing import Any

import torch
from torch import Tensor, nn

from compiled_ddp import functional as ddp


class FunctionalModule(nn.Module):
    """All of the model's forward and backward, and the reduction, run in `forward`: as one graph, or eagerly."""

    def __init__(self, model: nn.Module, *, backend: str | None, **options: Any) -> None:
        """`backend` is that of the compiled step; None for none."""
        super().__init__()
        self.module = model

        def loss(params: dict[str, Tensor], *batch: Tensor) -> Tensor:
            result: Tensor = torch.func.functional_call(model, params, batch)
            return result

        gradient = ddp.grad_and_value(loss, **options)
        self._step = gradient if backend is None else ddp.compile(gradient, backend=backend)

    def forward(self, *batch: Tensor) -> Tensor:
        named = dict(self.module.named_parameters())
        gradients, value = self._step({name: parameter.detach() for name, parameter in named.items()}, *batch)
        return _HandOut.apply(value, [gradients[name] for name in named], *named.values())


class _HandOut(torch.autograd.Function):
    """The loss, whose gradients are known."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, gradients: list[Tensor], *_: Tensor) -> Tensor:
        ctx.gradients = gradients
        return value.clone()

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Any:
        gradients, ctx.gradients = ctx.gradients, None
        return None, None, *gradients
