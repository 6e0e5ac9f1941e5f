"""What torch.optim's SGD, Adam and AdamW make of a gradient, as functions of tensors: for a graph that has the update.

Numbers of a parameter group (the learning rate, betas, weight decay) are inputs of the graph, a float64 vector for each
group, so that a scheduler, or an assignment, changes them without a compilation. What is a switch there, or turns a
part of the formula on (`weight_decay` other than 0), is part of the graph, and another graph when it changes.

State is torch's own: `optimizer.state[parameter]` has what `optimizer.step()` would have put there, under its names.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from compiled_ddp import torch_private

Group = Mapping[str, Any]
State = dict[str, Tensor]


@dataclass(frozen=True)
class Kind:
    """The part of a group that a graph has fixed: which numbers it takes, and which switches are on."""

    numbers: tuple[str, ...]
    switches: tuple[str, ...]

    def has(self, switch: str) -> bool:
        return switch in self.switches


class Numbers(Protocol):
    """The numbers of a group in a graph, by their names: float64 tensors of no dimension."""

    def __getitem__(self, name: str) -> Tensor: ...


class Rule(Protocol):
    """How one class of optimizers updates a parameter."""

    def why_not(self, group: Group) -> str:
        """What of this group's options it does not have; empty where it has all."""

    def kind(self, group: Group) -> Kind: ...

    def numbers(self, group: Group) -> list[float]:
        """In the order of `kind(group).numbers`."""

    def needed(self, kind: Kind) -> tuple[str, ...]:
        """What a step finds in the state of a parameter, by torch's names; "step" is its count."""

    def begin(self, name: str, parameter: nn.Parameter, group: Group) -> Tensor:
        """What that is in a first step, where torch makes it."""

    def update(
        self, parameter: Tensor, gradient: Tensor, state: State, numbers: Numbers, kind: Kind, steps: Tensor
    ) -> tuple[Tensor, State]:
        """The parameter and its state behind the step; `steps` is the number of that, 1 for the first."""


def rule_of(optimizer: torch.optim.Optimizer) -> Rule:
    """Of an optimizer for which `why_outside` has nothing to say."""
    return _RULES[type(optimizer)]


def why_outside(optimizer: torch.optim.Optimizer) -> str:
    """Why a graph cannot do what `optimizer.step()` does; empty where it can."""
    rule = _RULES.get(type(optimizer))
    if rule is None:  # a subclass may compute anything
        return f"it is none of torch.optim's {', '.join(kind.__name__ for kind in _RULES)}"
    if torch_private.optimizers.has_hooks(optimizer):
        return "it has hooks on its step(), or another step()"
    for group in optimizer.param_groups:
        if why := rule.why_not(group):
            return why
        if any(parameter.is_complex() for parameter in group["params"]):
            return "it has complex parameters"
    return ""


def _switched_on(group: Group, *names: str) -> tuple[str, ...]:
    return tuple(name for name in names if group.get(name))


def _has(group: Group, *names: str) -> str:
    """The first of these options that is on, in words."""
    return next((f"it has {name}={group[name]!r}" for name in names if group.get(name)), "")


def _to(number: Tensor, like: Tensor) -> Tensor:
    """Rounded as torch rounds a Python number that meets this tensor, of 32 or 64 bits."""
    return number.to(device=like.device, dtype=like.dtype)


class _SGD:
    def why_not(self, group: Group) -> str:
        # With dampening the first step is another one than all later ones.
        return _has(group, "differentiable", *(("dampening",) if group["momentum"] else ()))

    def kind(self, group: Group) -> Kind:
        switches = _switched_on(group, "momentum", "weight_decay", "nesterov", "maximize")
        return Kind(("lr", "momentum", "weight_decay"), switches)

    def numbers(self, group: Group) -> list[float]:
        return [float(group[name]) for name in ("lr", "momentum", "weight_decay")]

    def needed(self, kind: Kind) -> tuple[str, ...]:
        return ("momentum_buffer",) if kind.has("momentum") else ()

    def begin(self, name: str, parameter: nn.Parameter, group: Group) -> Tensor:
        # torch's first step makes it the gradient, which is what zeros become.
        return torch.zeros_like(parameter, memory_format=torch.preserve_format)

    def update(
        self, parameter: Tensor, gradient: Tensor, state: State, numbers: Numbers, kind: Kind, steps: Tensor
    ) -> tuple[Tensor, State]:
        if kind.has("maximize"):
            gradient = -gradient
        if kind.has("weight_decay"):
            gradient = gradient + _to(numbers["weight_decay"], parameter) * parameter
        if kind.has("momentum"):
            momentum = _to(numbers["momentum"], parameter)
            buffer = state["momentum_buffer"] * momentum + gradient
            state = {"momentum_buffer": buffer}
            gradient = gradient + momentum * buffer if kind.has("nesterov") else buffer
        return parameter - _to(numbers["lr"], parameter) * gradient, state


class _Adam:
    def __init__(self, *, decoupled: bool) -> None:
        """AdamW's weight decay is `decoupled`; Adam's may be, by an option of the group."""
        self._decoupled = decoupled

    def why_not(self, group: Group) -> str:
        return _has(group, "differentiable", "capturable")

    def kind(self, group: Group) -> Kind:
        switches = _switched_on(group, "weight_decay", "amsgrad", "maximize")
        decoupled = group.get("decoupled_weight_decay", self._decoupled)
        return Kind(
            ("lr", "beta1", "beta2", "weight_decay", "eps"), (*switches, *(("decoupled",) if decoupled else ()))
        )

    def numbers(self, group: Group) -> list[float]:
        beta1, beta2 = group["betas"]
        return [float(each) for each in (group["lr"], beta1, beta2, group["weight_decay"], group["eps"])]

    def needed(self, kind: Kind) -> tuple[str, ...]:
        return ("step", "exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if kind.has("amsgrad") else ()))

    def begin(self, name: str, parameter: nn.Parameter, group: Group) -> Tensor:
        if name == "step":
            return torch.tensor(0.0, dtype=torch.float32, device=parameter.device if group.get("fused") else "cpu")
        return torch.zeros_like(parameter, memory_format=torch.preserve_format)

    def update(
        self, parameter: Tensor, gradient: Tensor, state: State, numbers: Numbers, kind: Kind, steps: Tensor
    ) -> tuple[Tensor, State]:
        if kind.has("maximize"):
            gradient = -gradient
        if kind.has("weight_decay") and kind.has("decoupled"):
            parameter = parameter * _to(1 - numbers["lr"] * numbers["weight_decay"], parameter)
        elif kind.has("weight_decay"):
            gradient = gradient + _to(numbers["weight_decay"], parameter) * parameter
        beta1, beta2 = numbers["beta1"], numbers["beta2"]
        first = state["exp_avg"] + _to(1 - beta1, parameter) * (gradient - state["exp_avg"])
        second = state["exp_avg_sq"] * _to(beta2, parameter) + _to(1 - beta2, parameter) * gradient * gradient
        new = {"exp_avg": first, "exp_avg_sq": second}
        largest = second
        if kind.has("amsgrad"):
            new["max_exp_avg_sq"] = largest = torch.maximum(state["max_exp_avg_sq"], second)
        rate = numbers["lr"] / (1 - beta1**steps)
        scale = (1 - beta2**steps).sqrt()
        spread = largest.sqrt() / _to(scale, parameter) + _to(numbers["eps"], parameter)
        return parameter - _to(rate, parameter) * (first / spread), new


_RULES: dict[type[torch.optim.Optimizer], Rule] = {
    torch.optim.SGD: _SGD(),
    torch.optim.Adam: _Adam(decoupled=False),
    torch.optim.AdamW: _Adam(decoupled=True),
}


class Vector:
    """Numbers of a group in a graph, out of the vector that it is given."""

    def __init__(self, kind: Kind, values: Tensor) -> None:
        self._places, self._values = {name: place for place, name in enumerate(kind.numbers)}, values

    def __getitem__(self, name: str) -> Tensor:
        return self._values[self._places[name]]


def as_vectors(rule: Rule, groups: Sequence[Group]) -> list[Tensor]:
    """A graph's inputs: the numbers of each group, float64, on the CPU."""
    return [torch.tensor(rule.numbers(group), dtype=torch.float64, device="cpu") for group in groups]
