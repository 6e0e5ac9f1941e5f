"""Conversions of a whole module between two steps, as for a checkpoint, or for good."""

from collections.abc import Callable

from torch import nn

from fuzz.by_hand import ByHand

# Name -> what is called on the module, and whether gradients may be rounded in it.
CONVERSIONS: dict[str, tuple[tuple[Callable[[nn.Module], object], ...], bool]] = {
    "double and back": ((nn.Module.double, nn.Module.float), False),
    "half and back": ((nn.Module.half, nn.Module.float), True),
    "bfloat16 and back": ((nn.Module.bfloat16, nn.Module.float), True),
    "float": ((nn.Module.float,), True),
    "double": ((nn.Module.double,), False),
    "cpu": ((nn.Module.cpu,), False),
}
ROUNDED = 0.01  # of the largest number of a gradient, in bfloat16


def convert(module: nn.Module, by_hand: ByHand, kind: str) -> list[str]:
    """Convert the module and its twin; returns what has become of `.grad` against all rules, in words."""
    calls, rounds = CONVERSIONS[kind]
    for call in calls:
        call(module)
        call(by_hand.module)
    wrong = list(by_hand.differences(module, tolerance=ROUNDED if rounds else 0.0)) if rounds else []
    if rounds:
        for name, parameter in module.named_parameters():
            if parameter.grad is not None:
                by_hand.gradients[name] = parameter.grad.double()
    return [f"{kind}: {difference}" for difference in wrong]
