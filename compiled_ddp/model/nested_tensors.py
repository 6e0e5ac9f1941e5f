"""The tensors in what a module returns."""

import math
import types
from collections.abc import Mapping, Sequence, Set

import torch
from torch import nn


def tensors_in(value: object, *, most_parts: float = math.inf) -> list[torch.Tensor]:
    """The tensors in a module's output: in lists, tuples, sets, mappings, dataclasses and other plain objects.

    At most `most_parts` of these are looked into.
    """
    tensors = []
    seen: dict[int, object] = {}  # keeps what it holds alive, so that no id comes up twice
    pending = [value]
    while pending:
        part = pending.pop()
        if isinstance(part, torch.Tensor):
            tensors.append(part)
        elif id(part) not in seen and len(seen) < most_parts and not isinstance(part, _WITHOUT_TENSORS):
            seen[id(part)] = part
            pending += _parts_of(part)
    return tensors


# Also what leads to the whole program from any output that mentions it.
_WITHOUT_TENSORS = (
    *(str, bytes, int, float, complex, range, type(None)),
    *(type, types.ModuleType, types.FunctionType, nn.Module),
)


def _parts_of(value: object) -> list[object]:
    parts: list[object] = []
    if isinstance(value, Mapping):
        parts += value.values()
    elif isinstance(value, Sequence | Set):
        parts += value
    parts += getattr(value, "__dict__", {}).values()
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        parts += [getattr(value, slot, None) for slot in ((slots,) if isinstance(slots, str) else slots)]
    return parts
