"""Train a random program on a rank under a wrapper, and beside it by plain autograd, averaged by hand."""

import contextlib
import math
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fuzz import failures
from fuzz.by_hand import is_close, words
from fuzz.conversion import CONVERSIONS, convert
from fuzz.defaults import changed_defaults
from fuzz.description import Change, Join, Program, Step
from fuzz.ensemble import Batch, Ensemble
from fuzz.joins import Joined
from fuzz.legality import permitted
from fuzz.reducing_hooks import TOLERANCES
from fuzz.users_gradients import change_gradients

# Tolerances relative to the largest gradient of the model; none on two ranks, where every value is exact.
ROUNDED_TOLERANCE = 1e-6  # thirds of thirds, where something is reduced twice or .grad is kept on three ranks
BFLOAT16_TOLERANCE = 0.04  # 8 bits


def train(rank: int, program: Program, names: tuple[str, ...]) -> list[str]:
    """Run the program under each of these wrappers; returns what differs from the averages by hand, in words."""
    found = []
    for name in names:
        allowed = permitted(program, name)
        with warnings.catch_warnings(), changed_defaults(allowed.setting):
            warnings.simplefilter("ignore")
            run = Run(allowed, name, rank)
            found += [f"{name}, {difference}" for difference in run.all_steps()]
    return found


def tolerance_of(program: Program, world_size: int) -> float:
    exact = world_size == 2 and program.setting.reduction != "weighted"
    low = any("bfloat16" in model.dtypes for model in program.models)
    tolerance = BFLOAT16_TOLERANCE if low else 0.0 if exact else ROUNDED_TOLERANCE
    return max(tolerance, TOLERANCES.get(program.setting.hook, 0.0))


class Run:
    """A program under one wrapper, on this rank."""

    def __init__(self, program: Program, name: str, rank: int) -> None:
        self.program, self.rank, self.world_size = program, rank, dist.get_world_size()
        self.tolerance = tolerance_of(program, self.world_size)
        self.ensemble = Ensemble(program, name, rank)
        self.members = self.ensemble.members

    def all_steps(self) -> list[str]:
        found = []
        for number, step in enumerate(self.program.steps):
            run = self._join if isinstance(step, Join) else self._step
            found += [f"step {number}, {difference}" for difference in run(step, number)]  # type: ignore[operator]
            self._change_parameters()
        plans: list[Any] = [None] * self.world_size
        dist.all_gather_object(plans, [member.ddp.plan.fingerprint for member in self.members])
        if any(plan != plans[0] for plan in plans):
            found.append(f"the plans differ: {plans}")
        for member in self.members:
            member.ddp.unwrap()  # Dynamo never forgets what it compiled around a graph break, nor its group
        return found

    def _change_parameters(self) -> None:
        for member in self.members:
            for module in (member.module, member.by_hand.module):
                change_parameters(module)

    def of_rank(self, values: tuple[Any, ...]) -> Any:
        return values[self.rank % len(values)]

    # ---- a step ------------------------------------------------------------------------------------------------------

    def _step(self, step: Step, number: int) -> Iterator[str]:
        rows, local_count = self.of_rank(step.rows), self.of_rank(step.local)
        seeds = [10 * number + n for n in range(local_count + step.forwards)]
        batches = [
            self.ensemble.batch(seed, rows, step.reads[(2 * self.rank + n) % len(step.reads)])
            for n, seed in enumerate(seeds)
        ]
        self.ensemble.set_active(self.rank in step.active_on)
        self._zero(step.zero)
        yield from self._changed(step.before)
        stance = torch.compiler.set_stance("force_eager") if self.rank in step.eager_on else contextlib.nullcontext()
        with stance:
            twins = yield from self._local_backwards(batches[:local_count])
            yield from self._changed(step.between)
            if step.failure is not None:
                yield from self._failing(step, batches[local_count:])
            else:
                twins += self._synchronised(step, batches[local_count:])
                if self.rank not in step.skipped_on:
                    yield from self._differences_of_inputs(batches, twins)
        yield from self._differences("synchronised")
        for member in self.members:
            member.kept.keep(member.module, step.keeps, f"in step {number}")

    def _zero(self, how: str) -> None:
        for member in self.members:
            member.by_hand.zero(how)
            if how != "none":
                member.kept.let_go(member.module)
            if how != "keep":
                member.ddp.zero_grad(set_to_none=how == "none")

    def _changed(self, changes: tuple[Change, ...]) -> Iterator[str]:
        for change in changes:
            for member in self.members:
                if change.kind in CONVERSIONS:
                    member.kept.let_go(member.module)
                    yield from convert(member.module, member.by_hand, change.kind)
                elif self.rank in change.on:
                    member.kept.let_go(member.module)
                    change_gradients(member.module, member.by_hand, change.kind, change.every)

    def _local_backwards(self, batches: list[Batch]) -> Iterator[str]:  # returns inputs of twins
        twins: list[Tensor] = []
        for batch in batches:
            twins += self.ensemble.backward_by_hand([batch])
            with contextlib.ExitStack() as contexts:
                for member in self.members:
                    contexts.enter_context(member.ddp.no_sync())
                    member.kept.let_go(member.module)
                self.ensemble.loss(self.ensemble.wrapped(), batch).backward()
        if batches:
            yield from self._differences("under no_sync")
        return twins

    def _synchronised(self, step: Step, batches: list[Batch]) -> list[Tensor]:
        """The backward that reduces; returns the inputs of the twins."""
        skips, ensemble, twins = self.rank in step.skipped_on, self.ensemble, []
        factor = math.nan if self.rank in step.nan_on else 1.0
        weight = self._set_weight(step, skips=skips)
        for member in self.members:
            member.kept.let_go(member.module)
        if skips:
            run_here = batches if step.skip_after_forward else []  # kept: a forward whose graph is dead does not count
            losses = [ensemble.loss(ensemble.wrapped(), batch) for batch in run_here]
            ensemble.first.skip_step(*(member.ddp for member in self.members[1:]))
            del losses
        else:
            run = torch.compile(_forwards_and_backward, backend="eager") if step.compiled_around else None
            (run or _forwards_and_backward)(ensemble, batches, factor)
            twins = ensemble.backward_by_hand(batches, factor=factor)
        for member in self.members:
            member.by_hand.reduce(self.program.setting.reduction, weight)
        return twins

    def _set_weight(self, step: Step | Join, *, skips: bool = False) -> float:
        if self.program.setting.reduction != "weighted":
            return 1.0
        nan_on = () if isinstance(step, Join) else step.nan_on
        weight = 0.0 if self.rank in nan_on else float(self.of_rank(step.weights))
        for member in self.members:
            member.ddp.set_weight(weight)
        # Without anything accumulated, a rank that skips has no weight.
        return 0.0 if skips and not any(member.by_hand.used for member in self.members) else weight

    def _differences(self, when: str) -> Iterator[str]:
        for index, member in enumerate(self.members):
            of = f"{when}: " + (f"model {index}: " if index else "")
            for difference in member.by_hand.differences(member.module, tolerance=self.tolerance):
                yield of + difference
            for difference in member.kept.differences():
                yield of + difference

    def _differences_of_inputs(self, batches: list[Batch], twins: list[Tensor]) -> Iterator[str]:
        """The gradients of a rank's own inputs are its own: nothing averages or scales them."""
        inputs = [x for batch in batches for x in batch.inputs]
        for number, (x, twin) in enumerate(zip(inputs, twins, strict=True)):
            assert twin.grad is not None
            largest = twin.grad.abs().nan_to_num(0.0).max().item()
            if x.grad is None or not is_close(x.grad, twin.grad, self.tolerance * largest):
                yield f"gradient of input {number} is {words(x.grad)}, expected {words(twin.grad)}"

    # ---- a step in which one rank fails ------------------------------------------------------------------------------

    def _failing(self, step: Step, batches: list[Batch]) -> Iterator[str]:
        """Ends with a step that is right."""
        assert step.failure is not None
        plant = failures.Plant(step.failure, self.rank == step.failure.rank % self.world_size)
        weight = self._set_weight(step)
        for member in self.members:
            member.kept.let_go(member.module)
        here = failures.Outcome()
        yield from self._fail(plant, here, batches)
        if not (yield from self._recover(here, batches, weight)):
            yield "the step after the one that was refused is not right either"

    def _fail(self, plant: failures.Plant, here: failures.Outcome, batches: list[Batch]) -> Iterator[str]:
        failure, ensemble = plant.failure, self.ensemble
        losses: list[Tensor] = []
        with failures.recorded(here):
            plant.in_forward()
            losses += [ensemble.loss(ensemble.wrapped(), batch) for batch in batches]
        plant.remove()
        if failure.place == "forward":  # ranks tell each other, and all drop the step
            if all(outcome.kind == failures.RIGHT for outcome in failures.everyones(here)):
                torch.stack(losses).sum().backward()
            return
        with failures.recorded(here):
            loss = torch.stack(losses).sum()
            plant.in_backward(loss, batches[0].inputs, self.members[0].module)
            loss.backward()
            plant.in_optimizer()
        plant.remove()
        if here.kind == failures.PLANTED_HERE and failure.place != "optimizer":
            again = failures.Outcome()
            with failures.recorded(again):
                failures.after(failure, ensemble.first, lambda: ensemble.loss(ensemble.wrapped(), batches[0]))
            if again.kind != failures.RIGHT:
                yield f"{failure.then}: {again.words}"

    def _recover(
        self, here: failures.Outcome, batches: list[Batch], weight: float
    ) -> Iterator[str]:  # returns whether a step went right
        allowed = {failures.RIGHT, failures.PLANTED_HERE, failures.REFUSED}
        # Whether a parameter that was used before an exception alone has zeros afterwards or None is nobody's promise.
        batches = [replace(batch, reads="all") for batch in batches]
        for attempt in range(3):
            self._zero("none")
            now = failures.Outcome()
            with failures.recorded(now):
                losses = [self.ensemble.loss(self.ensemble.wrapped(), batch) for batch in batches]
            if attempt == 0:  # not before this forward, by which a rank whose backward broke off lets others go on
                yield from failures.differences(failures.everyones(here), allowed, "the failing step")
            if now.kind == failures.RIGHT:
                with failures.recorded(now):
                    torch.stack(losses).sum().backward()
            outcomes = failures.everyones(now)
            yield from failures.differences(outcomes, allowed, f"attempt {attempt}")
            if len({outcome.kind for outcome in outcomes}) > 1:
                yield f"attempt {attempt}: ranks differ: {outcomes}"
                return False
            if now.kind == failures.RIGHT:
                self.ensemble.backward_by_hand(batches)
                for member in self.members:
                    member.by_hand.reduce(self.program.setting.reduction, weight)
                return True
        return False

    # ---- uneven numbers of batches -----------------------------------------------------------------------------------

    def _join(self, join: Join, number: int) -> Iterator[str]:
        weight = self._set_weight(join)
        joined = Joined(join, self.ensemble, self.program.setting.reduction, weight, self.tolerance)
        yield from joined.run(self.of_rank(join.batches), number, change_parameters)
        yield from self._differences("after the join")


def _forwards_and_backward(ensemble: Ensemble, batches: list[Batch], factor: float) -> None:
    losses = [ensemble.loss(ensemble.wrapped(), batch, factor=factor) for batch in batches]
    torch.stack(losses).sum().backward()


@torch.no_grad()
def change_parameters(module: nn.Module) -> None:
    """In place of an optimizer's step: other values, which stay small integers."""
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.copy_(parameter.flip(0))
