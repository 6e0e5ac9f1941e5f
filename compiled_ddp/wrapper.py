"""What both wrappers share: their public methods, each a word to what does the work (`wrapping/`)."""

import contextlib
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Joinable

from compiled_ddp import torch_private
from compiled_ddp.collector import collector_paused
from compiled_ddp.model.owners import mark_wrapped
from compiled_ddp.options import Options
from compiled_ddp.plan import ReductionSequence
from compiled_ddp.planning.trained_parameters import TrainedParameters
from compiled_ddp.ranks.agreement import Description
from compiled_ddp.ranks.alone import begin_alone
from compiled_ddp.ranks.communicator import Communicator
from compiled_ddp.ranks.rank_group import RankGroup
from compiled_ddp.report.explain import Explanation, explain_sequence
from compiled_ddp.report.stats import training_stats
from compiled_ddp.step.graph_call import GraphCall
from compiled_ddp.step.join import UnevenInputs
from compiled_ddp.step.reduction import Wrapped
from compiled_ddp.step.runtime import Runtime
from compiled_ddp.wrapping.checkpoints import Checkpointed
from compiled_ddp.wrapping.closing import Closable
from compiled_ddp.wrapping.comm_hook_registration import TakesCommHooks
from compiled_ddp.wrapping.copies import Copyable
from compiled_ddp.wrapping.ddp_arguments import DDPArguments, group_of, options_as_under_ddp
from compiled_ddp.wrapping.ddp_attributes import DDPAttributes
from compiled_ddp.wrapping.forwards import Forwards
from compiled_ddp.wrapping.joining import TakesUnevenInputs
from compiled_ddp.wrapping.lifecycle import Lifecycle
from compiled_ddp.wrapping.local_methods import LocalMethods
from compiled_ddp.wrapping.names import BareNames
from compiled_ddp.wrapping.sent_numbers import SendsNumbers
from compiled_ddp.wrapping.settings import Settings
from compiled_ddp.wrapping.setup import Setup
from compiled_ddp.wrapping.steps import SkipsSteps
from compiled_ddp.wrapping.switches import Switches
from compiled_ddp.wrapping.watched_model import WatchedModel


class DataParallelWrapper(
    Checkpointed,
    BareNames,
    DDPAttributes,
    SkipsSteps,
    TakesUnevenInputs,
    SendsNumbers,
    TakesCommHooks,
    Copyable,
    Closable,
):
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
        on_default_group = process_group is None and ddp_arguments.get("device_mesh") is None
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
            self._setup.choose_bucket_cap(communicator)
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
        parameters, sparse = TrainedParameters.of(self._setup.dense()), TrainedParameters.of(self._setup.sparse())
        options = self._settings.options
        return Runtime(Wrapped(parameters, sparse, communicator, options, self._why_not_graph(), self._live_calls))

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
        self._check_in_use()
        module: nn.Module = self._modules["module"]  # type: ignore[assignment]  # spares a call of __getattr__
        return self._forwards.run(module, args, kwargs, training=self.training)

    @torch_private.dynamo.untraced
    def warmup(self, *args: Any, **kwargs: Any) -> None:
        """Compile everything that a step with this batch needs, before the first step. Takes forward's arguments.

            ddp.warmup(x, y)  # a collective: every rank calls it, as often as all others
            for x, y in batches:
                ddp(x, y).backward()

        Runs the forward once and compiles every backward variant of the graphs that it calls (with and without
        communication, with and without gradients to fold in). Then, in training mode, it times some passes of forward
        and backward, compiled and as the model is, and chooses the faster way for all ranks: `explain()` tells which,
        `warmup_chooses=False` keeps graphs. It starts no collective of its own and leaves parameters, gradients,
        buffers and the random state of CPU and CUDA as they were; what else the model's forward changes stays changed.
        Call it as the steps will run, under autocast for example, in the mode (train or eval), and again for other
        shapes: each call adds to what the choice is made by. Rank 0 logs a line for each compilation, with its seconds,
        to the logger `compiled_ddp.graph.warmup`, or to stderr where logging has not been set up (docs/api.md, "What is
        told").

        At its end the ranks wait for each other in the store, so a slow compiler delays here and not in a collective:
        for two hours at most, and for one that does not tell any more that it lives, for the group's timeout. Under
        `EagerDDP` there is nothing to compile, and it returns at once.

        Raises what forward or the compiler raises on this rank, RuntimeError if that happened on another rank or after
        unwrap().
        """
        self._check_in_use()

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Leave gradients local: backwards of forwards called in here accumulate into .grad without communication.

        They are reduced together with the next backward whose forward is called outside, as under DDP.
        """
        return self._switches.local()

    @torch_private.dynamo.untraced
    def skip_step(self, *others: "DataParallelWrapper") -> None:
        """Contribute zeros to this step. A rank that drops its batch calls it in place of backward.

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
        self._skip_step(others)

    @torch_private.dynamo.untraced
    def abandon_backward(self, *others: "DataParallelWrapper") -> None:
        """Send zeros for the rest of a backward that an exception ended on this rank, so that no other rank waits.

        Other ranks may be waiting for it. The next forward does this by itself; call it where there is none, for
        example before leaving the training loop. Where the exception came before the backward had reached what the
        wrapper returned (in a hook on the loss), nothing but this call can tell: a forward that still waits for its
        backward is given up too, and so are those of the wrappers in `others`, which were to take part in the same
        backward. For that, call it where the exception is handled, or while what the wrapper returned is still there.
        A no-op otherwise.
        """
        self._abandon_backward(others)

    # ---- what users look at ------------------------------------------------------------------------------------------

    @property
    def plan(self) -> ReductionSequence | None:
        """The agreed sequence of buckets, fixed from the end of the first synchronised backward on.

        Before that backward it is None where graphs take part, and the order it will try where hooks do everything.
        """
        return self._runtime.reduction.agreed.sequence

    @torch_private.dynamo.untraced
    def explain(self) -> Explanation:
        """Report which buckets graphs and hooks reduce, and why; `print` it for a table."""
        return explain_sequence(
            self._runtime.reduction.agreed.sequence,
            self._runtime.reduction.fallback.reasons,
            self._settings.options,
            self._setup.link_bytes_per_second,
            str(self._runtime.reduction.proof),
            self._runtime.reduction.sparse.names,
            tuple(self._managed.left_alone()),
            self._chosen(),
            self._compiled_from(),
        )

    def _chosen(self) -> str:
        """The line of `explain()` about what a warm-up has chosen; empty if none has."""
        return ""

    def _compiled_from(self) -> str:
        """What was compiled here, and what was found in the cache; empty where nothing is compiled."""
        return ""

    @torch_private.dynamo.untraced
    def stats(self) -> dict[str, Any]:
        """Numbers for a logger: those of DDP's `_get_ddp_logging_data()`, by the same names. No collective.

        Sizes are in bytes; `bucket_sizes` and `per_bucket_param_indices` (positions among the trained parameters) are
        of the buckets in launch order, riders included, and empty before there is a plan. `has_rebuilt_buckets` tells
        whether the sequence is fixed, `iteration` counts the synchronised backwards begun, `comm_hook` is the hook's
        name or empty, `unused_parameters` are those that no rank has used.

        Left out: all times, CUDA's and the host's; environment variables and gloo's and NCCL's settings; DDP's own
        arguments (`find_unused_parameters`, `static_graph`, `device_ids`). `torch.profiler` shows when each bucket is
        launched and awaited, `explain()` why hooks reduce what they do.
        """
        self._check_in_use()
        return training_stats(self.module, self._runtime, self._settings.options)

    def _wrap(self, module: nn.Module, options: Options, ddp_arguments: DDPArguments) -> None:
        DataParallelWrapper.__init__(self, module, None, options, ddp_arguments)

    def _handed_out(self, method: types.MethodType) -> types.MethodType:
        return self._methods.watched(method) if self._lifecycle is Lifecycle.IN_USE else method
