"""The wrappers as subclasses of torch's DistributedDataParallel, for code that asks for that class.

Trainers construct `torch.nn.parallel.DistributedDataParallel` by its name, ask `isinstance` of it, and reach for some
of its internals. These classes have its constructor, its keys in state dicts, and what is asked for.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import parallel

from compiled_ddp.compiled import CompiledDDP
from compiled_ddp.eager import EagerDDP
from compiled_ddp.model.state_keys import accept_wrapped_keys
from compiled_ddp.options import CompilerKeywords, OptionKeywords, part_options
from compiled_ddp.wrapper import DataParallelWrapper
from compiled_ddp.wrapping.ddp_arguments import Device
from compiled_ddp.wrapping.ddp_attributes import refuse


class StandInReducer:
    """What is asked of `DistributedDataParallel.reducer`, which is an object of torch's in C++."""

    def __init__(self, ddp: "TorchDDP") -> None:
        self._ddp = ddp

    def prepare_for_backward(self, outputs: Sequence[torch.Tensor]) -> None:
        """Let the next backward be synchronised, also one of forwards that were called under `no_sync()`.

        Which parameters `outputs` use need not be known. Every rank calls it.
        """
        self._ddp.synchronise_next_backward()

    def _rebuild_buckets(self) -> bool:
        """Whether buckets were made anew: they are by themselves, where that is due."""
        return False

    def _delay_all_reduce(self) -> None:
        """Without effect: the first backward of a static graph has launched at its end what it put off until then."""


class Refused:
    """An attribute of torch's class that has no meaning here."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, wrapper: Any, owner: type) -> Any:
        if wrapper is None:
            return self
        return refuse(wrapper, self._name)


_Torchs: Any = parallel.DistributedDataParallel  # whose annotations differ from ours where the meaning is the same


class TorchDDP(DataParallelWrapper, _Torchs):
    """What both have in common, and torch's class has."""

    # The options that are taken by keyword, and what is then called with module, group, options and DDP's arguments.
    _keywords: type[OptionKeywords]
    _construct: Callable[..., None]

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[Device] | None = None,
        output_device: Device | None = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        **others: Any,
    ) -> None:
        given = {name: value for name, value in locals().items() if name in _BY_POSITION} | others
        self._construct(module, process_group, *part_options(given, self._keywords))

    # All names have `module.`, as torch's: [Note: one set of names].
    named_modules, named_children, children = nn.Module.named_modules, nn.Module.named_children, nn.Module.children
    get_submodule, get_buffer, __setattr__ = nn.Module.get_submodule, nn.Module.get_buffer, nn.Module.__setattr__

    def _names_behind(self) -> list[str]:
        return []

    def _name_state(self) -> None:
        self.register_load_state_dict_pre_hook(accept_wrapped_keys)  # type: ignore[no-untyped-call]

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As torch's class, from what it, this one or the bare module has saved. Refuses `assign=True`."""
        self._check_loadable(state_dict, assign=assign)
        return nn.Module.load_state_dict(self, state_dict, strict=strict)

    def state_dict_for_ddp(self) -> dict[str, Any]:
        """`state_dict()`, which has torch's keys."""
        return self.state_dict()

    @property
    def reducer(self) -> StandInReducer:
        return StandInReducer(self)

    def synchronise_next_backward(self) -> None:
        """Let the next backward be synchronised, also one of forwards under `no_sync()`. Every rank calls it."""
        self._check_in_use()
        self._runtime.begin_forward(synchronise=True, counted=True)
        self._runtime.end_forward(())  # graphs of the forwards before stay local: hooks reduce what they return

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        return self.stats()

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        """Without effect: no times are measured."""


def _refuse_internals(wrapper: type[DataParallelWrapper]) -> None:
    """Let what torch's class has for itself be an AttributeError on `wrapper`; what is called on the class stays."""
    own = {name for part in wrapper.__mro__ for name in vars(part) if part is not parallel.DistributedDataParallel}
    for name, value in vars(parallel.DistributedDataParallel).items():
        if name not in own and (inspect.isfunction(value) or isinstance(value, property)):
            setattr(wrapper, name, Refused(name))


_refuse_internals(TorchDDP)


class DistributedDataParallel(TorchDDP, CompiledDDP):
    """`compile_ddp(module)` that is a torch.nn.parallel.DistributedDataParallel.

    Takes the arguments of torch's class, in their places and with its defaults, and those of `compile_ddp` by keyword.
    With `backend="hooks"` it is an `EagerDistributedDataParallel`, as within `compiled_ddp.replace_ddp`.
    `state_dict()` has torch's keys, each with `module.` before it: checkpoints of torch's class load here, and those of
    this one there, with torch.distributed.checkpoint too. Raises what `compile_ddp` raises.
    """

    _keywords, _construct = CompilerKeywords, CompiledDDP.__init__

    def __new__(cls, *args: Any, backend: str = "inductor", **others: Any) -> Any:
        if backend != "hooks":
            return super().__new__(cls)
        if cls is not DistributedDataParallel:
            raise TypeError(
                f'{cls.__name__} compiles: derive it from EagerDistributedDataParallel for backend="hooks".'
            )
        return EagerDistributedDataParallel(*args, **others)  # no instance of this class: its constructor is not called


class EagerDistributedDataParallel(TorchDDP, EagerDDP):
    """`EagerDDP(module)` that is a torch.nn.parallel.DistributedDataParallel: nothing is compiled.

    Takes the arguments of torch's class, in their places and with its defaults, and those of `EagerDDP` by keyword; as
    `DistributedDataParallel` otherwise.
    """

    _keywords, _construct = OptionKeywords, DataParallelWrapper.__init__


_BY_POSITION = inspect.signature(TorchDDP).parameters.keys() - {"module", "process_group", "others"}
