"""The traps of whole steps in a graph, taken by what else compiles one: `python -m benchmarks.step_traps`.

Each way takes the same steps as an ordinary loop without any compiler. It is right where losses and parameters are that
loop's behind each step; how often it has compiled is counted. One process: no trap here is about other ranks.
"""

import argparse
import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor, nn

from benchmarks.trap_scores import scores
from compiled_ddp import compile_step
from compiled_ddp.torch_private.for_benchmarks import CountingBackend, backward_in_graphs

BACKEND = "aot_eager"
STEPS = 6


class Net(nn.Module):
    """With a norm, a buffer that forward replaces, a number that it reads, and a part that it may not use."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)
        self.spare = nn.Linear(8, 8)
        self.register_buffer("mean", torch.zeros(8))
        self.mean: Tensor
        self.temperature, self.uses_spare = 1.0, False

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = torch.tanh(self.norm(self.first(x)) / self.temperature)
        self.mean = 0.9 * self.mean + 0.1 * hidden.detach().mean(0)
        hidden = self.spare(hidden) if self.uses_spare else hidden
        return F.mse_loss(self.last(hidden - self.mean).squeeze(1), y)


Optimizer = torch.optim.Optimizer
Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]


class Ordinary:
    """A loop without a compiler."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, loss: Loss) -> None:
        self._model, self._optimizer, self._loss = model, optimizer, loss
        self._update: Callable[[], Any] = optimizer.step
        self._counter = CountingBackend(BACKEND)

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        loss = self._loss(self._model, x, y)
        loss.backward()
        self._update()
        self._optimizer.zero_grad()
        return loss.detach()

    @property
    def compilations(self) -> int:
        return self._counter.compilations


class CompiledModel(Ordinary):
    """torch.compile(model) in an ordinary loop."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, loss: Loss) -> None:
        super().__init__(model, optimizer, loss)
        self._model = torch.compile(model, backend=self._counter)


class CompiledOptimizer(CompiledModel):
    """torch.compile(model), and torch.compile of the optimizer's step, as torch's recipe has it."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, loss: Loss) -> None:
        super().__init__(model, optimizer, loss)
        self._update = torch.compile(lambda: optimizer.step(), backend=self._counter)


class CompiledLoop(Ordinary):
    """torch.compile of the whole step, with the backward in the graph (compiled_autograd)."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, loss: Loss) -> None:
        super().__init__(model, optimizer, loss)
        self._compiled = torch.compile(super().step, backend=self._counter)

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        with backward_in_graphs():
            return self._compiled(x, y)


class Ours(Ordinary):
    """compile_step."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, loss: Loss) -> None:
        self._step = compile_step(model, optimizer, loss, backend=BACKEND)

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        loss: Tensor = self._step(x, y)
        return loss

    @property
    def compilations(self) -> int:
        return sum(known.graphs for every in self._step._known.values() for known in every)


WAYS: dict[str, type[Ordinary]] = {
    "compiled model": CompiledModel,
    "compiled model, compiled optimizer": CompiledOptimizer,
    "compiled loop": CompiledLoop,
    "compile_step": Ours,
}


# ---- traps -----------------------------------------------------------------------------------------------------------


@dataclass
class Run:
    """What a trap may change before each step."""

    model: Any
    optimizer: Optimizer
    weight: dict[str, float]  # of the loss, which closes over it

    @property
    def group(self) -> dict[str, Any]:
        return self.optimizer.param_groups[0]


Change = Callable[[Run, int], None]


def _once(change: Callable[[Run], Any]) -> Change:
    """Before the fourth step."""

    def changed(run: Run, number: int) -> None:
        if number == 3:
            change(run)

    return changed


def _add_group(run: Run) -> None:
    last = [*run.model.last.parameters()]
    run.group["params"] = [each for each in run.group["params"] if all(each is not other for other in last)]
    for each in last:
        run.optimizer.state.pop(each, None)
    run.optimizer.add_param_group({"params": last, "lr": 0.3})


def _other_memory(run: Run) -> None:
    run.model.first.weight.data = torch.ones(8, 6, dtype=torch.float64)


TRAPS: dict[str, Change] = {
    "nothing changes (the optimizer's state is made late, and counts steps)": lambda run, number: None,
    "another learning rate in each step": lambda run, number: run.group.update(lr=0.05 / (number + 1)),
    "other betas and eps": _once(lambda run: run.group.update(betas=(0.5, 0.6), eps=1e-3)),
    "another weight decay": _once(lambda run: run.group.update(weight_decay=0.5)),
    "optimizer.load_state_dict()": _once(
        lambda run: run.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))
    ),
    "add_param_group()": _once(_add_group),
    "a parameter is frozen": _once(lambda run: run.model.first.bias.requires_grad_(False)),
    "other memory in parameter.data": _once(_other_memory),
    "eval()": _once(lambda run: run.model.eval()),
    "a number that the loss closes over, another in each step": lambda run, number: run.weight.update(of=1.0 + number),
    "a number that forward reads": _once(lambda run: setattr(run.model, "temperature", 2.0)),
    "a part is used later": _once(lambda run: setattr(run.model, "uses_spare", True)),
    "a last, smaller batch": lambda run, number: None,  # see `_batches`
}


def _batches(trap: str) -> Iterator[tuple[Tensor, ...]]:
    generator = torch.Generator().manual_seed(0)
    for number in range(STEPS):
        rows = 3 if "smaller" in trap and number == STEPS - 1 else 5
        yield tuple(torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((rows, 6), (rows,)))


def _taken(way: type[Ordinary], trap: str) -> tuple[list[list[Tensor]], int]:
    """Losses and parameters behind each step; and how often it has compiled."""
    torch.compiler.reset()
    torch.manual_seed(0)
    model, weight = Net().double(), {"of": 1.0}  # Adam divides rounding errors by each other in 32 bits
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)
    run = Run(model, optimizer, weight)
    taking = way(model, optimizer, lambda net, x, y: net(x, y) * weight["of"])
    seen = []
    for number, (x, y) in enumerate(_batches(trap)):
        TRAPS[trap](run, number)
        loss = taking.step(x, y)
        seen.append([loss.clone(), *(value.detach().clone() for value in model.state_dict().values())])
    return seen, taking.compilations


def _are_close(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> bool:
    return all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(ours, theirs, strict=True))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.step_traps",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--trap", nargs="+", choices=[*TRAPS], default=[*TRAPS], metavar="TRAP")
    options = parser.parse_args(arguments)
    rows = []
    for trap in options.trap:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = scores(WAYS.values(), trap, taken=_taken, ordinary=Ordinary, are_close=_are_close)
        rows.append((trap, *found))
        print(rows[-1], flush=True)
    print(tabulate(rows, headers=("", *WAYS), tablefmt="github"))


if __name__ == "__main__":
    main()
