"""The wrapper: what `CompiledDDP` and `EagerDDP` share. What torch's class has besides stands in `wrapping/`."""

import contextlib
import os
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Joinable

from compiled_ddp import torch_private
from compiled_ddp.collector import collector_paused
from compiled_ddp.keywords import suggests_keywords
from compiled_ddp.model.owners import mark_wrapped, unmark_wrapped
from compiled_ddp.options import Options
from compiled_ddp.plan import BucketPlan, ReductionKind, ReductionSequence
from compiled_ddp.planning.cost_model import BackwardWork
from compiled_ddp.planning.saved_plan import SavedPlan
from compiled_ddp.planning.trained_parameters import TrainedParameters
from compiled_ddp.ranks.agreement import Description, agree_on_description
from compiled_ddp.ranks.alone import begin_alone
from compiled_ddp.ranks.communicator import Communicator
from compiled_ddp.ranks.rank_group import RankGroup
from compiled_ddp.ranks.recorder import Recorder, check_steps
from compiled_ddp.reducers.ddp_hook import Hook, TorchCommHook, builtin_hook, check_comm_hook, check_takes_complex
from compiled_ddp.reducers.weights import as_weight
from compiled_ddp.report.explain import Explanation, Times, explain_sequence
from compiled_ddp.report.stats import training_stats
from compiled_ddp.report.timeline import timeline_of_backward, write_timeline
from compiled_ddp.step.conductor import conductor
from compiled_ddp.step.graph_call import GraphCall
from compiled_ddp.step.join import JoinContext, UnevenInputs, WrapperJoinHook
from compiled_ddp.step.reduction import Wrapped
from compiled_ddp.step.runtime import Runtime
from compiled_ddp.users_code import warn_user
from compiled_ddp.wrapping.copies import Copyable
from compiled_ddp.wrapping.ddp_arguments import DDPArguments, group_of, options_as_under_ddp
from compiled_ddp.wrapping.ddp_attributes import DDPAttributes
from compiled_ddp.wrapping.forwards import Forwards
from compiled_ddp.wrapping.local_methods import LocalMethods
from compiled_ddp.wrapping.measured_plan import measured_plan
from compiled_ddp.wrapping.parts import Lifecycle, Settings, Switches
from compiled_ddp.wrapping.sent_numbers import as_passengers
from compiled_ddp.wrapping.setup import Setup, WatchedModel
from compiled_ddp.wrapping.state_dict import BareNames


class DataParallelWrapper(BareNames, DDPAttributes, Copyable):
    """A module whose gradients are averaged over ranks. Base of `CompiledDDP` and `EagerDDP`."""

    is_compiled_ddp_wrapper = True
    _runtime_kind = Runtime
    _registrations = 0  # of communication hooks, so far

    def __init__(
        self,
        module: nn.Module,
        process_group: dist.ProcessGroup | None,
        options: Options,
        ddp_arguments: DDPArguments,
    ) -> None:
        nn.Module.__init__(self)
        Joinable.__init__(self)
        with collector_paused(then_collect=True):
            self._set_up(module, process_group, options, ddp_arguments)

    def _set_up(
        self,
        module: nn.Module,
        process_group: dist.ProcessGroup | None,
        options: Options,
        ddp_arguments: DDPArguments,
    ) -> None:
        begin_alone()
        on_default_group = process_group in (None, dist.group.WORLD) and ddp_arguments.get("device_mesh") is None
        options = options_as_under_ddp(options, ddp_arguments)
        self._settings = Settings(options, ddp_arguments, on_default_group=on_default_group)
        wrong_group: Exception | None = None
        try:
            group = group_of(process_group, ddp_arguments)
        except (TypeError, ValueError, RuntimeError) as error:
            group, wrong_group = None, error  # which is told to all ranks there are
        ranks, name = RankGroup(group), type(self).__name__
        self._setup = Setup(name, self._settings, ranks, self._check_devices)
        self._setup.agree(module, self._check_and_describe, wrong_group)
        communicator = Communicator(ranks)
        self.module, self._managed = module, self._setup.managed_state
        try:
            self._setup.synchronise_state(communicator)
            self._setup.calibrate(communicator)
            self._runtime = self._new_runtime(communicator)
        except BaseException:
            communicator.close()
            raise
        self._uneven = UnevenInputs(self, communicator, self._runtime)
        self._runtime.reduction.follow_join(self._uneven)
        self._switches = Switches(buffers_are_stale=True)
        self._methods = LocalMethods(self, self._runtime)
        self._watched_model = WatchedModel(
            self._setup, self._settings, self._runtime, why_not_graph=self._why_not_graph, refreshed=self._refreshed
        )
        self._forwards = Forwards(
            name,
            self._managed,
            self._settings,
            self._switches,
            runtime=self._runtime,
            uneven=self._uneven,
            model=self._watched_model,
            run_module=self._run_module,
        )
        self._lifecycle = Lifecycle.IN_USE
        mark_wrapped(self._managed, self)
        self._name_state()

    def _new_runtime(self, communicator: Communicator) -> Runtime:
        parameters = TrainedParameters.of(self._setup.dense(), self._setup.by_rows())
        communicator.sum_rows(parameters.rows)
        sparse = TrainedParameters.of(self._setup.sparse())
        options = self._settings.options
        wrapped = Wrapped(parameters, sparse, communicator, options, self._why_not_graph(), self._live_calls)
        return self._runtime_kind(wrapped)

    # ---- for the two wrappers to fill in -----------------------------------------------------------------------------

    def _check_and_describe(self, module: nn.Module) -> Description:
        """Collect what ranks compare at construction. Raises an error that says what to do if `module` does not fit."""
        return self._setup.check_and_describe(module)

    def _check_devices(self) -> None:
        """Raise ValueError where the model is on devices that this kind of wrapper cannot use."""

    def _refreshed(self) -> None:
        """The runtime has other parameters, as the model has changed."""

    @property
    def _live_calls(self) -> Callable[[], Sequence[GraphCall]]:
        """Returns the calls of graphs whose backward may still run, latest first."""
        return tuple

    def _run_module(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    # ---- the training loop -------------------------------------------------------------------------------------------

    # Where a wrapper stands inside another's model, that one's graphs end before it and begin again behind it.
    @torch_private.dynamo.untraced_forward
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._lifecycle is Lifecycle.COPY:
            return self._forward_of_copy(*self._settings.placed(args, kwargs))
        if self._lifecycle is not Lifecycle.IN_USE:
            self._check_in_use()
        module: nn.Module = self._modules["module"]  # type: ignore[assignment]  # spares a call of __getattr__
        return self._forwards.run(module, args, kwargs, training=module.training)

    @torch_private.dynamo.untraced
    def warmup(self, *args: Any, **kwargs: Any) -> None:
        """Compile everything that a step with this batch needs, before the first step. Takes forward's arguments.

            ddp.warmup(x, y)  # a collective: every rank calls it, as often as all others
            for x, y in batches:
                ddp(x, y).backward()

        Runs the forward once and compiles every backward variant of the graphs that it calls (with and without
        communication, with and without gradients to fold in). Then, in training mode, it times some passes of forward
        and backward, compiled and as the model is, and all ranks use the faster one: `explain()` says which,
        `warmup_chooses=False` keeps graphs. It starts no collective of its own and leaves parameters, gradients,
        buffers and the random state of Python, NumPy, CPU and CUDA as they were; any other side effect of the model's
        forward remains. Frozen parameters that forward writes are put back as far as they have no more bytes than the
        trained ones; a larger one is warned of.
        Call it the way the steps will run (autocast, train or eval mode), and once for each shape: the choice takes all
        calls into account. Rank 0 logs a line for each compilation, with its seconds, to the logger
        `compiled_ddp.graph.warmup`, or to stderr if logging has not been set up (docs/api.md, "Progress messages").

        At its end the ranks wait for each other through the store, so that a slow compiler delays this call and no
        collective: for two hours at most, or for the group's timeout if a rank shows no sign of life. Under
        `EagerDDP` there is nothing to compile, and it returns at once.

        Raises whatever forward or the compiler raises on this rank; RuntimeError if that happened on another rank, or
        after unwrap().
        """
        self._check_in_use()

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Keep gradients local: backwards of forwards called in this context do not communicate.

        They accumulate into .grad, and are reduced in the next backward whose forward is called outside, as under DDP.
        Entered by the module itself, as by a training step that calls backward, it keeps backwards in it local too.
        """
        if self._lifecycle is Lifecycle.IN_USE and self._forwards.runs_module:
            return self._backwards_stay_local()
        return self._switches.local()

    @contextlib.contextmanager
    def _backwards_stay_local(self) -> Iterator[None]:
        before = self._runtime.local
        self._runtime.stay_local(True)
        try:
            with self._switches.local():
                yield
        finally:
            self._runtime.stay_local(before)

    @torch_private.dynamo.untraced
    def skip_step(self, *others: "DataParallelWrapper") -> None:
        """Contribute zeros to this step. Call it instead of backward on a rank that drops its batch.

            loss = ddp(x, y)
            if loss.isnan():
                ddp.skip_step()
            else:
                loss.backward()
            optimizer.step()  # on every rank

        Afterwards each .grad is the mean over ranks, as after a backward on the others, so step the optimizer
        here too. Without a forward before it (a rank whose data has run out) it replaces the forward as well. After
        an exception in backward call `abandon_backward()` instead. A no-op under `no_sync()`. Wrappers inside the
        model skip the step too, and so do `others`: wrappers of the same backward, whose graphs the other ranks wait
        for in the middle of it.

        Raises RuntimeError when called inside a backward, or if torch's DistributedDataParallel is inside the model.
        """
        self._check_in_use()
        for other in others:
            if not isinstance(other, DataParallelWrapper):
                raise TypeError(f"skip_step() takes further wrappers of this package, found {other!r}.")
        if torch_private.autograd.current_graph_task() != -1:
            raise RuntimeError("skip_step() was called inside a backward: call it in place of backward.")
        if not self._switches.synchronises:
            return
        skipped = [self, *others]
        wrappers = [w for one in skipped for w in (one, *one._wrappers_inside())]
        synchronised = [w for w in wrappers if w._switches.synchronises and not w._runtime.local]
        conductor.forget_unbegun()
        broken = conductor.finish_broken_of([w._runtime for w in wrappers])
        skipping = [w for w in synchronised if w._runtime not in broken]
        for wrapper in sorted(skipping, key=lambda w: w._forwards.began):
            if not wrapper._runtime.awaits_backward:
                if wrapper._watched_model.look().changed:  # in the forward, on the other ranks
                    wrapper._watched_model.take_changes()
                wrapper._forwards.begin(with_gradients=True, training=wrapper.module.training)
                wrapper._switches.refresh_buffers(True)
        # In the order in which the other ranks' backward reaches them; their graphs wait in the middle of it.
        wrappers = [w for one in skipped for w in (one, *one._wrappers_inside(last_first=True))]
        skipping = sorted((w for w in wrappers if w in skipping), key=lambda w: w._forwards.ended, reverse=True)
        conductor.skip([wrapper._runtime for wrapper in skipping])

    @torch_private.dynamo.untraced
    def abandon_backward(self, *others: "DataParallelWrapper") -> None:
        """Send zeros for the rest of a backward that an exception ended on this rank, so that no other rank waits.

        The next forward does this by itself; call it if none follows, for example before leaving the training loop. It
        is also the only way to give up a forward whose backward failed before it reached the wrapper's output (in a
        hook on the loss, say): that of this wrapper and those of `others`, wrappers of the same backward. For that,
        call it where the exception is handled, or while the wrapper's output is still alive. A no-op otherwise.

        Raises RuntimeError when called inside a backward.
        """
        if torch_private.autograd.current_graph_task() != -1:
            raise RuntimeError(
                "abandon_backward() was called inside a backward, which still runs: let the exception end it, and call "
                "it where that is handled."
            )
        runtimes = [wrapper._runtime for wrapper in (self, *others)]
        awaited = [runtime for runtime in runtimes if runtime.is_awaited()]
        broken = conductor.finish_broken_of(runtimes)
        conductor.finish_broken(also=[waiting for waiting in awaited if waiting not in broken])

    def _wrappers_inside(self, *, last_first: bool = False) -> Iterator["DataParallelWrapper"]:
        """All wrappers inside the model, each before those inside it, in registration order or in its reverse."""
        inside = list(self._managed.wrappers_inside().items())
        for name, wrapper in reversed(inside) if last_first else inside:
            bare = torch_private.modules.without_compile_wrapper(wrapper)
            if not isinstance(bare, DataParallelWrapper):
                raise RuntimeError(f"{name} is wrapped by torch's DistributedDataParallel, which cannot skip a step.")
            yield bare
            yield from bare._wrappers_inside(last_first=last_first)

    # ---- uneven inputs -----------------------------------------------------------------------------------------------

    @suggests_keywords
    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> contextlib.AbstractContextManager[None]:
        """Let ranks train on different numbers of batches, as under torch's DDP.

            with ddp.join():
                for x, y in batches:  # fewer on some rank
                    ddp(x, y).backward()
                    optimizer.step()
                    optimizer.zero_grad()

        A rank that leaves the loop contributes zeros to the others' backwards until all have left. Then every rank
        receives the parameters of the last one to leave, and its buffers if forwards synchronise them. For an
        optimizer that communicates (ZeroRedundancyOptimizer) use torch's `Join([ddp, optimizer])`.

        Args:
            divide_by_initial_world_size: divide sums of gradients by the number of all ranks; False divides by the
                number of those that still have data. Without effect on sums, weighted means and communication hooks.
            enable: False turns the context into a no-op, for data that is known to be even.
            throw_on_early_termination: raise RuntimeError on every rank as soon as one has left, instead of going on.

        Within the context, synchronised forwards take buffers from the first rank that still has data.
        """
        self._check_in_use()
        if not enable:
            return contextlib.nullcontext()
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
        """Return the hook that torch's `Join` asks for. Takes `divide_by_initial_world_size`, as `join` does."""
        self._check_in_use()
        if self._runtime.reduction.sparse.names or self._managed.wrappers_inside():
            raise RuntimeError(
                "join() takes no model with sparse gradients, and none with wrapped modules inside: give every rank "
                "the same number of batches, or call skip_step() on those that have run out."
            )
        self._uneven.divide_by(initial_world_size=bool(kwargs.get("divide_by_initial_world_size", True)))
        return WrapperJoinHook(self._uneven, self._follow, self._take_final_model)

    @property
    def join_device(self) -> torch.device:
        return self.device

    @property
    def join_process_group(self) -> dist.ProcessGroup | None:
        """The process group on which torch's `Join` counts the ranks that still have data."""
        return self.process_group

    def _follow(self) -> None:
        self._runtime.finish_broken_backward()
        self._uneven.shadow(self._forwards.broadcast_buffers, self._runtime.shadow_backward)

    @torch.no_grad()
    def _take_final_model(self, is_last_joiner: bool) -> None:
        tensors = [parameter.data for parameter in self._managed.parameters().values()]
        if self._settings.options.synchronise_buffers_in_forward:
            tensors += [buffer.data for buffer in self._managed.buffers().values()]
        self._runtime.communicator.broadcast(tensors, source=self._uneven.last_of(is_last_joiner))
        self._switches.refresh_buffers(True)

    # ---- numbers that travel with the gradients, as float32 ----------------------------------------------------------

    @property
    def reduction(self) -> ReductionKind:
        """How a synchronised backward combines the ranks' gradients: "mean", "sum" or "weighted"."""
        return self._settings.options.reduction

    @torch_private.dynamo.untraced
    def set_weight(self, weight: float) -> None:
        """Set this rank's weight in the mean over ranks, from the next synchronised backward on. Initially 1.

            ddp = compile_ddp(model, reduction="weighted")
            loss = ddp(x, y)  # a mean over this rank's tokens
            ddp.set_weight(number_of_tokens)
            loss.backward()  # .grad is the mean over all ranks' tokens

        With weights w and gradients g, each .grad becomes sum(w g) / sum(w), or zero if all weights are 0. The
        weight travels with the gradients and needs no collective of its own. It applies to everything that a backward
        reduces, including what was accumulated under `no_sync()`. A rank that calls `skip_step()` and has accumulated
        nothing has the weight 0.

        Raises, on this rank, ValueError for a weight that is negative or that float32 cannot hold (one that is not
        finite there, or that becomes zero; 0 itself is allowed), TypeError for anything but a number, RuntimeError
        without `reduction="weighted"`.
        """
        if self.reduction != "weighted":
            raise RuntimeError(
                f'set_weight() has no effect on reduction="{self.reduction}": pass reduction="weighted" to the wrapper.'
            )
        ranks = self._runtime.communicator.ranks
        self._runtime.reduction.carried.set_weight(
            as_weight(weight, taker=f"rank {ranks.global_rank}: set_weight()", world_size=ranks.world_size)
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
        cannot hold, TypeError for anything but a number.
        """
        ranks, names = self._runtime.communicator.ranks, self._settings.options.piggyback
        passengers = as_passengers(values, names, device=self.device, rank=ranks.global_rank)
        self._runtime.reduction.carried.set_piggyback(passengers)

    @property
    def piggybacked(self) -> dict[str, torch.Tensor]:
        """The sums over ranks from the last synchronised backward, as scalars on the parameters' device.

        Empty before the first one.
        """
        carried = self._runtime.reduction.carried.piggybacked
        return {} if carried is None else dict(zip(self._settings.options.piggyback, carried.unbind(), strict=True))

    # ---- communication hooks -----------------------------------------------------------------------------------------

    @torch_private.dynamo.untraced
    def register_comm_hook(self, state: object, hook: Hook) -> None:
        """Let `hook(state, bucket)` reduce every bucket from the next backward on, as under torch's DDP.

            ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)  # on every rank, before training

        Hooks written for DDP work as they are, torch's own in `torch.distributed.algorithms.ddp_comm_hooks` among
        them. `bucket` has the methods of `dist.GradBucket`: `index()`, `is_last()`, `buffer()`, `set_buffer()`,
        `gradients()` and `parameters()`. The gradients in it are not divided: the hook divides. It returns a
        `torch.futures.Future` that holds the reduced tensor, as large as the buffer. All ranks see the buckets in
        the same order, whatever each of them ran; their sizes are fixed from the second backward on.

        From then on gradient hooks launch all buckets, under `compile_ddp` too, whose graphs no longer communicate.
        `verify` is off, because ranks need not agree after an arbitrary hook.

        A collective: every rank calls it, between the same two steps. The wrapper compares the hooks' names.

        Raises TypeError or ValueError for what cannot be a hook; RuntimeError if one is registered already, if some
        rank registers none or a different one, inside a backward, under `strict=True`, and with a `reduction` other
        than the mean. If a hook raises in a backward, that backward fails on every rank and the wrapper cannot be used
        to reduce any more.
        """

        def name() -> str:
            checked = check_comm_hook(hook)
            check_takes_complex(hook, self._managed.trained())
            return checked

        self._register(state, hook, name)

    @torch_private.dynamo.untraced
    def _register_builtin_comm_hook(self, comm_hook_type: dist.BuiltinCommHookType) -> None:
        """Let the hook that DDP has built in reduce every bucket, on the wrapper's own communicator."""

        def name() -> str:
            check_takes_complex(builtin_hook(comm_hook_type), self._managed.trained())
            return str(comm_hook_type)

        def reduce(state: Communicator, bucket: Any) -> Any:
            return builtin_hook(comm_hook_type)(state, bucket)

        self._register(self._runtime.communicator, reduce, name)

    def _register(self, state: object, hook: Hook, checked_name: Callable[[], str]) -> None:
        self._check_in_use()
        if self._runtime.reduction.ddp_hook is not None:
            raise RuntimeError("register_comm_hook or register_builtin_comm_hook can only be called once.")
        if torch_private.autograd.current_graph_task() != -1:
            raise RuntimeError("register_comm_hook() was called inside a backward: call it before or after one.")
        self._runtime.finish_broken_backward()
        self._registrations += 1
        ranks, name, options = self._runtime.communicator.ranks, "", self._settings.options

        def describe() -> dict[str, list[object]]:
            nonlocal name
            name = checked_name()
            if options.strict and self._why_not_graph() is None:
                raise RuntimeError("strict=True wants graphs to reduce, and under a communication hook none does.")
            sparse = self._runtime.reduction.sparse.names
            if sparse:
                raise RuntimeError(
                    f"parameter {sparse[0]} has a sparse gradient, which no communication hook "
                    "reduces: pass sparse=False to its embedding."
                )
            if options.planned_reduction != "mean" or options.scaling is not None:
                what = f'reduction="{options.reduction}"' if options.reduction != "mean" else "other options"
                raise RuntimeError(
                    f"a communication hook takes the place of {what}, comm_hook= and scaling: drop them."
                )
            return {
                "communication hook": [name],
                "number of backwards before it": [self._runtime.number],
            }

        agree_on_description(
            ranks,
            describe,
            occasion=f"communication hook/{self._registrations}",
            purpose="to compare the communication hooks of all ranks",
            failure="the communication hook was not registered",
        )
        if options.verify == "always":
            warn_user('verify="always" is ignored under a communication hook.')
        self._runtime.reduction.register_comm_hook(TorchCommHook(state, hook, name=name, timeout=ranks.timeout))

    @torch_private.dynamo.untraced
    def comm_hook_state_dict(self) -> dict[str, list[torch.Tensor]]:
        """Return a copy of the `comm_hook`'s state on this rank, for a checkpoint that every rank writes.

        Keys name each bucket's parameters.
        """
        hook = self._runtime.reduction.traced_hook
        return {} if hook is None else hook.state_dict(self._runtime.parameters.names)

    @torch_private.dynamo.untraced
    def load_comm_hook_state_dict(self, state: Mapping[str, Sequence[torch.Tensor]]) -> None:
        """Restore the state of the `comm_hook` from what `comm_hook_state_dict` returned on the same rank.

        Buckets, dtypes and devices may differ from those at the time of saving: what is owed to a parameter moves to
        the bucket of its gradient. What the hook keeps for a bucket as a whole, such as PowerSGD's factor, is restored
        only if a bucket has the same parameters, and otherwise starts afresh.

        Raises KeyError for a parameter that the model does not have, ValueError, which names the bucket, for tensors of
        another number or shape than the hook's or owed values that are not finite, RuntimeError without a `comm_hook`.
        Then nothing is loaded.
        """
        if self._runtime.reduction.traced_hook is None:
            raise RuntimeError("the wrapper has no comm_hook, and so no state of one.")
        if not isinstance(state, Mapping):
            raise TypeError(f"the state must be what comm_hook_state_dict() has returned, found {state!r}.")
        parameters = self._runtime.parameters
        self._runtime.reduction.traced_hook.load_state_dict(state, parameters.names, parameters.tensors)

    # ---- what users look at ------------------------------------------------------------------------------------------

    @property
    def plan(self) -> ReductionSequence | None:
        """The agreed sequence of buckets, fixed from the end of the first synchronised backward on.

        Before that backward it is None if graphs reduce, and the order of the first attempt if hooks do everything.
        """
        return self._runtime.reduction.agreed.sequence

    @torch_private.dynamo.untraced
    def explain(self) -> Explanation:
        """Report which buckets graphs and hooks reduce, why, and when; `print` it for a table. No collective.

        When each bucket is ready, on the link and there is predicted where the link is known: with the buckets that
        are planned by default, or a `calibration`. What `profile()` has measured on this rank stands beside it, with
        the exposed communication and the reasons of the longest waits. `to_json()` of the result has everything.
        """
        communicator = self._runtime.communicator
        counted_rows = communicator.counted_rows if self._runtime.reduction.ddp_hook is None else None
        return explain_sequence(
            self._runtime.reduction.agreed.sequence,
            [*self._runtime.reduction.fallback.reasons, *self._why_without_graphs()],
            self._settings.options,
            str(self._runtime.reduction.proof),
            self._runtime.reduction.sparse.names,
            tuple(self._managed.left_alone()),
            self._chosen(),
            self._compiled_from(),
            Times(communicator.world_size, self._work_of, self._runtime.recorded, counted_rows),
        )

    def _work_of(self, plan: BucketPlan) -> BackwardWork | None:
        """What backward computes until each gradient of a graph's plan is ready; None where that is not known."""
        return None

    def _chosen(self) -> str:
        """The line of `explain()` about what a warm-up has chosen; empty if none has."""
        return ""

    def _why_without_graphs(self) -> Sequence[str]:
        """Why parts of the model run without graphs though others have some."""
        return ()

    def _compiled_from(self) -> str:
        """What was compiled here, and what was found in the cache; empty where nothing is compiled."""
        return ""

    @torch_private.dynamo.untraced
    def profile(self, steps: int = 10) -> Recorder:
        """Measure the next `steps` synchronised backwards on this rank, for `explain()` and `timeline()`.

            ddp.profile(steps=10)
            for x, y in batches:
                ddp(x, y).backward()
            print(ddp.explain())

        When each bucket is launched, awaited and there, from the beginning of the backward, by the host's clock. The
        first backward is left out, as a warm-up; of the others the one of median length is shown. If backwards under
        `no_sync()` run meanwhile, two or more, exposed communication is the difference to these. No collective: any
        rank may call it, at any time, and each sees its own times. A second call begins anew.

        Until then each backward takes some more of the host's time, as under `torch.profiler`; afterwards none.
        `remaining` of the object that is returned tells how many backwards are still to come.

        Raises TypeError or ValueError for anything but a whole number of at least 2.
        """
        self._check_in_use()
        check_steps(steps)
        return self._runtime.record(steps)

    @torch_private.dynamo.untraced
    def measured_plan(self) -> SavedPlan:
        """The buckets that are best for the backwards that `profile()` has measured. A collective.

            ddp.profile(steps=10)  # on every rank, and then ten steps
            plan = ddp.measured_plan()
            plan.save("plan.json")  # for the next run; or at once:
            ddp = compile_ddp(ddp.unwrap(), plan=plan)

        What a captured graph computes is counted before its first step, and right to a factor of two at best. Launches
        tell when gradients are ready: of all ranks' the last ones count. It is the present plan where another one would
        end the backward less than a hundredth earlier.

        Raises RuntimeError, on every rank, where a rank has not measured the present plan's buckets, where the link
        was not (pass `calibration=`), and where a communication hook reduces or graphs share a parameter.
        """
        self._check_in_use()
        return measured_plan(self._runtime, self._settings.options, self._work_of)

    @torch_private.dynamo.untraced
    def timeline(self, path: str | os.PathLike[str]) -> None:
        """Write what `explain()` says of times as a picture, or as a trace that https://ui.perfetto.dev opens.

            ddp.timeline("step.png")   # needs matplotlib: pip install 'compiled-ddp[plots]'
            ddp.timeline("step.json")

        Two lanes, computation and link, with the buckets in colour: as predicted, and below as `profile()` has measured
        them on this rank. No collective.

        Raises ValueError for a name that ends otherwise, RuntimeError where nothing is predicted or measured yet, and
        ImportError without matplotlib.
        """
        self._check_in_use()
        write_timeline(timeline_of_backward(self.explain()), Path(path))

    @torch_private.dynamo.untraced
    def stats(self) -> dict[str, Any]:
        """Numbers for a logger: those of DDP's `_get_ddp_logging_data()`, by the same names. No collective.

        Sizes are in bytes; `bucket_sizes` and `per_bucket_param_indices` (positions among the trained parameters) are
        of the buckets in launch order, riders included, and empty before there is a plan. `has_rebuilt_buckets` tells
        whether the sequence is fixed, `iteration` counts the synchronised backwards begun, `comm_hook` is the hook's
        name or empty, `unused_parameters` are those that no rank has used.

        Left out: all times, CUDA's and the host's; environment variables and gloo's and NCCL's settings; DDP's own
        arguments (`find_unused_parameters`, `static_graph`, `device_ids`). `profile()` measures when each bucket is
        launched and awaited, and `torch.profiler` shows it; `explain()` says why hooks reduce what they do.
        """
        self._check_in_use()
        return training_stats(self.module, self._runtime, self._settings.options)

    def _wrap(self, module: nn.Module, options: Options, ddp_arguments: DDPArguments) -> None:
        DataParallelWrapper.__init__(self, module, None, options, ddp_arguments)

    def _handed_out(self, method: types.MethodType) -> types.MethodType:
        return self._methods.watched(method) if self._lifecycle is Lifecycle.IN_USE else method

    # ---- the end: the module is given back, or wrapped once more; an `Owner` of it until then ------------------------

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
            unmark_wrapped(self._managed)
            self._watched_model.close()
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
