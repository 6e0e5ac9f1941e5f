"""Where an exception would keep this rank from collectives that the others launch."""

from types import TracebackType

import torch

from compiled_ddp.ranks.communicator import Communicator


class GivingUpAfterSurprises:
    """Where collectives follow that an exception in here would keep this rank from: no other is launched then.

    An error of ours is raised on every rank, or after the last of them.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: TracebackType | None) -> None:
        if error is not None and self._is_surprise(error):
            self._communicator.give_up(f"{type(error).__name__} ended this rank's part in the end of a backward")

    def _is_surprise(self, error: BaseException) -> bool:
        return not isinstance(error, RuntimeError) or isinstance(error, torch.OutOfMemoryError)


class GivingUpAfterAnyException(GivingUpAfterSurprises):
    """The same where the code of a communication hook runs in here, whose RuntimeErrors are none of ours."""

    def _is_surprise(self, error: BaseException) -> bool:
        return not self._communicator.has_failed
