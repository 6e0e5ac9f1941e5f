"""`with ddp.join():` where ranks have different numbers of batches.

While ranks are in it they cannot meet by hand: each notes what it finds and what autograd makes of its batches, and the
means are computed when the join is over.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fuzz.by_hand import is_close, words
from fuzz.description import Join
from fuzz.ensemble import Ensemble

Gradients = dict[str, Tensor | None]


@dataclass
class _Iteration:
    found: Gradients  # clones of .grad behind the backward
    local: dict[str, Tensor]  # of the twin, in float64


class Joined:
    """A join of a program with one model."""

    def __init__(self, join: Join, ensemble: Ensemble, reduction: str, weight: float, tolerance: float) -> None:
        (self._member,) = ensemble.members
        self._join, self._ensemble, self._reduction = join, ensemble, reduction
        self._weight, self._tolerance = weight, tolerance
        self._iterations: list[_Iteration] = []

    def run(self, batches: int, number: int, change_parameters: Callable[[nn.Module], None]) -> Iterator[str]:
        """`batches` are this rank's. Leaves the member's expected gradients as they must be after the join."""
        everyones: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyones, batches)
        ends_early = self._join.throws and min(everyones) < max(everyones)
        total = min(everyones) if ends_early else max(everyones)
        error = ""
        try:
            with self._member.ddp.join(
                divide_by_initial_world_size=self._join.by_all, throw_on_early_termination=self._join.throws
            ):
                for iteration in range(batches):
                    self._iterate(100 * (number + 1) + iteration)
                    change_parameters(self._member.module)
                    change_parameters(self._member.by_hand.module)
        except RuntimeError as caught:
            error = str(caught)
        if ends_early != bool(error) or (error and "exhausted" not in error):
            yield f"the join ended with {error!r}"
            return
        for _ in range(total - len(self._iterations)):  # the last rank's model becomes everyone's
            change_parameters(self._member.by_hand.module)
        yield from self._differences(everyones, batches, total)
        if ends_early and batches > total:
            self._member.by_hand.zero(self._join.zero)  # before the forward that raised

    def _iterate(self, seed: int) -> None:
        ddp, twin = self._member.ddp, self._member.by_hand.module
        if self._join.zero != "none":
            self._member.kept.let_go(self._member.module)
        if self._join.zero != "keep":
            ddp.zero_grad(set_to_none=self._join.zero == "none")
        batch = self._ensemble.batch(seed, 2)
        self._ensemble.loss(self._ensemble.wrapped(), batch).backward()
        twin.zero_grad()
        self._ensemble.loss(self._ensemble.twins(), batch.copy()).backward()
        self._iterations.append(
            _Iteration(
                {n: None if p.grad is None else p.grad.clone() for n, p in self._member.module.named_parameters()},
                {n: p.grad.double() for n, p in twin.named_parameters() if p.grad is not None},
            )
        )

    def _differences(self, everyones: list[int], batches: int, total: int) -> Iterator[str]:
        by_hand = self._member.by_hand
        for number in range(total):
            training = len(everyones) if self._join.by_all else sum(number < count for count in everyones)
            if number >= batches:
                before, by_hand.gradients = by_hand.gradients, {}
                by_hand.reduce(self._reduction, 0.0, divisor=training)
                by_hand.gradients = before
                continue
            by_hand.zero(self._join.zero)
            for name, gradient in self._iterations[number].local.items():
                old = by_hand.gradients.get(name)
                by_hand.gradients[name] = gradient if old is None else old + gradient
                by_hand.used.add(name)
            by_hand.reduce(self._reduction, self._weight, divisor=training)
            yield from self._differences_of(number)
        for name, parameter in self._member.module.named_parameters():
            expected = by_hand.module.get_parameter(name)
            if not torch.equal(parameter, expected):
                yield f"after the join {name} is {words(parameter)}, expected {words(expected)}"

    def _differences_of(self, number: int) -> Iterator[str]:
        expected = self._member.by_hand.gradients
        largest = max((g.abs().max().item() for g in expected.values() if g is not None), default=0.0)
        for name, found in self._iterations[number].found.items():
            due = expected.get(name)
            if (found is None) != (due is None) or (
                found is not None and due is not None and not is_close(found, due, self._tolerance * largest)
            ):
                yield f"batch {number} of the join: {name}.grad is {words(found)}, expected {words(due)}"
