"""What a rank has accumulated itself, put aside while it shadows other ranks (`join`)."""

from collections.abc import Sequence, Set

import torch

from compiled_ddp import torch_private


class OwnGradients:
    """The .grad of each parameter, and which of them are still to be sent, as they were before the first shadowed step.

    The tensors themselves are kept, so whoever puts them aside must not write to their memory any more.
    """

    def __init__(
        self, parameters: Sequence[torch.nn.Parameter], unsent: Set[int], piggyback: torch.Tensor | None
    ) -> None:
        """`unsent` have been used since the last synchronised backward; `piggyback` waits for the next one too."""
        self.unsent, self.piggyback = set(unsent), piggyback
        self._before = [(parameter, parameter.grad) for parameter in parameters]
        self._shadowed: dict[int, tuple[torch.Tensor | None, int]] = {}  # what the latest shadowed step left
        self.take_away()

    def take_away(self) -> None:
        """Let the next shadowed step begin without any .grad."""
        for parameter, _ in self._before:
            parameter.grad = None

    def note_shadowed(self) -> None:
        """Note what a shadowed step has left in .grad."""
        self._shadowed = {id(parameter): _now(parameter) for parameter, _ in self._before}

    def give_back(self, *, if_untouched: bool = False) -> None:
        """Put every .grad back; with `if_untouched`, only where nobody has changed what the last step left."""
        for parameter, gradient in self._before:
            if not if_untouched or _is(self._shadowed.get(id(parameter)), _now(parameter)):
                parameter.grad = gradient


def _now(parameter: torch.Tensor) -> tuple[torch.Tensor | None, int]:
    gradient = parameter.grad
    return gradient, 0 if gradient is None else torch_private.tensors.version_of(gradient)


def _is(one: tuple[torch.Tensor | None, int] | None, other: tuple[torch.Tensor | None, int]) -> bool:
    return one is not None and one[0] is other[0] and one[1] == other[1]
