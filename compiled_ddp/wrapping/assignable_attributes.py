"""Attributes of torch's DistributedDataParallel that scripts assign: each changes what it changes there."""

from compiled_ddp.wrapping.lifecycle import Lifecycle
from compiled_ddp.wrapping.parts import HasParts


class AssignableAttributes(HasParts):
    """The part of a wrapper that is about them."""

    @property
    def require_backward_grad_sync(self) -> bool:
        """DDP's switch: whether the backwards of forwards from here on are synchronised. May be assigned.

        False is what `no_sync()` sets, which gives back at its end what it found. As under DDP it does nothing to the
        backward of a forward before it, of which it warns once.
        """
        return self._switches.synchronises

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        in_use = self._lifecycle is Lifecycle.IN_USE
        if in_use and not value and self._switches.synchronises and self._runtime.is_awaited():
            self._switches.tell_too_late()
        self._switches.synchronise(bool(value))

    @property
    def require_forward_param_sync(self) -> bool:
        """True if the next forward follows a synchronised one, and so broadcasts rank 0's buffers if forwards do."""
        return self._switches.buffers_are_stale

    @require_forward_param_sync.setter
    def require_forward_param_sync(self, value: bool) -> None:
        self._switches.refresh_buffers(bool(value))

    @property
    def forward_sync_buffers(self) -> bool:
        """Switch: broadcast rank 0's buffers in forwards that follow a synchronised one. Assign it on every rank."""
        return self._settings.options.synchronise_buffers_in_forward

    @forward_sync_buffers.setter
    def forward_sync_buffers(self, value: bool) -> None:
        self._settings.change(forward_sync_buffers=bool(value))

    @property
    def broadcast_buffers(self) -> bool:
        """DDP's older name for `forward_sync_buffers`."""
        return self.forward_sync_buffers

    @broadcast_buffers.setter
    def broadcast_buffers(self, value: bool) -> None:
        self.forward_sync_buffers = value

    @property
    def find_unused_parameters(self) -> bool:
        """What was passed; without effect, as unused parameters need no flag."""
        return bool(self._settings.ddp_arguments.get("find_unused_parameters", False))

    @find_unused_parameters.setter
    def find_unused_parameters(self, value: bool) -> None:
        self._settings.change_ddp_arguments({"find_unused_parameters": bool(value)})

    @property
    def static_graph(self) -> bool:
        """Promise that every step runs the same graph. May be set to True, as by `_set_static_graph()`."""
        return self._settings.options.static_graph

    @static_graph.setter
    def static_graph(self, value: bool) -> None:
        if value:
            self._set_static_graph()
        elif self.static_graph:
            raise AttributeError(
                f"{type(self).__name__}.static_graph cannot become false: unwrap() and wrap the model again.",
                name="static_graph",
                obj=self,
            )

    def _set_static_graph(self) -> None:
        """DDP's older name for `static_graph=True`."""
        self._check_in_use()
        self._settings.change(static_graph=True)
        self._runtime.reduction.expect_static_graph()

    def will_sync_module_buffers(self) -> bool:
        """Tell whether the next forward broadcasts rank 0's buffers."""
        return self._switches.buffers_are_stale and self.forward_sync_buffers and bool(self._managed.buffers())
