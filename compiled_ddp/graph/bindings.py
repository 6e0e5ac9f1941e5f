"""The segments that a wrapper has run, bound to its parameters, and its calls of them."""

import contextlib
import itertools
import operator
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from compiled_ddp import torch_private
from compiled_ddp.graph.program import Binding, Bound, Program
from compiled_ddp.graph.segment import Segment, SegmentCall
from compiled_ddp.graph.telling import Teller
from compiled_ddp.model.managed import ManagedState
from compiled_ddp.plan import GradientSpec
from compiled_ddp.planning.assignment import BucketPolicy
from compiled_ddp.step.runtime import Runtime

# ---- bindings --------------------------------------------------------------------------------------------------------

# Which parameter each input that may get a gradient is, in the segment's gradient order; None for any other tensor.
_Parameters = tuple[int | None, ...]


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
        parameters, known = self._parameters(segment, inputs), self._known_of(segment)
        binding = known.bindings.get(parameters)
        if binding is None:
            binding = self._binding(known, segment, _those_once(parameters), inputs)
            known.bindings[parameters] = binding
        if not binding.whole.index_of:
            return None
        return SegmentCall(binding, may_leave_out=segment.may_leave_out, node=node, runtime=self._runtime)

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
        known = self._known.get(segment)
        if known is None:
            known = self._known[segment] = _Known()
        return known

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
        pattern = tuple(None if index is None else planned[index].dtype for index in parameters)
        programs = known.programs
        if pattern not in programs:
            gradients = [replace(planned[index], index=position) for position, index in index_of.items()]
            programs[pattern] = self._new_program(segment, gradients)
        plan = programs[pattern].plan.renumbered(index_of)
        return Bound(programs[pattern], plan, plan.fingerprint, index_of)

    def _new_program(self, segment: Segment, gradients: Sequence[GradientSpec]) -> Program:
        """`gradients` of the graph's inputs, in the order in which backward completes them."""
        runtime = self._runtime
        plan = self._policy.assign(gradients)
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
        # By which of the inputs are parameters, and the dtypes of their gradients.
        self.programs: dict[tuple[torch.dtype | None, ...], Program] = {}
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
