"""A captured segment, which Dynamo calls in place of a graph, and each wrapper's program in it.

A segment knows no wrapper. A wrapper binds its parameters to the segment's inputs (`Bindings`), has a program for them
that reduces by the plan (`Program`), and remembers each call until its backward has run (`SegmentCall`).
"""

import contextlib
import functools
import itertools
import operator
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import torch
from torch import nn
from torch.fx import GraphModule

from compiled_ddp import torch_private
from compiled_ddp.checks.values import Expected, Reference
from compiled_ddp.formatting import quoted
from compiled_ddp.graph import compile_once
from compiled_ddp.graph.backward_work import count_backward, counted
from compiled_ddp.graph.capture import gradient_order, outputs_reached, with_own_outputs
from compiled_ddp.graph.compiled_graph import LOCAL, CompiledGraph, HasTeller
from compiled_ddp.graph.reference import NoReference
from compiled_ddp.graph.telling import Teller
from compiled_ddp.model.managed import ManagedState
from compiled_ddp.passes.inline_hook import TracedHook
from compiled_ddp.passes.pipeline import Pipeline
from compiled_ddp.plan import BucketPlan, GradientSpec
from compiled_ddp.planning.assignment import BucketPolicy
from compiled_ddp.planning.cost_model import BackwardWork
from compiled_ddp.ranks.communicator import SHARED_NAME, Communicator, NameInGraphs
from compiled_ddp.step.graph_call import GraphCall
from compiled_ddp.step.graphs import ReservedSection
from compiled_ddp.step.runtime import Runtime, UntilBackward
from compiled_ddp.step.steady import SteadyGraph
from compiled_ddp.torch_private.inductor import Rewriting
from compiled_ddp.users_code import warn_user

# ---- a wrapper's program ---------------------------------------------------------------------------------------------

# [Note: backward variants] A graph has one forward and several backwards, each compiled when it is first needed:
# local          no collective, no scaling: what plain torch.compile produces, and shares its cache entry
# synchronised   the passes' program, which wrappers share where their plans are equal: [Note: one name in all graphs]
# folding        the same, with gradients of earlier local backwards as further inputs
# Which one runs is decided when the backward starts.
Variant = Literal["synchronised", "folding"]
VARIANTS: tuple[Variant, ...] = ("synchronised", "folding")

AnySection = ReservedSection | SteadyGraph


class Program:
    """How a wrapper reduces the gradients of some of a graph's inputs."""

    def __init__(
        self,
        plan: BucketPlan,
        *,
        communicator: Communicator,
        naive: bool,
        hooks: Sequence[TracedHook | None],
        backend: str,
        compiler_options: dict[str, Any],
        captured: Callable[[], "Segment | None"],
        teller: Teller,
    ) -> None:
        """`plan` is over the graph's inputs; `hooks` reduce its buckets, one for each or none.

        `teller` tells of what compilers do for it. What was `captured` is asked for its graph when a backward is
        needed, as the first one of a graph is known before that is compiled.
        """
        self.plan, self.teller = plan, teller
        self._captured = captured
        self._in_cuda_graphs = backend == "inductor" and any(
            torch_private.compiler_options.uses_cuda_graphs(compiler_options, bucket.device) for bucket in plan.buckets
        )
        self._communicator = weakref.ref(communicator)  # an autograd graph that lives on is not to keep it
        self._shares_name = not hooks and not self._in_cuda_graphs  # hooks are traced with the communicator's own
        self._pipeline = Pipeline(
            plan,
            SHARED_NAME if self._shares_name else communicator.group_name,
            naive=naive,
            hooks=tuple(hooks),
            in_place=backend == "aot_eager",
            replayed=self._in_cuda_graphs,
        )
        self._rewritings: dict[tuple[Variant, str], Rewriting] = {}
        self._lent_buckets = self._pipeline.lent_buckets
        self._has_hooks = bool(hooks)
        self._failures: dict[Variant, str] = {}

    def rewriting(self, variant: Variant, group_name: str | None = None) -> Rewriting:
        """`group_name` is that of most runs by default."""
        key = variant, group_name or self._pipeline.group_name
        if key not in self._rewritings:
            fold, name = variant == "folding", key[1]
            pipeline = replace(self._pipeline, fold=fold, group_name=name)
            self._rewritings[key] = torch_private.inductor.rewriting_by(pipeline.run, pipeline.cache_identity, variant)
        return self._rewritings[key]

    def _graph(self) -> CompiledGraph:
        captured = self._captured()
        assert captured is not None, "the backward of a graph that is gone"
        return captured.graph

    def compile_ahead(self, variant: Variant) -> bool:
        """Compile a backward before it is needed; returns False if it was compiled already."""
        with self.named():  # Inductor looks for the group
            _, is_new = self._graph().backward(self.rewriting(variant), self)
        return is_new

    def named(self) -> contextlib.AbstractContextManager[str]:
        """Within this context the communicator has the name that is returned: [Note: one name in all graphs]"""
        communicator = self._communicator()
        assert communicator is not None, "the program of a wrapper that is gone"
        return NameInGraphs(
            communicator.group, communicator.group_name, shared=self._shares_name, by_rows=communicator.by_rows
        )

    def compile(self, variant: Variant) -> str | None:
        """Compile a backward, unless it is; returns how the compiler has failed, if it has, now or before."""
        if variant in self._failures:
            return self._failures[variant]
        rewriting = self._rewritings.get((variant, self._pipeline.group_name))
        if rewriting is None or rewriting.identity not in self._graph().compiled:
            try:
                self.compile_ahead(variant)
            except Exception as error:
                self._failures[variant] = quoted(error)
                return self._failures[variant]
        return None

    def run(self, section: AnySection, call: GraphCall, node: Any, saved_and_tangents: list[Any]) -> Any:
        """The gradients of the graph's inputs, reduced in a reserved `section` of the running backward."""
        with self.named() as group_name:
            graph = self._graph()
            section, compiled, state = self._take_inputs(section, call, graph, saved_and_tangents, group_name)
            # A communication hook is code of its user's in the graph.
            run = _below_autograd if graph.calls_torch_alone and not self._has_hooks else operator.call
            call_graph = functools.partial(run, compiled, node, saved_and_tangents)
            try:
                *gradients, riders = section.run(call_graph, group_name, sees_values=not self._in_cuda_graphs)
                return self._hand_over(section, call, gradients, riders, state)
            except BaseException:
                section.break_off()
                raise

    def _take_inputs(
        self,
        section: AnySection,
        call: GraphCall,
        graph: CompiledGraph,
        saved_and_tangents: list[Any],
        group_name: str,
    ) -> tuple[AnySection, torch_private.aot.BackwardImplementation, int]:
        """Add what the section gives; returns that, the compiled backward, and how many tensors are a hook's state."""
        try:
            if graph.inputs_when_traced_again is not None:
                graph.check_fits(saved_and_tangents)
            to_fold = section.gradients_to_fold() if isinstance(section, ReservedSection) else ()
            variant: Variant = "folding" if to_fold else "synchronised"
            rewriting = self._rewritings.get((variant, group_name)) or self.rewriting(variant, group_name)
            compiled = graph.compiled.get(rewriting.identity) or graph.backward(rewriting, self)[0]
            fingerprint = (
                graph.fingerprint_at(call.fingerprint, saved_and_tangents) if graph.is_dynamic else call.fingerprint
            )
            if isinstance(section, SteadyGraph):
                given = section.inputs(self._lent_buckets, compiled, fingerprint)
                if given is not None:
                    saved_and_tangents += given
                    return section, compiled, 0
                section = section.in_general()
            section.note_graph(
                compiled, fingerprint, functools.partial(self._without_passes, call, saved_and_tangents, to_fold)
            )
            flat_buffers = section.lend_buffers(self._lent_buckets)
            state = section.hook_state() if self._has_hooks else []
            riders = section.rider_values([call.index_of[n] for n in call.undefined & call.index_of.keys()])
            saved_and_tangents += [riders, *to_fold, *state, *flat_buffers]
        except BaseException:
            section.give_up()
            raise
        return section, compiled, len(state)

    def _without_passes(
        self, call: GraphCall, saved_and_tangents: Sequence[Any], to_fold: Sequence[torch.Tensor], share: float
    ) -> Reference:
        """What the gradients of the call's parameters are, and times `share` in their bucket: `checks.values`."""
        try:
            return self._run_without_passes(call, saved_and_tangents, to_fold, share)
        except NoReference as error:
            return Reference({}, str(error))
        except torch.OutOfMemoryError:
            torch_private.tensors.give_back_cached_memory()
            return Reference({}, "there was no memory for it")

    def _run_without_passes(
        self, call: GraphCall, saved_and_tangents: Sequence[Any], to_fold: Sequence[torch.Tensor], share: float
    ) -> Reference:
        gradients, epsilon = self._graph().run_without_passes(saved_and_tangents)
        folded = dict(zip(self.plan.indices, to_fold, strict=True)) if to_fold else {}
        expected = {}
        for place, index in call.index_of.items():
            rounded = gradients[place]
            if rounded is not None:
                value = rounded.gradient if place not in folded else rounded.gradient + folded[place]
                noise = (abs(share) * rounded.noise_norm, abs(share) * rounded.noise_most)
                expected[index] = Expected(value * share if share else torch.zeros_like(value), *noise, epsilon)
        return Reference(expected, "its gradient is known before the backward runs")

    def _hand_over(
        self, section: AnySection, call: GraphCall, gradients: list[Any], riders: torch.Tensor, state: int
    ) -> Any:
        """Give the section what the graph has returned, with `state` tensors of a hook; returns autograd's part."""
        left_out = set[int]()
        if isinstance(section, ReservedSection):  # a steady step has every gradient, and no communication hook
            if call.undefined:
                left_out = section.unused_everywhere(riders)
            if state:
                gradients, new_state = gradients[:-state], gradients[-state:]
                if self._in_cuda_graphs:  # the next replay writes over what this one returned
                    new_state = [tensor.clone() for tensor in new_state]
                section.keep_hook_state(new_state, left_out)
        positions = call.index_of
        if call.undefined:
            reduced_too = {place for place, index in positions.items() if index not in left_out}
            gradients = list(without(gradients, call.undefined - reduced_too))
        reduced = [*map(gradients.__getitem__, positions)]  # in C, as for every parameter in every step
        if any(map(operator.is_, reduced, itertools.repeat(None))):
            positions = {place: index for place, index in positions.items() if gradients[place] is not None}
            reduced = [*map(gradients.__getitem__, positions)]
        handed_out = section.complete(riders, [*positions.values()], reduced, left_out)
        for place, gradient in zip(positions, handed_out, strict=True):
            gradients[place] = gradient
        return tuple(gradients)


def _below_autograd(compiled: torch_private.aot.BackwardImplementation, node: Any, inputs: list[Any]) -> Any:
    """What the compiled backward returns. Within what looks at its launches, which is dispatched as autograd is."""
    with torch_private.autograd.below_autograd():
        return compiled(node, inputs)


def without(gradients: Sequence[Any], undefined: Set[int]) -> tuple[Any, ...]:
    """The gradients of a graph's inputs, None in these places."""
    return tuple(None if place in undefined else gradient for place, gradient in enumerate(gradients))


# ---- bound to the parameters that a wrapper calls it with ------------------------------------------------------------


@dataclass(frozen=True)
class Bound:
    """A program, bound to the parameters that a call runs it with."""

    program: Program
    plan: BucketPlan  # over parameters
    fingerprint: str
    index_of: dict[int, int]  # graph input -> parameter


class Binding:
    """What all calls of a graph with the same parameters are bound to."""

    def __init__(self, whole: Bound, without: Callable[[frozenset[int]], Bound]) -> None:
        """`whole` has every parameter; `without` binds the program without some graph inputs."""
        self.whole, self.without = whole, without
        # The inputs that the latest backward brought no gradient: [Note: undefined gradients]
        self.left_out = frozenset[int]()

    def note_undefined(self, undefined: frozenset[int]) -> None:
        """A backward brings these graph inputs no gradient."""
        self.left_out = undefined


# ---- one call of a segment -------------------------------------------------------------------------------------------

# [Note: undefined gradients] A parameter that only feeds outputs which the loss does not use has no gradient in eager
# mode. AOTAutograd has zeros come to the graph for such outputs, and so zeros for the parameter. Which outputs are not
# used is seen where their gradients come in; which inputs feed no other one is read from the graph. Inputs that get no
# gradient are left out of the wrapper's program from the next call on, as frozen ones would be: hooks reduce them if
# they get one after all. Where the sequence has been agreed with them, the graph runs as it was agreed, the riders say
# that this rank has no gradient of them, and where none has, None is returned. So do graphs that share parameters in
# one backward, always: which of their outputs are used is not known when the first of them is reached, and hooks could
# not take what one of them has reduced in part. Left out from the beginning are inputs that reach no output, and those
# for which a Function's backward returns None, which the traced backward tells: it is never cached together with a
# program that has them. Parameters with tensor hooks of the user's get zeros: such a hook is not called with None.

_NOTHING = frozenset[int]()


class SegmentCall:
    """One call of a segment in a forward: the graph, bound to the parameters that it was called with."""

    def __init__(self, binding: Binding, *, may_leave_out: bool, node: Any, runtime: Runtime) -> None:
        self._binding = binding
        self.undefined = _NOTHING  # graph inputs that the running backward brings no gradient
        self.may_leave_out = may_leave_out
        self._is_whole = False
        self._bind(binding.left_out)
        self.synchronise = runtime.forward.synchronises
        self.until_backward = UntilBackward(runtime)
        self._node = weakref.ref(node)
        self.ran_locally_in: int | None = None  # a task of autograd

    @property
    def teller(self) -> Teller:
        return self.program.teller

    def reached(self, undefined: frozenset[int]) -> None:
        """The backward brings these graph inputs no gradient; all others of the call it does."""
        self.undefined = undefined
        self._binding.note_undefined(undefined)
        if not self._is_whole:
            self._bind(undefined)

    @property
    def leaves_out(self) -> bool:
        """Whether it is bound to less than every parameter."""
        return self.may_leave_out and self.fingerprint != self.every_parameter().fingerprint

    def every_parameter(self) -> Bound:
        """What the call is bound to with all of its parameters, also those without gradient."""
        return self._binding.whole

    def places_of(self, is_meant: Callable[[int], bool]) -> frozenset[int]:
        """The graph inputs of those of the call's parameters."""
        return frozenset(place for place, index in self.every_parameter().index_of.items() if is_meant(index))

    def take_all_in(self, whole: bool = True) -> None:
        """In the backward that begins: be bound to every parameter, whichever of them get no gradient."""
        self._is_whole = whole
        if whole:
            self._bind(_NOTHING)

    def _bind(self, left_out: frozenset[int]) -> None:
        bound = self._binding.without(left_out) if left_out else self._binding.whole
        self.program, self.index_of = bound.program, bound.index_of
        self.plan, self.fingerprint = bound.plan, bound.fingerprint  # over parameters

    def will_run(self) -> bool:
        node = self._node()
        if node is None:
            return False
        return node is torch_private.autograd.evaluating_node() or torch_private.autograd.backward_will_execute(node)

    def note_local_run(self) -> None:
        """The backward that this thread runs evaluates the call's node while none of the wrapper's is under way."""
        self.ran_locally_in = torch_private.autograd.current_graph_task()

    def has_run_locally(self) -> bool:
        """Whether this thread's backward has evaluated the node while none of the wrapper's was under way."""
        return self.ran_locally_in == torch_private.autograd.current_graph_task()

    def is_still_to_run(self) -> bool:
        """Whether the backward that this thread runs will evaluate the node, and has not done so locally."""
        return self.ran_locally_in != torch_private.autograd.current_graph_task() and self.will_run()

    def note_defined(self, indices: Set[int]) -> None:
        """The running backward brings these parameters a gradient, through other calls if not through this one."""
        self.undefined = frozenset(place for place in self.undefined if self.index_of.get(place) not in indices)

    def compile(self, *, folds: bool) -> str | None:
        """Compile the backward that reduces in the graph; returns how the compiler has failed, if it has.

        `folds` tells whether gradients of earlier backwards are to go into it.
        """
        return self.program.compile("folding" if folds else "synchronised")

    def when_reached(self, tell: Callable[[Runtime], None]) -> None:
        """Let `tell` be called before a backward evaluates the call's node.

        Even before its saved tensors are looked at.
        """
        node = self._node()
        if node is not None:
            torch_private.autograd.register_own_prehook(node, functools.partial(self.until_backward.tell, tell))


# ---- a captured segment ----------------------------------------------------------------------------------------------

# [Note: whose segment] Dynamo runs one graph for all modules of a shape, of whichever wrapper. So a segment knows no
# wrapper: each has programs of its own in it (`Bindings`), and says in each call who it is.

MERGED = "a captured graph overwrites one of several inputs that share memory (such as buffers that are views of one)"


class Caller(Protocol):
    """A wrapper that runs its module."""

    @property
    def teller(self) -> Teller:
        """Tells of compilers that take long."""

    def segment_captured(self, segment: "Segment", inputs: Sequence[Any]) -> Program | None:
        """The caller's program in a segment that is about to be compiled."""

    def segment_not_compiled(self, failure: str) -> None:
        """The compiler has failed, and a graph runs as it is. Raises where the caller wants graphs."""

    def segment_called(self, segment: "Segment", inputs: Sequence[Any], node: Any) -> None:
        """A call with gradients has made `node`."""


_of_this_thread = threading.local()


def call_captured(
    captured: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], *, caller: Caller
) -> Any:
    """What `captured` returns, whose segments, in this thread, are called by `caller`."""
    before = getattr(_of_this_thread, "caller", None)
    _of_this_thread.caller = caller
    try:
        return captured(*args, **kwargs)
    finally:
        _of_this_thread.caller = before


def caller_of_this_thread() -> Caller:
    """Dynamo runs what it has captured nowhere else than in `call_captured`."""
    caller: Caller = _of_this_thread.caller
    return caller


def _with_gradient(inputs: Sequence[Any], reached: Mapping[int, frozenset[int]] | None) -> list[int]:
    """Where the inputs are that get a gradient, as far as is known."""
    return [
        place
        for place, value in enumerate(inputs)
        if isinstance(value, torch.Tensor) and value.requires_grad and (reached is None or reached[place])
    ]


class Segment:
    """[Note: whose segment]"""

    def __init__(
        self,
        graph_module: GraphModule,
        example_inputs: Sequence[Any],
        *,
        backend: str,
        compiler_options: dict[str, Any],
    ) -> None:
        """`graph_module` is consumed. Raises CompilerFailed."""
        self.backend, self.compiler_options = backend, compiler_options
        reached = outputs_reached(graph_module.graph)
        with_gradient = _with_gradient(example_inputs, reached) if torch.is_grad_enabled() else []
        # The inputs that may get a gradient, in the order in which backward completes them.
        self.gradient_order = gradient_order(graph_module.graph, with_gradient)
        self._counted = {place: number for number, place in enumerate(self.gradient_order)}
        self._work = counted(lambda: count_backward(graph_module.graph, self.gradient_order))
        # [Note: undefined gradients]
        self._outputs_of = {} if reached is None else with_own_outputs(reached, self.gradient_order)
        self.may_leave_out = bool(self._outputs_of)  # whether there are inputs that some backwards bring no gradient
        self._slots: list[int | None] | None = None  # of the outputs, among what comes to a call's node
        self._uncompiled: torch_private.aot.BackwardImplementation | None = None  # in place of the local one
        caller = caller_of_this_thread()
        first = caller.segment_captured(self, example_inputs)
        rewriting = LOCAL if first is None else first.rewriting("synchronised")
        work = None
        if caller.teller.takes_turns:
            work = compile_once.work_on(graph_module, example_inputs, compiler_options, rewriting.identity)
        self.why_hooks: str | None = None  # why no wrapper reduces anything in this graph
        with (
            contextlib.nullcontext() if first is None else first.named(),
            caller.teller.in_turn(work, "forward", caller.teller.next_graph),
        ):
            self.graph = CompiledGraph(
                graph_module,
                example_inputs,
                backend=backend,
                options=compiler_options,
                teller=caller.teller,
                first=rewriting,
                work=work,
            )
            planned = self.gradient_order
            if self.graph.function is not None:  # None without gradients: an inference graph has no backward
                self._look_at_backward(self.graph.function, len(example_inputs))
            # Unless it was planned for gradients that there turn out not to be: [Note: undefined gradients]
            if work is not None and caller.teller.backward_follows and self.gradient_order == planned:
                self.graph.compile_first_ahead()

    def _look_at_backward(self, function: type[torch.autograd.Function], inputs: int) -> None:
        """As it was traced, which is not known any more when it has been compiled and is in AOTAutograd's cache."""
        traced = torch_private.aot.inputs_with_gradient(function)
        if traced is not None:
            self._keep(traced.__contains__)
        parts = self.graph.parts_of_gradients
        if parts is not None:  # hooks reduce what has such a gradient, and AOTAutograd takes no None for it
            self._keep(parts.is_whole)
        if torch_private.aot.merges_inputs(function, inputs):
            self.why_hooks = MERGED  # what comes back is not in the order of the captured graph's inputs
            self._keep(lambda place: False)
        self.graph.replace_backward(self._run_backward)

    def _keep(self, is_meant: Callable[[int], bool]) -> None:
        """Keep only these of the inputs that may get a gradient."""
        self.gradient_order = [*filter(is_meant, self.gradient_order)]
        self._outputs_of = {place: outputs for place, outputs in self._outputs_of.items() if is_meant(place)}
        self.may_leave_out = bool(self._outputs_of)

    def work_until(self, places: Iterable[int]) -> BackwardWork | None:
        """What the backward computes until the gradients of these inputs are ready; None if that is not known."""
        return self._work and self._work.only([self._counted[place] for place in places])

    def __call__(self, *inputs: Any) -> Any:
        first_node = torch_private.aot.next_node()
        outputs = self.graph.forward(*inputs)
        if not torch.is_grad_enabled():
            return outputs
        if self.graph.function is None:
            torch_private.aot.check_without_backward(inputs, outputs)
        else:
            node = torch_private.aot.node_of(self.graph.function, outputs, first_node)
            if node is not None:
                if self._outputs_of:
                    self._slots = self._slots or torch_private.autograd.slots_of(node, outputs)
                    torch_private.autograd.note_undefined(node)
                _of_this_thread.caller.segment_called(self, inputs, node)
        return outputs

    def compile_local_ahead(self, needed_by: HasTeller) -> bool:
        """Compile the local backward before it is needed; returns False if it was compiled already."""
        return self._local_backward(needed_by)[1]

    def _local_backward(self, needed_by: HasTeller | None) -> tuple[torch_private.aot.BackwardImplementation, bool]:
        if self._uncompiled is None:
            try:
                return self.graph.backward(LOCAL, needed_by)
            except Exception as error:
                warn_user(f"the backward of a graph runs operator by operator, as its compiler failed: {quoted(error)}")
            self._uncompiled = self.graph.uncompiled_backward()
        return self._uncompiled, False

    def _run_backward(self, node: Any, saved_and_tangents: list[Any]) -> Any:
        """The backward of every call, between AOTAutograd's prologue and epilogue."""
        if torch_private.autograd.keeps_graph():
            self.graph.spare_saved_tensors()
        undefined = self._undefined(node) if self.may_leave_out else _NOTHING
        call: SegmentCall | None = getattr(node, torch_private.autograd.CALL, None)
        runtime = call.until_backward.take() if call is not None else None
        if call is not None and runtime is not None:
            if undefined:
                undefined -= call.places_of(runtime.reduction.with_tensor_hooks)  # which take no None
            if self._outputs_of:
                call.reached(undefined)
            with runtime.lock:
                section = runtime.reserve(call)
                if section is not None:
                    return call.program.run(section, call, node, saved_and_tangents)
        backward, _ = self._local_backward(call)
        if self.graph.inputs_when_traced_again is not None:
            self.graph.check_fits(saved_and_tangents)
        gradients = backward(node, saved_and_tangents)
        if undefined:
            gradients = without(gradients, undefined)
        if call is None or runtime is None:
            return gradients
        with runtime.lock:
            return runtime.under_way.pass_on(call, gradients)

    def _undefined(self, node: Any) -> frozenset[int]:
        """The inputs that the running backward brings no gradient: [Note: undefined gradients]"""
        slots = torch_private.autograd.undefined_at(node)
        if not slots or self._slots is None:
            return _NOTHING
        used = {number for number, slot in enumerate(self._slots) if slot not in slots}
        return frozenset(place for place, outputs in self._outputs_of.items() if used.isdisjoint(outputs))


# ---- a wrapper's programs, by segment and parameters -----------------------------------------------------------------

# Which parameter each input that may get a gradient is, in the segment's gradient order; None for any other tensor.
_Parameters = tuple[int | None, ...]

# The dtypes and rows of their gradients, and which they are where buckets go by names.
_Pattern = tuple[tuple[tuple[torch.dtype, int | None] | None, ...], _Parameters | None]


class Bindings:
    """A wrapper's programs, by segment and by which of the inputs are its parameters."""

    def __init__(
        self,
        runtime: Runtime,
        own: ManagedState,
        policy: BucketPolicy,
        index_of_parameter: Mapping[int, int],
        teller: Teller,
        *,
        naive: bool,
    ) -> None:
        """`index_of_parameter` maps id(parameter) to its index, and follows the model."""
        self._teller = teller
        self._runtime, self._managed, self._policy, self._naive = runtime, own, policy, naive
        self._index_of_parameter = index_of_parameter
        self._known: weakref.WeakKeyDictionary[Segment, _Known] = weakref.WeakKeyDictionary()

    def forget(self) -> None:
        """The parameters have other indices."""
        for known in self._known.values():
            known.forget()

    def program(self, segment: Segment, inputs: Sequence[Any]) -> Program | None:
        """The wrapper's program for a graph with these inputs; None where none of them is a parameter of its own."""
        parameters = _those_once(self._parameters(segment, inputs))
        bound = self._bound_to(self._known_of(segment), segment, parameters, inputs)
        return bound.program if bound.index_of else None

    def call(self, segment: Segment, inputs: Sequence[Any], node: Any) -> SegmentCall | None:
        """A call of the segment, whose backward has `node`; None as in `program`.

        Raises RuntimeError if an input is a parameter that has been put into the model since it was wrapped.
        """
        parameters, known = self._parameters(segment, inputs), self._known.get(segment) or self._known_of(segment)
        binding = known.bindings.get(parameters)
        if binding is None:
            binding = self._binding(known, segment, _those_once(parameters), inputs)
            known.bindings[parameters] = binding
        if not binding.whole.index_of:
            return None
        return SegmentCall(binding, may_leave_out=segment.may_leave_out, node=node, runtime=self._runtime)

    def work_of(self, plan: BucketPlan) -> BackwardWork | None:
        """What the backward of the graph with this plan over parameters computes until each of its gradients is ready.

        In the plan's order; None where no such graph is known here.
        """
        for segment, known in self._known.items():
            for bound in known.bound.values():
                if bound.fingerprint == plan.fingerprint:
                    place_of = {index: place for place, index in bound.index_of.items()}
                    return segment.work_until(map(place_of.__getitem__, plan.indices))
        return None

    def report_left(self, inputs: Sequence[Any], why: str) -> None:
        """Hooks reduce the parameters among these inputs of a graph. Raises RuntimeError if that must not be."""
        reduction = self._runtime.reduction
        indices = {self._index_of_parameter[id(value)] for value in inputs if id(value) in self._index_of_parameter}
        if indices and why not in reduction.fallback.reasons:
            reduction.fallback.report(why, reduction.parameters.named(sorted(indices)))

    def _binding(self, known: "_Known", segment: Segment, parameters: _Parameters, inputs: Sequence[Any]) -> Binding:
        alive = weakref.ref(self)  # a call hangs on an autograd graph, which is not to keep the wrapper
        captured = weakref.ref(segment)

        def bind_without(undefined: frozenset[int]) -> Bound:
            bindings, segment = alive(), captured()
            assert bindings is not None and segment is not None, "a backward of a wrapper that is gone"
            pairs = zip(segment.gradient_order, parameters, strict=True)
            left = tuple(None if place in undefined else index for place, index in pairs)
            return bindings._bound_to(bindings._known_of(segment), segment, left)

        return Binding(self._bound_to(known, segment, parameters, inputs), bind_without)

    def _parameters(self, segment: Segment, inputs: Sequence[Any]) -> _Parameters:
        ids = map(id, map(inputs.__getitem__, segment.gradient_order))  # in C, for every parameter in every step
        return tuple(map(self._index_of_parameter.get, ids))

    def _known_of(self, segment: Segment) -> "_Known":
        return self._known.setdefault(segment, _Known())

    def _bound_to(
        self, known: "_Known", segment: Segment, parameters: _Parameters, inputs: Sequence[Any] = ()
    ) -> Bound:
        """Raises RuntimeError if one of `inputs` is a parameter that has been put into the model since."""
        bound = known.bound.get(parameters)
        if bound is None:
            self._refuse_replaced(inputs)
            bound = known.bound[parameters] = self._bind(known, segment, parameters)
        return bound

    def _bind(self, known: "_Known", segment: Segment, parameters: _Parameters) -> Bound:
        pairs = zip(segment.gradient_order, parameters, strict=True)
        index_of = {position: index for position, index in pairs if index is not None}
        planned = self._runtime.parameters.gradients
        # One graph may run for parameters that tell autograd to cast their gradients to different dtypes.
        # Or of which one is an embedding's alone, and sent by rows, and the other is not.
        dtypes = tuple(None if i is None else (planned[i].dtype, planned[i].row) for i in parameters)
        pattern = (dtypes, parameters) if self._policy.planner.goes_by_names else (dtypes, None)
        programs = known.programs
        if pattern not in programs:
            gradients = [replace(planned[index], index=position) for position, index in index_of.items()]
            names = {position: self._runtime.parameters.names[index] for position, index in index_of.items()}
            programs[pattern] = self._new_program(segment, gradients, names)
        plan = programs[pattern].plan.renumbered(index_of)
        return Bound(programs[pattern], plan, plan.fingerprint, index_of)

    def _new_program(self, segment: Segment, gradients: Sequence[GradientSpec], names: Mapping[int, str]) -> Program:
        """`gradients` of the graph's inputs in the order in which backward completes them, and their `names`."""
        runtime = self._runtime
        work = segment.work_until(gradient.index for gradient in gradients)
        plan = self._policy.assign(gradients, names, work)
        hook = runtime.reduction.traced_hook
        return Program(
            plan,
            communicator=runtime.communicator,
            naive=self._naive,
            hooks=() if hook is None else [hook.program(bucket) for bucket in plan.buckets],
            backend=segment.backend,
            compiler_options=segment.compiler_options,
            captured=weakref.ref(segment),
            teller=self._teller,
        )

    def _refuse_replaced(self, inputs: Sequence[Any]) -> None:
        unknown = [
            value
            for value in inputs
            if isinstance(value, nn.Parameter) and value.requires_grad and id(value) not in self._index_of_parameter
        ]
        if not unknown:  # as for each of the thousand experts of a model, through all of which the rest would look
            return
        sparse = self._managed.sparse()
        names = {id(parameter): name for name, parameter in self._managed.parameters().items() if name not in sparse}
        for newcomer in self._runtime.reduction.newcomers().values():  # which this forward's end takes in
            names.pop(id(newcomer), None)
        for value in unknown:
            if id(value) in names:
                raise RuntimeError(
                    f"parameter {names[id(value)]} was replaced or unfrozen after compile_ddp: nothing would reduce "
                    "its gradient. Call unwrap() and wrap the model again."
                )


def _those_once(parameters: _Parameters) -> _Parameters:
    """None for a parameter that is several inputs, whose gradient is the sum of theirs: hooks reduce it.

    Dynamo gives a tied parameter one input, but runs a graph that it has captured of a model with two parameters, for
    another model of the same code whose two are tied: by default it guards no parameter against being another one.
    """
    times = Counter(parameters)
    return tuple(None if times[index] > 1 else index for index in parameters)


class _Known:
    """What is known of one segment."""

    def __init__(self) -> None:
        self.programs: dict[_Pattern, Program] = {}
        self.bound: dict[_Parameters, Bound] = {}
        self.bindings: dict[_Parameters, Binding] = {}  # those with all parameters of a call

    def forget(self) -> None:
        """The parameters have other indices."""
        self.bound, self.bindings = {}, {}


# ---- the calls that one wrapper has made -----------------------------------------------------------------------------

_is_over = operator.attrgetter("until_backward.is_over")


class SegmentCalls:
    """The calls of the forward under way, and all calls whose backward may still run."""

    def __init__(self) -> None:
        self._made: list[weakref.ref[SegmentCall]] = []
        self._of_forward: list[SegmentCall] = []
        self._segments: dict[Segment, Program | None] = {}
        self.stay_local = False  # whether graphs are called of which the wrapper reduces nothing

    @contextlib.contextmanager
    def apart(self, *, stay_local: bool) -> Iterator[None]:
        """Within this context a forward is run outside of any step: its calls are forgotten at the end."""
        before = self._made, self._of_forward, self._segments, self.stay_local
        self._made, self.stay_local = [], stay_local
        self.begin_forward()
        try:
            yield
        finally:
            self._made, self._of_forward, self._segments, self.stay_local = before

    def begin_forward(self) -> None:
        """The calls that follow belong to another forward. Those whose backward has run are forgotten.

        Users who keep their outputs and losses keep such calls alive. Inside of a backward it may still be asked of
        them.
        """
        alive = [*filter(None, map(operator.call, self._made))]  # in C, as below: in every step
        inside = torch_private.autograd.current_graph_task() != -1
        self._made = [*map(weakref.ref, alive if inside else itertools.filterfalse(_is_over, alive))]
        self._of_forward, self._segments = [], {}

    def note(self, segment: Segment, call: SegmentCall | None) -> None:
        """A segment was called; `call` is None where it reduces nothing of this wrapper."""
        self._segments[segment] = None if call is None else call.program
        if call is not None:
            self._of_forward.append(call)
            self._made.append(weakref.ref(call))

    def take_forward(self) -> Sequence[SegmentCall]:
        """The calls of the forward that has ended, which keeps them no longer."""
        calls, self._of_forward = self._of_forward, []
        return calls

    @property
    def follows_another(self) -> bool:
        """Whether the forward under way has called a segment that reduces something of this wrapper."""
        return any(program is not None for program in self._segments.values())

    @property
    def segments(self) -> Mapping[Segment, Program | None]:
        """What the latest forward has called, and the wrapper's program in it, if any."""
        return self._segments

    def live(self) -> Sequence[SegmentCall]:
        """The calls whose backward may still run, latest first."""
        return [*filter(None, map(operator.call, reversed(self._made)))]  # in C: asked some times in each step
