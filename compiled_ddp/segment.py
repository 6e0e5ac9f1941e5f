"""A captured segment: one graph, its plan, and the variants of its backward."""

import contextlib
import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Literal, ParamSpec, TypeVar

import torch
from torch.fx import GraphModule

from compiled_ddp import torch_private
from compiled_ddp.backward import SynchronisedBackward
from compiled_ddp.graph_run import watched_graph
from compiled_ddp.passes.pipeline import Pipeline
from compiled_ddp.plan import BucketPlan
from compiled_ddp.runtime import Runtime, UntilBackward

# [Note: backward variants] A graph has one forward and up to three backwards, each compiled when it is first needed:
# local          no collective, no scaling: what plain torch.compile produces, and shares its cache entry
# synchronised   the passes' program
# folding        the same, with gradients of earlier local backwards as further inputs
# Which one runs is decided when the backward starts.
# Inductor lets a backward overwrite the tensors saved for it (donated buffers). From the first backward with
# retain_graph on, the variants are compiled anew without that, on the rank that asks for it alone.
Variant = Literal["local", "synchronised", "folding"]
VARIANTS: tuple[Variant, ...] = ("local", "synchronised", "folding")

_serial_numbers = itertools.count()


P = ParamSpec("P")
T = TypeVar("T")


def weakly(method: Callable[P, T]) -> Callable[P, T]:
    """A bound method, for what may outlive its object without keeping that alive."""
    reference, method_name = weakref.WeakMethod(method), getattr(method, "__qualname__", "a method")

    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        alive = reference()
        assert alive is not None, f"{method_name} of an object that is gone"
        return alive(*args, **kwargs)

    return call


class SegmentCall:
    """One call of a segment in a forward: the graph, bound to the parameters that it was called with."""

    def __init__(
        self,
        segment: "Segment",
        plan: BucketPlan,
        fingerprint: str,
        *,
        index_of: dict[int, int],
        node: Any,
        synchronise: bool,
    ) -> None:
        self.segment = segment
        self.plan, self.fingerprint = plan, fingerprint  # over parameters
        self.synchronise = synchronise
        self.index_of = index_of  # graph input -> parameter
        self.serial = next(_serial_numbers)
        self.until_backward = UntilBackward(segment.runtime)
        self._node = weakref.ref(node)

    def will_run(self) -> bool:
        node = self._node()
        return node is not None and torch_private.backward_will_execute(node)

    def when_reached(self, do: Callable[[Any], None]) -> None:
        """Let `do` run before a backward evaluates the call's node, even before its saved tensors are looked at."""
        node = self._node()
        if node is not None:
            node.register_prehook(do)


class Segment:
    """What Dynamo calls in place of a captured graph, and keeps for as long as the model's class.

    `plan` is over graph inputs. Which parameters these are is read from the real inputs at every call: one graph
    serves every module of the same shape.
    """

    def __init__(
        self,
        graph_module: GraphModule,
        example_inputs: Sequence[Any],
        plan: BucketPlan,
        runtime: Runtime,
        *,
        index_of_parameter: dict[int, int],
        leaves_alone: Callable[[object], bool],
        backend: str,
        compiler_options: dict[str, Any],
        naive: bool,
        called: Callable[[SegmentCall], None],
    ) -> None:
        """`index_of_parameter` maps id(parameter) to its index; `called` is told of every call with gradients.

        `leaves_alone` tells of a parameter whether it is the model's, but not the wrapper's to reduce. Neither these
        two nor `runtime` are kept alive.
        """
        self.plan = plan
        self._weak_runtime = weakref.ref(runtime)
        self._index_of_parameter, self._leaves_alone = index_of_parameter, weakly(leaves_alone)
        self._backend, self._compiler_options, self._naive = backend, compiler_options, naive
        self._in_cuda_graphs = backend == "inductor" and any(
            torch_private.uses_cuda_graphs(compiler_options, bucket.device) for bucket in plan.buckets
        )
        self._called = weakly(called)
        self._graph_module = torch_private.copy_captured(graph_module)
        self._fake_inputs = torch_private.captured_inputs(graph_module)
        self._state = torch_private.CaptureState(sorted({bucket.device.type for bucket in plan.buckets}))
        self._bound: dict[tuple[int, ...], tuple[BucketPlan, str]] = {}
        self._backwards: dict[Variant, torch_private.BackwardImplementation] = {}
        self._function: type[torch.autograd.Function] | None = None  # whose node the outputs hang on
        self._spares_saved_tensors = False  # from the first backward with retain_graph on
        self._lent_buckets = self._pipeline("synchronised").lent_buckets
        self._forward = self._compile("synchronised", graph_module, example_inputs)

    @property
    def runtime(self) -> Runtime:
        runtime = self._weak_runtime()
        assert runtime is not None, "a graph runs for a wrapper that is gone"
        return runtime

    # ---- compiling ---------------------------------------------------------------------------------------------------

    def _pipeline(self, variant: Variant) -> Pipeline:
        name = self.runtime.communicator.group_name
        hook = self.runtime.bucket_hook
        hooks = () if hook is None else tuple(hook.program(bucket) for bucket in self.plan.buckets)
        return Pipeline(
            self.plan,
            name,
            fold=variant == "folding",
            naive=self._naive,
            hooks=hooks,
            in_place=self._backend == "aot_eager",
            replayed=self._in_cuda_graphs,
        )

    def _compile(self, variant: Variant, graph_module: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compile one variant, register its backward, and return its forward."""
        pipeline = None if variant == "local" else self._pipeline(variant)

        def rewrite(backward: GraphModule, backward_inputs: Sequence[Any]) -> Sequence[Any]:
            assert pipeline is not None
            positions = torch_private.gradient_output_positions(backward.graph)
            pipeline.run(backward.graph, output_positions=positions)
            backward.recompile()
            placeholders = backward.graph.find_nodes(op="placeholder")
            return [*backward_inputs, *(node.meta["val"] for node in placeholders[len(backward_inputs) :])]

        identity = pipeline.cache_identity if pipeline else ""
        compiled = torch_private.compile_captured(
            graph_module,
            inputs,
            backend=self._backend,
            rewrite_backward=rewrite if pipeline else None,
            cache_identity=identity + (torch_private.SPARING if self._spares_saved_tensors else ""),
            options=self._compiler_options,
        )
        function = torch_private.compiled_function_of(compiled)
        if function is not None:  # None without gradients: an inference graph has no backward
            self._backwards[variant] = torch_private.backward_implementation(function)
            if self._spares_saved_tensors:
                torch_private.allow_several_backwards(function)
            if self._function is None:
                self._function = function
                torch_private.replace_backward_implementation(function, self._run_backward)
        return compiled

    def _backward(self, variant: Variant) -> torch_private.BackwardImplementation:
        if variant not in self._backwards:
            with contextlib.ExitStack() as stack:
                stack.enter_context(self._state.restored())
                if self._spares_saved_tensors:
                    stack.enter_context(torch_private.sparing_saved_tensors())
                self._compile(variant, torch_private.copy_captured(self._graph_module), self._fake_inputs)
        return self._backwards[variant]

    def compile_ahead(self, variant: Variant) -> bool:
        """Compile a variant before it is needed; returns False if it was compiled already."""
        is_new = variant not in self._backwards
        return torch_private.compile_backward_now(self._backward(variant)) or is_new

    def _spare_saved_tensors(self) -> None:
        """Compile every variant anew, when next needed, so that it may run several times after one forward."""
        assert self._function is not None
        if not self._spares_saved_tensors and torch_private.overwrites_saved_tensors(self._function):
            self._spares_saved_tensors = True
            self._backwards.clear()

    # ---- running -----------------------------------------------------------------------------------------------------

    def __call__(self, *inputs: Any) -> Any:
        outputs = self._forward(*inputs)
        if self._function is not None and torch.is_grad_enabled():
            node = torch_private.node_of(self._function, outputs)
            if node is not None:
                call = self._bind(inputs, node)
                if call is not None:
                    torch_private.attach(node, call)
                    self._called(call)
        return outputs

    def _bind(self, inputs: Sequence[Any], node: Any) -> SegmentCall | None:
        """The call's plan over parameters; None where some of them are left alone: its backward runs locally.

        Dynamo runs one graph for all modules of a shape, also for one with such parameters; hooks reduce its others.

        Raises RuntimeError if an input that was a parameter of the wrapper at capture is another tensor now.
        """
        index_of = {}
        for position in self.plan.indices:
            index = self._index_of_parameter.get(id(inputs[position]))
            if index is None and self._leaves_alone(inputs[position]):
                return None
            if index is None:
                raise RuntimeError(
                    f"a parameter of shape {tuple(inputs[position].shape)} is not one of those that were wrapped: it "
                    "was replaced after compile_ddp. Call unwrap() and wrap the model again."
                )
            index_of[position] = index
        key = tuple(index_of.values())
        if key not in self._bound:
            plan = self.plan.renumbered(index_of)
            self._bound[key] = plan, plan.fingerprint
        return SegmentCall(self, *self._bound[key], index_of=index_of, node=node, synchronise=self.runtime.synchronise)

    def _run_backward(self, node: Any, saved_and_tangents: list[Any]) -> Any:
        """The backward of every variant's forward, between AOTAutograd's prologue and epilogue."""
        if torch_private.keeps_graph():
            self._spare_saved_tensors()
        call: SegmentCall | None = torch_private.attached(node)
        runtime = call.until_backward.take() if call is not None else None
        if call is None or runtime is None:
            return self._backward("local")(node, saved_and_tangents)
        with runtime.launching_alone():
            claimed = runtime.claim(call)
            if claimed is not None:
                return self._run_synchronised(runtime, call, *claimed, node, saved_and_tangents)
        return self._backward("local")(node, saved_and_tangents)

    def _run_synchronised(
        self,
        runtime: Runtime,
        call: SegmentCall,
        backward: SynchronisedBackward,
        section: int,
        node: Any,
        saved_and_tangents: list[Any],
    ) -> Any:
        try:
            pending = backward.take_pending(call.plan)
            implementation = self._backward("folding" if pending else "synchronised")
            if runtime.proof.meets_new_graph(implementation, call.fingerprint, call.plan.indices):
                backward.message.verify = True
            flat_buffers = backward.lend_buffers(section, self._lent_buckets)
            state = backward.hook_state(section)
            saved_and_tangents += [backward.rider_values(call.plan), *pending, *state, *flat_buffers]
        except BaseException:
            backward.graph_broke(call.plan)
            backward.give_back(section)  # nothing has been launched: others get zeros
            raise
        try:
            gradients, riders, new_state = self._run_graph(
                runtime, call, implementation, node, saved_and_tangents, len(state)
            )
            backward.keep_hook_state(section, new_state)
            positions = call.index_of
            reduced = ((positions[i], gradients[i]) for i in positions if gradients[i] is not None)
            backward.segment_ran(section, riders, reduced)
        except BaseException:
            backward.graph_broke(call.plan)
            raise
        return tuple(gradients)

    def _run_graph(
        self,
        runtime: Runtime,
        call: SegmentCall,
        implementation: torch_private.BackwardImplementation,
        node: Any,
        inputs: list[Any],
        state_tensors: int,
    ) -> tuple[list[Any], torch.Tensor, list[torch.Tensor]]:
        """The gradients of the graph's inputs, the reduced riders, and the new state of a communication hook."""
        watching = runtime.proof.watching(call.plan, sees_values=not self._in_cuda_graphs)
        with watched_graph(runtime.communicator), watching:
            *gradients, riders = implementation(node, inputs)
        new_state: list[torch.Tensor] = []
        if state_tensors:
            gradients, new_state = gradients[:-state_tensors], gradients[-state_tensors:]
            if self._in_cuda_graphs:  # the next replay writes over what this one returned
                new_state = [tensor.clone() for tensor in new_state]
        for bucket in self.plan.buckets:
            if len(bucket.gradients) == 1:  # then it may be the lent flat buffer itself
                (alone,) = bucket.indices
                gradients[alone] = gradients[alone].detach()  # autograd would copy what anyone else holds
        return gradients, riders, new_state
