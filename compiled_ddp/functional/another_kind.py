"""Why a compiled step is compiled once more, in a message."""

from collections.abc import Collection, Hashable, Sequence
from typing import Any

import torch

from compiled_ddp.functional.traced_step import Leaf

_MOST_OF_A_VALUE = 60  # characters


def why_another(known: Collection[Sequence[Any]], kind: Sequence[Any]) -> str:
    """How a kind of arguments (`CompiledStep.__call__` makes them) differs from the latest of those known."""
    if not known:
        return "in its first call"
    *_, latest = known
    differs = [before != now for before, now in zip(latest, kind, strict=True)]
    structure, leaves, generators, closed_over, _ = differs
    if structure:
        return "again: the structure of its arguments is another one"
    if leaves:
        return f"again: {_other_leaf(latest[1], kind[1])}"
    if generators:
        return "again: its generators are shared in another way"
    if closed_over:
        return "again: something that it closes over has been replaced"
    return "again: autocast is another one"


def _other_leaf(before: Sequence[Leaf], now: Sequence[Leaf]) -> str:
    """The first leaf that differs; both are as many, as their structure is the same."""
    number, old, new = next((n, a, b) for n, (a, b) in enumerate(zip(before, now, strict=True)) if a != b)
    return f"leaf {number} of its arguments is {_described(new.properties)}, and was {_described(old.properties)}"


def _described(properties: Hashable) -> str:
    if isinstance(properties, tuple) and properties and isinstance(properties[0], torch.Size):
        shape, stride, dtype, device = properties
        return f"a {dtype} of shape {tuple(shape)}, strides {stride} on {device}"
    value = repr(properties[1] if isinstance(properties, tuple) else properties)
    return value if len(value) <= _MOST_OF_A_VALUE else f"{value[:_MOST_OF_A_VALUE]}..."
