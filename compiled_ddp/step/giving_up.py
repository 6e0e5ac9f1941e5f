"""Where an exception would keep this rank from collectives that the others launch."""

import contextlib
from collections.abc import Iterator

import torch

from compiled_ddp.ranks.communicator import Communicator


@contextlib.contextmanager
def giving_up_after_surprises(communicator: Communicator) -> Iterator[None]:
    """Where collectives follow that an exception in here would keep this rank from: no other is launched then.

    An error of ours is raised on every rank, or after the last of them.
    """
    try:
        yield
    except BaseException as error:
        if not isinstance(error, RuntimeError) or isinstance(error, torch.OutOfMemoryError):
            _give_up(communicator, error)
        raise


@contextlib.contextmanager
def giving_up_after_any_exception(communicator: Communicator) -> Iterator[None]:
    """The same where the code of a communication hook runs in here, whose RuntimeErrors are none of ours."""
    try:
        yield
    except BaseException as error:
        if not communicator.has_failed:
            _give_up(communicator, error)
        raise


def _give_up(communicator: Communicator, error: BaseException) -> None:
    communicator.give_up(f"{type(error).__name__} ended this rank's part in the end of a backward")
