"""What torch.optim's SGD, Adam and AdamW make of a gradient, as functions of tensors: for a graph that has the update.

Numbers of a parameter group (the learning rate, betas, weight decay) are inputs of the graph, a float64 vector for each
group, so that a scheduler, or an assignment, changes them without a compilation. What is a switch there, or turns a
part of the formula on (`weight_decay` other than 0), is part of the graph, and another graph when it changes.

State is torch's own: `optimizer.state[parameter]` has what `optimizer.step()` would have put there, under its names.
"""

from collections.abc import Callable, Mapping, Sequence
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


Number = Callable[[str], Tensor]  # one of those for a parameter, by its name


class Numbers:
    """A group's numbers in a graph, by their names: float64, of no dimension or one for each of its parameters.

    Each is rounded once for all parameters of a dtype and device: graphs of models with many would be as many nodes.
    """

    def __init__(self, values: Mapping[str, Tensor]) -> None:
        self._values = values
        self._rounded: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}

    def of(self, parameter: Tensor, place: int) -> Number:
        """Those for the parameter at this place in the group, of 32 or 64 bits."""

        def number(name: str) -> Tensor:
            key = name, parameter.dtype, parameter.device
            if key not in self._rounded:  # as torch rounds a Python number that meets this tensor
                self._rounded[key] = self._values[name].to(device=parameter.device, dtype=parameter.dtype)
            return self._rounded[key][place] if self._rounded[key].dim() else self._rounded[key]

        return number


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

    def derived(self, numbers: Mapping[str, Tensor], steps: Tensor) -> dict[str, Tensor]:
        """What updates read besides a group's numbers; `steps` are those of its parameters, 1 for the first."""

    def update(
        self, parameter: Tensor, gradient: Tensor, state: State, number: Number, kind: Kind
    ) -> tuple[Tensor, State]:
        """The parameter and its state behind the step."""


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

    def derived(self, numbers: Mapping[str, Tensor], steps: Tensor) -> dict[str, Tensor]:
        return {}

    def update(
        self, parameter: Tensor, gradient: Tensor, state: State, number: Number, kind: Kind
    ) -> tuple[Tensor, State]:
        if kind.has("maximize"):
            gradient = -gradient
        if kind.has("weight_decay"):
            gradient = gradient + number("weight_decay") * parameter
        if kind.has("momentum"):
            momentum = number("momentum")
            buffer = state["momentum_buffer"] * momentum + gradient
            state = {"momentum_buffer": buffer}
            gradient = gradient + momentum * buffer if kind.has("nesterov") else buffer
        return parameter - number("lr") * gradient, state


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

    def derived(self, numbers: Mapping[str, Tensor], steps: Tensor) -> dict[str, Tensor]:
        beta1, beta2 = numbers["beta1"], numbers["beta2"]
        return {
            "decay": 1 - numbers["lr"] * numbers["weight_decay"],
            "1 - beta1": 1 - beta1,
            "1 - beta2": 1 - beta2,
            "rate": numbers["lr"] / (1 - beta1**steps),
            "scale": (1 - beta2**steps).sqrt(),
        }

    def update(
        self, parameter: Tensor, gradient: Tensor, state: State, number: Number, kind: Kind
    ) -> tuple[Tensor, State]:
        if kind.has("maximize"):
            gradient = -gradient
        if kind.has("weight_decay") and kind.has("decoupled"):
            parameter = parameter * number("decay")
        elif kind.has("weight_decay"):
            gradient = gradient + number("weight_decay") * parameter
        first = state["exp_avg"] + number("1 - beta1") * (gradient - state["exp_avg"])
        second = state["exp_avg_sq"] * number("beta2") + number("1 - beta2") * gradient * gradient
        new = {"exp_avg": first, "exp_avg_sq": second}
        largest = second
        if kind.has("amsgrad"):
            new["max_exp_avg_sq"] = largest = torch.maximum(state["max_exp_avg_sq"], second)
        spread = largest.sqrt() / number("scale") + number("eps")
        return parameter - number("rate") * (first / spread), new


_RULES: dict[type[torch.optim.Optimizer], Rule] = {
    torch.optim.SGD: _SGD(),
    torch.optim.Adam: _Adam(decoupled=False),
    torch.optim.AdamW: _Adam(decoupled=True),
}


def numbers_in_graph(rule: Rule, kind: Kind, vector: Tensor, steps: Tensor) -> Numbers:
    """A group's numbers, out of the `vector` that the graph is given, and the counts of its parameters' `steps`."""
    own = {name: vector[place] for place, name in enumerate(kind.numbers)}
    return Numbers(own | rule.derived(own, steps))


def as_vectors(rule: Rule, groups: Sequence[Group]) -> list[Tensor]:
    """A graph's inputs: the numbers of each group, float64, on the CPU."""
    return [torch.tensor(rule.numbers(group), dtype=torch.float64, device="cpu") for group in groups]
