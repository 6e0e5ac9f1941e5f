"""A captured graph, compiled: its forward once, and its backward as often as somebody wants another one."""

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch.fx import GraphModule

from compiled_ddp import torch_private
from compiled_ddp.graph.capture import calls_torch_alone
from compiled_ddp.graph.reference import NoReference, ReferenceGraph, Rounded
from compiled_ddp.graph.telling import CapturedFor, Teller, compiling
from compiled_ddp.torch_private.aot import BackwardImplementation, TracedBackward
from compiled_ddp.torch_private.inductor import Rewriting

_log = logging.getLogger(__name__)

LOCAL = Rewriting()  # the backward as plain torch.compile has it, whose cache entry it shares


class HasTeller(Protocol):
    """A wrapper's call or program that needs a backward."""

    @property
    def teller(self) -> Teller: ...


class CompilerFailed(Exception):
    """The graph cannot be compiled. Has it as it was captured, and for a cause what the compiler has raised."""

    def __init__(self, graph_module: GraphModule) -> None:
        super().__init__()
        self.graph_module = graph_module


# [Note: one trace] All backwards of a graph are compiled from the one backward graph that AOTAutograd traced together
# with the forward: what that saves is what they take. To trace the captured graph again may save other tensors or
# sizes, as what is known of symbolic sizes has changed since. Where AOTAutograd had the graph in its cache there is no
# trace, and sizes are not symbolic; then it is traced again when a second backward is asked for.
class CompiledGraph:
    """A captured graph's forward and backwards. What the compiler raises for a backward is raised when it is needed."""

    def __init__(
        self,
        graph_module: GraphModule,
        example_inputs: Sequence[Any],
        *,
        backend: str,
        options: dict[str, Any],
        teller: Teller,
        first: Rewriting = LOCAL,
        work: Mapping[str, str] | None = None,
    ) -> None:
        """`first` is the backward that AOTAutograd compiles and caches by itself. `graph_module` is consumed.

        `work` is what the work on it depends on, for others who find in the cache what has come of it, if they do.

        `teller` is that of the wrapper for which Dynamo has captured the graph.

        Raises CompilerFailed.
        """
        self._compiler: dict[str, Any] = {"backend": backend, "options": options}
        self._captured_for = CapturedFor(teller)
        self._work = work
        self._first = self._rewriting = first
        self._kept = torch_private.dynamo.copy_captured(graph_module)
        self.calls_torch_alone = calls_torch_alone(self._kept.graph, example_inputs)
        self._fake_inputs = torch_private.dynamo.captured_inputs(graph_module)
        devices = {value.device.type for value in example_inputs if isinstance(value, torch.Tensor)}
        self._state = torch_private.dynamo.CaptureState(sorted(devices))
        self._lock = threading.RLock()
        self.compiled: dict[str, BackwardImplementation] = {}  # the backwards, by the identity of their rewriting
        self._traced: TracedBackward | None = None
        self._reference: ReferenceGraph | None = None
        self.is_dynamic = any(isinstance(value, torch.SymInt) for value in self._fake_inputs)
        self.inputs_when_traced_again: int | None = None
        self._spares_saved_tensors = False  # from the first backward with retain_graph on
        try:
            with self._captured_for.compiling_forward():
                compiled = self._compile(graph_module, example_inputs, cached=True)
        except Exception as error:
            if torch_private.dynamo.asks_for_another_capture(error):
                raise
            raise CompilerFailed(self._kept) from error
        self.forward = torch_private.dynamo.without_disable(compiled)  # Dynamo calls a segment where it is off
        # The autograd.Function whose node outputs hang on; None without gradients.
        self.function = torch_private.aot.compiled_function_of(self.forward)
        if self.function is not None:
            self._first_backward = torch_private.aot.backward_implementation(self.function)

    def _compile(self, graph_module: GraphModule, inputs: Sequence[Any], *, cached: bool) -> Callable[..., Any]:
        return torch_private.inductor.compile_captured(
            graph_module,
            inputs,
            **self._compiler,
            rewriting=lambda: self._rewriting,
            cached=cached,
        )

    def compile_first_ahead(self) -> None:
        """Compile the first backward before it is needed: it is then that AOTAutograd puts the graph into its cache."""
        if self.function is None or self.is_dynamic:
            return
        try:
            self.backward(self._first, None)
        except Exception as error:  # it is raised again where the backward is needed
            _log.debug("the first backward of a graph was not compiled ahead: %s", error)

    def backward(self, rewriting: Rewriting, needed_by: HasTeller | None) -> tuple[BackwardImplementation, bool]:
        """The backward after `rewriting`, compiled, and whether it has been compiled just now.

        It returns one entry for each of the graph's inputs, in their order, and what the rewriting has added.

        Whoever needs it has the teller; None is for that of the wrapper for which the graph was captured.
        """
        compiled = self.compiled.get(rewriting.identity)
        if compiled is not None:
            return compiled, False
        teller = None if needed_by is None else needed_by.teller
        again = self._spares_saved_tensors
        work = self._captured_for.compiling_backward(rewriting.name, teller, spares_saved_tensors=again)
        shared = None if self._work is None else {**self._work, "backward": f"{rewriting.identity} {again}"}
        turn = self._captured_for.in_turn(shared, rewriting.name)
        with self._lock, turn, work:
            is_first = rewriting.identity == self._first.identity and not self._spares_saved_tensors
            compiled, is_new = self._compile_first() if is_first else (self._compile_another(rewriting), True)
            compiled = self.compiled[rewriting.identity] = self._by_input(compiled)
        return compiled, is_new

    @compiling
    def _compile_first(self) -> tuple[BackwardImplementation, bool]:
        """AOTAutograd may have it in its cache, or have compiled it together with the forward."""
        with contextlib.suppress(LookupError):
            self._traced = TracedBackward(self._function, self._first_backward)  # before it is cached
        return self._first_backward, torch_private.aot.compile_backward_now(self._first_backward)

    @compiling
    def _compile_another(self, rewriting: Rewriting) -> BackwardImplementation:
        traced = self._trace()
        with self._compiling(rewriting):
            return traced.compile()

    def uncompiled_backward(self) -> BackwardImplementation:
        """The backward graph as it was traced, without any rewriting, run operator by operator."""
        with self._lock:
            return self._by_input(self._trace().uncompiled())

    def run_without_passes(self, saved_and_tangents: Sequence[Any]) -> tuple[Sequence[Rounded | None], float]:
        """The gradients of the graph's inputs, and the coarsest epsilon in them, with nothing of ours in the backward.

        Raises NoReference.
        """
        if self._reference is None:
            try:
                traced = torch_private.aot.traced_backward_graph(self._function, self._first_backward)
            except LookupError as error:
                raise NoReference(str(error)) from error
            graph_module, without_autocast = traced
            self._reference = ReferenceGraph(graph_module, without_autocast=without_autocast)
        if self.parts_of_gradients is not None:
            raise NoReference("some of its gradients are tensor subclasses")
        return self._reference.gradients(saved_and_tangents)

    def fingerprint_at(self, fingerprint: str, saved_and_tangents: Sequence[Any]) -> str:
        """The plan's fingerprint with the sizes of a dynamic graph: it differs where kernels may take other ways.

        Those of another order of magnitude, or that are a multiple of 16 where others are none.
        """
        sizes = [value for value in saved_and_tangents if type(value) is int]
        return f"{fingerprint} {[(size.bit_length(), size % 16 == 0) for size in sizes]}"

    @property
    def parts_of_gradients(self) -> torch_private.subclasses.PartsOfGradients | None:
        """Where the gradients are that the backward gives in parts; None in nearly all graphs."""
        return torch_private.subclasses.parts_of_gradients(self._function)

    def _by_input(self, backward: BackwardImplementation) -> BackwardImplementation:
        parts = self.parts_of_gradients
        return backward if parts is None else parts.together(backward)

    def replace_backward(self, backward: BackwardImplementation) -> None:
        """Let autograd call `backward`, which returns one entry for each of the graph's inputs, in their order."""
        parts = self.parts_of_gradients
        replacement = backward if parts is None else parts.apart(backward)
        torch_private.aot.replace_backward_implementation(self._function, replacement)

    def spare_saved_tensors(self) -> None:
        """From now on every backward may run several times after one forward.

        Inductor lets a backward overwrite the tensors saved for it (donated buffers). From the first backward with
        retain_graph on, backwards are compiled anew without that, on the rank that asks for it alone.
        """
        with self._lock:
            if not self._spares_saved_tensors and torch_private.aot.overwrites_saved_tensors(self._function):
                self._spares_saved_tensors = True
                self.compiled.clear()
                torch_private.aot.allow_several_backwards(self._function)

    def check_fits(self, saved_and_tangents: Sequence[Any]) -> None:
        """Raise RuntimeError if the graph, when it was traced again, saved another number of tensors for backward."""
        again = self.inputs_when_traced_again
        if again is not None and again != len(saved_and_tangents):
            raise RuntimeError(
                f"a graph from AOTAutograd's cache hands {len(saved_and_tangents)} tensors to its backward, and "
                f"{again} when it is traced again. Delete the cache, or set TORCHINDUCTOR_AUTOGRAD_CACHE=0."
            )

    def _trace(self) -> TracedBackward:
        """[Note: one trace]"""
        if self._traced is None:
            try:
                self._traced = TracedBackward(self._function, self._first_backward)
            except LookupError:
                self._traced = self._trace_again()
        if self._spares_saved_tensors:
            self._traced.spare_saved_tensors()
        return self._traced

    @property
    def _function(self) -> type[torch.autograd.Function]:
        assert self.function is not None, "a graph without gradients has no backward"
        return self.function

    def _trace_again(self) -> TracedBackward:
        with self._state.restored(), self._compiling(LOCAL):
            compiled = self._compile(torch_private.dynamo.copy_captured(self._kept), self._fake_inputs, cached=False)
        function = torch_private.aot.compiled_function_of(compiled)
        assert function is not None
        traced = TracedBackward(function, torch_private.aot.backward_implementation(function))
        self.inputs_when_traced_again = traced.inputs
        return traced

    @contextlib.contextmanager
    def _compiling(self, rewriting: Rewriting) -> Iterator[None]:
        before, self._rewriting = self._rewriting, rewriting
        try:
            yield
        finally:
            self._rewriting = before
