"""The mean is taken on the tangents only where that is proven right, and right everywhere else."""

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import SumOverRanks, assert_gradients, expected_mean
from torch import Tensor, nn

from compiled_ddp import compile_ddp
from ranks import RankPool


class AuxiliaryLoss(torch.autograd.Function):
    """As in mixtures of experts: passes the activation on, and its gradient gets a constant added."""

    @staticmethod
    def forward(ctx: Any, activation: Tensor) -> Tensor:
        return activation.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient + 0.5


class WithAuxiliaryLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(AuxiliaryLoss.apply(torch.tanh(self.first(x)))).square().sum()


class WithClampingHook(WithAuxiliaryLoss):
    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
        return self.second(hidden).square().sum()


class Plain(WithAuxiliaryLoss):
    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x))).square().sum()


def _gradients(rank: int, model_class: Callable[[], nn.Module], dtype: torch.dtype, backend: str) -> None:
    torch.manual_seed(0)
    model = model_class().to(dtype)
    ddp = compile_ddp(model, backend=backend, fullgraph=True)
    x = torch.randn(6, 5, generator=torch.Generator().manual_seed(rank)).to(dtype)
    expected = expected_mean(model, lambda module: module(x))
    ddp(x).backward()
    assert {section.origin for section in ddp.plan.sections} == {"graph"}
    half = dtype == torch.float16
    assert_gradients(model, expected, rtol=2e-3 if half else 1e-5, atol=2e-3 if half else 1e-6)


NON_LINEAR = [(WithAuxiliaryLoss, torch.float32), (WithClampingHook, torch.float32), (Plain, torch.float16)]


@pytest.mark.parametrize(("model_class", "dtype"), [*NON_LINEAR, (Plain, torch.float32)])
def test_mean_is_right_whether_backward_is_linear_or_not_on_two_ranks(
    ranks2: RankPool, model_class: type[nn.Module], dtype: torch.dtype
) -> None:
    ranks2.run(_gradients, model_class, dtype, "aot_eager")


@pytest.mark.parametrize(
    ("model_class", "dtype"),
    [NON_LINEAR[0], (Plain, torch.float32), *(pytest.param(*case, marks=pytest.mark.slow) for case in NON_LINEAR[1:])],
)
def test_mean_is_right_whether_backward_is_linear_or_not_on_three_ranks(
    ranks3: RankPool, model_class: type[nn.Module], dtype: torch.dtype
) -> None:
    ranks3.run(_gradients, model_class, dtype, "aot_eager")


@pytest.mark.inductor
def test_mean_is_right_with_an_auxiliary_loss_under_inductor(ranks2: RankPool) -> None:
    ranks2.run(
        _gradients, WithAuxiliaryLoss, torch.float32, "inductor", timeout_seconds=300, collective_timeout_seconds=120
    )


def _tiny_gradients(rank: int) -> float:
    """float16 gradients that the division of a tangent by the world size would underflow."""
    model = nn.Linear(4, 1, bias=False).half()
    ddp = compile_ddp(model, backend="aot_eager", fullgraph=True)
    x = torch.full((1, 4), 1024.0).half()
    smallest = torch.finfo(torch.float16).smallest_normal / 1024  # the smallest subnormal: half of it is zero
    ddp(x).backward(torch.full((1, 1), smallest).half())
    assert model.weight.grad is not None
    return model.weight.grad[0, 0].item()


def test_float16_tangents_are_not_scaled(ranks2: RankPool) -> None:
    smallest = torch.finfo(torch.float16).smallest_normal / 1024
    assert ranks2.run(_tiny_gradients) == [smallest * 1024] * 2


class ReturnsActivation(nn.Module):
    """Its output needs a gradient on the way back to a user's input, which must be unscaled."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(self.linear(x))


def _input_gradient(rank: int) -> None:
    model = ReturnsActivation()
    ddp = compile_ddp(model, backend="aot_eager", fullgraph=True)
    x = torch.randn(3, 5, generator=torch.Generator().manual_seed(rank), requires_grad=True)
    model(x).square().sum().backward()
    expected, x.grad = x.grad, None
    model.zero_grad()
    means = expected_mean(model, lambda module: module(x.detach()).square().sum())
    ddp(x).square().sum().backward()
    torch.testing.assert_close(x.grad, expected, rtol=0 if torch.distributed.get_world_size() == 2 else 1e-6, atol=0)
    assert_gradients(model, means)


def test_the_gradient_of_an_input_is_local_and_unscaled(ranks2: RankPool) -> None:
    ranks2.run(_input_gradient)


def test_the_gradient_of_an_input_is_local_and_unscaled_on_three_ranks(ranks3: RankPool) -> None:
    ranks3.run(_input_gradient)


def _scaled_nodes(rank: int, model_class: type[nn.Module]) -> list[str]:
    """Names of what the synchronised backward multiplies by 1/world."""
    seen: list[str] = []

    class Observed(model_class):  # type: ignore[misc,valid-type]
        pass

    from compiled_ddp.passes import pipeline

    original = pipeline.Pipeline.run

    def run(self: pipeline.Pipeline, graph: torch.fx.Graph, **kwargs: Any) -> None:
        original(self, graph, **kwargs)
        for node in graph.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor):
            if node.args[1] == 1.0 / self.plan.world_size:
                seen.append(node.args[0].name)

    pipeline.Pipeline.run = run  # type: ignore[method-assign]
    try:
        ddp = compile_ddp(Observed(), backend="aot_eager", fullgraph=True)
        ddp(torch.randn(6, 5)).backward()
    finally:
        pipeline.Pipeline.run = original  # type: ignore[method-assign]
    return seen


def test_a_linear_backward_scales_one_tangent_and_no_gradient(ranks2: RankPool) -> None:
    assert ranks2.run(_scaled_nodes, Plain) == [["tangents_1"]] * 2


def test_a_non_linear_backward_scales_each_gradient_and_no_tangent(ranks2: RankPool) -> None:
    for scaled in ranks2.run(_scaled_nodes, WithAuxiliaryLoss):
        assert len(scaled) == 4
        assert not any(name.startswith("tangents") for name in scaled)


class AddsParameter(nn.Module):
    """The tangent itself is the parameter's gradient, and the input's."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(3, 5))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.shift


def _tangent_is_the_gradient(rank: int) -> tuple[Tensor, Tensor]:
    ddp = compile_ddp(AddsParameter(), backend="aot_eager", fullgraph=True)
    x = torch.zeros(3, 5, requires_grad=True)
    (ddp(x) * (rank + 1)).sum().backward()
    assert x.grad is not None
    assert ddp.module.shift.grad is not None
    return ddp.module.shift.grad, x.grad


def test_a_gradient_that_is_the_tangent_itself_is_averaged_and_the_inputs_is_not(ranks2: RankPool) -> None:
    for rank, (parameter_gradient, input_gradient) in enumerate(ranks2.run(_tangent_is_the_gradient)):
        assert torch.equal(parameter_gradient, torch.full((3, 5), 1.5))
        assert torch.equal(input_gradient, torch.full((3, 5), rank + 1.0))


# ---- ranks that meet inside the backward -----------------------------------------------------------------------------


class Normalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        mean = SumOverRanks.apply(hidden.sum(0)) / (len(x) * dist.get_world_size())
        return self.second(torch.tanh(hidden - mean)).square().sum()


def _with_other_graphs(rank: int, eager_on: int, hooked: bool) -> None:
    """One rank reduces in its graph, the other by hooks: both gradients meet in the model's own all-reduce."""
    torch.manual_seed(0)
    model = Normalised()
    ddp = compile_ddp(model, backend="aot_eager")
    for step in range(3):
        x = torch.randn(6, 5, generator=torch.Generator().manual_seed(10 * step + rank))
        expected = expected_mean(copy.deepcopy(model), lambda module, x=x: module(x))
        ddp.zero_grad()
        handles = []
        if hooked and step and rank == eager_on:
            handles = [parameter.register_hook(lambda gradient: gradient * 1.0) for parameter in model.parameters()]
        is_eager = step and rank == eager_on and not hooked
        with torch.compiler.set_stance("force_eager") if is_eager else contextlib.nullcontext():
            ddp(x).backward()
        for handle in handles:
            handle.remove()
        assert_gradients(model, expected, rtol=1e-4, atol=1e-6)
    assert {section.origin for section in ddp.plan.sections} == {"graph"}


@pytest.mark.skipif(torch.__version__ < (2, 12), reason="torch.compile alone loses the all-reduce in a backward")
@pytest.mark.filterwarnings("ignore:gradients of")
@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize("eager_on", [0, 1])
def test_ranks_that_run_other_graphs_may_meet_inside_the_backward(
    ranks2: RankPool, eager_on: int, hooked: bool
) -> None:
    ranks2.run(_with_other_graphs, eager_on, hooked)
