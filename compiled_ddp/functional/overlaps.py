"""Which tensors overlap in memory: those that lie beside each other in one buffer, or parts of one batch, are apart."""

from collections.abc import Sequence

from torch import Tensor

from compiled_ddp import torch_private


def overlapping(tensors: Sequence[Tensor]) -> list[list[int]]:
    """The places of those with elements that overlap with others, together; each group begins with its first one."""
    memory, begins = [*torch_private.tensors.memory_of_each(tensors)], [*map(begin_bytes, tensors)]
    places = sorted((n for n in range(len(tensors)) if tensors[n].numel()), key=lambda n: (memory[n], begins[n]))
    groups: list[list[int]] = []
    where, end = 0, 0
    for place in places:
        if not groups or memory[place] != where or begins[place] >= end:
            groups.append([])
            where, end = memory[place], 0
        groups[-1].append(place)
        end = max(end, begins[place] + _extent_bytes(tensors[place]))
    return [sorted(group) for group in groups if len(group) > 1]


def begin_bytes(tensor: Tensor) -> int:
    """Where it begins in its memory."""
    return int(tensor.storage_offset()) * tensor.itemsize


def _extent_bytes(tensor: Tensor) -> int:
    """How many bytes lie between the first and the last that a tensor reads, with these."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return (1 + sum((size - 1) * stride for size, stride in steps)) * tensor.itemsize
