"""What both wrappers share: the module, its state, its buffers, no_sync."""

import contextlib
import dataclasses
import itertools
import math
import types
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Joinable

from compiled_ddp import torch_private
from compiled_ddp.model.checks import (
    broadcast_tensors,
    check_layouts,
    check_model,
    check_not_inside_ddp,
    check_parts,
    check_writable,
    describe_model,
)
from compiled_ddp.model.managed import OwnState
from compiled_ddp.model.nested_tensors import tensors_in
from compiled_ddp.model.owners import mark_wrapped, owner_of, unmark_wrapped
from compiled_ddp.model.state_keys import bare_keys_in_state, bare_state
from compiled_ddp.model.watch import Look, ModelWatch, StandIns
from compiled_ddp.options import Mode, Options, mode_from_environment
from compiled_ddp.plan import ReductionKind, ReductionSequence
from compiled_ddp.planning.trained_parameters import TrainedParameters
from compiled_ddp.ranks.agreement import Description, agree_on_description
from compiled_ddp.ranks.communicator import Communicator, RankGroup
from compiled_ddp.ranks.link_speed import bucket_cap_for, measure_bytes_per_second
from compiled_ddp.reducers.hook_program import check_hook
from compiled_ddp.report.explain import Explanation, explain_sequence
from compiled_ddp.report.stats import training_stats
from compiled_ddp.step.conductor import conductor
from compiled_ddp.step.graph_call import GraphCall
from compiled_ddp.step.join import JoinContext, UnevenInputs, WrapperJoinHook
from compiled_ddp.step.runtime import Runtime
from compiled_ddp.users_code import warn_user
from compiled_ddp.wrapping.comm_hook_registration import TakesCommHooks
from compiled_ddp.wrapping.copies import Copyable
from compiled_ddp.wrapping.ddp_arguments import DDPArguments, check_ddp_arguments, group_of, input_device
from compiled_ddp.wrapping.ddp_attributes import DDPAttributes
from compiled_ddp.wrapping.lifecycle import Lifecycle
from compiled_ddp.wrapping.local_methods import LocalMethods
from compiled_ddp.wrapping.piggyback import as_passengers, as_weight

_moments = itertools.count(1)
_all: "weakref.WeakSet[DataParallelWrapper]" = weakref.WeakSet()


def refresh_changed(of: "DataParallelWrapper") -> None:
    """Let every wrapper of this process whose model has changed take it as it is now: a collective of all ranks.

    All at once, in an order that ranks share: each one waits for all ranks, whose forwards may come in other orders.
    Raises where `of` cannot; another one tries again in its own forward, and raises there.
    """
    changed = [w for w in _all if w._lifecycle is Lifecycle.IN_USE and w._watch.look().changed]
    error: Exception | None = None
    for wrapper in sorted(changed, key=lambda w: w._runtime.communicator.group_name):
        try:
            wrapper._refresh()
        except Exception as refused:
            error = refused if wrapper is of else error
    if error is not None:
        raise error


class DataParallelWrapper(DDPAttributes, TakesCommHooks, Copyable):
    """A module whose gradients are averaged over ranks. Base of `CompiledDDP` and `EagerDDP`."""

    is_compiled_ddp_wrapper = True

    def __init__(
        self,
        module: nn.Module,
        process_group: dist.ProcessGroup | None,
        options: Options,
        ddp_arguments: DDPArguments,
    ) -> None:
        nn.Module.__init__(self)
        Joinable.__init__(self)
        self._options = self._options_given = options
        self._ddp_arguments = ddp_arguments
        self._on_default_group = process_group is None and ddp_arguments.get("device_mesh") is None
        ranks = RankGroup(group_of(process_group, ddp_arguments))
        name = type(self).__name__
        self._own: OwnState  # what this wrapper looks after
        before = owner_of(module)

        def describe() -> Description:
            if before is not None:
                before.make_way()
            description = self._check_and_describe(module, name, ranks)
            if before is not None:
                before.warn_of(name)  # which may be an error: then it is one on every rank
            return description

        agree_on_description(ranks, describe, failure="the model was not wrapped")
        self._mode: Mode = mode_from_environment()
        if before is not None:
            before.be_replaced()
        communicator = Communicator(ranks)
        self.module = module
        self._require_sync = True
        self._buffers_stale = True
        try:
            if options.init_sync:
                self._synchronise_state(communicator)
            named, sparse = self._dense_and_sparse()
            self._options = options = self._with_bucket_cap(communicator, next(iter(named.values())).device)
            self._runtime = Runtime(
                TrainedParameters(tuple(named), tuple(named.values())),
                communicator,
                options,
                live_calls=self._live_calls,
                hooks_reason=self._hooks_reason(),
                sparse=TrainedParameters(tuple(sparse), tuple(sparse.values())),
            )
        except BaseException:
            communicator.close()
            raise
        self._uneven = UnevenInputs(self, communicator, self._runtime)
        self._runtime.reduction.follow_join(self._uneven)
        self._lifecycle = Lifecycle.IN_USE
        self._methods = LocalMethods(self, self._runtime)
        self._entered = self._left = 0  # when the last forward began and ended, among those of all wrappers
        self._watch = ModelWatch(self._own, follows=options.follows_model)
        self._refreshes = self._registrations = 0
        mark_wrapped(self._own, self)
        bare_keys_in_state(self)
        _all.add(self)

    def _check_and_describe(self, module: nn.Module, name: str, ranks: RankGroup) -> Description:
        torch_private.versions.check_torch_version()
        self._options.check()
        self._own = check_model(module, name)
        check_layouts(self._own, self._options)
        if self._options.init_sync:
            check_writable(self._own)
        check_ddp_arguments(self._ddp_arguments, module, name)
        self._input_device = input_device(self._ddp_arguments, self._own.devices())
        self._check_devices(ranks)
        if self._options.comm_hook is not None:
            check_hook(self._options.comm_hook, self._dense_and_sparse()[0])
        if self._own.sparse() and (self._options.comm_hook is not None or self._options.scaling is not None):
            raise ValueError(
                f"parameter {min(self._own.sparse())} has a sparse gradient, which takes part in no communication hook "
                "and in none of apex's scalings: pass sparse=False to its embedding."
            )
        return {"wrapper": [name], **describe_model(self._own, self._options, mode_from_environment())}

    def _check_devices(self, ranks: RankGroup) -> None:
        broadcast = (tensor.device for tensor in broadcast_tensors(self._own, self._options).values())
        torch_private.groups.check_backends(ranks.process_group, [*self._own.devices(), *broadcast])

    def _dense_and_sparse(self) -> tuple[dict[str, nn.Parameter], dict[str, nn.Parameter]]:
        """The trained parameters with dense gradients, and those with sparse ones."""
        trained, sparse = self._own.trained(), self._own.sparse()
        return {n: p for n, p in trained.items() if n not in sparse}, {n: trained[n] for n in trained if n in sparse}

    def _with_bucket_cap(self, communicator: Communicator, device: torch.device) -> Options:
        """The options with a bucket size: the user's, or the one that fits the link."""
        self._link_bytes_per_second: float | None = None  # unless it was measured
        given = (self._options.bucket_cap_mb, self._options.bucket_cap_mb_list or None, self._options.bucket_rule)
        if any(size is not None for size in given):
            return self._options
        if communicator.world_size == 1:
            return dataclasses.replace(self._options, bucket_cap_mb=bucket_cap_for(math.inf))
        with communicator.explaining("the link could not be measured"):
            self._link_bytes_per_second = measure_bytes_per_second(communicator, device)
        return dataclasses.replace(self._options, bucket_cap_mb=bucket_cap_for(self._link_bytes_per_second))

    def _synchronise_state(self, communicator: Communicator) -> None:
        tensors = [parameter.detach() for parameter in self._own.parameters().values()]
        if self._options.synchronise_buffers_at_init:
            tensors += [buffer.detach() for buffer in self._own.buffers().values()]
        with torch.no_grad():
            communicator.broadcast(tensors)

    # ---- for the two wrappers to fill in -----------------------------------------------------------------------------

    def _hooks_reason(self) -> str | None:
        """Why hooks reduce everything; None where graphs take part."""
        raise NotImplementedError

    def _live_calls(self) -> Sequence[GraphCall]:
        return ()

    def _run_module(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    # ---- forward -----------------------------------------------------------------------------------------------------

    # Where a wrapper stands inside another's model, that one's graphs end before it and begin again behind it.
    @torch_private.dynamo.untraced_forward
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._lifecycle is Lifecycle.COPY:
            return self._forward_of_copy(*self._on_its_device(args, kwargs))
        self._check_in_use()
        if self.module is not self._own.module:
            raise RuntimeError(
                f"{type(self).__name__}.module is another than the one it was made for: nothing would reduce the "
                "gradients of what stands there now. Wrap that, on every rank."
            )
        check_not_inside_ddp(self._own, type(self).__name__)
        self._entered = next(_moments)
        with_gradients = torch.is_grad_enabled()
        if with_gradients and torch_private.autograd.in_distributed_autograd():
            raise RuntimeError(
                "the forward runs in a torch.distributed.autograd context, whose backward leaves .grad alone: there is "
                "nothing that could be averaged. Run forward and backward of this wrapper outside of the context."
            )
        recomputing = (
            torch_private.autograd.current_graph_task() != -1
        )  # a checkpoint's forward inside backward: no new one
        if not recomputing:
            self._runtime.finish_broken_backward()  # before other ranks, which may wait in it, are asked for anything
        look = self._watch.look()
        if look.stand_ins is StandIns.ALL:
            return self._run_on_stand_ins(args, kwargs, look)
        if look.changed and with_gradients:
            if recomputing:
                raise RuntimeError(
                    "the model has changed since the forward of this backward, which a checkpoint runs again now: the "
                    "buckets of a backward under way are fixed. Change the model between backward and forward."
                )
            refresh_changed(self)
        transformed = torch_private.autograd.transforms_are_active()
        if not recomputing:
            self._begin_forward(with_gradients=with_gradients, counted=self.training and not transformed)
        elif with_gradients and torch_private.autograd.in_reentrant_checkpoint():
            self._runtime.begin_reentrant_forward(synchronise=self._require_sync)
        # Also if the module raises: as on other ranks.
        stale = self._buffers_stale and self._uneven.is_training  # put off, see _begin_forward
        self._buffers_stale = stale or (with_gradients and self._require_sync)
        args, kwargs = self._on_its_device(args, kwargs)
        self._runtime.module_begins()
        try:
            if transformed or look.stand_ins is not StandIns.NOTHING:  # no graph would fit, captured or to be
                outputs = self._run_eagerly(*args, **kwargs)
            else:
                outputs = self._run_module(*args, **kwargs)
        except BaseException:
            if with_gradients and not recomputing and not transformed:
                self._runtime.forward_raised()
            raise
        self._runtime.module_ended()
        self._left = next(_moments)
        if with_gradients and not transformed:  # autograd cannot be asked about what runs inside of a transform
            self._runtime.watch(tensors_in(outputs))
        return outputs

    def _run_on_stand_ins(self, args: tuple[Any, ...], kwargs: dict[str, Any], look: Look) -> Any:
        """A forward on none of the trained parameters, in a functional_call: local, whatever other ranks do.

        Where its gradients may go on to the parameters, the next backward that reaches these is synchronised.
        """
        recomputing = torch_private.autograd.current_graph_task() != -1
        leads_back = look.leads_back and torch.is_grad_enabled() and not recomputing
        args, kwargs = self._on_its_device(args, kwargs)
        if not leads_back:
            return self.module(*args, **kwargs)
        self._runtime.begin_forward(synchronise=self._require_sync, counted=False)
        outputs = self._run_eagerly(*args, **kwargs)
        if not torch_private.autograd.transforms_are_active():
            self._runtime.watch(tensors_in(outputs))
        return outputs

    def _run_eagerly(self, *args: Any, **kwargs: Any) -> Any:
        outputs = self.module(*args, **kwargs)
        if torch.is_grad_enabled():
            self._runtime.end_forward(())  # hooks watch what graphs would have reduced
        return outputs

    def _on_its_device(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """A forward's arguments where `device_ids` wants them."""
        return (
            (args, kwargs)
            if self._input_device is None
            else torch_private.modules.moved(args, kwargs, self._input_device)
        )

    def _begin_forward(self, *, with_gradients: bool, counted: bool) -> None:
        if with_gradients:
            self._runtime.end_shadowing(if_untouched=True)  # where torch's Join has ended without a word
            self._runtime.begin_forward(synchronise=self._require_sync, counted=counted)
        brings_buffers = self._buffers_stale and self._options.synchronise_buffers_in_forward
        if not self._uneven.is_training:
            if brings_buffers:
                self._broadcast_buffers()
        elif brings_buffers and with_gradients and self._require_sync and self._own.buffers():
            # In a join, forwards of other kinds have no collective: joined ranks follow backwards.
            self._broadcast_buffers(self._uneven.begin_broadcast())
        elif with_gradients and self.training:
            self._uneven.begin_forward()

    def _refresh(self) -> None:
        """Take the model as it is now: on every rank before the same forward, or an error on every rank."""
        self._refreshes += 1
        communicator = self._runtime.communicator
        agree_on_description(
            communicator.ranks,
            self._check_and_describe_parts,
            occasion=f"refresh/{self._refreshes}",
            purpose="to compare the models of all ranks, as this rank's has changed since it was wrapped",
            failure="the model has changed since it was wrapped, and its gradients cannot be reduced as it is",
        )
        known = self._runtime.parameters
        indices = {id(tensor) for tensor in known.tensors}
        added = {n: p for n, p in self._dense_and_sparse()[0].items() if id(p) not in indices}
        kept = list(zip(known.names, known.tensors, strict=True))
        if self._options.follows_model:  # else they keep their places, which captured segments know
            present = {id(parameter) for parameter in self._own.parameters().values()}
            kept = [(name, parameter) for name, parameter in kept if id(parameter) in present]
        if self._options.init_sync:
            with torch.no_grad():
                communicator.broadcast([parameter.detach() for parameter in added.values()])
        mark_wrapped(self._own, self)
        trained = [*kept, *added.items()]
        self._runtime.reduction.agreed.leave_to_hooks(self._hooks_reason())
        self._runtime.reduction.retrain(TrainedParameters(tuple(n for n, _ in trained), tuple(p for _, p in trained)))
        self._watch = ModelWatch(self._own, follows=self._options.follows_model)

    def _check_and_describe_parts(self) -> dict[str, list[object]]:
        check_parts(self._own)
        check_layouts(self._own, self._options)
        self._check_devices(self._runtime.communicator.ranks)
        if self._options.comm_hook is not None:
            check_hook(self._options.comm_hook, self._dense_and_sparse()[0])
        added = sorted(self._own.sparse().difference(self._runtime.reduction.sparse.names))
        if added:
            raise ValueError(
                f"parameter {added[0]} with a sparse gradient was added or unfrozen after the model was wrapped: call "
                "unwrap() and wrap the model again."
            )
        return describe_model(self._own, self._options, self._mode)

    @torch.no_grad()
    def _broadcast_buffers(self, source: int = 0) -> None:
        # Of .data, which has a version counter of its own: a graph that saved a buffer may still run its backward.
        own = [buffer.data for buffer in self._own.buffers().values()]
        self._runtime.communicator.broadcast(own, source=source)

    @torch_private.dynamo.untraced
    def warmup(self, *args: Any, **kwargs: Any) -> None:
        """Compile what a step with this batch needs, on every rank, before the first step: pass what forward takes.

            ddp.warmup(x, y)  # a collective: every rank calls it, as often as all others
            for x, y in batches:
                ddp(x, y).backward()

        Runs the forward once and compiles every backward variant of the graphs that it calls (with and without
        communication, with and without gradients to fold in). It starts no collective of its own and leaves
        parameters, gradients, buffers and the random state of CPU and CUDA as they were; what else the model's forward
        changes stays changed. Call it as the steps will run, under autocast for example, in the mode (train or eval),
        and again for other shapes. Rank 0 logs a line for each compilation, with its seconds, to the logger
        `compiled_ddp.graph.warmup`, or to stderr where logging has not been set up.

        At its end the ranks wait for each other in the store, for up to two hours, so a slow compiler delays here and
        not in a collective. Under `EagerDDP` there is nothing to compile, and it returns at once.

        Raises what forward or the compiler raises on this rank, RuntimeError if that happened on another rank or after
        unwrap().
        """
        self._check_in_use()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Leave gradients local: backwards of forwards called in here accumulate into .grad without communication.

        They are reduced together with the next backward whose forward is called outside, as under DDP.
        """
        before, self._require_sync = self._require_sync, False
        try:
            yield
        finally:
            self._require_sync = before

    def _set_static_graph(self) -> None:
        """DDP's older name for `static_graph=True`."""
        self._check_in_use()
        self._options = dataclasses.replace(self._options, static_graph=True)
        self._options_given = dataclasses.replace(self._options_given, static_graph=True)
        self._runtime.reduction.expect_static_graph()

    @torch_private.dynamo.untraced
    def skip_step(self, *others: "DataParallelWrapper") -> None:
        """Take part in this step's backward with zeros: what a rank that drops a step calls in place of backward.

            loss = ddp(x, y)
            if loss.isnan():
                ddp.skip_step()
            else:
                loss.backward()
            optimizer.step()  # on every rank

        Afterwards each .grad is the mean over ranks, as after a backward on the others, so the optimizer's step must
        follow here too. Without a forward before it (a rank whose data has run out) it takes the place of that as
        well. After an exception in backward it is `abandon_backward()`. A no-op under `no_sync()`. Wrappers inside the
        model skip the step too, and so do `others`: wrappers that take part in the same backward, whose graphs the
        other ranks wait for in the middle of it.

        Raises RuntimeError when called inside a backward, or if torch's DistributedDataParallel is inside the model.
        """
        self._check_in_use()
        given: Sequence[object] = others
        for other in given:
            if not isinstance(other, DataParallelWrapper):
                raise TypeError(f"skip_step() takes further wrappers of this package, found {other!r}.")
        if torch_private.autograd.current_graph_task() != -1:
            raise RuntimeError("skip_step() was called inside a backward: call it in place of backward.")
        if not self._require_sync:
            return
        skipped = [self, *others]
        wrappers = [w for one in skipped for w in (one, *one._wrappers_inside())]
        synchronised = [w for w in wrappers if w._require_sync and not w._runtime.conducted.local]
        broken = conductor.finish_broken()
        skipping = [w for w in synchronised if w._runtime.conducted not in broken]
        for wrapper in sorted(skipping, key=lambda w: w._entered):
            if not wrapper._runtime.awaits_backward:
                if wrapper._watch.look().changed:  # in the forward, on the other ranks
                    refresh_changed(self)
                wrapper._begin_forward(with_gradients=True, counted=wrapper.training)
                wrapper._buffers_stale = True
        # In the order in which the other ranks' backward reaches them; their graphs wait in the middle of it.
        wrappers = [w for one in skipped for w in (one, *one._wrappers_inside(last_first=True))]
        skipping = sorted((w for w in wrappers if w in skipping), key=lambda w: w._left, reverse=True)
        conductor.skip([wrapper._runtime.conducted for wrapper in skipping])

    def _wrappers_inside(self, *, last_first: bool = False) -> Iterator["DataParallelWrapper"]:
        """All wrappers inside the model, each before those inside it, in registration order or in its reverse."""
        inside = list(self._own.wrappers_inside().items())
        for name, wrapper in reversed(inside) if last_first else inside:
            bare = torch_private.modules.without_compile_wrapper(wrapper)
            if not isinstance(bare, DataParallelWrapper):
                raise RuntimeError(f"{name} is wrapped by torch's DistributedDataParallel, which cannot skip a step.")
            yield bare
            yield from bare._wrappers_inside(last_first=last_first)

    @torch_private.dynamo.untraced
    def abandon_backward(self, *others: "DataParallelWrapper") -> None:
        """Take part in what is left of a backward that an exception broke off on this rank.

        Other ranks may be waiting for it. The next forward does this by itself; call it where there is none, for
        example before leaving the training loop. Where the exception came before the backward had reached what the
        wrapper returned (in a hook on the loss), nothing but this call can tell: a forward that still waits for its
        backward is given up too, and so are those of the wrappers in `others`, which were to take part in the same
        backward. For that, call it where the exception is handled, or while what the wrapper returned is still there.
        A no-op otherwise.
        """
        awaited = [wrapper._runtime.conducted for wrapper in (self, *others) if wrapper._runtime.is_awaited()]
        broken = conductor.finish_broken()
        conductor.finish_broken(also=[waiting for waiting in awaited if waiting not in broken])

    # ---- uneven inputs -----------------------------------------------------------------------------------------------

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> contextlib.AbstractContextManager[None]:
        """Train on as many batches as each rank has, as under torch's DDP.

            with ddp.join():
                for x, y in batches:  # fewer on some rank
                    ddp(x, y).backward()
                    optimizer.step()
                    optimizer.zero_grad()

        A rank that leaves the loop takes part in the others' backwards with zeros, until all have left. Then every
        rank takes the parameters, and the buffers if forwards synchronise them, of the last one to leave. For an
        optimizer that communicates (ZeroRedundancyOptimizer) use torch's `Join([ddp, optimizer])`.

        Args:
            divide_by_initial_world_size: divide sums of gradients by the number of all ranks; False divides by the
                number of those that still have data. Without effect on sums, weighted means and communication hooks.
            enable: False does nothing, for data that is known to be even.
            throw_on_early_termination: raise RuntimeError on every rank as soon as one has left, instead of going on.

        In it buffers come from the first rank that still has data, in forwards that are synchronised.
        """
        self._check_in_use()
        context: contextlib.AbstractContextManager[None] = JoinContext(
            self,
            self._uneven,
            self._follow,
            enable=enable,
            throw_on_early_termination=throw_on_early_termination,
            divide_by_initial_world_size=divide_by_initial_world_size,
        )
        return context

    def join_hook(self, **kwargs: Any) -> WrapperJoinHook:
        """What torch's `Join` calls. Takes `divide_by_initial_world_size`, as `join` does."""
        self._check_in_use()
        if self._runtime.reduction.sparse.names or self._own.wrappers_inside():
            raise RuntimeError(
                "join() takes no model with sparse gradients, and none with wrapped modules inside: give every rank "
                "the same number of batches, or call skip_step() on those that have run out."
            )
        self._uneven.divide_by_initial_world_size = bool(kwargs.get("divide_by_initial_world_size", True))
        return WrapperJoinHook(self._uneven, self._follow, self._take_final_model)

    @property
    def join_device(self) -> torch.device:
        return self.device

    @property
    def join_process_group(self) -> dist.ProcessGroup | None:
        """On which torch's `Join` counts the ranks that go on."""
        return self.process_group

    def _follow(self) -> None:
        self._runtime.finish_broken_backward()
        self._uneven.shadow(self._broadcast_buffers, self._runtime.shadow_backward)

    @torch.no_grad()
    def _take_final_model(self, is_last_joiner: bool) -> None:
        tensors = [parameter.data for parameter in self._own.parameters().values()]
        if self._options.synchronise_buffers_in_forward:
            tensors += [buffer.data for buffer in self._own.buffers().values()]
        self._runtime.communicator.broadcast(tensors, source=self._uneven.last_of(is_last_joiner))
        self._buffers_stale = True

    # ---- what travels with the gradients -----------------------------------------------------------------------------

    @property
    def reduction(self) -> ReductionKind:
        """What a synchronised backward makes of the ranks' gradients."""
        return self._options.reduction

    @torch_private.dynamo.untraced
    def set_weight(self, weight: float) -> None:
        """This rank's weight in the mean over ranks, from the next synchronised backward on; 1 before the first call.

            ddp = compile_ddp(model, reduction="weighted")
            loss = ddp(x, y)  # a mean over this rank's tokens
            ddp.set_weight(number_of_tokens)
            loss.backward()  # .grad is the mean over all ranks' tokens

        With weights w and gradients g, each .grad becomes sum(w g) / sum(w), or zero where no rank has a weight. The
        weight travels with the gradients, in a collective that is there anyway. It applies to all that a backward
        reduces, also to what was accumulated under `no_sync()`. A rank in `skip_step()` that has accumulated nothing
        has the weight 0.

        Raises, on this rank, ValueError for a weight that is negative or that float32 cannot hold (one that is not
        finite there, or that becomes zero; 0 itself is allowed), TypeError for what is no number, RuntimeError without
        `reduction="weighted"`.
        """
        if self._options.reduction != "weighted":
            raise RuntimeError(
                f'set_weight() has no effect on reduction="{self._options.reduction}": pass reduction="weighted" to '
                "the wrapper."
            )
        ranks = self._runtime.communicator.ranks
        self._runtime.reduction.carried.set_weight(
            as_weight(weight, rank=ranks.ranks[ranks.rank], world_size=ranks.world_size)
        )

    @torch_private.dynamo.untraced
    def piggyback(self, **values: float | torch.Tensor) -> None:
        """Send numbers along with the gradients of the next synchronised backward, to be summed over ranks.

            ddp = compile_ddp(model, piggyback=("loss", "tokens"))
            ddp.piggyback(loss=loss.detach(), tokens=y.numel())
            loss.backward()
            mean_loss = ddp.piggybacked["loss"] / world_size

        Numbers or tensors of one element, which travel as float32, without a collective of their own; what is not
        given counts as zero. A rank that skips the step may send them too.

        Raises, on this rank, ValueError for a name that the wrapper was not made with and for a number that float32
        cannot hold, TypeError for what is no number.
        """
        ranks = self._runtime.communicator.ranks
        passengers = as_passengers(values, self._options.piggyback, device=self.device, rank=ranks.ranks[ranks.rank])
        self._runtime.reduction.carried.set_piggyback(passengers)

    @property
    def piggybacked(self) -> dict[str, torch.Tensor]:
        """The sums over ranks that the last synchronised backward brought, scalars on the parameters' device.

        Empty before the first one.
        """
        carried = self._runtime.reduction.carried.piggybacked
        return {} if carried is None else dict(zip(self._options.piggyback, carried.unbind(), strict=True))

    # ---- what users look at ------------------------------------------------------------------------------------------

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The group that the wrapper was made for; it reduces on a communicator of its own, made from this one."""
        return self._runtime.communicator.ranks.group()

    @property
    def device(self) -> torch.device:
        """Where the trained parameters are."""
        trained = (
            self._own.trained().values() if self._lifecycle is Lifecycle.COPY else self._runtime.parameters.tensors
        )
        return next(iter(trained)).device

    @property
    def plan(self) -> ReductionSequence | None:
        """The agreed sequence of buckets, fixed from the end of the first synchronised backward on.

        Before that backward it is None where graphs take part, and the order it will try where hooks do everything.
        """
        return self._runtime.reduction.agreed.sequence

    @torch_private.dynamo.untraced
    def explain(self) -> Explanation:
        """What is reduced where, and why; `print` it for a table."""
        return explain_sequence(
            self._runtime.reduction.agreed.sequence,
            self._runtime.reduction.fallback.reasons,
            self._options,
            self._link_bytes_per_second,
            str(self._runtime.reduction.proof),
            self._runtime.reduction.sparse.names,
            tuple(self._own.left_alone()),
        )

    @torch_private.dynamo.untraced
    def stats(self) -> dict[str, Any]:
        """What torch's DDP tells in `_get_ddp_logging_data()`, under the same names, as plain values. No collective.

        Sizes are in bytes; `bucket_sizes` and `per_bucket_param_indices` (positions among the trained parameters) are
        of the buckets in launch order, riders included, and empty before there is a plan. `has_rebuilt_buckets` tells
        whether the sequence is fixed, `iteration` counts the synchronised backwards begun, `comm_hook` is the hook's
        name or empty, `unused_parameters` are those that no rank has used.

        Left out: all times, CUDA's and the host's; environment variables and gloo's and NCCL's settings; DDP's own
        arguments (`find_unused_parameters`, `static_graph`, `device_ids`). `torch.profiler` shows when each bucket is
        launched and awaited, `explain()` why hooks reduce what they do.
        """
        self._check_in_use()
        return training_stats(self.module, self._runtime, self._options)

    @torch_private.dynamo.untraced
    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load what the bare module, or any wrapper of it, has saved: keys may carry `module.` and `_orig_mod.`.

        Missing and unexpected keys are reported under the bare module's names. Raises ValueError for `assign=True`,
        which would put other parameters in the place of those that are reduced.
        """
        if assign:
            raise ValueError(
                "assign=True would replace the parameters whose gradients are reduced: load without it, or load into "
                "the module before wrapping it."
            )
        if not isinstance(state_dict, Mapping):
            raise TypeError(f"load_state_dict() takes what state_dict() has returned, found {state_dict!r}.")
        return self.module.load_state_dict(bare_state(state_dict, list(self.module.state_dict())), strict=strict)

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
            unmark_wrapped(self._own)
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

    def _wrap(self, module: nn.Module, options: Options, ddp_arguments: DDPArguments) -> None:
        DataParallelWrapper.__init__(self, module, None, options, ddp_arguments)

    def _handed_out(self, method: types.MethodType) -> types.MethodType:
        return self._methods.watched(method) if self._lifecycle is Lifecycle.IN_USE else method
