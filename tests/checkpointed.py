"""What checkpoints are tried with: a model of many kinds of state in every wrapper, training, and what is compared."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from compiled_ddp import EagerDDP, compile_ddp
from compiled_ddp.integrations.torch import DistributedDataParallel, EagerDistributedDataParallel


class Counted(nn.Module):
    """Saves a number that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(6, 6), 0

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


class Model(nn.Module):
    """A parameter and a buffer at its root, tied weights, a frozen part, batch statistics, dropout, extra state."""

    def __init__(self, *, tensors_only: bool = False) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))
        self.register_buffer("shift", torch.zeros(6))
        self.register_buffer("scratch", torch.zeros(1), persistent=False)
        self.embed = nn.Embedding(11, 6)
        last = nn.Linear(6, 6) if tensors_only else Counted()
        self.part = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.1), last)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.part(self.embed(tokens) * self.scale + self.shift)
        return self.head(torch.tanh(self.frozen(x)))


def with_part_wrapped(model: Model) -> nn.Module:
    model.part = EagerDDP(model.part)
    return model


KINDS: dict[str, Callable[[Model], nn.Module]] = {
    "bare model": lambda model: model,
    "torch DDP": TorchDDP,
    "compile_ddp": lambda model: compile_ddp(model, backend="aot_eager"),
    "EagerDDP": EagerDDP,
    "the subclass": lambda model: DistributedDataParallel(model, backend="aot_eager"),
    "the eager subclass": EagerDistributedDataParallel,
    "EagerDDP of a part": with_part_wrapped,
    "EagerDDP of torch.compile": lambda model: EagerDDP(torch.compile(model, backend="eager")),
}
OURS = ("compile_ddp", "EagerDDP", "the subclass", "the eager subclass", "EagerDDP of torch.compile")
WITH_MODULE = ("torch DDP", "the subclass", "the eager subclass")  # in their state dicts


def made(kind: str, seed: int, *, named: bool = False, lr: float = 0.01) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A wrapped model, and its optimizer with a group for each way of decay."""
    torch.manual_seed(seed)
    wrapped = KINDS[kind](Model())
    all_named = list(wrapped.named_parameters())
    groups = [
        {"params": [pair if named else pair[1] for pair in all_named if pair[1].ndim > 1], "weight_decay": 0.1},
        {"params": [pair if named else pair[1] for pair in all_named if pair[1].ndim == 1], "lr": lr / 2},
    ]
    return wrapped, torch.optim.AdamW(groups, lr=lr)


def batch(rank: int, step: int) -> Tensor:
    return torch.randint(11, (8,), generator=torch.Generator().manual_seed(100 * step + rank))


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, step: int) -> None:
    tokens = batch(rank, step)
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(tokens), tokens).backward()
    optimizer.step()


def canonical(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in ("module", "_orig_mod"))


def values(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """All that a checkpoint is to hold, by the names of the bare model. (Of tuples torch may make lists.)"""
    found: dict[str, Any] = {}
    for name, value in model.state_dict().items():
        found[f"model {canonical(name)}"] = value.clone() if isinstance(value, Tensor) else value
    named = {parameter: canonical(name) for name, parameter in model.named_parameters()}
    for number, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            if key not in ("params", "param_names"):
                found[f"group {number} {key}"] = list(value) if isinstance(value, tuple) else value
        for parameter in group["params"]:
            for key, value in optimizer.state[parameter].items():
                found[f"optimizer {named[parameter]} {key}"] = value.clone()
    return found


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        same = torch.equal(found[name], value) if isinstance(value, Tensor) else found[name] == value
        assert same, f"{name}: {found[name]}, {value} was saved"
