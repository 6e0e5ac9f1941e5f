"""The .grad tensors that captured graphs fold in."""

from collections.abc import Callable, Iterable, Set
from contextlib import AbstractContextManager

import torch

from compiled_ddp import torch_private
from compiled_ddp.backward.existing_gradients import ExistingGradients, any_has_gradient
from compiled_ddp.backward.grad_mode import grad_mode_off
from compiled_ddp.backward.withheld_gradients import WithheldGradients, as_planned
from compiled_ddp.plan import BucketPlan
from compiled_ddp.planning.trained_parameters import TrainedParameters

_NOTHING_WITHHELD = WithheldGradients()  # as in most backwards: nothing is added where no graph is called several times


class FoldedGradients:
    """Each is None in .grad from the moment its graph takes it until the backward ends, which gives it back."""

    def __init__(self, parameters: TrainedParameters, existing: ExistingGradients) -> None:
        self._parameters, self._existing = parameters, existing
        self.withheld = _NOTHING_WITHHELD  # what graphs fold in too
        self.taken: dict[int, torch.Tensor] = {}
        self._accumulated: set[int] = set()  # those of them that the backward brings a .grad
        self._left_out: set[int] = set()
        self.not_accumulated: set[int] = set()  # by torch.autograd.grad, where .grad was there before

    def expect(self, repeated: Iterable[str]) -> None:
        """[Note: equal calls] The backward will call the graphs with these fingerprints several times."""
        self.withheld = WithheldGradients(repeated)

    def take(self, plan: BucketPlan, named: Callable[[int], AbstractContextManager[object]]) -> list[torch.Tensor]:
        """What a graph must fold in, one tensor per gradient in plan order; empty if no parameter has a .grad.

        Those without one get zeros. `named` gives the name in a profile of what is done for a bucket of the plan.
        """
        parameters = self._parameters.tensors
        if not any_has_gradient(map(parameters.__getitem__, plan.indices)):
            return []
        inputs = []
        for place, bucket in enumerate(plan.buckets):
            with named(place):
                inputs += [as_planned(self._take(gradient.index), gradient, bucket) for gradient in bucket.gradients]
        return inputs

    def _take(self, index: int) -> torch.Tensor | None:
        """What .grad was, which is None from here on."""
        parameter = self._parameters.tensors[index]
        existing = parameter.grad
        if existing is not None:
            self._existing.check(index, existing)
            self.taken[index] = existing
            if torch_private.autograd.backward_will_accumulate(parameter):
                self._accumulated.add(index)
            parameter.grad = None
        return existing

    def leave_out(self, indices: Set[int]) -> None:
        """The graph brings these no .grad after all: it has reduced nothing of them, nor what it has taken."""
        self._accumulated -= indices
        self._left_out |= indices

    def give_back_as_they_were(self, indices: Iterable[int]) -> None:
        """Where an exception has ended the graph that took them."""
        for index in indices:
            if index in self.taken and self._parameters.tensors[index].grad is None:
                self._parameters.tensors[index].grad = self.taken.pop(index)

    def forget(self) -> None:
        """An exception has ended the backward: the user may have cleared .grad since."""
        self.taken.clear()

    def give_back(self) -> None:
        """Put the same tensors into .grad again, with the reduced values."""
        for index, tensor in self.taken.items():
            parameter = self._parameters.tensors[index]
            if parameter.grad is not None:
                with grad_mode_off():
                    if index in self._left_out:
                        tensor.add_(parameter.grad)
                    else:
                        tensor.copy_(parameter.grad)
            elif index in self._accumulated:
                continue  # a hook of the user's has taken it away
            else:
                self.not_accumulated.add(index)
            parameter.grad = tensor
        self.taken.clear()
