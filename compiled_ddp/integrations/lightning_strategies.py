"""What the strategies for `lightning` and for `pytorch_lightning` have in common: neither package is imported here."""

import contextlib
import functools
import types
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from compiled_ddp.compiled import compile_ddp
from compiled_ddp.eager import EagerDDP
from compiled_ddp.integrations.replacement import check_replacement, replace_ddp
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
            place until the training ends; they must hold all trained parameters. None is the module as a whole, with
            its training step.
    """

    model: Any
    lightning_module: Any

    def __init__(self, *args: Any, submodules: Sequence[str] | None = None, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        if isinstance(submodules, str):
            raise TypeError(f"submodules must be a list of names, found {submodules!r}: pass [{submodules!r}].")
        self._submodules = submodules
        self._parts: list[tuple[nn.Module, str, DataParallelWrapper]] = []  # parent, name in it, what stands there

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
        inside = {id(tensor) for name in names for tensor in model.get_submodule(name).parameters()}
        left = [name for name, tensor in model.named_parameters() if tensor.requires_grad and id(tensor) not in inside]
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
        """As Lightning's."""
        parent: Any = super()
        return parent.optimizer_step(*args, **kwargs)


class SetsUpOurs(ConstructsOurs):
    """Sets a module up with our wrappers in Fabric's strategy."""

    def setup_module(self, module: nn.Module) -> Any:
        parent: Any = super()
        with self._ours():
            return parent.setup_module(module)
