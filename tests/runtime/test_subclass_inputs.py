"""Tensor subclasses among a graph's inputs: AOTAutograd takes them apart, and gradients come back in other places."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import assert_step, row_batch, wrappers
from torch import Tensor, nn

from compiled_ddp import torch_private
from ranks import RankPool

BOTH = ("compile_ddp", "EagerDDP")
LIMITS = {"timeout_seconds": 400, "collective_timeout_seconds": 120}  # ranks wait for each other's compiler


class Two(torch.autograd.Function):
    """A tensor and its double, as one tensor subclass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        return torch_private.for_tests.two_tensors(x.clone(), 2 * x)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Tensor:  # type: ignore[override]
        return gradient.a + 2 * gradient.b


class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, two: Any) -> Tensor:
        return two.a + two.b

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return torch_private.for_tests.two_tensors(gradient.clone(), gradient.clone())


class BehindABreak(nn.Module):
    """A graph with a subclass amid its inputs; parameters have one shape, and `extra` feeds an output of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.behind = nn.Linear(5, 4), nn.Linear(4, 3)
        self.first, self.second, self.extra = (nn.Parameter(torch.randn(4)) for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        two = self.into(torch.tanh(self.before(x)))
        two = torch.tanh(2 * two)
        factor, extra = torch.tanh(self.first) + torch.tanh(self.second), torch.sin(self.extra)
        return self.behind(self.out_of(two) * factor), extra

    @torch.compiler.disable
    def into(self, x: Tensor) -> Tensor:
        return Two.apply(x)  # type: ignore[no-any-return,no-untyped-call]

    @torch.compiler.disable
    def out_of(self, two: Tensor) -> Tensor:
        return Sum.apply(two)  # type: ignore[no-any-return,no-untyped-call]


class Jagged(nn.Module):
    """The same with jagged rows."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.behind = nn.Linear(5, 4), nn.Linear(4, 3)
        self.first, self.extra = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        rows = torch.nested.nested_tensor_from_jagged(x, torch.tensor([0, 1, 4], device=x.device))
        hidden = self.cut(torch.tanh(self.before(rows)))
        hidden, extra = torch.tanh(2 * hidden) * self.first, torch.sin(self.extra)
        return self.behind(self.cut(hidden)).values(), extra

    @torch.compiler.disable
    def cut(self, x: Tensor) -> Tensor:
        return x.clone()


def _loss(uses: str, x: Tensor) -> Callable[[nn.Module], Tensor]:
    def loss(module: nn.Module) -> Tensor:
        total = torch.zeros(())
        for times in (1.0, 0.5)[: 1 + ("twice" in uses)]:
            found, extra = module(times * x)
            total = total + found.square().mean()
            if "extra" in uses:
                total = total + extra.square().sum()
        return total

    return loss


# What the loss uses in each step, on rank 0 and 1.
USES = {
    "never": (("", ""),) * 3,
    "always": (("extra", "extra"),) * 3,
    "in turn": (("", ""), ("extra", "extra"), ("", ""), ("extra", "extra")),
    "on one rank": (("", "extra"),) * 3,
    "twice": (("extra twice", "extra twice"),) * 3,
    "twice, in turn": (("extra twice", "twice"), ("twice", "twice"), ("", ""), ("extra twice", "twice")),
}


def _train(rank: int, wrapper: str, model: type[nn.Module], uses: str, options: dict[str, Any]) -> None:
    torch.compiler.reset()
    torch.manual_seed(0)
    ddp = wrappers([wrapper])[wrapper](model(), **options)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step, of_ranks in enumerate(USES[uses]):
        unused = () if any("extra" in of_rank for of_rank in of_ranks) else ("extra",)
        assert_step(ddp, _loss(of_ranks[rank], row_batch(rank, step)), unused=unused)
        optimizer.step()
    if wrapper == "compile_ddp":
        by_graphs = [section.plan.indices for section in ddp.plan.sections if section.origin == "graph"]
        names = {ddp._runtime.parameters.names[index] for indices in by_graphs for index in indices}
        assert {"first", "before.weight", "behind.weight"} <= names, names
    ddp.unwrap()


@pytest.mark.parametrize("uses", USES)
@pytest.mark.parametrize("model", [BehindABreak, Jagged])
@pytest.mark.parametrize("wrapper", BOTH)
def test_parameters_beside_a_subclass_with_gradient_are_reduced(
    ranks2: RankPool, wrapper: str, model: type[nn.Module], uses: str
) -> None:
    ranks2.run(_train, wrapper, model, uses, {})


@pytest.mark.inductor
@pytest.mark.parametrize(
    ("model", "uses"),
    [
        (Jagged, "in turn"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [(Jagged, "twice, in turn"), (BehindABreak, "in turn"), (BehindABreak, "twice, in turn")]
        ),
    ],
)
def test_so_they_are_with_inductor(ranks2: RankPool, model: type[nn.Module], uses: str) -> None:
    for _ in range(2):  # the second time from the caches
        ranks2.run(_train, "compile_ddp", model, uses, {"backend": "inductor"}, **LIMITS)


class OfTwo(nn.Module):
    """Takes a subclass without gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.head = nn.Parameter(torch.randn(5)), nn.Linear(5, 3)

    def forward(self, two: Any) -> Tensor:
        return self.head(torch.tanh(self.scale) * (two.a + two.b)).square().sum()


def _without_gradient(rank: int) -> None:
    ddp = wrappers(["compile_ddp"])["compile_ddp"](OfTwo(), strict=True)
    for step in range(3):
        x = row_batch(rank, step)
        two = torch_private.for_tests.two_tensors(x, x.sin())
        assert_step(ddp, lambda module: module(two))  # noqa: B023
    assert {section.origin for section in ddp.plan.sections} == {"graph"}
    ddp.unwrap()


def test_a_graph_that_takes_a_subclass_without_gradient_reduces_all_parameters(ranks2: RankPool) -> None:
    ranks2.run(_without_gradient)
