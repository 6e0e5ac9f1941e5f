"""Taking part in other ranks' backwards with nothing but zeros: this rank's data has run out (`join`)."""

import threading
from collections.abc import Sequence, Set

import torch

from compiled_ddp import torch_private
from compiled_ddp.backward.forward_count import ForwardCount
from compiled_ddp.step.conducted import ConductedWrapper
from compiled_ddp.step.reduction import Reduction


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


class Shadowing:
    """Puts aside what this rank had accumulated itself, until the join is over."""

    def __init__(
        self, reduction: Reduction, forwards: ForwardCount, wrapper: ConductedWrapper, lock: threading.RLock
    ) -> None:
        self._reduction, self._forwards, self._wrapper, self._lock = reduction, forwards, wrapper, lock
        self._own: OwnGradients | None = None  # while this rank shadows others

    def shadow_backward(self, forward_count: int) -> None:
        """Skip one, in which .grad becomes what it is on the others, who have begun `forward_count` forwards."""
        with self._lock:
            carried = self._reduction.carried
            if self._own is None:
                self._reduction.agreed.buffers.let_go()  # which hold what is put aside
                self._own = OwnGradients(self._reduction.parameters.tensors, carried.used, carried.piggyback)
            self._own.take_away()
            carried.put_aside()
            self._forwards.follow(forward_count)
            self._wrapper.begin_skipping()
            self._wrapper.end()
            self._own.note_shadowed()

    def end(self, *, if_untouched: bool = False) -> None:
        """Let all that this rank had accumulated itself be as it was before the first `shadow_backward`.

        A no-op without one. With `if_untouched`, a .grad that somebody has changed since stays as it is.
        """
        if self._own is None:
            return
        with self._lock:
            own, self._own = self._own, None
            own.give_back(if_untouched=if_untouched)
            self._reduction.carried.take_up_again(own.unsent, own.piggyback)
