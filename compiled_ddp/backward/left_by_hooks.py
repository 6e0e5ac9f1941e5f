"""What hooks have left in .grad in one backward, once they had put the gradients into their buckets."""

import itertools
import operator
from collections.abc import Collection, Iterable, Sequence

import torch

from compiled_ddp import torch_private
from compiled_ddp.backward.existing_gradients import any_has_gradient, gradient_of


class LeftByHooks:
    """Knows each by the very object and its version, to tell whether anybody has added to it, or replaced it, since."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._parameters = parameters
        self.there: dict[int, torch.Tensor] = {}
        self.nothing: set[int] = set()  # the parameters without .grad, for which zeros were sent
        self._versions: dict[int, int] = {}  # where they are not 0
        self._untracked: dict[int, torch.Tensor] = {}  # without a version

    def note_new(self, indices: Iterable[int], gradients: Iterable[torch.Tensor]) -> None:
        """Of the parameters `indices`, .grad is one of these now, to which nobody has written yet."""
        self.there.update(zip(indices, gradients, strict=True))

    def note(self, indices: Collection[int]) -> None:
        """What .grad is now of these parameters, if it is anything, has been put into a bucket."""
        for index in indices:
            gradient = self._parameters[index].grad
            if gradient is None:
                self.nothing.add(index)
            elif gradient.is_inference():
                self._untracked[index] = gradient
            else:
                self.there[index] = gradient
                self._versions[index] = torch_private.tensors.version_of(gradient)

    def take_changed(self) -> list[int]:
        """The parameters whose .grad is not as it was left: another object, or one that has been written to.

        Holds none of them any longer: [Note: memory that others hold]
        """
        there, parameters = self.there, self._parameters
        gradients = [*map(gradient_of, map(parameters.__getitem__, there))]
        before = [*map(self._versions.get, there, itertools.repeat(0))]
        now = [*map(torch_private.tensors.version_of, there.values())]
        changed = []
        if now != before or not all(map(operator.is_, gradients, there.values())):  # else in C, as in most steps
            found = zip(there.items(), gradients, now, before, strict=True)
            changed = [i for (i, one), gradient, is_, was in found if gradient is not one or is_ != was]
        if self._untracked:
            changed += [index for index, one in self._untracked.items() if parameters[index].grad is not one]
        if self.nothing and any_has_gradient(map(parameters.__getitem__, self.nothing)):
            changed += [index for index in sorted(self.nothing) if parameters[index].grad is not None]
        self.there, self.nothing, self._untracked = {}, set(), {}
        return changed
