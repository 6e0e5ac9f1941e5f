"""Attributes of torch's DistributedDataParallel (2.15): each has its meaning here, or an error that says what to use.

A name of DDP's never reaches the model: what a model has under such a name is at `wrapper.module`, as under DDP.
`tests/runtime/test_ddp_attributes.py` reads the names off an instance of torch's class.
"""

import types
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from compiled_ddp import torch_private
from compiled_ddp.wrapping.parts import HasParts, Lifecycle

_FINISHED = "a backward that has returned has reduced everything"

# What there is nothing of here, and what to use instead.
INSTEAD = {
    "reducer": "plan, explain() and stats() tell what is reduced where",
    "logger": "stats() has what DDP logs",
    "device_mesh": "process_group is the group that was made of it, if one was passed",
    "scatter": "inputs are not split, and the forward itself moves them to device_ids",
    "gather": "outputs stay where the model makes them",
    "to_kwargs": "the forward itself moves its inputs to device_ids",
    "_get_ddp_logging_data": "use stats(), which has the same names",
    "_set_ddp_runtime_logging_sample_rate": "stats() counts every step, and measures no times",
    "_register_buffer_comm_hook": (
        "pass broadcast_buffers=False, and synchronise the buffers your way in a forward pre-hook of the wrapper"
    ),
    "_register_fused_optim": "let an optimizer step in register_post_accumulate_grad_hook, which sees the mean",
    "_update_process_group": "call unwrap(), and wrap again with process_group=, on every rank",
    "_set_params_and_buffers_to_ignore_for_model": "call it on torch's class, before wrapping the model",
    "_module_parameters": "use parameters()",
    "_distributed_rank": "use torch.distributed.get_rank(process_group)",
    "_has_rebuilt_buckets": "stats() has has_rebuilt_buckets",
    "_comm_hooks": "stats() has the comm_hook's name",
    "should_finalize_after_backward": _FINISHED,
    "finalize_backward": _FINISHED,
    "_check_reducer_finalized": _FINISHED,
    "_remove_autograd_hooks": "call unwrap()",
}
_INTERNAL = "it is internal to torch's class"

_OF_DDP = frozenset(dir(DistributedDataParallel)) - frozenset(dir(nn.Module)) | frozenset(INSTEAD)


def refuse(wrapper: nn.Module, name: str) -> NoReturn:
    """Raise AttributeError for a name of DDP's that `wrapper` does not have."""
    instead = INSTEAD.get(name, _INTERNAL)
    module = " What the model has under this name is at .module." if hasattr(wrapper.module, name) else ""
    raise AttributeError(
        f"{type(wrapper).__name__} has no {name!r}, as torch's DistributedDataParallel has: {instead}.{module}",
        name=name,
        obj=wrapper,
    )


class Fixed:
    """An attribute that the constructor decides."""

    def __init__(self, read: Callable[[Any], Any]) -> None:
        self._read = read
        self.__doc__ = read.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, wrapper: Any, owner: type) -> Any:
        return self if wrapper is None else self._read(wrapper)

    def __set__(self, wrapper: Any, value: object) -> NoReturn:
        raise AttributeError(
            f"{type(wrapper).__name__}.{self._name} is fixed when a model is wrapped, and cannot become {value!r}: "
            "pass what you want to the constructor.",
            name=self._name,
            obj=wrapper,
        )


class DDPAttributes(HasParts):
    """The part of a wrapper that answers for DDP's attributes, and looks up others on the model."""

    # ---- those that scripts assign: each changes what it changes there -----------------------------------------------

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

    # ---- what a wrapper was given ------------------------------------------------------------------------------------

    @Fixed
    def device_ids(self) -> list[int | None] | None:
        """The index of the GPU where inputs are moved, in a list; None where they stay where they are."""
        return None if self._settings.input_device is None else [self._settings.input_device.index]

    @Fixed
    def output_device(self) -> int | None:
        """The index of the model's GPU, if it was passed; outputs stay where the model makes them."""
        return None if self._settings.input_device is None else self._settings.input_device.index

    @Fixed
    def dim(self) -> int:
        """What was passed; without effect, as inputs are not split."""
        return self._settings.ddp_arguments.get("dim", 0)

    @Fixed
    def gradient_as_bucket_view(self) -> bool:
        """True if hooks leave .grad as views of the buckets; False if each has memory of its own."""
        return self._settings.options.gradient_as_bucket_view

    @Fixed
    def batched_grad_copy(self) -> bool:
        """What was passed; without effect."""
        return self._settings.ddp_arguments.get("batched_grad_copy", False)

    @Fixed
    def lazy_bucket_allocation(self) -> bool:
        """True with `keep_buffers=False`: flat buffers are given back when a forward begins."""
        return not self._settings.options.keep_buffers

    @Fixed
    def require_manual_backward_finalization(self) -> bool:
        """False: a backward that has returned has reduced everything."""
        return False

    @Fixed
    def skip_all_reduce_unused_params(self) -> bool:
        """What was passed; without effect, as what no rank uses is not reduced."""
        return self._settings.ddp_arguments.get("skip_all_reduce_unused_params", False)

    @Fixed
    def mixed_precision(self) -> None:
        """None: the constructor refuses others."""
        return

    @Fixed
    def bucket_bytes_cap(self) -> int | float:
        """The size at which a bucket closes, the last one of a list; infinite where none was given."""
        return self._settings.options.largest_bucket_bytes

    @Fixed
    def bucket_bytes_cap_list(self) -> list[int]:
        """The sizes of `bucket_cap_mb_list`; empty without."""
        capacities = self._settings.options.bucket_capacities_bytes if self._settings.options.bucket_cap_mb_list else ()
        return [int(capacity) for capacity in capacities]

    @Fixed
    def bucket_bytes_cap_default(self) -> bool:
        """True if no bucket size was passed, so that the wrapper has chosen one."""
        given = self._settings.given
        return given.bucket_cap_mb is None and not given.bucket_cap_mb_list and given.bucket_rule is None

    @Fixed
    def broadcast_bucket_size(self) -> int:
        """The size in bytes of the pieces in which parameters and buffers are broadcast."""
        return torch_private.groups.BROADCAST_BYTES

    @Fixed
    def use_side_stream_for_tensor_copies(self) -> bool:
        """True if inputs are moved to the GPU on a stream of their own."""
        return True

    @Fixed
    def device_mesh(self) -> Any:
        """The mesh that was passed."""
        mesh = self._settings.ddp_arguments.get("device_mesh")
        if mesh is None:
            refuse(self, "device_mesh")
        return mesh

    # ---- what it found in its model ----------------------------------------------------------------------------------

    @Fixed
    def device_type(self) -> str:
        """The kind of device that the trained parameters are on."""
        return self.device.type

    @Fixed
    def is_multi_device_module(self) -> bool:
        """True if the parameters are on several devices, so that hooks reduce them."""
        return len({parameter.device for parameter in self._managed.parameters().values()}) > 1

    @Fixed
    def parameters_to_ignore(self) -> set[str]:
        """The names in the module's `_ddp_params_and_buffers_to_ignore`, as they were read at construction."""
        return set(self._managed.ignored)

    @Fixed
    def modules_buffers(self) -> list[torch.Tensor]:
        """The buffers that the wrapper synchronises."""
        return list(self._managed.buffers().values())

    @Fixed
    def named_module_buffers(self) -> dict[str, torch.Tensor]:
        """The buffers that the wrapper synchronises, with their names, as DDP's attribute of this name has them."""
        return self._managed.buffers()

    # ---- all others --------------------------------------------------------------------------------------------------

    def _handed_out(self, method: types.MethodType) -> types.MethodType:
        """A method of the model, for the user to call through the wrapper."""
        raise NotImplementedError

    def __getattr__(self, name: str) -> Any:
        """What the model has and the wrapper has not, unless DDP has it too."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
        if name in _OF_DDP:
            refuse(self, name)
        bare = torch_private.modules.without_compile_wrapper(self.module)
        try:
            found = getattr(self.module, name)
        except AttributeError as error:
            raise AttributeError(
                f"neither {type(self).__name__} nor the {type(bare).__name__} that it wraps has an attribute {name!r}: "
                f"{error}",
                name=name,
                obj=self,
            ) from error
        is_method = isinstance(found, types.MethodType) and found.__self__ is bare
        return self._handed_out(found) if is_method else found
