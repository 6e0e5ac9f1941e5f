"""The forwards of a wrapper: what comes before and behind the module's own."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from compiled_ddp import torch_private
from compiled_ddp.model.checks import check_not_inside_ddp
from compiled_ddp.model.managed import ManagedState
from compiled_ddp.model.nested_tensors import tensors_in
from compiled_ddp.model.watch import Look, StandIns
from compiled_ddp.step.join import UnevenInputs
from compiled_ddp.step.runtime import Runtime
from compiled_ddp.torch_private.autograd import rpc_is_set_up
from compiled_ddp.torch_private.modules import is_joining
from compiled_ddp.wrapping.parts import Settings, Switches
from compiled_ddp.wrapping.setup import WatchedModel

_moments = itertools.count(1)


class Forwards:
    """The forwards of one wrapper in use."""

    def __init__(
        self,
        wrapper: str,
        own: ManagedState,
        settings: Settings,
        switches: Switches,
        *,
        runtime: Runtime,
        uneven: UnevenInputs,
        model: WatchedModel,
        run_module: Callable[..., Any],
    ) -> None:
        """`wrapper` is the name of its class; `run_module` runs the module by graphs where there are any."""
        self._wrapper, self._managed, self._settings, self._switches = wrapper, own, settings, switches
        self._runtime, self._uneven, self._model, self._run_module = runtime, uneven, model, run_module
        self.began = self.ended = 0  # when the latest one did, among those of all wrappers
        self.runs_module = False

    def run(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, training: bool) -> Any:
        """A call of the wrapper, whose `module` it is now. Raises RuntimeError if its gradients could not be averaged.

        A checkpoint's forward inside a backward is no new one: `recomputing`.
        """
        with_gradients = torch.is_grad_enabled()
        self._check(module, with_gradients=with_gradients)
        self.began = next(_moments)
        recomputing = torch_private.autograd.current_graph_task() != -1
        if not recomputing and (with_gradients or not self._runtime.communicator.has_failed):
            self._runtime.finish_broken_backward()  # before other ranks, which may wait in it, are asked for anything
        look = self._model.look()
        if look.stand_ins is StandIns.ALL:
            return self._run_on_stand_ins(args, kwargs, look, recomputing=recomputing)
        if self._model.to_broadcast and with_gradients and not recomputing:
            self._model.broadcast_newcomers()
        if look.changed and with_gradients:
            self._take_changes(recomputing=recomputing)
        transformed = torch_private.autograd.transforms_are_active()
        if not recomputing:
            self.begin(with_gradients=with_gradients, training=training, transformed=transformed)
        elif with_gradients and torch_private.autograd.in_reentrant_checkpoint():
            self._runtime.begin_reentrant_forward(synchronise=self._switches.synchronises)
        # Also if the module raises: as on other ranks.
        put_off = self._switches.buffers_are_stale and is_joining(self._uneven.joinable) and self._uneven.is_training
        synchronises = self._switches.synchronises
        if self._switches.buffers_are_stale != (refreshes := put_off or (with_gradients and synchronises)):
            self._switches.refresh_buffers(refreshes)
        # Where a transform or a functional_call is under way, no graph would fit, captured or to be.
        fits = not transformed and look.stand_ins is StandIns.NOTHING
        may_count = with_gradients and not recomputing and not transformed
        outputs = self._run_between(self._run_module if fits else self._run_eagerly, args, kwargs, may_count=may_count)
        if may_count and fits and self._model.may_train_more() and self._model.look().changed:
            self._model.take_changes(in_forward=True)  # what the model has made for itself in this forward
        if with_gradients and self._switches.synchronises is not synchronises:
            # Turned by the module itself, as Lightning does where a training step calls backward.
            self._switches.refresh_buffers(put_off or self._switches.synchronises)
        # Autograd cannot be asked about what runs inside of a transform.
        runtime = self._runtime
        if (
            with_gradients
            and not transformed
            and (runtime.forward.synchronises or runtime.communicator.recorder is not None)
        ):
            runtime.watch((outputs,) if type(outputs) is torch.Tensor else tensors_in(outputs))
        return outputs

    def _check(self, module: nn.Module, *, with_gradients: bool) -> None:
        if module is not self._managed.module:
            if torch_private.modules.without_compile_wrapper(module) is self._managed.module:
                raise RuntimeError(
                    f"{self._wrapper}.module was compiled after it was wrapped, where nothing runs it: compile it "
                    "first, as in EagerDDP(torch.compile(model)); compile_ddp(model) compiles it by itself."
                )
            raise RuntimeError(
                f"{self._wrapper}.module is another than the one it was made for: nothing would reduce the "
                "gradients of what stands there now. Wrap that, on every rank."
            )
        ddp = torch_private.modules.running_ddp()
        if ddp is not None:
            check_not_inside_ddp(ddp, self._managed, self._wrapper)
        if with_gradients and rpc_is_set_up() and torch_private.autograd.in_distributed_autograd():
            raise RuntimeError(
                "the forward runs in a torch.distributed.autograd context, whose backward leaves .grad alone: there is "
                "nothing that could be averaged. Run forward and backward of this wrapper outside of the context."
            )

    def _take_changes(self, *, recomputing: bool) -> None:
        if recomputing:
            raise RuntimeError(
                "the model has changed since the forward of this backward, which a checkpoint runs again now: the "
                "buckets of a backward under way are fixed. Change the model between backward and forward."
            )
        self._model.take_changes()

    def _run_between(
        self, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], *, may_count: bool
    ) -> Any:
        """What the module returns; the runtime is told when it begins and how it ends."""
        collectives = self._runtime.reduction.models_collectives
        before, self.runs_module = self.runs_module, True
        try:
            if self._settings.input_device is not None:
                args, kwargs = self._settings.placed(args, kwargs)
            collectives.begin()
            outputs = run(*args, **kwargs)
        except BaseException:
            if may_count:
                self._runtime.forward_raised()
            raise
        finally:
            self.runs_module = before
        collectives.end()
        self.ended = next(_moments)
        return outputs

    def _run_on_stand_ins(self, args: tuple[Any, ...], kwargs: dict[str, Any], look: Look, *, recomputing: bool) -> Any:
        """A forward on none of the trained parameters, in a functional_call: local, whatever other ranks do.

        Where its gradients may go on to the parameters, the next backward that reaches these is synchronised.
        """
        leads_back = look.leads_back and torch.is_grad_enabled() and not recomputing
        args, kwargs = self._settings.placed(args, kwargs)
        if not leads_back:
            return self._managed.module(*args, **kwargs)
        self._runtime.begin_forward(synchronise=self._switches.synchronises, counted=False)
        outputs = self._run_eagerly(*args, **kwargs)
        if not torch_private.autograd.transforms_are_active():
            self._runtime.watch(tensors_in(outputs))
        return outputs

    def _run_eagerly(self, *args: Any, **kwargs: Any) -> Any:
        outputs = self._managed.module(*args, **kwargs)
        if torch.is_grad_enabled():
            self._runtime.end_forward(())  # hooks watch what graphs would have reduced
        return outputs

    def begin(self, *, with_gradients: bool, training: bool, transformed: bool = False) -> None:
        """What ranks do together at the start of a forward, whether it follows on this rank or is skipped."""
        if with_gradients:
            if self._runtime.own_gradients is not None:  # torch's Join has ended without a word
                self._runtime.end_shadowing(if_untouched=True)
            counted = training and not transformed
            self._runtime.begin_forward(synchronise=self._switches.synchronises, counted=counted)
        brings_buffers = self._switches.buffers_are_stale and self._settings.options.synchronise_buffers_in_forward
        buffers = self._model.buffers() if brings_buffers else ()
        if not (is_joining(self._uneven.joinable) and self._uneven.is_training):
            if buffers:
                self._broadcast(buffers)
        elif buffers and with_gradients and self._switches.synchronises:
            # In a join, forwards of other kinds have no collective: joined ranks follow backwards.
            self._broadcast(buffers, self._uneven.begin_broadcast())
        elif with_gradients and training:
            self._uneven.begin_forward()

    def broadcast_buffers(self, source: int = 0) -> None:
        """Overwrite every rank's buffers by those of rank `source`."""
        self._broadcast(self._model.buffers(), source)

    @torch.no_grad()
    def _broadcast(self, buffers: Sequence[torch.Tensor], source: int = 0) -> None:
        # Of .data, which has a version counter of its own: a graph that saved a buffer may still run its backward.
        self._runtime.communicator.broadcast([buffer.data for buffer in buffers], source=source)
