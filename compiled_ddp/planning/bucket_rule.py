"""A planner that fills buckets by numbers of elements or by trigger parameters, as apex did."""

import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from compiled_ddp.plan import GradientSpec
from compiled_ddp.planning.cost_model import BackwardWork
from compiled_ddp.planning.planners import Names

# What is left at the end of backward is shipped in this order of dtypes, others behind them.
_ORDER = (torch.float16, torch.float32, torch.float64, torch.bfloat16)


@dataclass(frozen=True)
class BucketRule:
    """When hooks close a bucket. Each dtype (and device) has buckets of its own.

    `elements` is how many a bucket has at least. With `triggers`, names of parameters, it is ignored: the
    gradient of a trigger closes the bucket of its own dtype. `delayed` makes one bucket for each dtype, in registration
    order, that is launched when backward has ended.
    """

    elements: float
    triggers: tuple[str, ...] | None = None
    delayed: bool = False

    @property
    def naive(self) -> bool:
        return False

    @property
    def goes_by_names(self) -> bool:
        return self.triggers is not None

    def fill(
        self, gradients: Sequence[GradientSpec], names: Names, work: BackwardWork | None = None
    ) -> list[list[GradientSpec]]:
        opened: dict[tuple[torch.dtype, torch.device], list[GradientSpec]] = {}
        numel: Counter[tuple[torch.dtype, torch.device]] = Counter()  # of the bucket that is open
        shipped: list[list[GradientSpec]] = []
        for gradient in sorted(gradients, key=lambda spec: spec.index) if self.delayed else gradients:
            kind = (gradient.dtype, gradient.device)
            opened.setdefault(kind, []).append(gradient)
            numel[kind] += gradient.numel
            if self._closes(numel[kind], names[gradient.index]):
                shipped.append(opened.pop(kind))
                del numel[kind]
        return [*shipped, *sorted(opened.values(), key=_dtype_order)]

    @functools.cached_property
    def _trigger_names(self) -> frozenset[str]:
        """Each gradient is looked up in them."""
        return frozenset(self.triggers or ())

    def _closes(self, numel: int, latest: str) -> bool:
        if self.delayed:
            return False
        if self.triggers is not None:
            return latest in self._trigger_names
        return numel >= self.elements

    def sends_rows(self, name: str, rows: int, nbytes: int) -> bool:
        return False

    def __str__(self) -> str:
        if self.delayed:
            return "One bucket for each dtype, launched when backward has ended."
        if self.triggers is not None:
            return f"A bucket closes with the gradient of {', '.join(self.triggers) or 'no trigger'}, of its own dtype."
        return f"A bucket closes at {self.elements:,} elements."


def _dtype_order(bucket: Sequence[GradientSpec]) -> int:
    dtype = bucket[0].dtype
    return _ORDER.index(dtype) if dtype in _ORDER else len(_ORDER)
