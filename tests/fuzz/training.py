"""Train a random program on a rank under a wrapper, and beside it by plain autograd, averaged by hand."""

import contextlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from models import wrappers
from torch import Tensor

from fuzz.description import Program, Step
from fuzz.source import WIDTH, Base, build

# Tolerances relative to the largest gradient of the model; none on two ranks, where every value is exact.
ROUNDED_TOLERANCE = 1e-6  # thirds of thirds, where something is reduced twice or .grad is kept on three ranks
BFLOAT16_TOLERANCE = 0.04  # 8 bits


@dataclass
class ByHand:
    """A twin of the model whose gradients are kept in float64 and averaged by one all-reduce each."""

    module: Base
    gradients: dict[str, Tensor | None] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)  # since the last synchronised backward
    inputs: list[Tensor] = field(default_factory=list)  # of this step

    def backward(self, batches: list[Tensor]) -> None:
        """One backward of the sum of the losses of these batches."""
        self.module.zero_grad()
        inputs = [x.detach().clone().requires_grad_() for x in batches]
        torch.stack([loss_of(self.module, x) for x in inputs]).sum().backward()
        self.inputs += inputs
        for name, parameter in self.module.named_parameters():
            if parameter.grad is not None:
                before = self.gradients.get(name)
                self.gradients[name] = parameter.grad.double() + (0 if before is None else before)
                self.used.add(name)

    def average(self) -> None:
        """As a synchronised backward must: what no rank has used stays as it was."""
        for name, parameter in self.module.named_parameters():
            if not parameter.requires_grad:
                continue
            gradient = self.gradients.get(name)
            total = torch.zeros(parameter.shape, dtype=torch.float64) if gradient is None else gradient.clone()
            total = total.contiguous()
            used = torch.tensor(float(name in self.used))
            dist.all_reduce(total)
            dist.all_reduce(used)
            if used > 0:
                self.gradients[name] = total / dist.get_world_size()
        self.used.clear()

    def differences_of_inputs(self, batches: list[Tensor], *, tolerance: float) -> Iterator[str]:
        """The gradients of a rank's own inputs are its own: nothing averages or scales them."""
        for number, (x, twin) in enumerate(zip(batches, self.inputs, strict=True)):
            assert x.grad is not None and twin.grad is not None
            if not (x.grad - twin.grad).abs().max().item() <= tolerance * twin.grad.abs().max().item():
                yield f"gradient of input {number} is {_words(x.grad)}, expected {_words(twin.grad)}"

    def zero(self, how: str) -> None:
        self.inputs.clear()
        if how == "none":
            self.gradients.clear()
        elif how == "zeros":
            self.gradients = {n: None if g is None else torch.zeros_like(g) for n, g in self.gradients.items()}


def batch(seed: int, rank: int, rows: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randint(-2, 3, (rows, WIDTH), generator=generator).float().requires_grad_()


def loss_of(module: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return (module(x) * torch.tensor([6.0, -6.0, 12.0])).sum()


def train(rank: int, program: Program, names: tuple[str, ...]) -> list[str]:
    """Run the program under each of these wrappers; returns what differs from the averages by hand, in words."""
    return [f"{name}, {difference}" for name in names for difference in _train_under(name, program, rank)]


def _train_under(name: str, program: Program, rank: int) -> list[str]:
    model, by_hand = build(program.model, rank), ByHand(build(program.model, rank))
    world_size = dist.get_world_size()
    differences: list[str] = []
    tolerance = ROUNDED_TOLERANCE if world_size > 2 else 0.0
    if "bfloat16" in program.model.dtypes:
        tolerance = BFLOAT16_TOLERANCE
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ddp = wrappers([name])[name](model, bucket_cap_mb=1e-4, first_bucket_mb=5e-5)
        for number, step in enumerate(program.steps):
            found = [*_run_step(ddp, by_hand, step, number, rank, tolerance=tolerance)]
            differences += [f"step {number}, {difference}" for difference in found]
            for module in (model, by_hand.module):
                change_parameters(module)
    plans: list[str] = [""] * world_size
    dist.all_gather_object(plans, ddp.plan.fingerprint)
    if len(set(plans)) > 1:
        differences.append(f"the plans differ: {plans}")
    ddp.unwrap()  # Dynamo never forgets what it compiled around a graph break, and so neither the wrapper nor its group
    return differences


def _run_step(
    ddp: torch.nn.Module, by_hand: ByHand, step: Step, number: int, rank: int, *, tolerance: float
) -> Iterator[str]:
    def of_rank(values: tuple[int, ...]) -> int:
        return values[rank % len(values)]

    batches = [batch(10 * number + n, rank, of_rank(step.rows)) for n in range(of_rank(step.local) + step.forwards)]
    local, synchronised = batches[: of_rank(step.local)], batches[of_rank(step.local) :]
    ddp.module.active = by_hand.module.active = rank in step.active_on
    by_hand.zero(step.zero)
    if step.zero != "keep":
        ddp.zero_grad(set_to_none=step.zero == "none")
    stance = torch.compiler.set_stance("force_eager") if rank in step.eager_on else contextlib.nullcontext()
    skips = rank in step.skipped_on
    with stance:
        for x in local:
            by_hand.backward([x])
            with ddp.no_sync():
                loss_of(ddp, x).backward()
        yield from _differences("under no_sync", ddp.module, by_hand, tolerance=tolerance)
        losses = [loss_of(ddp, x) for x in synchronised] if not skips or step.skip_after_forward else []
        if skips:
            ddp.skip_step()
        else:
            torch.stack(losses).sum().backward()
            by_hand.backward(synchronised)
    by_hand.average()
    if not skips:
        yield from by_hand.differences_of_inputs(batches, tolerance=tolerance)
    yield from _differences("synchronised", ddp.module, by_hand, tolerance=tolerance)


def _differences(when: str, module: torch.nn.Module, by_hand: ByHand, *, tolerance: float) -> Iterator[str]:
    largest = max((g.abs().max().item() for g in by_hand.gradients.values() if g is not None), default=0.0)
    for name, parameter in module.named_parameters():
        expected, found = by_hand.gradients.get(name), parameter.grad
        if found is None or expected is None:
            if found is not expected:
                yield f"{when}: {name}.grad is {_words(found)}, expected {_words(expected)}"
        elif found.dtype != parameter.dtype:
            yield f"{when}: {name}.grad is {found.dtype}, expected {parameter.dtype}"
        elif not (found.double() - expected).abs().max().item() <= tolerance * largest:
            yield f"{when}: {name}.grad is {_words(found)}, expected {_words(expected)}"


def _words(gradient: Tensor | None) -> str:
    return str(None if gradient is None else gradient.tolist())


@torch.no_grad()
def change_parameters(module: torch.nn.Module) -> None:
    """In place of an optimizer's step: other values, which stay small integers."""
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.copy_(parameter.flip(0))
