"""A wrapper's gradients beside those of plain autograd, which are averaged by hand."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.zoo.model import Loss, Parts, RealModel, Size

# What is nearly zero (a bias in front of a normalisation) is compared with this part of the model's largest gradient.
SMALLEST_SCALE = 1e-3

Gradients = Mapping[str, Tensor | None]


@dataclass(frozen=True)
class Difference:
    """How far one loss's gradients are from those by hand, on this rank.

    `relative` is the largest difference of an element, over the largest element of that gradient. `missing` are the
    parameters that have a gradient on one side alone.
    """

    step: int
    loss: str
    relative: float
    parameter: str
    missing: tuple[str, ...]
    loss_value: float


def seed_of(rank: int, step: int) -> int:
    """The random state that a forward begins with: of dropout, and of layers that are left out."""
    return 7000 + 10 * step + rank


def mean_by_hand(gradients: Gradients, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor | None]:
    """An all-reduce for each parameter; None where no rank has a gradient."""
    means: dict[str, Tensor | None] = {}
    for name, parameter in parameters.items():
        gradient = gradients[name]
        total = (
            torch.zeros_like(parameter) if gradient is None else gradient.to_dense() if gradient.is_sparse else gradient
        )
        total = total.clone(memory_format=torch.contiguous_format)
        having_one = torch.tensor(gradient is not None, dtype=torch.int64)
        dist.all_reduce(total)
        dist.all_reduce(having_one)
        means[name] = total / dist.get_world_size() if having_one else None
    return means


def trained(parts: Parts) -> dict[str, nn.Parameter]:
    """The parameters of all parts that get gradients, by part and name."""
    return {
        f"{part}.{name}": parameter
        for part, module in parts.items()
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
    }


def gradients_of(parts: Parts) -> dict[str, Tensor | None]:
    return {name: parameter.grad for name, parameter in trained(parts).items()}


def _relative(found: Tensor, expected: Tensor, least: float) -> float:
    dense = found.to_dense() if found.is_sparse else found
    scale = max(float(expected.abs().max()), least)
    largest = float((dense - expected).abs().max())
    return largest / scale if scale else largest


def difference(step: int, loss: str, value: float, found: Gradients, expected: Gradients) -> Difference:
    missing = tuple(name for name, mean in expected.items() if (mean is None) != (found[name] is None))
    largest = max((float(mean.abs().max()) for mean in expected.values() if mean is not None), default=0.0)
    relative = {
        name: _relative(gradient, mean, SMALLEST_SCALE * largest)
        for name, mean in expected.items()
        if mean is not None and (gradient := found[name]) is not None
    }
    worst = max(relative, key=lambda name: relative[name])
    return Difference(step, loss, relative[worst], worst, missing, value)


def optimizer_of(model: RealModel, part: nn.Module) -> torch.optim.Optimizer:
    parameters = [parameter for parameter in part.parameters() if parameter.requires_grad]
    if model.sparse:
        return torch.optim.SGD(parameters, lr=0.01)
    return torch.optim.AdamW(parameters, lr=1e-3)


@torch.no_grad()
def _copy_state(wrapped: Parts, reference: Parts) -> None:
    for name, part in wrapped.items():
        theirs = [*part.module.parameters(), *part.module.buffers()]
        ours = [*reference[name].parameters(), *reference[name].buffers()]
        for one, other in zip(ours, theirs, strict=True):
            one.copy_(other)


@dataclass(frozen=True)
class Loop:
    """How a model is trained. In the last step the batch is larger by one."""

    steps: int = 3
    micro_batches: int = 1  # all but the last of a step are under no_sync()
    bfloat16: bool = False  # by autocast
    last_is_larger: bool = False

    def size_of(self, size: Size, step: int) -> Size:
        is_larger = self.last_is_larger and step == self.steps - 1
        return replace(size, batch=size.batch + 1) if is_larger else size


def train_beside(
    model: RealModel, size: Size, wrap: Callable[[nn.Module], nn.Module], loop: Loop, *, rank: int
) -> Iterator[Difference]:
    """Train `model` under a wrapper; yields the difference of each loss, before the optimizer's step."""
    wrapped = {name: wrap(part) for name, part in model.parts(size, seed=rank).items()}
    optimizers = {name: optimizer_of(model, part) for name, part in wrapped.items()}
    reference = model.parts(size)
    for step in range(loop.steps):
        numbers = range(loop.micro_batches * step, loop.micro_batches * (step + 1))
        batches = [model.batch_of(loop.size_of(size, step), rank, number) for number in numbers]
        for name, loss in model.losses.items():
            _copy_state(wrapped, reference)
            for part in (*wrapped.values(), *reference.values()):
                part.zero_grad()
            _accumulate(reference, loss, batches, loop, seed_of(rank, step))
            expected = mean_by_hand(gradients_of(reference), trained(reference))
            value = _accumulate(wrapped, loss, batches, loop, seed_of(rank, step))
            found = gradients_of({part: wrapper.module for part, wrapper in wrapped.items()})
            yield difference(step, name, value, found, expected)
            optimizers[name].step()
    for part in wrapped.values():
        _assert_equal_over_ranks(part)


def _accumulate(parts: Parts, loss: Loss, batches: Sequence[Any], loop: Loop, seed: int) -> float:
    """The sum of the gradients of all batches; returns the last one's loss."""
    torch.manual_seed(seed)
    for number, batch in enumerate(batches, start=1):
        with contextlib.ExitStack() as stack:
            for part in parts.values() if number < len(batches) else ():
                if hasattr(part, "no_sync"):
                    stack.enter_context(part.no_sync())
            with torch.autocast("cpu", torch.bfloat16, enabled=loop.bfloat16):
                value = loss(parts, batch)
            value.backward()
    return float(value)


def _assert_equal_over_ranks(part: nn.Module) -> None:
    for name, parameter in part.named_parameters():
        everywhere = [torch.empty_like(parameter) for _ in range(dist.get_world_size())]
        dist.all_gather(everywhere, parameter.detach().contiguous())
        if not all(torch.equal(other, everywhere[0]) for other in everywhere):
            raise AssertionError(f"after the optimizer's step ranks have other values of {name}")
