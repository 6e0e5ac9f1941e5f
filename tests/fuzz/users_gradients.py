"""What users do to `.grad` between two backwards: point it elsewhere, replace it, write into it."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fuzz.by_hand import ByHand

Value = Tensor | None


def _by_data(parameter: nn.Parameter, gradient: Tensor) -> None:
    gradient.data = gradient.data.clamp(-18, 18)


def _by_set(parameter: nn.Parameter, gradient: Tensor) -> None:
    gradient.set_(gradient.clone())  # type: ignore[call-overload]


def _by_clone(parameter: nn.Parameter, gradient: Tensor) -> None:
    parameter.grad = gradient.clone()


def _by_none(parameter: nn.Parameter, gradient: Tensor) -> None:
    parameter.grad = None


def _clamp(parameter: nn.Parameter, gradient: Tensor) -> None:
    gradient.clamp_(-18, 18)


def _negate(parameter: nn.Parameter, gradient: Tensor) -> None:
    gradient.neg_()


def _transpose(parameter: nn.Parameter, gradient: Tensor) -> None:
    parameter.grad = gradient.t().contiguous().t() if gradient.dim() == 2 else gradient.clone()


def _leave_gaps(parameter: nn.Parameter, gradient: Tensor) -> None:
    roomy = gradient.new_zeros((2, *gradient.shape)).movedim(0, -1)
    roomy[..., 0].copy_(gradient)
    parameter.grad = roomy[..., 0].data  # no view of autograd's, see below


@dataclass(frozen=True)
class ToGradient:
    do: Callable[[nn.Parameter, Tensor], None]
    value: Callable[[Tensor], Value] = lambda gradient: gradient


CHANGES: dict[str, ToGradient] = {
    "data = clamp": ToGradient(_by_data, lambda gradient: gradient.clamp(-18, 18)),
    "set_": ToGradient(_by_set),
    "clone": ToGradient(_by_clone),
    "None": ToGradient(_by_none, lambda gradient: None),
    "clamp_": ToGradient(_clamp, lambda gradient: gradient.clamp(-18, 18)),
    "neg_": ToGradient(_negate, lambda gradient: -gradient),
    "transposed": ToGradient(_transpose),
    "gaps": ToGradient(_leave_gaps),
}
OF_ALL = ("one flat tensor", "zeros")


@torch.no_grad()
def change_gradients(module: nn.Module, by_hand: ByHand, kind: str, every: int) -> None:
    """On this rank, of every `every`-th parameter; and what must become of it."""
    chosen = [named for number, named in enumerate(module.named_parameters()) if number % every == 0]
    if kind == "one flat tensor":
        _flatten([parameter for _, parameter in chosen if parameter.grad is not None])
        return
    for name, parameter in chosen:
        expected = by_hand.gradients.get(name)
        if kind == "zeros" and parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
            by_hand.gradients[name] = torch.zeros_like(parameter, dtype=torch.float64)
        elif kind != "zeros" and parameter.grad is not None and expected is not None:
            CHANGES[kind].do(parameter, parameter.grad)
            by_hand.gradients[name] = CHANGES[kind].value(expected)


def _flatten(parameters: list[nn.Parameter]) -> None:
    """Gradients as views of one tensor of the user's, as scripts do that all-reduce by themselves."""
    for dtype in {parameter.dtype for parameter in parameters}:
        alike = [parameter for parameter in parameters if parameter.dtype == dtype]
        flat = torch.cat([p.grad.reshape(-1) for p in alike if p.grad is not None])
        for parameter, part in zip(alike, flat.split([p.numel() for p in alike]), strict=True):
            # No view of autograd's: Dynamo cannot take one in that is converted (`module.double()`) without its base.
            parameter.grad = part.view(parameter.shape).data
