"""What one rank measures of a model of the zoo: what was captured, what reduced its gradients, steps side by side."""

import inspect
import itertools
import time
import unittest.mock
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.zoo import SIZES, ZOO, RealModel, Size
from benchmarks.zoo.by_hand import optimizer_of, seed_of
from compiled_ddp import EagerDDP, compile_ddp, torch_private
from compiled_ddp.graph.program import Program
from compiled_ddp.tools.comparison.measure import take_turns, untimed_steps
from compiled_ddp.tools.comparison.ranks import Rank

OURS, PLAIN_EAGER, PLAIN_COMPILED = "compile_ddp", "plain eager", "plain compiled"
COUNTED_STEPS = 10
SETTLED = 2  # steps, after which what hooks and graphs launch is agreed


@dataclass(frozen=True)
class Captured:
    """What the first ten steps have captured; `recompilations` are Dynamo's captures in those after the first."""

    graphs: int
    breaks: int
    recompilations: int
    break_reasons: list[str]
    first_step_s: float


@dataclass(frozen=True)
class Reduced:
    """What compile_ddp's backwards launch: bytes of a step, by graphs and in all, and why hooks launch the rest."""

    gradient_bytes: int
    share_planned: float  # of the agreed sequence, what graphs launch
    share_run: float  # of what the counted steps but the first two launched, what graphs did
    by_hooks: list[str]
    sparse: list[str]
    warnings: list[str]


@dataclass(frozen=True)
class Measured:
    """Of one model. Errors of variants stand in `failed`; a variant that failed has no samples."""

    model: str
    size: str
    backend: str
    parameters: int
    captured: dict[str, Captured]
    reduced: Reduced | None
    samples_s: dict[str, list[float]]  # of whole steps, the slowest rank's, round by round
    failed: dict[str, str] = field(default_factory=dict)
    choice: str = ""  # what ddp.warmup() chose and why, where it was called


class Trainer:
    """A variant in training: parts of its own, with the weights of all."""

    def __init__(self, model: RealModel, size: Size, wrap: Callable[[nn.Module], nn.Module], rank: Rank) -> None:
        self._model, self._size, self._rank = model, size, rank
        self.parts = {name: wrap(part) for name, part in model.parts(size).items()}
        self._optimizers = {name: optimizer_of(model, part) for name, part in self.parts.items()}

    def warm_up(self) -> str:
        """Call each wrapper's warmup with what a step calls it with first; what it has chosen, in its words."""
        calls = _first_calls(self._model, self._size, self._model.batch_of(self._size, self._rank.index, 0))
        for name, (arguments, keywords) in calls.items():
            self.parts[name].warmup(*arguments, **keywords)
        return "; ".join(filter(None, (self.parts[name].explain().chosen for name in calls)))

    def step(self, number: int) -> float:
        """Seconds of one step, from a barrier on."""
        batch = self._model.batch_of(self._size, self._rank.index, number)
        torch.manual_seed(seed_of(self._rank.index, number))
        self._rank.barrier()
        begin = time.perf_counter()
        for name, loss in self._model.losses.items():
            loss(self.parts, batch).backward()
            self._optimizers[name].step()
            for part in self.parts.values():
                part.zero_grad()
        return time.perf_counter() - begin


def _first_calls(model: RealModel, size: Size, batch: Any) -> dict[str, tuple[tuple[Any, ...], dict[str, Any]]]:
    """The arguments and keywords of the first call of each part, as its losses call it."""
    parts, calls = model.parts(size), dict[str, tuple[tuple[Any, ...], dict[str, Any]]]()
    for name, part in parts.items():

        def note(_: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any], name: str = name) -> None:
            calls.setdefault(name, (arguments, keywords))

        part.register_forward_pre_hook(note, with_kwargs=True)
    with torch.no_grad():
        for loss in model.losses.values():
            loss(parts, batch)
    return calls


def variants(model: RealModel, backend: str, **of_compile_ddp: Any) -> dict[str, Callable[[nn.Module], nn.Module]]:
    """How each wraps a part. Ours is first: what Dynamo learns of changing sizes holds for all that come later."""
    apart = {"isolate_recompiles": True} if "isolate_recompiles" in inspect.signature(torch.compile).parameters else {}

    def compiled(module: nn.Module) -> nn.Module:
        return torch.compile(module, backend=backend, **apart)

    def torchs(module: nn.Module) -> nn.Module:
        return DistributedDataParallel(module, gradient_as_bucket_view=True, find_unused_parameters=model.unused)

    return {
        OURS: lambda module: compile_ddp(module, backend=backend, **of_compile_ddp),
        PLAIN_COMPILED: compiled,
        "torch.compile(DDP)": lambda module: compiled(torchs(module)),
        PLAIN_EAGER: lambda module: module,
        "torch DDP": torchs,
        "EagerDDP": EagerDDP,
    }


@contextmanager
def _noting_graphs(launched: list[int]) -> Iterator[None]:
    """Within this context, the bytes that each graph launches are added to the last of `launched`."""
    run = Program.run

    def note_and_run(program: Program, *args: Any, **kwargs: Any) -> Any:
        launched[-1] += program.plan.nbytes
        return run(program, *args, **kwargs)

    with unittest.mock.patch.object(Program, "run", note_and_run):
        yield


def _counters() -> tuple[int, int, dict[str, int]]:
    """Graphs and frames that Dynamo has captured so far, and its reasons for breaks."""
    counters = torch_private.for_tests.compiler_counters()
    breaks = counters.get("graph_break", {})
    return counters.get("stats", {}).get("unique_graphs", 0), counters.get("frames", {}).get("total", 0), breaks


def _first_steps(trainer: Trainer, steps: int, after_step: Callable[[], None] = lambda: None) -> Captured:
    graphs, _, breaks = _counters()
    first_step_s = trainer.step(0)
    after_step()
    graphs_now, frames, breaks_now = _counters()
    new = {reason: count - breaks.get(reason, 0) for reason, count in breaks_now.items()}
    for number in range(1, steps):
        trainer.step(number)
        after_step()
    _, frames_now, _ = _counters()
    reasons = [reason.partition("\n")[0] for reason, count in new.items() if count]
    return Captured(graphs_now - graphs, sum(new.values()), frames_now - frames, reasons, first_step_s)


class LaunchedBytes:
    """By graphs and hooks, in each step, as far as backwards were synchronised. A plan may grow from step to step."""

    def __init__(self, parts: Iterable[nn.Module]) -> None:
        self._parts = [*parts]
        self._backwards = [part.stats()["iteration"] for part in self._parts]
        self.of_steps: list[int] = []

    def note_step(self) -> None:
        """A step is over."""
        before, self._backwards = self._backwards, [part.stats()["iteration"] for part in self._parts]
        new = [now - then for now, then in zip(self._backwards, before, strict=True)]
        launched = (count * part.plan.nbytes for count, part in zip(new, self._parts, strict=True) if count)
        self.of_steps.append(sum(launched))


def first_steps_of_ours(trainer: Trainer, steps: int) -> tuple[Captured, Reduced]:
    """What compile_ddp's first steps capture, and what graphs and hooks launch in them."""
    in_graphs, parts = [0], trainer.parts.values()
    in_all = LaunchedBytes(parts)

    def after_step() -> None:
        in_graphs.append(0)
        in_all.note_step()

    with warnings.catch_warnings(record=True) as caught, _noting_graphs(in_graphs):
        warnings.simplefilter("always")
        captured = _first_steps(trainer, steps, after_step)
    planned = [section for part in parts for section in part.plan.launched]
    of_graphs = sum(section.plan.nbytes for section in planned if section.origin == "graph")
    explained = [part.explain() for part in parts]
    reasons = {section.reason for section in planned if section.origin == "hooks"}
    reasons |= {reason for explanation in explained for reason in explanation.fallback_reasons}
    return captured, Reduced(
        gradient_bytes=sum(section.plan.nbytes for section in planned),
        share_planned=of_graphs / sum(section.plan.nbytes for section in planned),
        share_run=sum(in_graphs[SETTLED:steps]) / sum(in_all.of_steps[SETTLED:steps]),
        by_hooks=sorted(reasons),
        sparse=[name for explanation in explained for name in explanation.sparse],
        warnings=sorted({str(warning.message) for warning in caught if "hooks reduce" in str(warning.message)}),
    )


def captured_by_torch_compile(model: RealModel, size: Size, backend: str, rank: Rank) -> Captured:
    """What it would capture in a process of its own; then Dynamo forgets, also which sizes change."""
    trainer = Trainer(model, size, variants(model, backend)[PLAIN_COMPILED], rank)
    captured = _first_steps(trainer, COUNTED_STEPS)
    torch.compiler.reset()
    return captured


def _side_by_side(trainers: Mapping[str, Trainer], rounds: int, rank: Rank) -> dict[str, list[float]]:
    """A turn of each in every round, as `compiled_ddp.tools.comparison.measure` has them."""
    numbers = {name: itertools.count(COUNTED_STEPS) for name in trainers}
    step_s = max((trainer.step(next(numbers[name])) for name, trainer in trainers.items()), default=0.0)
    untimed = untimed_steps(rank.gather(step_s))

    def turn(name: str) -> float:
        *_, timed = [trainers[name].step(next(numbers[name])) for _ in range(untimed + 1)]
        return timed

    samples = take_turns([partial(turn, name) for name in trainers], range(rounds))
    return {
        name: [max(of_ranks) for of_ranks in zip(*rank.gather(of_one), strict=True)]
        for name, of_one in zip(trainers, samples, strict=True)
    }


def measure(name: str, *, size: str, backend: str, only: Sequence[str], rounds: int, warmup: bool, rank: Rank) -> Any:
    """A `Measured` as a JSON value: of each variant ten steps alone, then `rounds` turns side by side."""
    model, reduced, failed = ZOO[name], None, dict[str, str]()
    captured = {PLAIN_COMPILED: captured_by_torch_compile(model, SIZES[size], backend, rank)}
    trainers: dict[str, Trainer] = {}
    choice = ""
    for variant, wrap in variants(model, backend).items():
        if only and variant not in only:
            continue
        try:
            trainer = Trainer(model, SIZES[size], wrap, rank)
            if variant == OURS:
                choice = trainer.warm_up() if warmup else ""
                captured[variant], reduced = first_steps_of_ours(trainer, COUNTED_STEPS)
            else:
                counted = _first_steps(trainer, COUNTED_STEPS)
                captured.setdefault(variant, counted)
            trainers[variant] = trainer
        except Exception as error:  # one row of the table is lost, and says why
            failed[variant] = f"{type(error).__name__}: {error}"[:1000]
        if any(rank.gather(variant in failed)):
            trainers.pop(variant, None)
    parameters = [p for part in model.parts(SIZES[size]).values() for p in part.parameters() if p.requires_grad]
    samples = _side_by_side(trainers, rounds, rank)
    numel = sum(parameter.numel() for parameter in parameters)
    return asdict(Measured(name, size, backend, numel, captured, reduced, samples, failed, choice))
