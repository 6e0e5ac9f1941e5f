"""What is trained: a model, its data and its optimizer, as the measurements see them."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn


class Workload(Protocol):
    """What a comparison trains under every variant: the same weights, batches and optimizer each time."""

    @property
    def name(self) -> str: ...

    def build_model(self, label: str, device: torch.device) -> nn.Module:
        """A new model on `device`, with the same weights for every label and rank."""
        ...

    def batches(self, rank: int, world_size: int) -> Iterator[Any]:
        """This rank's batches, without an end, the same in every call."""
        ...

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer: ...

    def loss(self, module: nn.Module, batch: Any) -> Tensor:
        """The loss of `module`, the model or what a variant made of it, on `batch`."""
        ...

    def forget_model(self) -> None:
        """Hold none of the models that were built: their memory is to be given back."""
        ...


def samples_in(batch: Any) -> int | None:
    """The leading dimension of the first tensor in `batch`: a tensor, or tuples, lists and mappings; None without."""
    if isinstance(batch, Tensor):
        return batch.shape[0] if batch.dim() else None
    if isinstance(batch, Mapping):
        batch = [*batch.values()]
    found = map(samples_in, batch) if isinstance(batch, tuple | list) else ()
    return next((samples for samples in found if samples is not None), None)


def total_samples(of_ranks: Sequence[int | None]) -> int | None:
    """The samples of a step over all ranks; None where some rank does not know how many its batch has."""
    known = [samples for samples in of_ranks if samples is not None]
    return sum(known) if len(known) == len(of_ranks) else None


def on_device(batch: Any, device: torch.device) -> Any:
    """`batch` on `device`: a tensor, whatever else has a `to`, or tuples, lists and mappings of these."""
    if callable(move := getattr(batch, "to", None)):
        return move(device)
    if isinstance(batch, Mapping):
        return {key: on_device(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(on_device(value, device) for value in batch))
    if isinstance(batch, tuple | list):
        return type(batch)(on_device(value, device) for value in batch)
    return batch
