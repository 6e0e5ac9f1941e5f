"""A twin of a model whose gradients are kept in float64 and reduced over ranks by hand."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from fuzz.source import Base

DOUBLE = {"dtype": torch.float64, "device": "cpu"}


@dataclass
class ByHand:
    """What every `.grad` of the wrapped model must be."""

    module: Base
    gradients: dict[str, Tensor | None] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)  # since the last synchronised backward

    def collect(self) -> None:
        """Add what a backward has left in `.grad` of the twin, which had none before."""
        for name, parameter in self.module.named_parameters():
            if parameter.grad is not None:
                before = self.gradients.get(name)
                self.gradients[name] = parameter.grad.double() + (0 if before is None else before)
                self.used.add(name)

    def reduce(self, reduction: str, weight: float, *, divisor: int | None = None) -> None:
        """As a synchronised backward must: what no rank has used stays as it was.

        `divisor` is that of a mean, in place of the number of ranks.
        """
        share = weight if reduction == "weighted" else 1.0
        named = [(name, p) for name, p in self.module.named_parameters() if p.requires_grad]
        parts = [self._part(name, p, share) for name, p in named]
        used = torch.tensor([*(float(name in self.used) for name, _ in named), share], **DOUBLE)  # type: ignore[arg-type]
        flat = torch.cat([*parts, used])
        dist.all_reduce(flat)
        *totals, used = flat.split([p.numel() for _, p in named] + [len(named) + 1])
        shares = used[-1].item()
        divided_by = {"mean": divisor or dist.get_world_size(), "sum": 1, "weighted": shares or 1}[reduction]
        for (name, parameter), total, uses in zip(named, totals, used[:-1].tolist(), strict=True):
            if uses:
                self.gradients[name] = (total / divided_by).view(parameter.shape)
        self.used.clear()

    def _part(self, name: str, parameter: Tensor, share: float) -> Tensor:
        """A rank without a weight contributes zeros, whatever its gradients are."""
        gradient = self.gradients.get(name)
        if gradient is None or share == 0.0:
            return torch.zeros(parameter.numel(), **DOUBLE)  # type: ignore[call-overload, no-any-return]
        return gradient.reshape(-1) * share

    def zero(self, how: str) -> None:
        if how == "none":
            self.gradients.clear()
        elif how == "zeros":
            self.gradients = {n: None if g is None else torch.zeros_like(g) for n, g in self.gradients.items()}

    def differences(self, module: torch.nn.Module, *, tolerance: float) -> Iterator[str]:
        """Where `.grad` of the wrapped module is not what it must be, in words."""
        finite = [g.nan_to_num(0.0).abs().max().item() for g in self.gradients.values() if g is not None]
        largest = max(finite, default=0.0)
        for name, parameter in module.named_parameters():
            expected, found = self.gradients.get(name), parameter.grad
            if found is None or expected is None:
                if found is not expected:
                    yield f"{name}.grad is {words(found)}, expected {words(expected)}"
            elif found.dtype != parameter.dtype:
                yield f"{name}.grad is {found.dtype}, expected {parameter.dtype}"
            elif not is_close(found, expected, tolerance * largest):
                yield f"{name}.grad is {words(found)}, expected {words(expected)}"


def is_close(found: Tensor, expected: Tensor, tolerance: float) -> bool:
    return torch.allclose(found.double(), expected.double(), rtol=0.0, atol=tolerance, equal_nan=True)


def words(gradient: Tensor | None) -> str:
    return str(None if gradient is None else gradient.tolist())
