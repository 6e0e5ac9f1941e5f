"""A batch that is used more than once, by models and losses that may change what they are given."""

import copy
from collections.abc import Mapping
from typing import Any

import torch


def fresh_copy(batch: Any) -> Any:
    """`batch` for one use: tensors cloned, tuples, lists and mappings made anew, whatever else has a `to` copied."""
    if isinstance(batch, torch.Tensor):
        return batch.detach().clone().requires_grad_(batch.requires_grad)
    if type(batch) is dict:
        return {key: fresh_copy(value) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*map(fresh_copy, batch))
    if type(batch) in (tuple, list):
        return type(batch)(map(fresh_copy, batch))
    # Other classes have constructors of their own: transformers' BatchEncoding, torch_geometric's Data.
    is_container = isinstance(batch, Mapping | tuple | list) or callable(getattr(batch, "to", None))
    return copy.deepcopy(batch) if is_container else batch
