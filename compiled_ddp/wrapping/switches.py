"""What the next forward, and the backward that follows it, do together with other ranks."""

import contextlib
from collections.abc import Iterator

from compiled_ddp.users_code import warn_user


class Switches:
    """DDP's two switches of a wrapper, which its users may turn too."""

    def __init__(self, *, buffers_are_stale: bool) -> None:
        self.synchronises = True  # whether the backwards of forwards from here on do; False under no_sync
        # Whether the next forward brings rank 0's buffers, if forwards do. DDP's rule: it follows a synchronised one.
        self.buffers_are_stale = buffers_are_stale
        self._has_told = False

    def tell_too_late(self) -> None:
        """Say once that a forward has been called with the switch on, and that its backward goes by that."""
        if not self._has_told:
            self._has_told = True
            warn_user(
                "require_backward_grad_sync = False comes behind a forward that still waits for its backward, which "
                "stays synchronised: as under torch's DDP the forward decides. Assign it before the forward."
            )

    def synchronise(self, wanted: bool) -> None:
        """Let the backwards of forwards from here on be synchronised, or stay local."""
        self.synchronises = wanted

    @contextlib.contextmanager
    def local(self) -> Iterator[None]:
        """Let them stay local for the time of this context."""
        before = self.synchronises
        self.synchronise(False)
        try:
            yield
        finally:
            self.synchronise(before)

    def refresh_buffers(self, wanted: bool) -> None:
        """Let the next forward bring rank 0's buffers, or leave each rank its own."""
        self.buffers_are_stale = wanted
