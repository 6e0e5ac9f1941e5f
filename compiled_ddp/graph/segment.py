"""A captured segment: what Dynamo calls in place of a graph, whichever wrapper runs it."""

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Sequence, Set
from typing import Any, Protocol

import torch
from torch.fx import GraphModule

from compiled_ddp import torch_private
from compiled_ddp.graph import compile_once
from compiled_ddp.graph.capture import gradient_order, outputs_reached, with_own_outputs
from compiled_ddp.graph.compiled_graph import LOCAL, CompiledGraph, HasTeller
from compiled_ddp.graph.program import Binding, Bound, Program, quoted, without
from compiled_ddp.graph.telling import Teller
from compiled_ddp.step.runtime import Runtime, UntilBackward
from compiled_ddp.users_code import warn_user

# [Note: whose segment] Dynamo runs one graph for all modules of a shape, of whichever wrapper. So a segment knows no
# wrapper: each has programs of its own in it (`Bindings`), and says in each call who it is.


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


class Calling:
    """Within this context segments that this thread runs are called by `caller`."""

    def __init__(self, caller: Caller) -> None:
        self._caller = caller

    def __enter__(self) -> None:
        self._before = getattr(_of_this_thread, "caller", None)
        _of_this_thread.caller = self._caller

    def __exit__(self, *_: object) -> None:
        _of_this_thread.caller = self._before


def caller_of_this_thread() -> Caller:
    """Dynamo runs what it has captured nowhere else than in `Calling`."""
    caller: Caller = _of_this_thread.caller
    return caller


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
        bound = self._binding.without(left_out)
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
        with_gradient = [
            position
            for position, value in enumerate(example_inputs)
            if isinstance(value, torch.Tensor) and value.requires_grad and (reached is None or reached[position])
        ]
        # The inputs that may get a gradient, in the order in which backward completes them.
        self.gradient_order = gradient_order(graph_module.graph, with_gradient) if torch.is_grad_enabled() else []
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
                caller_of_this_thread().segment_called(self, inputs, node)
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
        return self._gradients(node, saved_and_tangents, undefined)

    def _undefined(self, node: Any) -> frozenset[int]:
        """The inputs that the running backward brings no gradient: [Note: undefined gradients]"""
        slots = torch_private.autograd.undefined_at(node)
        if not slots or self._slots is None:
            return _NOTHING
        used = {number for number, slot in enumerate(self._slots) if slot not in slots}
        return frozenset(place for place, outputs in self._outputs_of.items() if used.isdisjoint(outputs))

    def _gradients(self, node: Any, saved_and_tangents: list[Any], undefined: frozenset[int]) -> Any:
        call: SegmentCall | None = torch_private.autograd.attached(node)
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
