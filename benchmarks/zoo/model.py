"""What a model of the zoo is: how to build it from a config, a batch for it, and its losses. Nothing is downloaded."""

import functools
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Generator, Tensor, nn

Parts = Mapping[str, nn.Module]  # what is wrapped, each by a wrapper of its own; mostly one, "model"
Loss = Callable[[Parts, Any], Tensor]


@dataclass(frozen=True)
class Size:
    """How large a model is built. Widths are divisible by 8, heads are four."""

    width: int
    layers: int
    batch: int
    length: int  # of a sequence, in tokens
    image: int  # height and width in pixels
    vocabulary: int


TINY = Size(width=32, layers=2, batch=2, length=16, image=32, vocabulary=96)
SMALL = Size(width=256, layers=2, batch=4, length=64, image=64, vocabulary=1024)
SIZES = {"tiny": TINY, "small": SMALL}


def loss_of_output(parts: Parts, batch: Any) -> Tensor:
    """The loss that transformers' models return."""
    loss: Tensor = parts["model"](**batch).loss
    return loss


@dataclass(frozen=True)
class RealModel:
    """A model of the zoo. `losses` are taken one after the other in a step, each with a backward.

    After each of them the optimizer of the part that it is named after moves that part.
    """

    name: str
    build: Callable[[Size], nn.Module | Parts]
    batch: Callable[[Size, Generator], Any]  # other tensors for every state of the generator
    losses: Mapping[str, Loss] = field(default_factory=lambda: {"model": loss_of_output})
    package: str | None = None  # what it needs besides torch
    unused: bool = False  # whether a step may leave parameters without gradient, which torch's DDP has to be told
    sparse: bool = False  # whether it has sparse gradients, which take SGD

    @property
    def is_installed(self) -> bool:
        return self.package is None or importlib.util.find_spec(self.package) is not None

    def parts(self, size: Size, seed: int = 0) -> dict[str, nn.Module]:
        """Its parts in training mode, with the same weights for the same seed."""
        torch.manual_seed(seed)
        built = self.build(size)
        parts = {"model": built} if isinstance(built, nn.Module) else dict(built)
        return {name: part.train() for name, part in parts.items()}

    def batch_of(self, size: Size, rank: int, step: int) -> Any:
        return self.batch(size, torch.Generator().manual_seed(1000 * step + rank))


def tokens(size: Size, generator: Generator, length: int | None = None) -> Tensor:
    """Token ids, shape (batch, length); 0 to 3 are left to markers."""
    shape = (size.batch, length or size.length)
    return torch.randint(4, size.vocabulary, shape, generator=generator)


def text(size: Size, generator: Generator) -> dict[str, Tensor]:
    """Inputs of a language model, which are its labels, too."""
    ids = tokens(size, generator)
    return {"input_ids": ids, "labels": ids}


def images(size: Size, generator: Generator, channels: int = 3) -> Tensor:
    return torch.randn(size.batch, channels, size.image, size.image, generator=generator)


def classes(size: Size, generator: Generator, number: int = 10) -> Tensor:
    return torch.randint(0, number, (size.batch,), generator=generator)


def named(models: Sequence[RealModel]) -> dict[str, RealModel]:
    return {model.name: model for model in models}


transformers_model = functools.partial(RealModel, package="transformers")
