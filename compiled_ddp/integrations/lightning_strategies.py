"""What the strategies for `lightning` and for `pytorch_lightning` have in common: neither package is imported here."""

import contextlib
import functools
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from compiled_ddp import torch_private
from compiled_ddp.compiled import compile_ddp
from compiled_ddp.eager import EagerDDP
from compiled_ddp.integrations.replacement import check_replacement, replace_ddp
from compiled_ddp.model.managed import ManagedState
from compiled_ddp.options import OptionKeywords, part_options
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


class _Part:
    """One of `submodules=`: its wrapper, where that stands, and what backwards have left in it unreduced.

    A wrapper reduces the backwards of its own forwards. A training step may use a part without one:
    F.linear(x, self.head.weight), or self.head.module.forward(x). What its backward leaves in .grad is this rank's own
    until a backward of the wrapper reduces it along with the rest.
    """

    def __init__(self, name: str, wrapper: DataParallelWrapper, places: Sequence[tuple[nn.Module, str]]) -> None:
        """`places` are all modules that have registered the part, each with its name there."""
        self.name, self.wrapper, self._places = name, wrapper, places
        self._parameters = tuple(wrapper.parameters())
        self._unreduced: set[torch.Tensor] = set()  # those whose gradient came in backwards without the wrapper
        for holder, place in places:
            setattr(holder, place, wrapper)

    def put_back(self) -> None:
        """Give the part its places back."""
        module = self.wrapper.unwrap()
        for holder, place in self._places:
            setattr(holder, place, module)

    @contextlib.contextmanager
    def watch_backward(self) -> Iterator[None]:
        """Note which gradients the backward in this context leaves unreduced.

        Hooks would tell as much, but there are none where graphs reduce everything.
        """
        runtime = self.wrapper._runtime
        number = runtime.number
        before = [(parameter, parameter.grad, _version(parameter.grad)) for parameter in self._parameters]
        yield
        if runtime.number != number:
            self._unreduced.clear()  # what is reduced is .grad, with all that was in it
            return
        self._unreduced.update(p for p, grad, version in before if p.grad is not grad or _version(grad) != version)

    def unreduced(self, optimizer: torch.optim.Optimizer) -> list[str]:
        """The names of the parameters that `optimizer` is about to step by this rank's own gradients."""
        runtime = self.wrapper._runtime
        carried = runtime.reduction.carried.used  # also of backwards that the user's code has called by itself
        unreduced = self._unreduced.union(runtime.parameters.tensors[index] for index in carried)
        if not unreduced:  # as in every usual step
            return []
        unreduced &= {parameter for group in optimizer.param_groups for parameter in group["params"]}
        return [name for name, p in self.wrapper.named_parameters() if p in unreduced and _is_step(p.grad)]


def _version(gradient: torch.Tensor | None) -> int:
    """Grows where a backward adds to it in place."""
    return -1 if gradient is None else torch_private.tensors.version_if_any(gradient)


def _is_step(gradient: torch.Tensor | None) -> bool:
    """Whether there is anything in it: zero_grad(set_to_none=False) leaves zeros."""
    return gradient is not None and (gradient.is_sparse or bool(gradient.any()))


class TrainsWithOurs(ConstructsOurs):
    """Trains with our wrappers in the Trainer's strategy, whose steps call Lightning while Dynamo captures them.

    Args:
        submodules: names of the parts that are compiled and reduced, each by a wrapper of its own that stands in its
            place, under all of its names, until the training ends. They must hold all trained parameters: ValueError
            names others when the training begins, RuntimeError in `optimizer_step` those that are unfrozen or added
            later. The training step calls them: RuntimeError in `optimizer_step` names those that it has used
            otherwise, as in F.linear(x, self.head.weight). What is outside of them is rank 0's when the training
            begins, by DDP's rule (`init_sync`, `broadcast_buffers`), and each rank's own from then on. None is the
            module as a whole, with its training step.
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
        self._parts: list[_Part] = []
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
        modules: dict[nn.Module, str] = {}
        for name in names:
            modules.setdefault(model.get_submodule(name), name)  # one may have several names
        places = {
            module: [
                (holder, place) for holder in model.modules() for place, m in holder._modules.items() if m is module
            ]
            for module in modules
        }
        for module, name in modules.items():
            wrapper = (
                EagerDDP(module, **options)
                if self._backend == "hooks"
                else compile_ddp(module, backend=self._backend, **options)
            )
            self._parts.append(_Part(name, wrapper, places[module]))
        self._outside = outside
        if self._parts:
            self._synchronise(outside)

    def _synchronise(self, outside: ManagedState) -> None:
        """Give every rank rank 0's parameters and buffers of what no part holds, once, as the wrappers do of theirs."""
        options, _ = part_options(self._ddp_kwargs, OptionKeywords)
        if not options.init_sync:
            return
        buffers = outside.buffers().values() if options.synchronise_buffers_at_init else ()
        tensors = [tensor.detach() for tensor in [*outside.parameters().values(), *buffers]]
        group = self._parts[0].wrapper.process_group or dist.group.WORLD
        if tensors and group is not None:
            torch_private.groups.broadcast_coalesced(group, tensors, source=0)

    def _check_outside(self) -> None:
        """Raise RuntimeError where a parameter that no part holds has come to require a gradient."""
        if self._outside is None:
            return
        left = _trained_without(self._outside, [part.wrapper for part in self._parts])
        if left:
            raise RuntimeError(
                f"{left} require gradients by now and are outside of submodules={list(self._submodules or ())}, so "
                "nothing reduces them, and ranks would train them apart: name their modules in submodules= too, also "
                "if they are frozen when the training begins, or leave submodules= out."
            )

    def _run_closure(self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any]) -> Any:
        """The step's forward and backward, if Lightning leaves them to the optimizer. Raises RuntimeError after them.

        Only for gradients that `optimizer` steps by: those of a GAN's other part may wait for their own.
        """
        result = closure()
        for part in self._parts:
            left = part.unreduced(optimizer)
            if left:
                raise RuntimeError(
                    f"{left} of the part {part.name!r} of submodules= have gradients that no backward has averaged, so "
                    f"ranks would train them apart: a part's gradients are reduced where the training step calls it, "
                    f"self.{part.name}(...), and it has used it otherwise (its weights, its module, or a method other "
                    "than forward), or not in the last batch of an accumulation. Call it so, name a module in "
                    "submodules= whose forward does all of that, or leave submodules= out."
                )
        return result

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
        for part in self._parts:
            part.wrapper.register_comm_hook(
                state, hook if self._ddp_comm_wrapper is None else self._ddp_comm_wrapper(hook)
            )

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
            for part in self._parts:
                stack.enter_context(part.wrapper.no_sync())
            yield

    def teardown(self) -> None:
        """As Lightning's, and the module gets its parts and methods back."""
        for part in self._parts:
            part.put_back()
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
        with contextlib.ExitStack() as stack:
            for part in self._parts:
                stack.enter_context(part.watch_backward())
            return parent.backward(*args, **kwargs)

    @_untraced
    def optimizer_step(
        self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any], *args: Any, **kwargs: Any
    ) -> Any:
        """As Lightning's, where all that is trained is reduced."""
        self._check_outside()
        closure = functools.partial(self._run_closure, optimizer, closure)
        parent: Any = super()
        return parent.optimizer_step(optimizer, closure, *args, **kwargs)


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
