"""The wrapped models of a program beside their twins: forwards in an order of the rank's own, one loss of all."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from models import wrappers
from torch import Tensor, nn

from fuzz.by_hand import ByHand
from fuzz.description import OTHER_WRAPPER, Program, Setting
from fuzz.kept import Kept
from fuzz.reducing_hooks import TORCH, TRACED
from fuzz.source import FLOAT, WIDTH, build

Call = Callable[[Tensor], Any]


@dataclass
class Member:
    """One wrapped model."""

    ddp: Any
    by_hand: ByHand
    kept: Kept

    @property
    def module(self) -> nn.Module:
        module: nn.Module = self.ddp.module
        return module


def batch(seed: int, rank: int, rows: int) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(1000 * seed + rank)
    values = torch.randint(-2, 3, (rows, WIDTH), generator=generator, dtype=torch.int64, device="cpu")
    return values.float().requires_grad_()


def loss_of_output(output: Any, *, reads_asides: bool = True, factor: float = 1.0) -> Tensor:
    main, asides = (output[0], output[1:]) if isinstance(output, tuple) else (output, ())
    coefficients = torch.tensor([6.0, -6.0, 12.0], **FLOAT)
    loss: Tensor = (main * coefficients).sum()
    for aside in asides if reads_asides else ():
        loss = loss + (aside * coefficients).sum()
    return loss * factor


class Ensemble:
    def __init__(self, program: Program, wrapper: str, rank: int) -> None:
        self._rank = rank
        self._chains = _chains(program)
        swapped = (False, *(other.swapped for other in program.others))
        # Ranks that run collectives of the model run them in one order.
        self._turns = not any("all_reduce" in repr(model) for model in program.models)
        self.members = [
            Member(
                wrap(OTHER_WRAPPER[wrapper] if other else wrapper, build(model, rank), program.setting),
                ByHand(build(model, rank)),
                Kept(),
            )
            for model, other in zip(program.models, swapped, strict=True)
        ]

    @property
    def first(self) -> Any:
        """The wrapper of the first model."""
        return self.members[0].ddp

    def wrapped(self) -> list[Call]:
        return [member.ddp for member in self.members]

    def twins(self) -> list[Call]:
        return [member.by_hand.module for member in self.members]

    def set_active(self, active: bool) -> None:
        for member in self.members:
            member.ddp.module.active = member.by_hand.module.active = active

    def inputs(self, seed: int, rows: int) -> list[Tensor]:
        """A leaf for each chain of models, all with one rank's batch."""
        return [batch(seed, self._rank, rows) for _ in self._chains]

    def loss(self, calls: Sequence[Call], inputs: Sequence[Tensor], **how: Any) -> Tensor:
        """Of the forwards of all models, chain after chain, on each rank another one first."""
        first = self._rank % len(self._chains) if self._turns else 0
        losses = []
        for number in [*range(first, len(self._chains)), *range(first)]:
            x = inputs[number]
            for index in self._chains[number]:
                output = calls[index](x)
                losses.append(loss_of_output(output, **how))
                x = output[0] if isinstance(output, tuple) else output
        return torch.stack(losses).sum()

    def backward_by_hand(self, batches: Sequence[Sequence[Tensor]], **how: Any) -> list[Tensor]:
        """One backward of the twins; returns their inputs."""
        for member in self.members:
            member.by_hand.module.zero_grad()
        copies = [[x.detach().clone().requires_grad_() for x in inputs] for inputs in batches]
        torch.stack([self.loss(self.twins(), inputs, **how) for inputs in copies]).sum().backward()
        for member in self.members:
            member.by_hand.collect()
        return [x for inputs in copies for x in inputs]


def _chains(program: Program) -> list[list[int]]:
    """Indexes of the models that read each other's outputs, one list for each that reads the batch."""
    chains = [[0]]
    for index, other in enumerate(program.others, start=1):
        if other.chained:
            chains[-1].append(index)
        else:
            chains.append([index])
    return chains


def wrap(name: str, module: nn.Module, setting: Setting) -> Any:
    kind = "EagerDDP" if name == "EagerDDP" else "compile_ddp"
    options: dict[str, Any] = {
        "bucket_cap_mb": setting.bucket_cap_mb,
        "first_bucket_mb": 5e-5,
        "gradient_as_bucket_view": setting.bucket_view,
        "verify": setting.verify,
        "reduction": setting.reduction,
    }
    if name == "inductor":
        options["backend"] = "inductor"
    if setting.hook in TRACED:
        options["comm_hook"] = TRACED[setting.hook]
    ddp: Any = wrappers([kind])[kind](module, **options)
    if setting.hook in TORCH:
        # Hooks of two wrappers on one group would pair up in the order of each rank's forwards, as under torch's DDP.
        ddp.register_comm_hook(dist.new_group(), TORCH[setting.hook])
    return ddp
