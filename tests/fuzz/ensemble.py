"""The wrapped models of a program beside their twins: forwards in an order of the rank's own, one loss of all."""

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from models import wrappers
from torch import Tensor, nn

from compiled_ddp.wrapping.setup import Setup
from fuzz.by_hand import ByHand
from fuzz.description import OTHER_WRAPPER, Program, Reads, Setting
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


@dataclass
class Batch:
    """Of one forward of all models."""

    inputs: list[Tensor]  # a leaf for each chain of models, all of one value
    reads: Reads

    def copy(self) -> "Batch":
        """With leaves of their own."""
        return replace(self, inputs=[x.detach().clone().requires_grad_() for x in self.inputs])


def values_of(seed: int, rank: int, rows: int) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(1000 * seed + rank)
    values = torch.randint(-2, 3, (rows, WIDTH), generator=generator, dtype=torch.int64, device="cpu")
    return values.float().requires_grad_()


def loss_of_output(output: Any, reads: Reads = "all", *, factor: float = 1.0) -> Tensor:
    outputs = output if isinstance(output, tuple) else (output,)
    if len(outputs) > 1:
        outputs = {"all": outputs, "main": outputs[:1], "asides": outputs[1:]}[reads]
    coefficients = torch.tensor([6.0, -6.0, 12.0], **FLOAT)
    return torch.stack([(output * coefficients).sum() for output in outputs]).sum() * factor


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

    def batch(self, seed: int, rows: int, reads: Reads = "all") -> Batch:
        return Batch([values_of(seed, self._rank, rows) for _ in self._chains], reads)

    def loss(self, calls: Sequence[Call], batch: Batch, *, factor: float = 1.0) -> Tensor:
        """Of the forwards of all models, chain after chain, on each rank another one first."""
        first = self._rank % len(self._chains) if self._turns else 0
        losses = []
        for number in [*range(first, len(self._chains)), *range(first)]:
            x = batch.inputs[number]
            for index in self._chains[number]:
                output = calls[index](x)
                losses.append(loss_of_output(output, batch.reads, factor=factor))
                x = output[0] if isinstance(output, tuple) else output
        return torch.stack(losses).sum()

    def backward_by_hand(self, batches: Sequence[Batch], *, factor: float = 1.0) -> list[Tensor]:
        """One backward of the twins; returns their inputs."""
        for member in self.members:
            member.by_hand.module.zero_grad()
        copies = [batch.copy() for batch in batches]
        torch.stack([self.loss(self.twins(), batch, factor=factor) for batch in copies]).sum().backward()
        for member in self.members:
            member.by_hand.collect()
        return [x for batch in copies for x in batch.inputs]


def _chains(program: Program) -> list[list[int]]:
    """Indexes of the models that read each other's outputs, one list for each that reads the batch."""
    chains = [[0]]
    for index, other in enumerate(program.others, start=1):
        if other.chained:
            chains[-1].append(index)
        else:
            chains.append([index])
    return chains


def _all_matrices(setup: Setup) -> frozenset[str]:
    """What sums by rows asks for no embedding: any matrix will do, and most of these have no row of zeros."""
    matrices = {name: p for name, p in setup.dense().items() if p.is_cpu and p.dim() == 2 and p.numel()}
    return frozenset(name for name, matrix in matrices.items() if matrix.is_contiguous())


def wrap(name: str, module: nn.Module, setting: Setting) -> Any:
    kind = "EagerDDP" if name == "EagerDDP" else "compile_ddp"
    options: dict[str, Any] = {
        "bucket_cap_mb": setting.bucket_cap_mb,
        "first_bucket_mb": 5e-5,
        "gradient_as_bucket_view": setting.bucket_view,
        "verify": setting.verify,
        "reduction": setting.reduction,
    }
    if kind == "compile_ddp":
        options["smallest_graph_mb"] = setting.smallest_graph_mb
    if name == "inductor":
        options["backend"] = "inductor"
    if setting.hook in TRACED:
        options["comm_hook"] = TRACED[setting.hook]
    by_rows = mock.patch.object(Setup, "by_rows", _all_matrices) if setting.by_rows else contextlib.nullcontext()
    with by_rows:
        ddp: Any = wrappers([kind])[kind](module, **options)
    if setting.by_rows:
        ddp._setup.by_rows = functools.partial(_all_matrices, ddp._setup)  # when its model has changed
    if setting.hook in TORCH:
        # Hooks of two wrappers on one group would pair up in the order of each rank's forwards, as under torch's DDP.
        ddp.register_comm_hook(dist.new_group(), TORCH[setting.hook])
    return ddp
