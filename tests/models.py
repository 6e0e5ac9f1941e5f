"""Small models that the distributed tests share, and plain autograd averaged by hand to compare with."""

import copy
import warnings
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn


class Mlp(nn.Module):
    """Registration order differs from the order of use."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.head = nn.Linear(width, 3)
        self.first = nn.Linear(5, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(torch.tanh(self.first(x))))


class TokenModel(nn.Module):
    """Embedding, residual blocks, a head and the loss: a language model in small."""

    def __init__(self, width: int = 16, blocks: int = 2) -> None:
        super().__init__()
        self.token = nn.Embedding(32, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
            for _ in range(blocks)
        )
        self.head = nn.Linear(width, 32)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.token(x)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return F.cross_entropy(self.head(hidden).flatten(0, 1), y.flatten())


def token_batch(seed: int, batch: int = 3, time: int = 6) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randint(0, 32, (batch, time), generator=generator),
        torch.randint(0, 32, (batch, time), generator=generator),
    )


def row_batch(rank: int, step: int = 0) -> Tensor:
    """Rows for `Mlp`, others on every rank and in every step; shape (4, 5)."""
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + rank))


class Chain(nn.Module):
    """Three linear layers, so that gradients of integers are integers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(5, 4), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.first(x)))


class Deceptive(nn.Module):
    """Has a submodule called "module", and names that differ by that prefix alone."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.ModuleDict({"norm": nn.BatchNorm1d(5), "module": nn.Linear(5, 5)})
        self.norm = nn.BatchNorm1d(5)
        self.own = nn.Parameter(torch.randn(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.own * self.norm(self.module["module"](self.module["norm"](x)))


class SumOverRanks(torch.autograd.Function):
    """As in SyncBatchNorm: an all-reduce of the model's own in forward, and one in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        total = x.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        total = gradient.contiguous().clone()
        dist.all_reduce(total)
        return total


class BrokenBlock(nn.Module):
    """Two linear layers with a graph break between them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.into = nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.into(x))
        torch._dynamo.graph_break()
        return x + self.out(x)


class ThreeEqualBlocks(nn.Module):
    """One graph of Dynamo's serves several of these blocks."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(BrokenBlock(width) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def local_gradients(module: nn.Module, loss: Callable[[nn.Module], Tensor]) -> dict[str, Tensor | None]:
    """Gradients of the bare module on this rank alone; .grad is left as it was."""
    named = dict(module.named_parameters())
    before = {name: parameter.grad for name, parameter in named.items()}
    for parameter in named.values():
        parameter.grad = None
    loss(module).backward()
    gradients = {name: parameter.grad for name, parameter in named.items()}
    for name, parameter in named.items():
        parameter.grad = before[name]
    return gradients


def mean_over_ranks(gradients: dict[str, Tensor | None], module: nn.Module) -> dict[str, Tensor]:
    """The mean by hand, in float64: one all-reduce per gradient, zeros where a rank has none."""
    means = {}
    for name, parameter in module.named_parameters():
        gradient = gradients.get(name)
        total = torch.zeros_like(parameter, dtype=torch.float64) if gradient is None else gradient.double()
        total = total.contiguous()
        dist.all_reduce(total)
        means[name] = total / dist.get_world_size()
    return means


def expected_mean(module: nn.Module, loss: Callable[[nn.Module], Tensor]) -> dict[str, Tensor]:
    """What every .grad of a synchronised backward must be, from plain autograd averaged by hand."""
    return mean_over_ranks(local_gradients(module, loss), module)


def assert_gradients(module: nn.Module, expected: dict[str, Tensor], *, rtol: float = 1e-5, atol: float = 1e-7) -> None:
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None, f"{name} has no gradient"
        found = parameter.grad.double()
        torch.testing.assert_close(found, expected[name], rtol=rtol, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


def mean_by_hand(ddp: nn.Module, loss: Callable[[nn.Module], Tensor]) -> dict[str, Tensor]:
    """On a copy: a backward of `ddp.module` after a forward of `ddp` would be taken for that forward's."""
    return expected_mean(copy.deepcopy(ddp.module), loss)


def assert_step(ddp: nn.Module, loss: Callable[[nn.Module], Tensor], *, unused: Collection[str] = ()) -> None:
    """One step is right on this rank; `unused` parameters, which no rank uses, have no gradient after it."""
    expected = mean_by_hand(ddp, loss)
    ddp.zero_grad()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of buckets that go by hooks
        loss(ddp).backward()
    for name, parameter in ddp.module.named_parameters():
        if name in unused:
            assert parameter.grad is None, f"{name} has a gradient"
            parameter.grad = torch.zeros_like(parameter)
    assert_gradients(ddp.module, expected)


def assert_equal_on_all_ranks(value: Any) -> None:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    assert all(other == values[0] for other in values), values


def gradient_copies(module: nn.Module) -> dict[str, Tensor | None]:
    return {
        name: None if parameter.grad is None else parameter.grad.clone()
        for name, parameter in module.named_parameters()
    }


def wrappers(names: Sequence[str]) -> dict[str, Callable[..., nn.Module]]:
    """Both wrappers by name, with small buckets, so that small models have several, and each graph its own."""
    from compiled_ddp import EagerDDP, compile_ddp

    small = {"bucket_cap_mb": 0.002, "first_bucket_mb": 0.001}
    graphs = {"backend": "aot_eager", "smallest_graph_mb": 0}
    every: dict[str, Callable[..., nn.Module]] = {
        "compile_ddp": lambda model, **options: compile_ddp(model, **{**graphs, **small, **options}),
        "EagerDDP": lambda model, **options: EagerDDP(model, **{**small, **options}),
    }
    return {name: every[name] for name in names}
