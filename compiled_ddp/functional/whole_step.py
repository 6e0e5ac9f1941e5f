"""`compile_step(model, optimizer)`: forward, backward, all-reduces and the optimizer's update as one compiled graph.

The model and the optimizer stay their owner's. Each call hands their tensors, as they are then, to a functional step,
which writes what becomes of them back into the same memory: so a state dict, a scheduler, an average of weights, an
evaluation, `load_state_dict` and an ordinary loop in between mean what they always mean.

What is compiled stands in `step_graph`. Another layout is another graph, which is kept beside the first.
"""

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from compiled_ddp import torch_private
from compiled_ddp.comm_hooks import CommHook
from compiled_ddp.environment import check_environment
from compiled_ddp.formatting import format_function, format_names
from compiled_ddp.functional.around_sum import AroundSum, hook_of_step
from compiled_ddp.functional.closed_over import settings_of
from compiled_ddp.functional.compiled import Backend, CompiledStep, Memory
from compiled_ddp.functional.deferred import DeferredUpdate, Update
from compiled_ddp.functional.first_parameters import checksums_of
from compiled_ddp.functional.in_flight import InFlight, refuse_other_classes
from compiled_ddp.functional.kept import Arguments, Unchanged
from compiled_ddp.functional.on_buckets import OnBuckets
from compiled_ddp.functional.reached import OwnChanges, dictionaries_of
from compiled_ddp.functional.reduction import Options, current_world
from compiled_ddp.functional.same_updates import SameUpdates
from compiled_ddp.functional.sharded_state import ShardedState
from compiled_ddp.functional.step_graph import (
    USED,
    Given,
    Layout,
    Loss,
    Outcome,
    Read,
    StepGraph,
    Tensors,
    WithLoss,
    Written,
)
from compiled_ddp.functional.updates import as_vectors, noting_updates, rule_of
from compiled_ddp.functional.wanted import Agreed, ByRows
from compiled_ddp.keywords import check_switches, suggests_keywords
from compiled_ddp.model.checks import check_model, check_writable, properties_of
from compiled_ddp.model.managed import is_wrapper
from compiled_ddp.options import check_comm_hook, check_compiler, check_embedding_rows, check_plan, is_number
from compiled_ddp.plan import gradient_dtype
from compiled_ddp.plan.sequence import described
from compiled_ddp.planning.saved_plan import SavedPlan
from compiled_ddp.planning.step_model import Mode
from compiled_ddp.ranks.agreement import Description, agree_on_description
from compiled_ddp.ranks.alone import begin_alone
from compiled_ddp.ranks.progress import format_bucket
from compiled_ddp.ranks.rank_group import RankGroup
from compiled_ddp.ranks.recorder import check_steps
from compiled_ddp.ranks.row_sums import CountedRows
from compiled_ddp.ranks.step_recorder import StepRecorder
from compiled_ddp.report.explain import SUMMED_BY_ROWS, format_rows
from compiled_ddp.report.step_times import MeasuredStep, StepTimes, predict_whole
from compiled_ddp.report.timeline import Timeline, write_timeline
from compiled_ddp.torch_private.dynamo import untraced
from compiled_ddp.users_code import warn_user


@suggests_keywords
def compile_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_fn: Loss | None = None,
    *,
    has_aux: bool = False,
    process_group: dist.ProcessGroup | None = None,
    accumulate: int = 1,
    clip_grad_norm: float | None = None,
    scaler: torch.amp.GradScaler | None = None,
    pipeline_updates: bool = False,
    check_stale: bool = False,
    shard_optimizer: bool = False,
    comm_hook: CommHook | None = None,
    embedding_rows: bool | None = None,
    bucket_cap_mb: float | None = None,
    plan: SavedPlan | None = None,
    backend: Backend = "inductor",
    dynamic: bool | None = None,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> "TrainingStep":
    """Make a function that takes a whole training step as one graph: see `TrainingStep`. A collective.

        step = compile_step(model, torch.optim.AdamW(model.parameters(), lr=3e-4))
        for x, y in batches:
            loss = step(x, y)

    Args:
        model: a bare module. Its parameters and buffers are overwritten with those of the group's rank 0.
        optimizer: torch.optim's SGD, Adam and AdamW update in the graph; any other's `step()` is called behind it.
        loss_fn: called as `loss_fn(model, *batch)`, returns this rank's loss; None calls `model(*batch)`.
        has_aux: whether that returns a pair of the loss and anything else, which the step then returns too, detached.
        process_group: the ranks to average over; None is all of them.
        accumulate: how many calls make one update, with the mean of their gradients, which the last one alone sends.
        clip_grad_norm: the largest norm of all reduced gradients together, as of `torch.nn.utils.clip_grad_norm_`.
        scaler: for float16: scales losses, and leaves out updates that are not finite on some rank. Is updated, too.
        pipeline_updates: let ranks gather while the next call begins: the sums of gradients, for an update that the
            next call makes, or with `shard_optimizer` what ranks have made of their shares of parameters.
        check_stale: for debugging that: until then the memory of parameters is NaN, for who has another name for it.
        shard_optimizer: let each rank update its share of every parameter, and keep the state of that alone, as ZeRO-1
            does. `optimizer.state_dict()` and `.step()` are collectives then, and have the whole.
        comm_hook: what is sent in place of gradients, and what becomes of that: one of `compiled_ddp.comm_hooks`. With
            `pipeline_updates` or `shard_optimizer` one that does something to each element before and after one
            all-reduce, as `bf16_compress`.
        embedding_rows: whether the gradient of an embedding is sent as those of its rows that are not zero, where that
            is less (docs/planner.md); None where it may pay. Not with `pipeline_updates`, `shard_optimizer` or a
            `comm_hook`.
        bucket_cap_mb: size of a bucket in MiB; None plans them (docs/planner.md).
        plan: buckets as they were saved, by `step.plan.save()` or `ddp.plan.save()` of a wrapper's.
        backend: "inductor", or "aot_eager", which runs the same graph without compiling kernels.
        dynamic: must be None or False; batches of other shapes get a graph of their own.
        mode: as in torch.compile; for Inductor.
        options: as in torch.compile; for Inductor.

    Raises TypeError or ValueError for arguments that are not as described, and RuntimeError on every rank where ranks
    have different models or optimizers.
    """
    check_compiler(backend, mode, dynamic)
    check_switches(has_aux=has_aux, pipeline_updates=pipeline_updates, check_stale=check_stale)
    check_switches(shard_optimizer=shard_optimizer)
    if check_stale and not pipeline_updates:
        raise ValueError("check_stale is about parameters that are under way: give pipeline_updates=True too.")
    _check(model, optimizer, loss_fn, accumulate, clip_grad_norm, scaler)
    _check_reduction(comm_hook, bucket_cap_mb, plan, dynamic)
    is_whole = shard_optimizer or pipeline_updates or comm_hook is not None
    _check_embedding_rows(embedding_rows, is_whole=is_whole)
    options = torch_private.compiler_options.inductor_options(mode, options, dynamic)
    of_graph = Options(
        process_group,
        "mean" if comm_hook is None else "sum",  # of which the hook makes the mean
        bucket_cap_mb,
        is_scattered=shard_optimizer or pipeline_updates,
        is_gathered_later=pipeline_updates,
        whole=pipeline_updates and not shard_optimizer,
        plan=plan,
    )
    asked = Asked(accumulate, comm_hook, shard_optimizer, False if is_whole else embedding_rows)
    of_graph = _begin(model, optimizer, RankGroup(process_group), of_graph, asked)
    _warn_of_others(model, optimizer)
    in_flight: InFlight | None = None
    if pipeline_updates and shard_optimizer:
        in_flight = InFlight(model, check_stale=check_stale)
    elif pipeline_updates:
        in_flight = DeferredUpdate(model, optimizer, check_stale=check_stale)
    own_changes = OwnChanges()
    compiler = functools.partial(
        CompiledStep,
        backend=backend,
        options=options,
        keeps_donated=True,
        in_flight=in_flight,
        own_changes=own_changes,
        memory=Memory(),
    )
    graph = StepGraph(WithLoss(model, loss_fn, has_aux=has_aux), optimizer, of_graph, clip_grad_norm, scaler)
    return TrainingStep(model, optimizer, graph, compiler, accumulate, scaler, in_flight, own_changes)


def _check_reduction(comm_hook: object, bucket_cap_mb: object, plan: object, dynamic: bool | None) -> None:
    check_comm_hook(comm_hook)
    check_plan(plan)
    if plan is not None and bucket_cap_mb is not None:
        raise ValueError("plan= and bucket_cap_mb= are alternatives: pass one of them.")
    if dynamic:
        raise ValueError("a whole step is one graph of fixed shapes: leave out dynamic=True.")


def _check_embedding_rows(embedding_rows: object, *, is_whole: bool) -> None:
    check_embedding_rows(embedding_rows)
    if embedding_rows and is_whole:
        raise ValueError(
            "shard_optimizer, pipeline_updates and a comm_hook take whole gradients: leave out embedding_rows=True."
        )


def _check(
    model: object,
    optimizer: object,
    loss_fn: object,
    accumulate: object,
    clip_grad_norm: object,
    scaler: object,
) -> None:
    begin_alone()
    check_environment()
    if not isinstance(model, nn.Module):
        raise TypeError(f"compile_step takes a model, an nn.Module, found {type(model).__name__}.")
    if is_wrapper(model):
        raise TypeError(
            f"compile_step reduces gradients itself: give it the bare model, `{type(model).__name__}(...).module`."
        )
    compiled = next(
        (name for name, part in model.named_modules() if torch_private.modules.compile_wrappers(part)), None
    )
    if compiled is not None:
        raise TypeError(
            f"{compiled or 'the model'} is compiled by itself, and compile_step makes one graph of all: give it the "
            "model without torch.compile."
        )
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"compile_step takes an optimizer of torch.optim's, found {type(optimizer).__name__}.")
    if torch_private.optimizers.needs_closure(optimizer):
        raise TypeError(
            f"{type(optimizer).__name__} calls the loss itself, several times in a step, which no single graph holds: "
            "train with compile_ddp(model)."
        )
    if loss_fn is not None and not callable(loss_fn):
        raise TypeError(f"loss_fn must be a function (model, *batch), found {type(loss_fn).__name__}.")
    if isinstance(accumulate, bool) or not isinstance(accumulate, int) or accumulate < 1:
        raise ValueError(f"accumulate must be a number of calls, 1 or more, found {accumulate!r}.")
    if clip_grad_norm is not None and not (is_number(clip_grad_norm) and clip_grad_norm > 0):
        raise ValueError(f"clip_grad_norm must be a positive number, found {clip_grad_norm!r}.")
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        raise TypeError(f"scaler must be a torch.amp.GradScaler or None, found {type(scaler).__name__}.")


class Asked(NamedTuple):
    """What ranks compare of a step's arguments besides `Options`."""

    accumulate: int
    comm_hook: CommHook | None
    shard_optimizer: bool
    embedding_rows: bool | None


@torch.no_grad()
def _begin(
    model: nn.Module, optimizer: torch.optim.Optimizer, ranks: RankGroup, options: Options, asked: Asked
) -> Options:
    """Compare what ranks have, and send the values of the group's first one.

    Returns the options with the hook as a step takes it, and with what may be sent by rows.
    """
    accumulate, comm_hook, shard_optimizer, embedding_rows = asked
    hook: AroundSum | OnBuckets | None = None
    by_rows: ByRows | None = None

    def describe() -> Description:
        nonlocal hook, by_rows
        _, contents = check_model(model, "compile_step")
        check_writable(contents)
        parameters = dict(model.named_parameters())
        _refuse_hooks(parameters)
        if options.is_gathered_later:
            refuse_other_classes(parameters)
        layout = _layout(parameters, optimizer, options, ranks.world_size, is_shared=shard_optimizer)
        trained = layout.trained(parameters)
        differentiated: dict[str, Tensor] = {name: parameter for name, _, parameter in trained}
        if options.plan is not None:
            options.plan.check(differentiated)
        if ranks.world_size > 1 and ranks.is_gloo:
            by_rows = _by_rows(contents.by_rows, differentiated, embedding_rows)
        does: list[str] = []
        if comm_hook is not None:
            hook, does = hook_of_step(comm_hook, differentiated, ranks.world_size, scatters=options.is_scattered)
        description: Description = {"optimizer": [type(optimizer).__name__], "accumulate": [accumulate]}
        description |= {
            "shard_optimizer": [shard_optimizer],
            "pipeline_updates": [options.is_gathered_later],
            "comm_hook": [type(hook).__name__, *does],
            "embedding_rows": [repr(embedding_rows)],
        }
        description |= {
            f"group {number} of the optimizer": [*kind.switches] for number, kind in enumerate(layout.kinds)
        }
        for name, group, parameter in trained:
            description[f"parameter {name}"] = [f"group {group}", *properties_of(parameter)]
        return description

    agree_on_description(ranks, describe, failure="no step was made")
    tensors = [each.detach() for each in (*model.parameters(), *model.buffers())]
    if ranks.world_size > 1 and tensors:
        torch_private.groups.broadcast_coalesced(ranks.process_group, tensors, source=0)
    return replace(options, hook=hook, by_rows=by_rows)


def _by_rows(embeddings: Mapping[str, Tensor], trained: Mapping[str, Tensor], wanted: bool | None) -> ByRows | None:
    """Those of the `embeddings` that are trained, where they are sent by rows; `wanted` is as `embedding_rows`."""
    own = {id(weight) for weight in embeddings.values()}
    names = frozenset(name for name, parameter in trained.items() if id(parameter) in own)
    return ByRows(names, is_planned=wanted is None) if names and wanted is not False else None


def _layout(
    parameters: Mapping[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
    options: Options,
    world_size: int,
    *,
    is_shared: bool,
) -> Layout:
    """Of an optimizer whose update so many ranks share, if it `is_shared`."""
    needed_by = "shard_optimizer" if is_shared else "pipeline_updates" if options.is_gathered_later else ""
    ranks = world_size if is_shared else 1
    return Layout.of(parameters, optimizer, ranks=ranks, needed_by=needed_by if world_size > 1 else "")


def _warn_of_others(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Warn of parameters that a loop would give gradients to."""
    own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    others = [name for name, each in model.named_parameters() if each.requires_grad and id(each) not in own]
    if others:
        warn_user(
            f"{format_names(others)} of the model require gradients, and the optimizer does not have them: "
            "compile_step computes none for them, so no other optimizer can train them. Give all to one optimizer, as "
            "groups, or freeze them."
        )


def _refuse_hooks(parameters: Mapping[str, nn.Parameter]) -> None:
    """Raise ValueError for code of the user's that a graph would not run."""
    if torch_private.tensors.any_is_hooked([*parameters.values()]):
        name = next(name for name, each in parameters.items() if torch_private.tensors.any_is_hooked([each]))
        raise ValueError(
            f"parameter {name} has hooks on its gradient, which compile_step does not run: put what they do into the "
            "loss, or train with compile_ddp(model)."
        )


# ---- what users call -------------------------------------------------------------------------------------------------

_one_thread = threading.RLock()


class TrainingStep:
    """Made by `compile_step`: `loss = step(x, y)` does what this loop does under DDP, in one graph.

        loss = loss_fn(model, x, y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip_grad_norm)
        optimizer.step()
        optimizer.zero_grad()

    Parameters, buffers and the optimizer's state are updated in place, in the user's own objects, which mean before,
    between and after steps what they always mean; `.grad` stays None. Learning rate, betas, momentum and weight decay
    may change between any two calls. Every rank calls it equally often.

    With `accumulate=K` every K-th call is an update, and those before it hold gradients; `flush()` ends them early.

    With `pipeline_updates` parameters are under way when a call returns. Whatever reads one awaits all, as `flush()`
    does; a tensor that was taken earlier and shares a parameter's memory (`.data`, `.detach()`, an array) has old
    values until then.

    Where a rank raises, all do, and nothing has been updated on any; gradients that were held are forgotten. One that
    fails before its last micro-batch raises there, the others in their update: each begins an update anew behind it.
    With `shard_optimizer` one that raises in its backward, when others have updated their shares of some buckets,
    leaves a state that is none: from there on every call raises, until `optimizer.load_state_dict()` is called.
    Raises RuntimeError, too, for a model that no single graph can hold, with the place.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        graph: StepGraph,
        compiler: Callable[..., CompiledStep],
        accumulate: int,
        scaler: torch.amp.GradScaler | None,
        in_flight: InFlight | None,
        own_changes: OwnChanges,
    ) -> None:
        self.model, self.optimizer, self._in_flight = model, optimizer, in_flight
        self._deferred = in_flight if isinstance(in_flight, DeferredUpdate) else None
        is_shared = graph.reduction.options.is_scattered and self._deferred is None
        self._shared = ShardedState.of(optimizer, graph.reduction) if is_shared else None
        self._graph, self._compiler, self._own_changes = graph, compiler, own_changes
        self._accumulate, self._scaler = accumulate, scaler
        self._known: dict[tuple[Layout, int], list[_Known]] = {}  # with the number of ranks
        self._latest: _Now | None = None
        self._explained: tuple[Layout, CompiledStep, Sequence[str]] | None = None
        self._recorder: StepRecorder | None = None
        self._numbers: tuple[list[list[float]], Arguments] | None = None  # of the latest update
        self._is_behind = False  # whether an update outside of the graph has raised here
        hook = graph.reduction.options.hook
        self._on_buckets = hook if isinstance(hook, OnBuckets) else None
        self._same_updates = None if self._on_buckets is None else SameUpdates(self._on_buckets.hook)
        self._held, self._batches = Tensors(), 0  # sums of the gradients of so many micro-batches
        self._held_of: dict[str, nn.Parameter] = {}  # the parameters whose they are

    @untraced
    def __call__(self, *batch: Any, **named: Any) -> Any:
        """Take a step with this batch; returns this rank's loss, detached, and with `has_aux` a pair."""
        is_update = self._batches + 1 >= self._accumulate
        with self._calling(), self._recording() if is_update else contextlib.nullcontext():
            value, aux = self._take(batch, named, is_update=is_update)
        return (value, aux) if self._graph.has_aux else value

    @untraced
    def flush(self) -> None:
        """Update with the gradients that are held, where fewer than `accumulate` calls have been made. A collective.

        What is applied is the mean of those; where there are none, nothing is. Parameters that are under way are
        awaited, which is no collective: one rank alone may do so.
        """
        if self._batches:
            with self._calling():
                self._take(None, {}, is_update=True)
        if self._in_flight is not None:
            self._in_flight.land()

    def comm_hook_state_dict(self) -> dict[str, list[Tensor]]:
        """Return a copy of the `comm_hook`'s state on this rank, for a checkpoint that every rank writes.

        Keys name each bucket's parameters. Empty for a hook that keeps nothing, and before the first step.
        """
        return {} if self._on_buckets is None else self._on_buckets.state_dict()

    @untraced
    def load_comm_hook_state_dict(self, state: Mapping[str, Sequence[Tensor]]) -> None:
        """Restore what `comm_hook_state_dict` has returned on the same rank, also of `compile_ddp`'s wrapper.

        Buckets, dtypes and devices may differ from those at the time of saving: what is owed to a parameter moves to
        the bucket of its gradient. What the hook keeps for a bucket as a whole, such as PowerSGD's factor, is restored
        only if a bucket has the same parameters, and otherwise starts afresh.

        Raises KeyError for a parameter that the model does not have, ValueError, which names the bucket, for tensors of
        another number or shape than the hook's or owed values that are not finite, RuntimeError without a hook that
        keeps anything. Then nothing is loaded.
        """
        if not isinstance(state, Mapping):
            raise TypeError(f"the state must be what comm_hook_state_dict() has returned, found {state!r}.")
        if self._on_buckets is None:
            if state:
                raise RuntimeError("the step has no comm_hook that keeps a state, and so none to load.")
            return
        self._know(self._on_buckets, dict(self.model.named_parameters()))
        self._on_buckets.load_state_dict(state)

    # ---- what users look at ------------------------------------------------------------------------------------------

    @property
    def plan(self) -> SavedPlan | None:
        """The buckets of the latest update in launch order, to be saved; None before it, and where one rank is alone.

        `step.plan.save("plan.json")` writes what `plan=` of `compile_step` and `compile_ddp` takes.
        """
        own = self._agreed
        if own is None:
            return None
        names, parameters = own.names, dict(self.model.named_parameters())
        buckets = [tuple(names[index] for index in bucket.indices) for bucket in own.plan.buckets if bucket.indices]
        told = {name: described(tuple(parameters[name].shape), gradient_dtype(parameters[name])) for name in names}
        by_rows = tuple(names[spec.index] for spec in own.gradients if spec.row is not None)
        return SavedPlan(tuple(told.items()), tuple(buckets), own.world_size, by_rows)

    @property
    def _agreed(self) -> Agreed | None:
        """The reduction of the latest update."""
        reductions = [] if self._explained is None else self._explained[1].reductions
        return next((each for each in reductions if each.wanted.function == self._graph.reduction.name), None)

    @untraced
    def profile(self, steps: int = 10) -> StepRecorder:
        """Measure the next `steps` updates on this rank, for `explain()` and `timeline()`.

            step.profile(steps=10)
            for x, y in batches:
                step(x, y)
            print(step.explain())

        When each bucket is launched, awaited and there, from the beginning of the call, by the host's clock. The first
        update is left out, as a warm-up; of the others the one of median length is shown. No collective: any rank may
        call it, at any time, and each sees its own times. A second call begins anew. Until then each update takes some
        more of the host's time, as under `torch.profiler`; afterwards none. `remaining` of the object that is returned
        tells how many updates are still to come.

        Raises TypeError or ValueError for anything but a whole number of at least 2.
        """
        check_steps(steps)
        self._recorder = StepRecorder(steps, self._mode)
        return self._recorder

    @untraced
    def timeline(self, path: str | os.PathLike[str]) -> None:
        """Write when what happens in a step as a picture, or as a trace that https://ui.perfetto.dev opens.

            step.timeline("step.png")   # needs matplotlib: pip install 'compiled-ddp[plots]'
            step.timeline("step.json")

        Two lanes, computation and link, with the buckets in colour: as predicted, and below as `profile()` has measured
        them on this rank. No collective.

        Raises ValueError for a name that ends otherwise, RuntimeError where nothing is predicted or measured yet, and
        ImportError without matplotlib.
        """
        times = self._times()
        write_timeline(Timeline("step", (), {}) if times is None else times.timeline(), Path(path))

    def explain(self) -> str:
        """What the latest update was: one graph or more, its all-reduces, and what was left out of it.

        And when what happens, where the link was measured, as for planned buckets, or `profile()` was called.
        """
        if self._explained is None:
            return "No update has been made yet."
        layout, compiled, unused = self._explained
        optimizer, model = type(self.optimizer).__name__, type(self.model).__name__
        buckets = [
            format_bucket(place, bucket, agreed.names)
            for agreed in compiled.reductions
            for place, bucket in enumerate(agreed.plan.buckets)
        ]
        are_summed = all(agreed.plan.is_summed for agreed in compiled.reductions)
        what = f"{len(buckets)} {'all-reduce' if are_summed else 'bucket'}{'' if len(buckets) == 1 else 's'}"
        told = f"The forward and backward of {model}, {what} and the update of {optimizer} are one graph."
        if self._deferred is not None and self._agreed is not None:
            told += (
                " The update is made by the next call: of the sums of a bucket each rank is sent its shares, and "
                "these are gathered in the same buckets, the last one first, which is under way when a call returns; "
                "the next one awaits a bucket, and updates it, where it reads. The riders, in the first one, are "
                "summed on all ranks."
            )
        if layout.outside:
            told = f"The forward and backward of {model} and {what} are one graph. "
            told += f"{optimizer}.step() is called behind it: {layout.outside}."
        if layout.ranks > 1:
            told += (
                f" Each of {layout.ranks} ranks updates its share of every parameter, and has the optimizer's state of "
                "that alone: of the sums of a bucket it is sent its shares, and parameters are gathered in the same "
                "buckets. The riders, in the first one, are summed on all ranks."
            )
        if layout.ranks > 1 and self._in_flight is not None:
            told += (
                " That is under way when a call returns, the last bucket first, and awaited where the next one reads."
            )
        lines = [told, *(f"  {each}" for each in buckets)]
        for agreed in compiled.reductions:
            by_rows = format_rows(agreed.plan.buckets, agreed.names, self._counted_rows)
            lines += map(SUMMED_BY_ROWS.format, by_rows)
        if self._accumulate > 1:
            lines.append(f"{self._accumulate} calls make an update; {self._batches} were made for the next one.")
        hook = self._graph.reduction.options.hook
        if hook is not None:
            lines.append(f"{hook.told} are sent, and averaged, as {format_function(hook.hook)} has it.")
        if unused:
            lines.append(f"The latest batch of this rank did not use {format_names(unused)}.")
        times = self._times()
        return "\n".join([*lines, *(times.lines() if times is not None else ())])

    @property
    def _counted_rows(self) -> CountedRows:
        """Of the latest update; none behind destroy_process_group."""
        made = [each.made.counted_rows for each in self._graph.reduction.communicators if each.made is not None]
        return made[0] if made else {}

    def _times(self) -> StepTimes | None:
        """What is known of them; None before an update, and where one rank is alone."""
        agreed = self._agreed
        if agreed is None or self._explained is None:
            return None
        plan, predicted, measured = agreed.plan, None, None
        communicators = self._graph.reduction.communicators  # none behind destroy_process_group
        calibration = next((each.agreements.calibration(agreed.wanted.device) for each in communicators), None)
        work = agreed.arrival.work_of(plan.indices)
        if calibration is not None and self._graph.reduction.options.hook is None:
            needed = [{*rule_of(self.optimizer).needed(kind)} - {"step"} for kind in self._explained[0].kinds]
            states = max(map(len, needed), default=0)
            predicted = predict_whole(self._mode, plan, calibration, work, states=states, counted=self._counted_rows)
        if self._recorder is not None:
            measured = MeasuredStep.of(self._recorder, plan)
        return StepTimes(plan, agreed.names, predicted, work is None, measured)

    @property
    def _mode(self) -> Mode:
        if self._in_flight is not None:
            return "pipelined" if self._deferred is None else "deferred"
        return "all-reduced" if self._shared is None else "sharded"

    def _recording(self) -> contextlib.AbstractContextManager[None]:
        """One update, in here."""
        recorder = self._recorder
        return contextlib.nullcontext() if recorder is None or not recorder.remaining else recorder.step()

    # ---- a call ------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _calling(self) -> Iterator[None]:
        """What raises in here ends an update: its micro-batches do not belong to the next one.

        One thread at a time: so ranks whose threads come in another order are told of that, and do not hang.
        """
        within = contextlib.nullcontext() if self._in_flight is None else self._in_flight.within_step()
        # What is kept from call to call, as memory and the optimizer's state, is written in later calls.
        with _one_thread, torch.inference_mode(False), within:
            try:
                yield
            except BaseException:
                self._held, self._held_of, self._batches = {}, {}, 0
                raise

    def _take(self, batch: Any, named: Any, *, is_update: bool) -> tuple[Any, Any]:
        """The loss, and what comes with it."""
        with contextlib.nullcontext() if self._latest is None else self._latest.known.update.telling():
            if self._shared is not None:
                self._shared.refuse_torn()
            self._refuse_behind()
            now = self._latest = self._now()
            if self._in_flight is not None:
                self._in_flight.of({name: parameter for name, _, parameter in now.trained})
        scale = self._scale(now.trained[0][2].device)
        if is_update:
            outcome = self._update(now, Given(self._share(batch), scale, batch, named))
            value, aux, self._batches = outcome.value, outcome.aux, 0
            if batch is not None:
                self._explained = now.layout, now.known.update, outcome.unused
        else:
            if self._in_flight is not None:
                self._in_flight.land()
            with now.known.update.telling():
                value, aux = now.known.add.run((Given(None, scale, batch, named),), {}, now.beside_update)
            self._batches += 1
        now.known.note_traced(self.model, self._own_changes)
        return value, aux

    def _refuse_behind(self) -> None:
        """Raise RuntimeError, once and on every rank, where the update of the call before has raised on this one."""
        if self._is_behind:
            self._is_behind = False
            raise RuntimeError(
                f"{type(self.optimizer).__name__}.step() has raised in the call before, behind the reduction, when "
                "other ranks have made that update: parameters and state are no longer alike. Load the latest "
                "checkpoint on every rank before going on."
            )

    def _update(self, now: "_Now", given: Given) -> Outcome:
        outcome: Outcome
        same, reduction = self._same_updates, self._graph.reduction
        if same is not None and (same.is_seen or reduction.is_alone):
            same = None
        if now.layout.outside:
            outcome = now.known.update.run((given,), {}, now.before_update, self._recorder)
            if same is not None:
                same.compare(reduction.communicator, {}, outcome.gradients)
            self._update_outside(now, outcome)
        else:
            before = {} if same is None else checksums_of(now.read.params)
            outcome = self._update_inside(now, given)
            if same is not None:
                same.compare(reduction.communicator, before, now.read.params)
        if outcome.finite is not None:
            assert self._scaler is not None
            found = (~outcome.finite).float()
            torch_private.optimizers.note_found_infinity(self._scaler, self.optimizer, found)
            self._scaler.update()
        return outcome

    def _update_inside(self, now: "_Now", given: Given) -> Outcome:
        updated, begun = set[str](), dict[str, nn.Parameter]()
        try:
            with now.known.update.telling():
                written, read = now.in_update or self._in_update(now, begun)
                numbers, given = self._begun_with(now, written.tree, given)
            with self._noting_what_is_torn(is_first=len(begun) == len(now.trained)):
                outcome: Outcome = now.known.update.run((given,), {}, (written, read, numbers), self._recorder)
            torch_private.optimizers.note_step(self.optimizer)
            if begun or (now.known.defers and outcome.unused):
                updated = outcome.updated(now.layout)
            if now.known.defers:
                self._defer(now, written.tree, outcome, updated)
            return outcome
        finally:  # as with torch.optim, there is no state before an update
            for name, parameter in begun.items():
                if name not in updated:
                    del self.optimizer.state[parameter]

    def _begun_with(self, now: "_Now", written: Written, given: Given) -> tuple[Arguments, Given]:
        """The numbers of the update that a graph makes, and what it is given: of the step before where it `defers`."""
        if not now.known.defers:
            return self._numbers_now(), given
        assert self._deferred is not None
        before = self._deferred.before(now.layout, written.state)
        if before is None:
            device = now.trained[0][2].device
            return self._numbers_now(), given._replace(factor=self._graph.factor_of_none(device, given.scale))
        assert self._numbers is not None
        return self._numbers[1], given._replace(factor=before.factor, applies=before.applies)

    def _defer(self, now: "_Now", written: Written, outcome: Outcome, updated: set[str]) -> None:
        """Let the next call make this update, of all parameters or, where some are not used, of those `updated`."""
        assert self._deferred is not None
        state, params = written.state, [*now.read.params.values()]
        if outcome.unused and len(updated) < len(state):
            state = {name: own for name, own in state.items() if name in updated}
        terms = self._numbers_now().tensors, outcome.factor, outcome.used_by_some()
        self._deferred.note(Update(now.layout, self.optimizer, params, state, *terms))

    @contextlib.contextmanager
    def _noting_what_is_torn(self, *, is_first: bool) -> Iterator[None]:
        """Buckets of shares are updated as they come: an error behind some of them leaves neither old state nor new.

        Of the first update nothing is left.
        """
        if self._shared is None or is_first:
            yield
            return
        with noting_updates() as made:
            try:
                yield
            except BaseException:
                if any(each.has_state and not each.was_left_out for each in made):
                    self._shared.note_torn()
                raise

    def _update_outside(self, now: "_Now", outcome: Outcome) -> None:
        updated = outcome.updated(now.layout)
        if not updated or (outcome.is_sound is not None and not outcome.is_sound):
            return
        before = [parameter.grad for _, _, parameter in now.trained]
        try:
            for name, _, parameter in now.trained:
                parameter.grad = outcome.gradients[name] if name in updated else None
            self.optimizer.step()
        except BaseException:
            self._is_behind = True  # others are updating: to tell them now would end their next call, and not this one
            raise
        finally:
            for (_, _, parameter), gradient in zip(now.trained, before, strict=True):
                parameter.grad = gradient

    # ---- what a call is made with ------------------------------------------------------------------------------------

    def _now(self) -> "_Now":
        """What the model and the optimizer are in this call: what they were in the call before, where they still are.

        Raises ValueError for hooks, and for parameters of another model's.
        """
        latest = self._latest
        is_same_world = latest is not None and latest.world == current_world()
        is_held = latest is not None and latest.held is self._held and latest.kept is self._kept
        if latest is not None and is_same_world and is_held and latest.is_still(self.optimizer):
            _refuse_hooks(latest.parameters)
            return latest
        parameters = dict(self.model.named_parameters())
        _refuse_hooks(parameters)
        self._graph.reduction.find_ranks()
        options, world_size = self._graph.reduction.options, self._graph.reduction.world_size
        layout = _layout(parameters, self.optimizer, options, world_size, is_shared=self._shared is not None)
        trained = layout.trained(parameters)
        params: Tensors = {name: parameter for name, _, parameter in trained}
        if self._graph.reduction.options.plan is not None:
            self._graph.reduction.options.plan.check(params)
        device = trained[0][2].device
        read = Read(
            params,
            {name: each for name, each in parameters.items() if name not in params},
            rank=torch.tensor([self._graph.reduction.own_rank], dtype=torch.int64, device=device),
        )
        if self._accumulate > 1:
            self._hold({name: parameter for name, _, parameter in trained})
        if self._on_buckets is not None and self._same_updates is not None:
            self._know(self._on_buckets, parameters)
            passenger = torch.empty(len(params), dtype=torch.float32, device=device)
            plan = self._graph.reduction.planned(params, [passenger]).plan
            self._on_buckets.begin(plan, [*params])
            self._same_updates.begin(plan)
        known, buffers = self._known_of(layout), dict(self.model.named_buffers())
        unchanged = _unchanged(self.model, self.optimizer, [*parameters.values(), *buffers.values()])
        return _Now(
            layout,
            known,
            parameters,
            trained,
            buffers,
            self._held,
            self._kept,
            read,
            unchanged,
            _of_groups(self.optimizer),
        )

    @property
    def _kept(self) -> tuple[Tensor, ...]:
        """What a hook on buckets keeps: the same tensors, until others are trained or a state is loaded."""
        return () if self._on_buckets is None else self._on_buckets.tensors

    def _know(self, hook: OnBuckets, parameters: Mapping[str, Tensor]) -> None:
        """Let it know what it may keep something for, and among which ranks."""
        self._graph.reduction.find_ranks()
        hook.know(parameters, self._graph.reduction.for_hooks)

    def _hold(self, params: Mapping[str, nn.Parameter]) -> None:
        """Memory for the sums of micro-batches' gradients, zeros before the first.

        Within an update a parameter keeps its own, in its dtype and on its device as they are now. Raises RuntimeError
        for one that has been frozen since it got some.
        """
        before, of, used = self._held, self._held_of, dict[str, float]()
        are_names_the_same = [*of] == [*params]
        if are_names_the_same and all(of[n] is each and _is_like(before[n], each) for n, each in params.items()):
            return
        if self._batches:
            used = dict(zip(of, before[USED].tolist(), strict=True))
        for name, parameter in of.items():
            if used.get(name) and not parameter.requires_grad:
                raise RuntimeError(
                    f"parameter {name} was frozen within an update of {self._accumulate} micro-batches, of which "
                    f"{self._batches} have given it a gradient: freeze it behind the update, or behind step.flush()."
                )
        own = [name for name, each in params.items() if name in used and of[name] is each]
        kept = {name for name in own if before[name].shape == params[name].shape}
        held = {name: before[name].to(each) if name in kept else _zeros_like(each) for name, each in params.items()}
        counts = [used[name] if name in kept else 0.0 for name in params]
        device = next(iter(params.values())).device
        self._held = {**held, USED: torch.tensor(counts, dtype=torch.float32, device=device)}
        self._held_of = dict(params)

    def _share(self, batch: Any) -> Tensor | None:
        """What one micro-batch counts in the mean of all that an update has; None where it has one."""
        if self._accumulate == 1:
            return None
        batches = self._batches + (batch is not None)
        return torch.tensor(1.0 / batches, dtype=torch.float64, device="cpu")

    def _scale(self, device: torch.device) -> Tensor | None:
        if self._scaler is None or not self._scaler.is_enabled():
            return None
        return self._scaler.scale(torch.ones((), dtype=torch.float32, device=device))

    def _known_of(self, layout: Layout) -> "_Known":
        """What is compiled for this layout, and for the numbers and texts that the model's modules have."""
        plain = settings_of(self.model.modules(), self._own_changes)
        every = self._known.setdefault((layout, self._graph.reduction.world_size), [])
        known = next((each for each in every if each.plain == plain), None)
        if known is None:
            known = _Known(self._graph, layout, self._compiler, plain)
            every.append(known)
        return known

    def _in_update(self, now: "_Now", begun: dict[str, nn.Parameter]) -> tuple[Arguments, Arguments]:
        """The arguments of a graph that updates.

        Parameters that had no state of the optimizer's, and have now, are put into `begun`.
        """
        written = Written(now.read.params, now.buffers, self._state(now, begun), now.held, now.kept)
        made = now.passed(written), Arguments(now.read._replace(params={}))
        if not begun:
            now.in_update = made
        return made

    def _numbers_now(self) -> Arguments:
        """Those of the optimizer's groups, for the graph: the same tensors, which a scheduler's are written into."""
        numbers = [*map(rule_of(self.optimizer).numbers, self.optimizer.param_groups)]
        if self._numbers is not None and numbers == self._numbers[0]:
            return self._numbers[1]
        with torch.inference_mode(False), torch.no_grad():
            vectors = as_vectors(numbers)
            if self._numbers is None or [*map(len, numbers)] != [*map(len, self._numbers[0])]:
                self._numbers = numbers, Arguments(vectors)
            else:
                self._numbers = numbers, self._numbers[1]
                for vector, new in zip(self._numbers[1].tensors, vectors, strict=True):
                    vector.copy_(new)
        return self._numbers[1]

    def _state(self, now: "_Now", begun: dict[str, nn.Parameter]) -> dict[str, Tensors]:
        rule, states = rule_of(self.optimizer), dict[str, Tensors]()
        shared = self._shared if now.layout.ranks > 1 else None
        if shared is not None:
            shared.take_over(self._graph.reduction)
        for name, group, parameter in now.trained:
            needed = rule.needed(now.layout.kinds[group])
            own: dict[str, Any] = self.optimizer.state.get(parameter, {})  # which makes no entry, as torch makes none
            missing = [each for each in needed if own.get(each) is None]
            if missing:
                if not own:
                    begun[name] = parameter
                own, options = self.optimizer.state[parameter], self.optimizer.param_groups[group]
                like = parameter if shared is None else shared.share_like(parameter)
                own.update((each, rule.begin(each, like, options)) for each in missing)
            kept = [each for each in needed if each != "step"]
            if shared is None:
                _refuse_other_shapes(name, own, kept, parameter)
            else:
                own.update((each, shared.own(own[each], parameter)) for each in kept)
            if "step" in needed and not isinstance(own["step"], Tensor):  # a number in old checkpoints
                own["step"] = torch.tensor(float(own["step"]), dtype=torch.float32, device="cpu")
            states[name] = {each: own[each] for each in needed}
        return states


def _refuse_other_shapes(name: str, state: dict[str, Tensor], needed: Sequence[str], parameter: Tensor) -> None:
    other = next((each for each in needed if state[each].shape != parameter.shape), None)
    if other is not None:
        raise ValueError(
            f"{other} of {name} in the optimizer's state is of shape {tuple(state[other].shape)}, and {name} of "
            f"{tuple(parameter.shape)}: a share of it, as shard_optimizer leaves? Call optimizer.state_dict() on the "
            "ranks that have trained with it, and load what it returns."
        )


def _is_like(one: Tensor, other: Tensor) -> bool:
    return (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)


def _zeros_like(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter, memory_format=torch.preserve_format, requires_grad=False)


class _Now:
    """What the model and the optimizer are in one call, and in those after it for as long as it `is_still` so."""

    def __init__(
        self,
        layout: Layout,
        known: "_Known",
        parameters: Mapping[str, nn.Parameter],
        trained: Sequence[tuple[str, int, nn.Parameter]],
        buffers: Tensors,
        held: Tensors,
        kept: tuple[Tensor, ...],
        read: Read,
        unchanged: Unchanged,
        of_groups: list[list[object]],
    ) -> None:
        """`unchanged` tells of the model and of the optimizer's own attributes and state, `of_groups` of its groups.

        They are held, so that nothing else comes to have the ids by which they are compared.
        """
        self.layout, self.known, self.parameters, self.trained = layout, known, parameters, trained
        self.buffers, self.held, self.kept, self.read = buffers, held, kept, read
        self._unchanged, self._of_groups, self._ids_of_groups = unchanged, of_groups, _ids(of_groups)
        self.world = current_world()
        # Once each parameter has the state that an update needs.
        self.in_update: tuple[Arguments, Arguments] | None = None

    def is_still(self, optimizer: torch.optim.Optimizer) -> bool:
        are_same = self._unchanged.holds() and _ids(_of_groups(optimizer)) == self._ids_of_groups
        return are_same and self.layout.has_kinds_of(optimizer)

    @functools.cached_property
    def beside_update(self) -> tuple[Arguments, Arguments]:
        """The arguments of a graph that adds a micro-batch."""
        return self.passed(Written({}, self.buffers, {}, self.held)), Arguments(self.read)

    @functools.cached_property
    def before_update(self) -> tuple[Arguments, Arguments]:
        """The arguments of a graph behind which the update is."""
        return self.passed(Written({}, self.buffers, {}, self.held, self.kept)), Arguments(self.read)

    def passed(self, written: Written) -> Arguments:
        """What is passed again while this `is_still` so, which every call asks first."""
        return Arguments(written, watched=self._unchanged.watched)


def _unchanged(model: nn.Module, optimizer: torch.optim.Optimizer, tensors: Sequence[Tensor]) -> Unchanged:
    """Of these `tensors` of the model's, and of the optimizer's state."""
    states = [*optimizer.state.values()]
    of_state = [each for own in states for each in own.values() if isinstance(each, Tensor)]
    return Unchanged([*dictionaries_of([*model.modules()]), vars(optimizer), *states], [*tensors, *of_state])


def _of_groups(optimizer: torch.optim.Optimizer) -> list[list[object]]:
    """Each group's parameters, and the states that there are."""
    return [*([*group["params"]] for group in optimizer.param_groups), [*optimizer.state.values()]]


def _ids(lists: list[list[object]]) -> list[list[int]]:
    return [[*map(id, each)] for each in lists]


class _Known:
    """What was compiled for a layout, while the model's modules had these numbers and texts."""

    def __init__(
        self, graph: StepGraph, layout: Layout, compiler: Callable[..., CompiledStep], plain: tuple[Hashable, ...]
    ) -> None:
        # Whether its update is made by the next call.
        self.defers = graph.reduction.options.is_gathered_later and layout.ranks < graph.reduction.world_size
        make = graph.reduce_of if layout.outside else graph.deferred_of if self.defers else graph.update_of
        self.update = compiler(make(layout), donated=("written",))
        self.add = compiler(graph.add_of(layout), donated=("written",), tells=False, in_flight=None)
        self.plain = plain
        self._graphs = 0

    @property
    def graphs(self) -> int:
        """How many there are."""
        return self.update.graphs + self.add.graphs

    def note_traced(self, model: nn.Module, own_changes: OwnChanges) -> None:
        """A forward may count its own calls: what it does in Python happens while it is traced, and not again."""
        if self.graphs != self._graphs:
            self._graphs, self.plain = self.graphs, settings_of(model.modules(), own_changes)
