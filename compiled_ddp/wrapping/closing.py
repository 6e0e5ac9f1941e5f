"""The end of a wrapper: its module is given back, or wrapped once more."""

from torch import nn

from compiled_ddp import torch_private
from compiled_ddp.model.owners import unmark_wrapped
from compiled_ddp.users_code import warn_user
from compiled_ddp.wrapping.copies import CopiedModule
from compiled_ddp.wrapping.lifecycle import Lifecycle
from compiled_ddp.wrapping.parts import HasParts
from compiled_ddp.wrapping.watched_model import WatchedModel


class Closable(HasParts):
    """The part of a wrapper that is about it; an `Owner` of its module until then."""

    _watched_model: WatchedModel  # of a wrapper in use
    _copied: CopiedModule  # of a copy

    @torch_private.dynamo.untraced
    def unwrap(self) -> nn.Module:
        """Remove every hook, give the communicator back, and return the module, ready to be wrapped again.

        A collective: every rank calls it. The wrapper itself cannot be used afterwards; a second call changes nothing.
        """
        self._close(Lifecycle.UNWRAPPED)
        return self.module

    def _close(self, end: Lifecycle) -> None:
        """A no-op for a wrapper that is closed already."""
        before, name = self._lifecycle, type(self).__name__
        if before is Lifecycle.COPY:
            self._copied.close()
        elif before is Lifecycle.IN_USE:
            self._runtime.close(end.why_no_backward(name), abandon=end is Lifecycle.REPLACED)
            unmark_wrapped(self._managed)
            self._watched_model.close()
        else:
            return
        self._lifecycle = end

    def make_way(self) -> None:
        """Take part in what other ranks may still wait for, before the module is wrapped once more."""
        if not self._runtime.communicator.has_failed:
            self._runtime.finish_broken_backward()

    def warn_of(self, successor: str) -> None:
        """Warn that a `successor` is about to take this one's place."""
        module = type(torch_private.modules.without_compile_wrapper(self.module)).__name__
        warn_user(
            f"the {module} is wrapped once more: its {type(self).__name__} is closed, as by unwrap(), and the new "
            f"{successor} takes its place. Call unwrap() first if that is meant."
        )

    def be_replaced(self) -> None:
        """Close, for another wrapper that all ranks are about to make of the same module.

        On this rank alone, as on others this one may have been collected as garbage.
        """
        self._close(Lifecycle.REPLACED)
