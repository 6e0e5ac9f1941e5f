"""An exception on one rank, anywhere in a step: the next step is right, or refused with a clear error on every rank."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from fuzz.description import Failure
from fuzz.operators import ARMED, PLANTED

ERRORS: dict[str, type[BaseException]] = {
    "ValueError": ValueError,
    "KeyboardInterrupt": KeyboardInterrupt,
    "OutOfMemoryError": torch.OutOfMemoryError,
}
RIGHT, PLANTED_HERE, REFUSED, UNCLEAR = "right", "planted", "refused", "unclear"
# What a clear error never says: another rank's end, or its silence, is no answer.
UNCLEAR_WORDS = ("gloo", "Connection", "timed out", "timeout", "NoneType", "assert")


@dataclass
class Outcome:
    """What became of a step on this rank."""

    kind: str = RIGHT
    words: str = ""


@contextlib.contextmanager
def recorded(outcome: Outcome) -> Iterator[None]:
    """Catch what the body raises, and say what it was."""
    try:
        yield
    except BaseException as error:
        message = str(error)
        outcome.words = f"{type(error).__name__}: {message}"
        if message.startswith(PLANTED):
            outcome.kind = PLANTED_HERE
        elif isinstance(error, RuntimeError) and not any(word in message for word in UNCLEAR_WORDS):
            outcome.kind = REFUSED
        else:
            outcome.kind = UNCLEAR


def everyones(outcome: Outcome) -> list[Outcome]:
    outcomes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(outcomes, outcome)
    return outcomes


@dataclass
class Plant:
    """Raises the failure's error once on its rank."""

    failure: Failure
    armed: bool  # whether this is its rank
    _handles: list[Any] = field(default_factory=list)

    @property
    def _error(self) -> BaseException:
        return ERRORS[self.failure.error](PLANTED)

    def _raise(self, *_: Any) -> None:
        self.remove()
        raise self._error

    def in_forward(self) -> None:
        if self.armed and self.failure.place == "forward":
            ARMED["forward"] = ERRORS[self.failure.error]

    def in_backward(self, loss: torch.Tensor, inputs: list[torch.Tensor], module: torch.nn.Module) -> None:
        """After the forwards."""
        ARMED.clear()
        if not self.armed:
            return
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        parameter = trained[len(trained) // 2]
        match self.failure.place:
            case "backward":
                ARMED["backward"] = ERRORS[self.failure.error]
            case "loss hook":
                self._handles.append(loss.register_hook(self._raise))
            case "weight hook":
                self._handles.append(parameter.register_hook(self._raise))
            case "accumulate hook":
                self._handles.append(parameter.register_post_accumulate_grad_hook(self._raise))
            case "input hook":
                self._handles.append(inputs[0].register_hook(self._raise))

    def in_optimizer(self) -> None:
        if self.armed and self.failure.place == "optimizer":
            raise self._error

    def remove(self) -> None:
        ARMED.clear()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def after(failure: Failure, ddp: Any, evaluate: Callable[[], object]) -> None:
    """What the rank does where it has caught the exception, before anything else."""
    if failure.then == "abandon":
        ddp.abandon_backward()
    elif failure.then == "evaluate" and failure.place != "loss hook":  # nothing tells of that one but a call
        with torch.no_grad():
            evaluate()
    elif failure.place == "loss hook":
        ddp.skip_step()


def differences(outcomes: list[Outcome], allowed: set[str], when: str) -> list[str]:
    return [
        f"{when}: rank {rank}: {outcome.kind}, {outcome.words}"
        for rank, outcome in enumerate(outcomes)
        if outcome.kind not in allowed
    ]
