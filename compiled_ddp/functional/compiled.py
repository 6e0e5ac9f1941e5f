"""Compiling a whole training step as one graph that launches and awaits its own reductions."""

import contextlib
import dataclasses
import functools
import inspect
import itertools
import logging
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.fx import Node

from compiled_ddp import torch_private
from compiled_ddp.checks.values import fill_with_pattern
from compiled_ddp.environment import check_environment
from compiled_ddp.functional.agreements import Agreements
from compiled_ddp.functional.closed_over import closed_over, generators_shared
from compiled_ddp.functional.communicator import Communicator
from compiled_ddp.functional.donations import Donations, donations
from compiled_ddp.functional.in_flight import InFlight, land_what_is_read
from compiled_ddp.functional.kept import Arguments, Choice
from compiled_ddp.functional.loss_group import LossLaunch, LossLaunches
from compiled_ddp.functional.overlaps import begin_bytes, overlapping
from compiled_ddp.functional.reached import OwnChanges, Reached
from compiled_ddp.functional.reduction import current_world
from compiled_ddp.functional.reference import ReferenceStep
from compiled_ddp.functional.session import Session, current_session, tracing
from compiled_ddp.functional.traced_step import (
    Leaf,
    TracedStep,
    refuse_rows_of_shares,
    trace,
    unfit_leaf,
    why_another,
)
from compiled_ddp.functional.transforms import GradientFunction
from compiled_ddp.functional.unit import Launch, Unit, break_off
from compiled_ddp.functional.wanted import Agreed, Arrival
from compiled_ddp.graph import compile_once
from compiled_ddp.graph.backward_work import count_gradients, counted
from compiled_ddp.graph.telling import compiling
from compiled_ddp.keywords import check_switches, suggests_keywords
from compiled_ddp.options import check_compiler
from compiled_ddp.passes.gather_later import buckets_to_gather, departing
from compiled_ddp.passes.lend_rows import Lent, lent_memory
from compiled_ddp.passes.step_pipeline import StepPipeline, prepare_step
from compiled_ddp.passes.unfold_sums import arrival_order, find_sums
from compiled_ddp.plan import Bucket, BucketPlan
from compiled_ddp.ranks.step_recorder import StepRecorder
from compiled_ddp.telling.slow_work import SlowWork
from compiled_ddp.torch_private.dynamo import untraced
from compiled_ddp.users_code import warn_user

# ---- the memory that compiled steps pack their buckets into, kept from call to call ----------------------------------


Memory = dict[tuple[Lent, ...], list[Tensor]]  # of what has memory of its own


class FlatBuffers:
    """The flat buffers that one compiled graph writes into.

    [Note: nothing that leaves aliases what is kept] A step may return a bucket's part as it is, and only the compiled
    code tells: which results do is the same in every run of it, and is found in the first one.
    """

    def __init__(self, lent: Sequence[Lent], kept: Memory, rank: int) -> None:
        """What graphs on this `rank` that are `lent` the same are given is `kept` for all of them."""
        owners = tuple(each for each in lent if each.what != "own row")
        self._lent, self._rank = lent, rank
        self.memory = kept.setdefault(owners, [*map(_empty, owners)])
        self._received = {each.bucket: place for place, each in enumerate(owners) if each.what == "received"}
        self._leaving: list[int] | None = None  # the places of those that results are parts of; None before a run

    @property
    def inputs(self) -> list[Tensor]:
        """The memory, and rows of it."""
        owned = iter(self.memory)
        return [self._own_row(each.bucket) if each.what == "own row" else next(owned) for each in self._lent]

    def _own_row(self, bucket: Bucket) -> Tensor:
        return self.memory[self._received[bucket]].view(bucket.ranks, -1)[self._rank]

    def take_back(self, buckets: Sequence[Bucket], gathered: Sequence[Tensor]) -> None:
        """Take, for what is under way now, the memory of what was before: `gathered`, and is not any more."""
        for bucket, memory in zip(buckets, gathered, strict=False):
            if bucket in self._received:
                self.memory[self._received[bucket]] = memory

    def give_up(self, results: Sequence[Tensor]) -> None:
        """Take new memory for what `results` are parts of."""
        if self._leaving is None:
            held = {torch_private.tensors.memory_of(result) for result in results}
            places = range(len(self.memory))
            self._leaving = [n for n in places if torch_private.tensors.memory_of(self.memory[n]) in held]
        for number in self._leaving:
            self.memory[number] = torch.empty_like(self.memory[number])


def _lent(plans: Sequence[BucketPlan], *, rows: bool) -> list[Lent]:
    """What graphs with these plans are lent; with `rows` of what is scattered too."""
    scattered = [each for plan in plans if plan.is_scattered and rows for each in lent_memory(plan)]
    return scattered + [Lent(bucket, "flat") for plan in plans if plan.is_summed for bucket in plan.buckets]


def _empty(lent: Lent) -> Tensor:
    with torch.inference_mode(False):  # a later call, outside of that mode, writes into it too
        return torch.empty(lent.numel, dtype=lent.bucket.dtype, device=lent.bucket.device)


# ---- compiled steps --------------------------------------------------------------------------------------------------

_log = logging.getLogger(__name__)

Backend = Literal["inductor", "aot_eager"]


@suggests_keywords
def compile(
    step: Callable[..., Any] | None = None,
    *,
    donate: str | int | Sequence[str | int] = (),
    backend: Backend = "inductor",
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    fullgraph: bool = True,
    dynamic: bool | None = None,
) -> Callable[..., Any]:
    """Compile `step`, a function of trees of tensors that calls `grad` or `grad_and_value`, as one graph.

    Each bucket is launched right after its last gradient, and awaited where its sum is first read. Each rank compiles
    for the shapes of its own arguments.

    The step is traced once for each kind of arguments (structure, shapes, dtypes, devices, values other than tensors),
    and again if a number, tensor or function that it closes over is replaced. As with jax.jit, Python side effects
    happen only while tracing. Results do not require gradients. Inside another compiled step it becomes part of that
    one.

    With options alone it is a decorator: `@compile(donate="params")`.

    Args:
        donate: arguments, by name or position, whose memory results may reuse: each result is written to the first one
            of the same shape, stride and dtype that the step does not return unchanged. Do not use them afterwards:
            passing them to a step or a gradient function again is a RuntimeError.
        backend: "inductor", or "aot_eager", which runs the same graph without compiling kernels.
        mode: as in torch.compile; for Inductor.
        options: as in torch.compile; for Inductor.
        fullgraph: must be True; the step is always one graph.
        dynamic: must be None or False; other shapes get a graph of their own.

    Raises TypeError or ValueError for arguments that are not as described; TypeError if `donate` does not name an
    argument.
    """
    if step is None:  # as a decorator with options
        given: dict[str, Any] = {"donate": donate, "backend": backend, "mode": mode, "options": options}
        return functools.partial(compile, **given, fullgraph=fullgraph, dynamic=dynamic)
    _check_arguments(step, backend, mode, options, fullgraph, dynamic)
    check_environment()
    inductor_options = torch_private.compiler_options.inductor_options(mode, options, dynamic)
    compiled = CompiledStep(step, backend, inductor_options, _donated(donate))

    @functools.wraps(step)
    def compiled_step(*args: Any, **kwargs: Any) -> Any:
        return compiled(*args, **kwargs)

    return untraced(compiled_step)


def _check_arguments(
    step: object, backend: Backend, mode: str | None, options: object, fullgraph: bool, dynamic: bool | None
) -> None:
    if not callable(step):
        raise TypeError(f"compile takes a function, step, found {type(step).__name__}.")
    check_compiler(backend, mode, dynamic)
    check_switches(fullgraph=fullgraph)
    if not isinstance(options, Mapping | None):
        raise TypeError(f"options must be a dict, as in torch.compile, or None, found {options!r}.")
    if not fullgraph or dynamic:
        raise ValueError("a functional step is one graph of fixed shapes: leave out fullgraph=False and dynamic=True.")


_NOTHING = contextlib.nullcontext()
_MANY = 16  # compilations of one step


class _Runnable:
    """A step, traced and compiled for one kind of arguments; without reductions it has no `unit`."""

    def __init__(
        self,
        name: str,
        traced: TracedStep,
        run: Callable[..., Any],
        session: Session,
        unit: Unit | None,
        launches: Sequence[Launch],
        flat_buffers: FlatBuffers,
        in_cuda_graphs: Callable[[torch.device], bool],
        reference: ReferenceStep | None,
        donations: Donations | None,
        in_flight: InFlight | None,
        to_gather: tuple[Bucket, ...],
    ) -> None:
        """`donations` are told of what it writes its results into; None where that stays its owner's.

        It begins with what is `in_flight`, and leaves what is `to_gather` so; None, and empty, where nothing is.
        """
        self._name, self._donations = name, donations
        self._traced, self._run, self._runs, self._unit = traced, run, session.runs, unit
        self._loss_launches = LossLaunches([each for each in launches if isinstance(each, LossLaunch)])
        self._flat_buffers, self._in_cuda_graphs = flat_buffers, in_cuda_graphs
        self._in_flight, self._to_gather = in_flight, to_gather
        self._is_new = True  # has not run yet
        self._reference = reference  # until a run that ranks verify has been compared with it
        self._arrivals = [Arrival.last_first(run.wanted) for run in session.runs]  # of what ranks know by now

    @property
    def communicators(self) -> tuple[Communicator, ...]:
        return () if self._unit is None else self._unit.communicators

    @property
    def reductions(self) -> list[Agreed]:
        return [] if self._unit is None else self._unit.reductions

    @property
    def agreements_of_losses(self) -> tuple[Agreements, ...]:
        return self._loss_launches.agreements

    def fits(self, leaves: Sequence[Any]) -> bool:
        """Whether what it has met while it was traced is as it was, for arguments of these leaves."""
        return self._traced.fits(leaves)

    def refuse_constants(self, leaves: Sequence[Any], first: int) -> None:
        """Raise ValueError where it would write into what it closes over, from the `first` leaf on that is asked."""
        self._traced.surroundings.refuse_as_donated(leaves[place] for place in self._traced.written if place >= first)

    def __call__(self, leaves: Sequence[Any], tensors: Iterable[Tensor], recorder: StepRecorder | None) -> Any:
        """Run it with arguments of these leaves, whose `tensors` are detached."""
        generators = self._traced.generators
        with torch.inference_mode(False), torch.no_grad():
            for generator in generators:
                generator.load(leaves)
            land_what_is_read(self._traced.constants)
            given = [*tensors, *self._traced.constants]
            donated = [] if self._donations is None else [leaves[place] for place in self._traced.written]
            results = (
                self._communicated(given, donated) if self._unit is None else self._reduced(given, donated, recorder)
            )
            first_state = len(results) - len(generators)
            results, states = results[: first_state - len(self._runs)], results[first_state:]
            self._flat_buffers.give_up(results)
        for generator, state in zip(generators, states, strict=True):
            generator.advance(leaves, state)
        return self._traced.rebuild(results, leaves)

    def _ran(self, given: list[Tensor], donated: Sequence[Tensor]) -> list[Tensor]:
        """What the graph returns. It may have written to what is donated wherever it raises."""
        in_flight, flat_buffers = self._in_flight, self._flat_buffers
        gathered = [] if in_flight is None else in_flight.given_to(self._to_gather)
        inputs = [*given, *gathered, *flat_buffers.inputs]
        try:
            # Autocast's casts have been traced.
            with torch_private.tensors.without_autocast(), in_flight.awaited_by_graph() if in_flight else _NOTHING:
                results = list(self._run(*inputs))
            if in_flight is None:
                return results
            flat_buffers.take_back(self._to_gather, gathered)
            return in_flight.launched(self._to_gather, results)
        finally:
            if self._donations is not None:
                self._donations.note(self._name, donated)

    def _communicated(self, inputs: list[Tensor], donated: Sequence[Tensor]) -> list[Tensor]:
        with self._loss_launches.launching_alone():
            return self._ran(inputs, donated)

    def _reduced(self, inputs: list[Tensor], donated: Sequence[Tensor], recorder: StepRecorder | None) -> list[Tensor]:
        unit = self._unit
        assert unit is not None
        unit.take_turn(self._arrivals)
        unit.begin(is_new=self._is_new)
        self._is_new = False
        launching = unit.launching(self._flat_buffers.memory)
        reference_of = None
        if self._reference is not None and unit.verifies:
            if self._in_flight is not None:  # into the parameters, from which the reference begins
                self._in_flight.land()
            reference_of = self._reference.run(inputs)
            self._reference = None
            for flat_buffer in self._flat_buffers.memory:
                fill_with_pattern(flat_buffer)
        watching = unit.watching(in_cuda_graphs=self._in_cuda_graphs, reference_of=reference_of)
        recording = _NOTHING if recorder is None else unit.recorded_by(recorder)
        with recording, launching, watching, self._loss_launches.launching():
            results = self._ran(inputs, donated)
        first_state = len(results) - len(self._traced.generators)
        unit.check(results[first_state - len(self._runs) : first_state])
        unit.prove()
        return results


class CompiledStep:
    """A step compiled by `compile`, with a graph for each kind of arguments."""

    def __init__(
        self,
        step: Callable[..., Any],
        backend: Backend,
        options: Mapping[str, Any],
        donated: Sequence[str | int],
        *,
        keeps_donated: bool = False,
        tells: bool = True,
        in_flight: InFlight | None = None,
        own_changes: OwnChanges | None = None,
        memory: Memory | None = None,
    ) -> None:
        """Without `tells` its caller tells other ranks of what a call raises. `in_flight` is of a step that departs.

        `keeps_donated` is for a caller whose own tensors are donated in each call. Its `step` returns what
        becomes of each donated argument, in their order, and last its result, which alone is returned from here: the
        arguments have the rest. Where a rank has failed, and sent zeros, they have what they had.
        """
        self._step, self._backend, self._options, self._donated = step, backend, options, donated
        self._donations, self._tells = None if keeps_donated else donations, tells
        self._in_flight = in_flight
        self._compiled: dict[tuple[Any, ...], list[_Runnable]] = {}
        self._choice: Choice | None = None  # of the latest call
        self._memory: Memory = {} if memory is None else memory  # others of which one runs at a time may have the same
        self._latest: tuple[Communicator, ...] = ()  # what the latest graph launches on
        self._latest_of_losses: tuple[Agreements, ...] = ()  # by which it agrees on collectives outside of gradients
        self._world: Hashable = None  # of the latest call
        self.reductions: list[Agreed] = []  # that the latest call has launched
        self._own_changes = own_changes or OwnChanges()  # other steps of the same model may be given the same
        self._has_told = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if current_session() is not None or torch_private.tracing.is_tracing():
            return self._step(*args, **kwargs)  # a part of that graph
        if torch_private.autograd.transforms_are_active():
            self._tell_of_transforms()
            return self._step(*args, **kwargs)
        return self.run(args, kwargs)

    def run(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        kept: Sequence[Arguments] = (),
        recorder: StepRecorder | None = None,
    ) -> Any:
        """Call it outside of any other graph; `kept` are its first arguments. `recorder` is of its one reduction."""
        self._notice_another_world()
        if torch.is_anomaly_enabled():
            _warn_of_anomaly_mode()
        with self._telling():
            own = Arguments((args, kwargs))
            if not own.are_fit and torch_private.trees.open_user_dicts(own.leaves):
                own = Arguments((args, kwargs))
            every = [*kept, own]
            leaves = [*itertools.chain.from_iterable(each.leaves for each in every)]
            args = *(each.tree for each in kept), *args
            if self._donations is not None:
                self._donations.refuse(_name_of(self._step), leaves, functools.partial(self._named, args, kwargs))
            if not own.are_fit:
                raise self._unfit(args, kwargs)
            around = self._around(every)
            runnable = self._chosen_before(every, leaves, around)
            if runnable is None:
                key, runnable = self._choose(every, leaves, around)
        if runnable is None:
            why = why_another(self._compiled, key)
            with self._own_changes.changing(self._step):
                runnable = self._compile(args, kwargs, why=why)
            self._compiled.setdefault(self._key(every, around, self._reached()), []).insert(0, runnable)
            self._tell_of_many(why)
        self._latest, self._latest_of_losses = runnable.communicators, runnable.agreements_of_losses
        results = runnable(leaves, itertools.chain.from_iterable(each.detached for each in every), recorder)
        self.reductions = runnable.reductions
        return results

    @property
    def graphs(self) -> int:
        """How many have been traced."""
        return sum(map(len, self._compiled.values()))

    def telling(self) -> contextlib.AbstractContextManager[None]:
        """Tell the other ranks of what is raised in here, as of what a call raises; it has to be told once."""
        return self._telling()

    def _notice_another_world(self) -> None:
        """Behind destroy_process_group nobody hears of errors on what the latest graph launched on."""
        world = current_world()
        if world != self._world:
            self._world, self._latest, self._latest_of_losses = world, (), ()

    def _around(self, every: Sequence[Arguments]) -> tuple[Hashable, ...]:
        """What a graph depends on that is no part of the step."""
        return _ambient(frozenset[str]().union(*(each.device_types for each in every))), self._world

    def _chosen_before(
        self, every: Sequence[Arguments], leaves: Sequence[Any], around: tuple[Hashable, ...]
    ) -> _Runnable | None:
        """The graph of the call before, where this one is as that. See [Note: steady calls]."""
        if self._choice is None or not self._choice.holds(every, around):
            return None
        runnable: _Runnable = self._choice.graph
        if not runnable.fits(leaves):
            return None
        runnable.refuse_constants(leaves, first=len(leaves) - len(every[-1].leaves))
        return runnable

    def _choose(
        self, every: Sequence[Arguments], leaves: Sequence[Any], around: tuple[Hashable, ...]
    ) -> tuple[tuple[Any, ...], _Runnable | None]:
        """What the graph of these arguments depends on, and that, if there is one."""
        reached = self._reached()
        key, self._choice = self._key(every, around, reached), None
        runnable = next((each for each in self._compiled.get(key, ()) if each.fits(leaves)), None)
        if runnable is not None:
            runnable.refuse_constants(leaves, first=0)
            *_, shared_memory = key
            if not shared_memory:
                self._choice = Choice(runnable, every, reached.reads, around)
        return key, runnable

    def _reached(self) -> Reached:
        return Reached(self._step, self._own_changes)

    def _key(self, every: Sequence[Arguments], around: tuple[Hashable, ...], reached: Reached) -> tuple[Any, ...]:
        """All that a graph depends on that can be asked before it is known; `why_another` compares them."""
        closed = closed_over(reached, self._own_changes)
        generators = generators_shared([each for arguments in every for each in arguments.generators], closed)
        structure, kinds = [each.structure for each in every], [each.kinds for each in every]
        return tuple(structure), tuple(kinds), generators, closed, around, _shared_memory(every)

    def _unfit(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> TypeError:
        """The error for the first leaf that may change without being told from what it was, by name."""
        name, leaf = next((name, leaf) for name, leaf in self._named(args, kwargs) if Leaf.of(leaf) is None)
        return unfit_leaf(name, leaf, _name_of(self._step))

    def _named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[str, Any]]:
        """Every leaf of these arguments, as "params['head']"."""
        bound = inspect.signature(self._step).bind(*args, **kwargs).arguments
        return [
            (name + path, leaf) for name, tree in bound.items() for path, leaf in torch_private.trees.named_leaves(tree)
        ]

    def _tell_of_many(self, why: str) -> None:
        if self.graphs == _MANY:
            warn_user(
                f"{_name_of(self._step)} has been compiled {_MANY} times, the last time {why}. Each takes its time and "
                "is kept: pass numbers that change from call to call as tensors."
            )

    def _tell_of_transforms(self) -> None:
        if not self._has_told:
            self._has_told = True
            warn_user(
                f"{_name_of(self._step)} is compiled, and called within a transform of torch.func, where it runs "
                "operator by operator: compile the function that takes the transform."
            )

    @compiling
    def _compile(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, why: str) -> _Runnable:
        session = Session()
        work = functools.partial(SlowWork, _log, what=f"step {_name_of(self._step)}", why=lambda: why)
        work = functools.partial(work, is_told=lambda: self._is_on_rank_zero(session))
        with self._telling(session), tracing(session), work(("tracing", "traced")):
            keeps = self._donations is None
            traced = trace(self._step, args, kwargs, self._donated, session, writes_if_sound=keeps)
            self._own_changes.add_set(traced.set_first)
            graph = traced.graph_module.graph
            first = session.first_parameters(traced.values_by_node())
            reference = ReferenceStep(traced.graph_module) if session.sums_gradients else None
            prepare_step(graph)
            refuse_rows_of_shares(graph)
            if session.departing:
                session.gathers([each.meta["val"].dtype for each in departing(graph, len(session.departing) - 1)])
            arrivals = [_arrival_of(node) for node in find_sums(graph)]
            launches = session.launches_in(graph)
        unit = Unit(launches) if session.runs else None
        agreed = unit.take_turn(arrivals, first) if unit is not None else []
        if unit is None:  # making their groups: Inductor looks for them as it compiles
            LossLaunches([each for each in launches if isinstance(each, LossLaunch)]).agree()
        with self._telling(session, unit), work(("compiling", "compiled")):
            first.warn()
            plans = tuple(
                (one.plan, run.communicator.group_name) for one, run in zip(agreed, session.runs, strict=True)
            )
            traced, to_gather = self._gathering_later(traced, session, plans)
            rows = all(run.wanted.gathers_what_it_scatters for run in session.runs)
            lent = _lent([plan for plan, _ in plans], rows=rows)
            flat_buffers = FlatBuffers(lent, self._memory, unit.communicators[0].rank if unit is not None else 0)
            traced = traced.add_inputs(flat_buffers.inputs, "flat_buffer")
            hooks = {place: found for place, one in enumerate(agreed) if (found := one.programs)}
            pipeline = StepPipeline(plans, self._backend == "aot_eager", lent=True, lends_rows=rows, hooks=hooks)
            identity = f"{pipeline.cache_identity} {torch_private.tracing.labels_of(traced.graph_module.graph)}"
            rewriting = torch_private.inductor.rewriting_step(pipeline.run, identity)
            options = {**self._options, **(torch_private.compiler_options.KEEPS_ORDER if to_gather else {})}
            with self._in_turn(traced, options, identity, work):
                run = torch_private.inductor.compile_step(
                    traced.graph_module,
                    traced.inputs,
                    backend=self._backend,
                    options=options,
                    rewriting=rewriting,
                )
        in_cuda_graphs = functools.partial(torch_private.compiler_options.uses_cuda_graphs, self._options)
        name = _name_of(self._step)
        traced = dataclasses.replace(traced, inputs=())  # of the first call: they would live as long as the step
        what = name, traced, run, session, unit, launches
        in_flight = self._in_flight if to_gather else None
        return _Runnable(*what, flat_buffers, in_cuda_graphs, reference, self._donations, in_flight, to_gather)

    def _gathering_later(
        self, traced: TracedStep, session: Session, plans: Sequence[tuple[BucketPlan, str]]
    ) -> tuple[TracedStep, tuple[Bucket, ...]]:
        """The step with what departs gathered behind it, and the buckets of that; as it is where nothing departs."""
        if self._in_flight is None or not session.departing:
            return traced, ()
        (plan, group_name), wanted = plans[0], session.runs[0].wanted
        assert len(plans) == 1 and wanted.scattered is not None
        if torch_private.compiler_options.uses_cuda_graphs(self._options, wanted.device):
            raise ValueError(
                "pipeline_updates leaves results of a call under way, where a CUDA graph writes those of the next one: "
                'leave out mode="reduce-overhead" and options that turn on cudagraphs.'
            )
        buckets = buckets_to_gather(plan, wanted.scattered.gathered)
        return traced.gathering_later(plan, buckets, group_name, wanted.scattered.by), buckets

    def _in_turn(
        self, traced: TracedStep, options: Mapping[str, Any], identity: str, slow_work: Callable[..., SlowWork]
    ) -> contextlib.AbstractContextManager[object]:
        """To compile it in: one rank of a host does, and the others load it."""
        several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        if not several or self._backend != "inductor" or not compile_once.is_on():
            return contextlib.nullcontext()
        torch_private.vector_checks.remember()
        work = compile_once.work_on(traced.graph_module, traced.inputs, options, identity)
        waiting = functools.partial(slow_work, ("waiting", "waited"))
        return compile_once.in_turn(work, lambda owner: waiting(what=compile_once.waiting_for(owner)))

    @contextlib.contextmanager
    def _telling(self, session: Session | None = None, unit: Unit | None = None) -> Iterator[None]:
        """Tell the other ranks of what is raised in here, before the reductions of the step, or of `unit`, run."""
        try:
            yield
        except BaseException as error:
            if not self._tells:
                raise
            communicators, agreements = self._whom_to_tell(session)
            if unit is not None:
                communicators = unit.communicators
            if agreements is not None:
                break_off(communicators, agreements, _name_of(self._step), error)
            raise

    def _is_on_rank_zero(self, session: Session) -> bool:
        """Whether this is rank 0 of the ranks that the step reduces over, or of all ranks while those are not known."""
        communicators, _ = self._whom_to_tell(session)
        if communicators:
            return communicators[0].rank == 0
        return not dist.is_initialized() or dist.get_rank() == 0

    def _whom_to_tell(self, session: Session | None) -> tuple[tuple[Communicator, ...], Agreements | None]:
        """What other ranks launch on as they run this step, as far as it is known here, and what they agree by."""
        reached_here = [each.reduction for each in Reached(self._step) if isinstance(each, GradientFunction)]
        known = [communicator for each in reached_here for communicator in each.communicators]
        called, loss_launches = (session.called, session.loss_launches) if session is not None else ((), ())
        communicators = self._latest or tuple(dict.fromkeys(called)) or tuple(known)[:1]
        agreements = [each.agreements for each in communicators]
        agreements += [found for each in reached_here if (found := each.agreements()) is not None]
        of_losses = [*self._latest_of_losses, *(each.group.agreements for each in loss_launches)]
        agreements += [each for each in of_losses if each.ranks.is_gloo]  # nothing ends the waits of others elsewhere
        return communicators, agreements[0] if agreements else None


def _arrival_of(reduction: Node) -> Arrival:
    """As this rank has traced it."""
    order = tuple(arrival_order(reduction))
    gradients: Sequence[Node] = reduction.args[0]  # type: ignore[assignment]
    return Arrival(order, counted(lambda: count_gradients([gradients[index] for index in order])))


def _donated(donate: object) -> tuple[str | int, ...]:
    """As names and positions. Raises TypeError for what is neither."""
    is_listed = isinstance(donate, Sequence | Set) and not isinstance(donate, str | bytes)
    given: tuple[object, ...] = tuple(donate) if is_listed else (donate,)  # type: ignore[arg-type]
    donated = tuple(each for each in given if isinstance(each, str | int) and not isinstance(each, bool))
    if len(donated) < len(given):
        raise TypeError(
            "donate must be the name or position of an argument, or a sequence of these, empty for none; "
            f"found {donate!r}."
        )
    return donated


def _name_of(step: Callable[..., Any]) -> str:
    return str(getattr(step, "__qualname__", "a step")).replace("<locals>.", "")


def _shared_memory(every: Sequence[Arguments]) -> tuple[tuple[int, int], ...]:
    """For each tensor the first one of those that it overlaps with, and its distance from that in bytes.

    Empty where none do: those that lie beside each other in one buffer, or parts of one batch, are apart.
    """
    memory = [*itertools.chain.from_iterable(each.memory for each in every)]
    if len({*memory}) == len(memory):
        return ()
    strided = [tensor for each in every for tensor in each.tensors if tensor.layout == torch.strided]
    begins = [begin_bytes(tensor) for tensor in strided]
    found = {n: (group[0], begins[n] - begins[group[0]]) for group in overlapping(strided) for n in group}
    return tuple(found.get(place, (place, 0)) for place in range(len(strided))) if found else ()


def _ambient(device_types: Set[str]) -> Hashable:
    """What changes what operators do, besides their operands; a step may run some on a device of no argument's."""
    accelerator = torch.accelerator.current_accelerator()
    kinds = _kinds(device_types, "cpu" if accelerator is None else accelerator.type)
    autocast = tuple((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds)
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    return autocast, torch.get_default_dtype(), torch_private.tracing.default_device(), is_deterministic


@functools.cache
def _warn_of_anomaly_mode() -> None:
    warn_user(
        "torch.autograd.detect_anomaly does not see a compiled step, whose graph has derivatives as operators: to "
        "find where a NaN comes from, train some steps with compile_ddp(model) or EagerDDP(model) under it."
    )


@functools.cache
def _kinds(device_types: Set[str], accelerator: str) -> tuple[str, ...]:
    return tuple(sorted({"cpu", *device_types, accelerator}))
