"""How a user's model is called on a batch, and where its loss is found."""

from collections.abc import Callable, Mapping
from typing import Any

import torch


def call_model(model: Callable[..., Any], inputs: Any) -> Any:
    """The output of `model`: a mapping is passed as named arguments, a tuple or list as positional ones."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple | list) else model(inputs)


def loss_in(output: Any, source: str = "the model") -> torch.Tensor:
    """The loss in what `source` returned: a tensor of one element, or its `loss` (an attribute or a key).

    Raises TypeError where there is none.
    """
    found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", output)
    if not isinstance(found, torch.Tensor) or found.numel() != 1:
        raise TypeError(f"{source} returned {type(output).__name__}, which is no loss and has none")
    return found
