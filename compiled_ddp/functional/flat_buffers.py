"""The memory that compiled steps pack their buckets into, kept from call to call."""

from collections.abc import Sequence

import torch
from torch import Tensor

from compiled_ddp import torch_private
from compiled_ddp.plan import Bucket


def empty(bucket: Bucket) -> Tensor:
    """The flat buffer of `bucket`."""
    return torch.empty(bucket.numel, dtype=bucket.dtype, device=bucket.device)


class FlatBuffers:
    """Those that one compiled graph is given.

    [Note: nothing that leaves aliases what is kept] A step may return a bucket's part as it is, and only the compiled
    code tells: which results do is the same in every run of it, and is found in the first one.
    """

    def __init__(self, memory: list[Tensor]) -> None:
        """`memory` has a tensor for each bucket; other graphs may be given the same list."""
        self.memory = memory
        self._leaving: list[int] | None = None  # the places of those that results are parts of; None before a run

    def give_up(self, results: Sequence[Tensor]) -> None:
        """Take new memory for what `results` are parts of."""
        if self._leaving is None:
            held = {torch_private.tensors.memory_of(result) for result in results}
            places = range(len(self.memory))
            self._leaving = [n for n in places if torch_private.tensors.memory_of(self.memory[n]) in held]
        for number in self._leaving:
            self.memory[number] = torch.empty_like(self.memory[number])
