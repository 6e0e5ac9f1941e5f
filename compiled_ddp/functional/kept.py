"""Arguments of compiled steps, which are looked at once where they come in one call after another as they were."""

import functools
import itertools
import operator
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from compiled_ddp import torch_private
from compiled_ddp.functional.reached import Reads
from compiled_ddp.functional.traced_step import Leaf, in_plain_memory
from compiled_ddp.model.watch import RememberedParts


class Hashed:
    """A value whose hash is computed once, if it is asked for, and which is equal to itself without looking."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        return hash(self.value)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Hashed) and self.value == other.value)


class Arguments:
    """A tree of a step's arguments, and what of it a graph depends on.

    One that is passed again stands for a tree that is as it was: the same objects in the same places, and tensors of
    the same shape, strides, dtype and memory. `Unchanged` tells.
    """

    def __init__(self, tree: Any, watched: Iterable[dict[str, Any]] = ()) -> None:
        """Who passes them again has looked at what is `watched`, in the same call: nothing there was replaced."""
        self.tree, self.watched = tree, watched
        leaves, structure = torch_private.trees.flatten(tree)
        self.leaves = [*map(in_plain_memory, leaves)]
        self.structure = Hashed(structure)
        self.tensors = [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]

    @functools.cached_property
    def kinds(self) -> Hashed:
        """Of its leaves, in a tuple: a `Leaf`, or None for one that may change without being told from what it was."""
        return Hashed(tuple(map(Leaf.of, self.leaves)))

    @functools.cached_property
    def are_fit(self) -> bool:
        """Whether there is a `Leaf` of each."""
        return None not in self.kinds.value

    @functools.cached_property
    def detached(self) -> list[Tensor]:
        return [tensor.detach() for tensor in self.tensors]

    @functools.cached_property
    def generators(self) -> list[torch.Generator]:
        return [leaf for leaf in self.leaves if isinstance(leaf, torch.Generator)]

    @functools.cached_property
    def memory(self) -> list[int]:
        """Of those tensors that have one each."""
        return torch_private.tensors.memory_of_each(each for each in self.tensors if each.layout == torch.strided)

    @functools.cached_property
    def device_types(self) -> frozenset[str]:
        return frozenset(tensor.device.type for tensor in self.tensors)


# ---- whether it is as it was -----------------------------------------------------------------------------------------


class Unchanged:
    """Whether dictionaries hold the objects that they held, and tensors are what they were, in the same memory."""

    def __init__(self, dictionaries: Sequence[dict[str, Any]], tensors: Sequence[Tensor]) -> None:
        self._contents, self._tensors = RememberedParts(dictionaries), tensors
        self._are_of_same_kind, self._addresses = torch_private.dynamo.guard_of(tensors), self._addresses_now()

    @property
    def watched(self) -> list[dict[str, Any]]:
        """The dictionaries."""
        return self._contents.dictionaries

    def holds(self) -> bool:
        """Whether nothing has changed since this was made: asked in each call, in C. See [Note: as it was]."""
        return (
            self._contents.are_untouched()
            and self._are_of_same_kind(*self._tensors)
            and self._addresses_now() == self._addresses
        )

    def _addresses_now(self) -> list[int]:
        return [*map(Tensor.data_ptr, self._tensors)]


class Choice:
    """The graph that a call has run, which is that of the next one too where all that was asked for it is as it was.

    [Note: steady calls] Which graph a call runs depends on its arguments, on all that the step reaches by names, and on
    what is set around it. To put that together anew costs more than a small step's products; to see that nothing has
    been replaced costs a tenth of it. Whatever has changed, and what this does not look at, as memory that arguments
    share, is looked at in full: there is no second opinion on what a graph depends on.
    """

    def __init__(self, graph: Any, every: Sequence[Arguments], reads: Reads, around: Hashable) -> None:
        """`every` are the call's arguments, the last of which are its own; the others may be passed again."""
        *self._kept, own = every
        self.graph, self._around = graph, around
        self._reads = reads.but(itertools.chain.from_iterable(each.watched for each in self._kept))
        self._structure, self._kinds = own.structure, own.kinds  # and not its tensors: that would keep a batch
        self._generators = own.generators
        self._memory = frozenset(itertools.chain.from_iterable(each.memory for each in self._kept))

    def holds(self, every: Sequence[Arguments], around: Hashable) -> bool:
        """Whether a call with these arguments is as the one before."""
        *kept, own = every
        return (
            _are_the_same(kept, self._kept)
            and own.structure == self._structure
            and own.kinds == self._kinds
            and around == self._around
            and _are_the_same(own.generators, self._generators)
            and len({*own.memory}) == len(own.memory)
            and self._memory.isdisjoint(own.memory)
            and self._reads.are_as_they_were()
        )


def _are_the_same(objects: Sequence[object], others: Sequence[object]) -> bool:
    return len(objects) == len(others) and all(map(operator.is_, objects, others))
