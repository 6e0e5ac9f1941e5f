"""Taking part in other ranks' backwards with nothing but zeros: this rank's data has run out (`join`)."""

import threading

from compiled_ddp.backward.forward_count import ForwardCount
from compiled_ddp.step.conducted import ConductedWrapper
from compiled_ddp.step.own_gradients import OwnGradients
from compiled_ddp.step.reduction import Reduction


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
