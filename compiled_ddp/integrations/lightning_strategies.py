"""What the strategies for `lightning` and for `pytorch_lightning` have in common: neither package is imported here."""

import contextlib
import functools
import types
from collections.abc import Iterator, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn

from compiled_ddp import torch_private
from compiled_ddp.compiled import compile_ddp
from compiled_ddp.eager import EagerDDP
from compiled_ddp.integrations.replacement import check_replacement, replace_ddp
from compiled_ddp.model.managed import ManagedState
from compiled_ddp.torch_private.dynamo import untraced
from compiled_ddp.wrapper import DataParallelWrapper


class ConstructsOurs:
    """To be named before a DDPStrategy: what that constructs is of this package.

    Args:
        backend: that of `compile_ddp`, or "hooks" for `EagerDDP`, which compiles nothing.
        keywords: those of the DDPStrategy, and options of `compile_ddp` or `EagerDDP` (`bucket_cap_mb=`, ...).

    Raises TypeError or ValueError for what is no option.
    """

    _ddp_kwargs: dict[str, Any]  # of DDPStrategy: for the constructor of torch's class

    def __init__(self, *args: Any, backend: str = "inductor", **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        check_replacement(type(self).__name__, backend, self._ddp_kwargs)
        self._backend: Any = backend  # one of the compilers, or "hooks"

    def _ours(self) -> contextlib.AbstractContextManager[None]:
        return replace_ddp(backend=self._backend)


_WHY_UNTRACED = (
    "Lightning keeps what it logs, and its optimizers, in objects that change from step to step: leave out "
    "fullgraph=True, or compile parts of the module that hold no such call, by their names in submodules="
)
_untraced = functools.partial(untraced, why=_WHY_UNTRACED)


class TrainsWithOurs(ConstructsOurs):
    """Trains with our wrappers in the Trainer's strategy, whose steps call Lightning while Dynamo captures them.

    Args:
        submodules: names of the parts that are compiled and reduced, each by a wrapper of its own that stands in its
            place until the training ends. They must hold all trained parameters: ValueError names others when the
            training begins, RuntimeError in `optimizer_step` those that are unfrozen or added later. What is outside of
            them is rank 0's when the training begins, and each rank's own from then on. None is the module as a whole,
            with its training step.
    """

    model: Any
    lightning_module: Any
    root_device: Any
    _ddp_comm_state: Any
    _ddp_comm_hook: Any
    _ddp_comm_wrapper: Any

    def __init__(self, *args: Any, submodules: Sequence[str] | None = None, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        if isinstance(submodules, str):
            raise TypeError(f"submodules must be a list of names, found {submodules!r}: pass [{submodules!r}].")
        self._submodules = submodules
        self._parts: list[tuple[nn.Module, str, DataParallelWrapper]] = []  # parent, name in it, what stands there
        self._outside: ManagedState | None = None  # what none of them looks after

    def _setup_model(self, model: nn.Module) -> Any:
        parent: Any = super()
        if self._submodules is not None:
            self._wrap_parts(model, self._submodules)
            return model
        for name in ("log", "log_dict"):
            setattr(model, name, types.MethodType(_untraced(getattr(type(model), name)), model))
        with self._ours():
            return parent._setup_model(model)

    def _wrap_parts(self, model: nn.Module, names: Sequence[str]) -> None:
        outside = ManagedState(model)
        left = _trained_without(outside, [model.get_submodule(name) for name in names])
        if left:
            raise ValueError(
                f"submodules={list(names)} hold not all trained parameters, so nothing would reduce {left}: name their "
                "modules too, or freeze them."
            )
        options = {**self._ddp_kwargs, "device_ids": self._device_ids()}
        for name in names:
            holder, _, last = name.rpartition(".")
            wrapper = (
                EagerDDP(model.get_submodule(name), **options)
                if self._backend == "hooks"
                else compile_ddp(model.get_submodule(name), backend=self._backend, **options)
            )
            self._parts.append((model.get_submodule(holder), last, wrapper))
            setattr(model.get_submodule(holder), last, wrapper)
        self._outside = outside
        if self._parts and self._ddp_kwargs.get("init_sync", True):
            self._synchronise(outside)

    def _synchronise(self, outside: ManagedState) -> None:
        """Give every rank rank 0's parameters and buffers of what no part holds, once, as the wrappers do of theirs."""
        tensors = [tensor.detach() for tensor in [*outside.parameters().values(), *outside.buffers().values()]]
        group = self._parts[0][2].process_group or dist.group.WORLD
        if tensors and group is not None:
            torch_private.groups.broadcast_coalesced(group, tensors, source=0)

    def _check_outside(self) -> None:
        """Raise RuntimeError where a parameter that no part holds has come to require a gradient."""
        if self._outside is None:
            return
        left = _trained_without(self._outside, [wrapper for *_, wrapper in self._parts])
        if left:
            raise RuntimeError(
                f"{left} require gradients by now and are outside of submodules={list(self._submodules or ())}, so "
                "nothing reduces them, and ranks would train them apart: name their modules in submodules= too, also "
                "if they are frozen when the training begins, or leave submodules= out."
            )

    def _register_ddp_hooks(self) -> None:
        """As Lightning's, for the wrappers of the parts in place of the one that it expects."""
        parent: Any = super()
        if self._submodules is None:
            parent._register_ddp_hooks()
            return
        hook, state = self._ddp_comm_hook, self._ddp_comm_state
        if hook is None or self.root_device.type != "cuda":  # elsewhere Lightning registers none either
            return
        if len(self._parts) > 1 and not isinstance(state, dist.ProcessGroup | None):
            raise ValueError(
                f"ddp_comm_state is a {type(state).__name__}, which keeps what it knows by the numbers of buckets, and "
                f"each of submodules={list(self._submodules)} has a bucket of each number: name one part, or pass "
                "comm_hook= of compiled_ddp.comm_hooks instead."
            )
        for *_, wrapper in self._parts:
            wrapper.register_comm_hook(state, hook if self._ddp_comm_wrapper is None else self._ddp_comm_wrapper(hook))

    def _device_ids(self) -> list[int] | None:
        lightnings: Any = self
        ids: list[int] | None = lightnings.determine_ddp_device_ids()
        return ids

    @contextlib.contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """As Lightning's, for the wrappers of the parts too."""
        parent: Any = super()
        with contextlib.ExitStack() as stack:
            stack.enter_context(parent.block_backward_sync())
            for _, _, wrapper in self._parts:
                stack.enter_context(wrapper.no_sync())
            yield

    def teardown(self) -> None:
        """As Lightning's, and the module gets its parts and methods back."""
        for holder, name, wrapper in self._parts:
            setattr(holder, name, wrapper.unwrap())
        self._parts.clear()
        self._outside = None
        for name in ("log", "log_dict"):
            vars(self.lightning_module or self).pop(name, None)
        parent: Any = super()
        parent.teardown()

    @_untraced
    def backward(self, *args: Any, **kwargs: Any) -> Any:
        """As Lightning's."""
        parent: Any = super()
        return parent.backward(*args, **kwargs)

    @_untraced
    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        """As Lightning's, where all that is trained is reduced."""
        self._check_outside()
        parent: Any = super()
        return parent.optimizer_step(*args, **kwargs)


def _trained_without(managed: ManagedState, parts: Sequence[nn.Module]) -> list[str]:
    """The names of the trained parameters that none of `parts` holds; one that is tied to theirs is held by them."""
    trained = managed.trained()
    inside = {id(tensor) for part in parts for tensor in part.parameters()} if trained else set()
    return [name for name, tensor in trained.items() if id(tensor) not in inside]


class SetsUpOurs(ConstructsOurs):
    """Sets a module up with our wrappers in Fabric's strategy."""

    def setup_module(self, module: nn.Module) -> Any:
        parent: Any = super()
        with self._ours():
            return parent.setup_module(module)
