"""The host budget: what a warm step in which nothing special happens costs the host, in calls, which are no matter of
a clock or of the machine. The limits are what was counted; whoever needs more says so here."""

import functools
import gc
import itertools
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from growth import calls_in, files_of_calls
from models import wrappers
from torch import nn

import compiled_ddp
from compiled_ddp import compile_ddp, torch_private
from ranks import RankPool

OURS = str(Path(compiled_ddp.__file__).parent)
ONE_BUCKET, A_BUCKET_FOR_EACH_GRADIENT = 25.0, 1e-6


@dataclass(frozen=True)
class Cost:
    """Of one step."""

    forward: int  # Python calls of this package
    backward: int
    operators: int  # of torch in the backward, the model's own left out
    gradients: int
    buckets: int


class _Operators(torch_private.autograd.DispatchMode):
    """Counts what is called in this context."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += 1
        return func(*args, **(kwargs or {}))


def _operators(loss: torch.Tensor) -> int:
    with _Operators() as operators:
        loss.backward()
    return operators.number


def _cost(rank: int, wrapper: str, layers: int, bucket_cap_mb: float) -> Cost:
    """Counted twice: what a process keeps of equal steps, other tests may have filled or not."""
    _counted(rank, wrapper, layers, bucket_cap_mb)
    gc.collect()  # a second wrapper in the process costs calls
    return _counted(rank, wrapper, layers, bucket_cap_mb)


def _counted(rank: int, wrapper: str, layers: int, bucket_cap_mb: float) -> Cost:
    x = torch.full((3, 4), 1.0 + rank)

    def step_of(module: nn.Module) -> Any:
        def step() -> torch.Tensor:
            module.zero_grad()
            return module(x).sum()

        return step

    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers)))
    bare = step_of(torch.compile(model, backend="aot_eager") if wrapper == "compile_ddp" else model)
    bare().backward()
    own = _operators(bare())
    ddp = wrappers([wrapper])[wrapper](model, bucket_cap_mb=bucket_cap_mb, first_bucket_mb=bucket_cap_mb)
    step = step_of(ddp)
    for _ in range(4):
        step().backward()
    operators = _operators(step()) - own
    calls = [_calls_of(step) for _ in range(3)]  # a garbage collection may fall into one
    forward, backward = (min(of_steps) for of_steps in zip(*calls, strict=True))
    return Cost(forward, backward, operators, 2 * layers, len(ddp.plan.buckets))


def _calls_of(step: Callable[[], torch.Tensor]) -> tuple[int, int]:
    """In its forward and in its backward."""
    losses: list[torch.Tensor] = []
    forward = calls_in(lambda: losses.append(step()), below=OURS)
    return forward, calls_in(losses[0].backward, below=OURS)


Rates = dict[str, Callable[[Callable[[Cost], int]], tuple[float, float, float]]]


@pytest.fixture(scope="module")
def rates(ranks2: RankPool) -> Rates:
    """By wrapper, of what is asked for: what a step costs by itself, for each gradient and for each bucket."""

    @functools.cache
    def costs(wrapper: str) -> tuple[Cost, Cost, Cost]:
        few, many = (ranks2.run(_cost, wrapper, layers, ONE_BUCKET)[0] for layers in (10, 20))
        in_buckets = ranks2.run(_cost, wrapper, 20, A_BUCKET_FOR_EACH_GRADIENT)[0]
        assert (few.buckets, many.buckets, in_buckets.buckets) == (1, 1, 40)
        return few, many, in_buckets

    def rate(wrapper: str, of: Callable[[Cost], int]) -> tuple[float, float, float]:
        few, many, in_buckets = costs(wrapper)
        gradient = (of(many) - of(few)) / (many.gradients - few.gradients)
        bucket = (of(in_buckets) - of(many)) / (in_buckets.buckets - 1)
        return of(few) - few.gradients * gradient - bucket, gradient, bucket

    return {wrapper: functools.partial(rate, wrapper) for wrapper in FORWARD_CALLS}


def _assert_within(limits: tuple[float, float, float], found: tuple[float, float, float]) -> None:
    for what, limit, number in zip(("step", "gradient", "bucket"), limits, found, strict=True):
        assert number <= limit, f"a {what} costs {number:g}, it was {limit:g}"
    assert found[0] > 0, "nothing was counted"


# With zero_grad(), whose question for the parameters is one of them.
FORWARD_CALLS = {"EagerDDP": 32, "compile_ddp": 46 if torch.__version__ < "2.12" else 45}


@pytest.mark.parametrize(("wrapper", "limit"), FORWARD_CALLS.items())
def test_a_forward_costs_as_many_calls_whatever_the_models_size(rates: Rates, wrapper: str, limit: int) -> None:
    _assert_within((limit, 0, 0), rates[wrapper](lambda cost: cost.forward))


# Of the step itself, of each gradient, of each bucket.
CALLS = {"EagerDDP": (58, 0, 18), "compile_ddp": (87, 0, 2)}
OPERATORS = {"EagerDDP": (4, 1, 3), "compile_ddp": (6, 2, 3.1)}


@pytest.mark.parametrize("wrapper", CALLS)
def test_a_backward_costs_few_python_calls(rates: Rates, wrapper: str) -> None:
    _assert_within(CALLS[wrapper], rates[wrapper](lambda cost: cost.backward))


@pytest.mark.parametrize("wrapper", OPERATORS)
def test_a_backward_costs_few_operators(rates: Rates, wrapper: str) -> None:
    """Of each gradient: a view of its bucket for .grad, and whether .grad is still there at the end."""
    _assert_within(OPERATORS[wrapper], rates[wrapper](lambda cost: cost.operators))


# ---- the way through the house: what a reader who follows a warm step meets ------------------------------------------


@dataclass(frozen=True)
class Way:
    """Of a forward or a backward, in the package: Python calls, files entered, calls into another file than before."""

    calls: int
    files: int
    moves: int

    @classmethod
    def of(cls, phase: Callable[[], object]) -> "Way":
        files = files_of_calls(phase, below=OURS)
        return cls(len(files), len({*files}), sum(one != other for one, other in itertools.pairwise(files)))

    def exceeds(self, other: "Way") -> bool:
        return self.calls > other.calls or self.files > other.files or self.moves > other.moves


# Four parameters in one bucket. The aim is 100 calls, 12 files and 40 moves for a backward, 40 calls and 8 files for a
# forward; FSDP2's `replicate` has 105, 5 and 37, and 78 and 4 (torch 2.13).
WAYS = {
    "EagerDDP": (Way(27, 10, 18), Way(75, 12, 38)),
    "compile_ddp": (Way(40, 12, 27), Way(89, 12, 44)),
}


def _ways(rank: int, wrapper: str) -> tuple[Way, Way]:
    x = torch.full((3, 4), 1.0 + rank)
    ddp = wrappers([wrapper])[wrapper](nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    losses: list[torch.Tensor] = []
    for _ in range(5):
        ddp.zero_grad()
        ddp(x).sum().backward()
    ddp.zero_grad()
    forward = Way.of(lambda: losses.append(ddp(x).sum()))
    return forward, Way.of(losses[0].backward)


@pytest.mark.parametrize("wrapper", WAYS)
def test_a_warm_step_leads_a_reader_through_no_more_files_than_it_did(ranks2: RankPool, wrapper: str) -> None:
    ranks2.run(_ways, wrapper)  # what a process keeps of equal steps, other tests may have filled or not
    for found in ranks2.run(_ways, wrapper):
        for phase, way, limit in zip(("forward", "backward"), found, WAYS[wrapper], strict=True):
            assert not way.exceeds(limit), f"{phase}: {way}, it was {limit}"


# ---- the first step --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FirstStep:
    """All Python calls of it, torch's included."""

    forward: int
    backward: int


def _first_steps(rank: int, layers: int, backend: str) -> tuple[FirstStep, FirstStep]:
    """Under plain torch.compile and under compile_ddp, on rank 0; the other one takes part where it must."""

    def first_step(wrap: Callable[[nn.Module], Any], layers: int) -> FirstStep:
        torch.compiler.reset()
        module = wrap(nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers))))
        losses: list[torch.Tensor] = []
        with tempfile.TemporaryDirectory() as nothing_cached, pytest.MonkeyPatch.context() as environment:
            environment.setenv("TORCHINDUCTOR_CACHE_DIR", nothing_cached)
            forward = calls_in(lambda: losses.append(module(torch.ones(3, 4)).sum()))
            return FirstStep(forward, calls_in(losses[0].backward))

    def plain_step(layers: int) -> FirstStep:
        return first_step(lambda model: torch.compile(model, backend=backend), layers)

    def our_step(layers: int) -> FirstStep:
        return first_step(lambda model: compile_ddp(model, backend=backend, compile_once=False), layers)

    if rank == 0:
        plain_step(1)  # what is imported once
    our_step(1)
    plain = plain_step(layers) if rank == 0 else FirstStep(0, 0)
    return plain, our_step(layers)


FirstSteps = Callable[..., tuple[FirstStep, FirstStep]]


@pytest.fixture(scope="module")
def first_steps(ranks2: RankPool) -> FirstSteps:
    """Of so many layers, by a backend."""

    @functools.cache
    def counted(layers: int, backend: str = "aot_eager") -> tuple[FirstStep, FirstStep]:
        limits = {"timeout_seconds": 400, "collective_timeout_seconds": 120}
        plain, ours = ranks2.run(_first_steps, layers, backend, **limits)[0]
        assert plain.forward > 10**5 and plain.backward > 10**4, "nothing was compiled"
        return plain, ours

    return counted


def _assert_hardly_more(ours: FirstStep, plain: FirstStep, whole_factor: float) -> None:
    assert ours.forward <= 1.05 * plain.forward, f"forward: {ours}, plain torch.compile has {plain}"
    whole = plain.forward + plain.backward
    assert ours.forward + ours.backward <= whole_factor * whole, f"{ours}, plain torch.compile has {plain}"


def test_a_first_step_compiles_with_hardly_more_calls_than_under_plain_torch_compile(first_steps: FirstSteps) -> None:
    plain, ours = first_steps(20)
    _assert_hardly_more(ours, plain, 1.135)


def test_a_gradient_costs_the_first_backward_few_calls_more_than_under_plain_torch_compile(
    first_steps: FirstSteps,
) -> None:
    few, many = first_steps(10), first_steps(20)
    plain, ours = ((many[who].backward - few[who].backward) / 20 for who in (0, 1))
    # 670 of them for the proof by values. In a process that has compiled much else they are 1,572, alone 1,530.
    assert ours - plain <= 1590, f"{ours:g}, plain torch.compile has {plain:g}"


@pytest.mark.inductor
def test_a_first_step_through_inductor_compiles_with_few_calls_more(first_steps: FirstSteps) -> None:
    """17 % of layers as small as these: Inductor looks at the view of each gradient as at any other operator. 2 % more
    are the first run, which is compared by values.
    """
    plain, ours = first_steps(10, "inductor")
    _assert_hardly_more(ours, plain, 1.21)
