"""The parameters that a wrapper reduces, by the numbers that plans call them by."""

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from compiled_ddp.formatting import format_names
from compiled_ddp.plan import GradientSpec, rows_of


@dataclass(frozen=True)
class TrainedParameters:
    """The wrapper's trainable parameters in registration order; everywhere else a parameter is its index in here."""

    names: tuple[str, ...]
    tensors: tuple[torch.nn.Parameter, ...]
    by_rows: frozenset[str] = frozenset()  # the names of matrices whose gradients are sent by rows, without zeros

    @staticmethod
    def of(named: Mapping[str, torch.nn.Parameter], by_rows: frozenset[str] = frozenset()) -> "TrainedParameters":
        return TrainedParameters(tuple(named), tuple(named.values()), by_rows)

    @functools.cached_property
    def gradients(self) -> tuple[GradientSpec, ...]:
        """What the gradient of each looks like; a model that changes gets another object of this class."""
        return tuple(map(self.gradient_now, range(len(self.tensors))))

    def gradient_now(self, index: int) -> GradientSpec:
        """What it looks like as the parameter is now, which may have been converted since `gradients` was asked."""
        spec = GradientSpec.of(index, self.tensors[index])
        return spec.by_rows if self.names[index] in self.by_rows else spec

    @property
    def rows(self) -> set[int]:
        """How many elements the rows have by which some are sent."""
        return rows_of(self.gradients)

    @functools.cached_property
    def on_cpu(self) -> bool:
        """Whether all of them are there, where the host may read values without making a device wait."""
        return all(tensor.is_cpu for tensor in self.tensors)

    def named(self, indices: Iterable[int], most: int = 5) -> str:
        """Names for a message, at most `most` of them."""
        return format_names([self.names[index] for index in indices], most)
