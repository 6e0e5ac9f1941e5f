"""Copies of wrappers, and wrappers in files: `copy.deepcopy`, `pickle`, `torch.save`.

What is loaded from a file is a wrapper anew, which all ranks make together. A copy is one that other ranks know nothing
of, so that one rank alone may make it, as for an average of a model's parameters over its steps (EMA): it has the
module, its modes and the user's own attributes, and no runtime.
"""

import copy
import copyreg
import functools
import weakref
from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.algorithms.join import Joinable

from compiled_ddp import torch_private
from compiled_ddp.errors import NotPicklableError
from compiled_ddp.model.managed import ManagedState
from compiled_ddp.model.nested_tensors import tensors_in
from compiled_ddp.model.owners import is_owned
from compiled_ddp.options import Options
from compiled_ddp.step.hooks import GradientHooks
from compiled_ddp.step.runtime import Runtime
from compiled_ddp.wrapping.ddp_arguments import DDPArguments
from compiled_ddp.wrapping.parts import HasParts, Lifecycle, Settings, Switches


class CopiedModule:
    """What a copy has in the place of a runtime: whatever else wants one is told why there is none.

    A backward of a forward that was not under no_sync would be synchronised: it is an error before it has accumulated
    anything. As for a runtime, the latest forward decides where the loss is not among the outputs.
    """

    def __init__(self, own: ManagedState, why: str) -> None:
        self._managed, self._why = own, why
        self._expected = False  # whether the latest forward with gradients was synchronised
        self._parameters = tuple(own.trained().values())
        self._hooks = GradientHooks(self._parameters, self)

    def begin_forward(self, *, synchronise: bool) -> None:
        """Note a forward with gradients."""
        self._expected = synchronise
        if synchronise:
            self._hooks.install()

    def watch(self, outputs: Iterable[torch.Tensor]) -> None:
        if self._expected:
            for node in {output.grad_fn for output in outputs if output.grad_fn is not None}:
                torch_private.autograd.register_own_prehook(node, functools.partial(_reached, weakref.ref(self)))

    def refuse_gradients(self) -> None:
        """Raise RuntimeError if the backward that this thread runs brings the copy's parameters a gradient."""
        trained = (parameter for parameter in self._managed.trained().values() if not is_owned(parameter))
        if any(torch_private.autograd.fate_of_gradient(parameter) != "none" for parameter in trained):
            raise RuntimeError(self._why)

    def gradient_accumulated(self, index: int) -> None:
        if self._expected and not is_owned(self._parameters[index]):
            raise RuntimeError(self._why)

    def users_hook_comes(self, index: int) -> None:
        self.gradient_accumulated(index)

    def synchronises(self) -> bool:
        return False

    def close(self) -> None:
        """The copy's module is given back."""
        self._expected = False
        self._hooks.remove()

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(self._why)


@torch_private.dynamo.untraced
def _reached(copied: weakref.ref[CopiedModule], _: object) -> None:
    alive = copied()
    if alive is not None:  # else nobody holds the parameters either
        alive.refuse_gradients()


class Copyable(HasParts, Joinable):
    """The part of a wrapper that is about copies and files."""

    _copied: CopiedModule  # of a copy

    def _wrap(self, module: nn.Module, options: Options, ddp_arguments: DDPArguments) -> None:
        """Be constructed, on the default group."""
        raise NotImplementedError

    def _name_state(self) -> None:
        """Decide the keys of state dicts."""
        raise NotImplementedError

    def _become_copy(self) -> None:
        """Begin as a copy, with the module and the settings that are there."""
        Joinable.__init__(self)
        self._lifecycle = Lifecycle.COPY
        self._switches = Switches(buffers_are_stale=False)
        self._managed = ManagedState(self.module)
        self._copied = CopiedModule(self._managed, Lifecycle.COPY.why_not_in_use(type(self).__name__))
        self._runtime = cast(Runtime, self._copied)  # a copy has none

    def _forward_of_copy(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        watched = torch.is_grad_enabled() and torch_private.autograd.current_graph_task() == -1  # else a checkpoint's
        if watched:
            self._copied.begin_forward(synchronise=self._switches.synchronises)
        outputs = self.module(*args, **kwargs)
        if watched and not torch_private.autograd.transforms_are_active():  # inside, autograd cannot be asked
            self._copied.watch(tensors_in(outputs))
        return outputs

    def __reduce_ex__(self, protocol: object) -> Any:
        """For pickle and torch.save: the module with its modes, and the arguments of the constructor.

        Loading wraps the module again, on the default group: a collective, which every rank calls. The rest is not
        kept: .grad, the plan, a hook of `register_comm_hook` and the state of a `comm_hook` (which has a state dict of
        its own), the weight of `set_weight`, `no_sync`, hooks and attributes of the wrapper itself. Loading what was
        saved of a copy makes a copy, on this rank alone.

        Raises NotPicklableError, a TypeError, for a wrapper with a process group or device mesh of its own, which no
        file can hold.
        """
        if self._lifecycle is not Lifecycle.COPY:
            self._check_in_use()
            if not self._settings.on_default_group:
                raise NotPicklableError(
                    f"a {type(self).__name__} with a process_group or device_mesh of its own cannot be pickled: save "
                    "its .module (or its state_dict()), and wrap that on every rank."
                )
        state = {
            "copy": self._lifecycle is Lifecycle.COPY,
            "module": self.module,
            "options": self._settings.given,
            "ddp_arguments": self._settings.ddp_arguments,
            "training": self.training,
        }
        return copyreg.__newobj__, (type(self),), state  # type: ignore[attr-defined]

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        if state.get("copy"):
            nn.Module.__init__(self)
            self.module = state["module"]
            self._settings = Settings(state["options"], state["ddp_arguments"], on_default_group=True)
            self._name_state()
            self._become_copy()
        else:
            self._wrap(state["module"], state["options"], state["ddp_arguments"])
        self.training = state["training"]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy that evaluates, is saved and is averaged into, on this rank alone.

        It has the modes, hooks and public attributes of the wrapper itself. Its forward runs the module eagerly; a
        backward of one that was not under no_sync, and all that ranks do together, is an error that says so.
        """
        if self._lifecycle is not Lifecycle.COPY:
            self._check_in_use()
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        of_modules = vars(nn.Module())
        for name, value in vars(self).items():
            if name in of_modules or not name.startswith("_"):
                vars(copied)[name] = copy.deepcopy(value, memo)
        copied._settings = self._settings.of_a_copy()
        copied._become_copy()
        return copied

    def __copy__(self) -> Any:
        raise TypeError(
            f"a {type(self).__name__} cannot be copied without its module, whose gradients both would reduce: use "
            "copy.deepcopy for a copy to evaluate, save or average into, or a wrapper of a copy of its .module."
        )
