"""The gradients of graphs that one backward calls several times, until the last call of each reduces their sum."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager

import torch

from compiled_ddp.backward.grad_mode import grad_mode_off
from compiled_ddp.plan import Bucket, BucketPlan, Gradient

# [Note: equal calls] Two forwards before one backward, or a block that runs twice, are several calls of one graph with
# the same parameters. All but the last one that the backward reaches run locally, and autograd gets None for their
# parameters. The last one folds the sum in, as it does a .grad of earlier backwards, and reduces it once. So a backward
# fits the sequence however often it calls a graph, if the last calls of several graphs come in the agreed order.


def as_planned(value: torch.Tensor | None, gradient: Gradient, bucket: Bucket) -> torch.Tensor:
    """What a graph folds in for a gradient of `bucket`: the value itself, if it lies as planned; zeros for None."""
    if value is not None and value.stride() == gradient.stride and value.dtype == bucket.dtype:
        return value.detach()
    laid_out = torch.empty_strided(gradient.size, gradient.stride, dtype=bucket.dtype, device=bucket.device)
    return laid_out.zero_() if value is None else laid_out.copy_(value)


class WithheldGradients:
    """[Note: equal calls] Those of one backward."""

    def __init__(self, repeated: Iterable[str] = ()) -> None:
        """`repeated` are the fingerprints of the graphs that the backward calls several times."""
        self.repeated: Set[str] = frozenset(repeated)
        self._calls: set[object] = set()  # whose gradients wait for another call
        self._sums: dict[int, torch.Tensor] = {}
        self._made_on: dict[torch.device, torch.Stream] = {}

    def withhold(self, call: object) -> None:
        """The gradients of `call`, which is about to run locally, wait for another one."""
        self._calls.add(call)

    def withholds(self, call: object) -> bool:
        """Whether the gradients of `call` wait for another one."""
        return call in self._calls

    @property
    def indices(self) -> Set[int]:
        """The parameters of which something waits."""
        return self._sums.keys()

    def pass_on(
        self, call: object, gradients: Sequence[torch.Tensor | None], index_of: Mapping[int, int]
    ) -> tuple[torch.Tensor | None, ...]:
        """What autograd gets of `gradients`, by graph input, which a call has produced locally.

        Of the parameters, `index_of` graph input, it gets None where they wait for another call; from the last one all
        that has waited, if that has to run locally too.
        """
        produced = {index: gradient for place, index in index_of.items() if (gradient := gradients[place]) is not None}
        self._follow_streams(gradient.device for gradient in produced.values())
        with grad_mode_off():  # out of place: a graph may return one tensor twice, or what came to it
            self._sums |= {i: self._sums[i].add(g) if i in self._sums else g for i, g in produced.items()}
        passed_on: dict[int, torch.Tensor | None] = dict.fromkeys(index_of)
        if not self.withholds(call):
            passed_on = {place: self._sums.pop(index, None) for place, index in index_of.items()}
        return tuple(passed_on.get(place, gradient) for place, gradient in enumerate(gradients))

    def fold(
        self,
        plan: BucketPlan,
        existing: Sequence[torch.Tensor],
        named: Callable[[int], AbstractContextManager[object]],
    ) -> Sequence[torch.Tensor]:
        """What a graph must fold in: the `existing` gradients, if there are any, with what waits.

        One tensor per gradient in plan order; nothing waits any more. `named` is that of `FoldedGradients.take`.
        """
        if self._sums.keys().isdisjoint(plan.indices):
            return existing
        self._follow_streams(bucket.device for bucket in plan.buckets)
        there: Iterator[torch.Tensor | None] = iter(existing) if existing else itertools.repeat(None)
        to_fold = []
        for place, bucket in enumerate(plan.buckets):
            with grad_mode_off(), named(place):
                to_fold += [as_planned(self._joined(g.index, next(there)), g, bucket) for g in bucket.gradients]
        return to_fold

    def _joined(self, index: int, existing: torch.Tensor | None) -> torch.Tensor | None:
        """What waits for a parameter, which no longer does, and the `existing` gradient."""
        waiting = self._sums.pop(index, None)
        if existing is None or waiting is None:
            return waiting if existing is None else existing
        return existing.add(waiting)

    def _follow_streams(self, devices: Iterable[torch.device]) -> None:
        """Let the current streams wait for those on which what waits was made."""
        for device in {device for device in devices if device.type != "cpu"}:
            here = torch.accelerator.current_stream(device)
            if self._made_on.setdefault(device, here) != here:
                here.wait_stream(self._made_on[device])
                for gradient in self._sums.values():
                    if gradient.device == device:
                        gradient.record_stream(here)
                self._made_on[device] = here
