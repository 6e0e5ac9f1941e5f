"""The parameters that a wrapper reduces, by the numbers that plans call them by."""

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from compiled_ddp.formatting import format_names
from compiled_ddp.plan import GradientSpec


@dataclass(frozen=True)
class TrainedParameters:
    """The wrapper's trainable parameters in registration order; everywhere else a parameter is its index in here."""

    names: tuple[str, ...]
    tensors: tuple[torch.nn.Parameter, ...]

    @staticmethod
    def of(named: Mapping[str, torch.nn.Parameter]) -> "TrainedParameters":
        return TrainedParameters(tuple(named), tuple(named.values()))

    @functools.cached_property
    def gradients(self) -> tuple[GradientSpec, ...]:
        """What the gradient of each looks like; a model that changes gets another object of this class."""
        return tuple(GradientSpec.of(index, tensor) for index, tensor in enumerate(self.tensors))

    @functools.cached_property
    def on_cpu(self) -> bool:
        """Whether all of them are there, where the host may read values without making a device wait."""
        return all(tensor.is_cpu for tensor in self.tensors)

    def named(self, indices: Iterable[int], most: int = 5) -> str:
        """Names for a message, at most `most` of them."""
        return format_names([self.names[index] for index in indices], most)
