"""Errors that are of two classes: the one that our documentation promises, and the one that torch raises there.

Scripts written for torch's DDP catch the latter. `tests/runtime/test_ddp_errors.py` constructs both with the same bad
input.
"""


class ModelError(ValueError, RuntimeError):
    """A model that cannot be wrapped as it is; DDP's checks, and the broadcast of its state, raise RuntimeError."""


class NotInitialisedError(RuntimeError, ValueError):
    """There is no process group; ValueError under DDP."""


class WrongKindError(ValueError, TypeError):
    """An argument that is none of those allowed, and of a wrong type under DDP."""


class OptionError(ValueError, RuntimeError):
    """A value of an option of torch.compile's that it has not; RuntimeError there."""


class NotPicklableError(TypeError, RuntimeError):
    """A wrapper that no file can hold; RuntimeError under DDP."""
