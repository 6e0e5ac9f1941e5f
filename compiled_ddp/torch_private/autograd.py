"""Autograd: which backward this thread runs, what it will reach, and what stands with its nodes."""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch.distributed import autograd as distributed_autograd
from torch.distributed import rpc
from torch.utils._python_dispatch import TorchDispatchMode

from compiled_ddp.torch_private.modules import own_hooks

# Id of the backward that this thread runs, -1 outside of one. A reentrant backward has an id of its own.
current_graph_task: Callable[[], int] = torch._C._current_graph_task_id


# The autograd node that this thread is evaluating, if any; inside a reentrant backward's callback, its outer node.
evaluating_node: Callable[[], Any | None] = torch._C._current_autograd_node


# [Note: the type of unnamed nodes] torch makes it when it first looks whether something is a node, behind a lock of
# C++. Making it may collect garbage, a finalizer in that may release the GIL, and another thread that then looks for
# the first time holds the GIL and waits for the lock: for ever. So it is made here, by one thread.
def _make_the_type_of_unnamed_nodes() -> None:
    with torch.inference_mode(False), torch.enable_grad():
        node: Any = torch.ones((), dtype=torch.float32, device="cpu", requires_grad=True).view(()).grad_fn
    with contextlib.suppress(RuntimeError):  # as no backward runs, which is said after the look
        torch._C._will_engine_execute_node(node)


_make_the_type_of_unnamed_nodes()


def backward_will_execute(node: Any) -> bool:
    """Whether the backward that this thread runs will evaluate, or has evaluated, `node`.

    The engine does not count a single root among the nodes it will execute; it is the node under evaluation then.
    """
    return node is torch._C._current_autograd_node() or torch._C._will_engine_execute_node(node)


def backward_will_accumulate(parameter: torch.Tensor) -> bool:
    """Whether the backward that this thread runs will bring `parameter` a gradient."""
    return fate_of_gradient(parameter) == "accumulated"


def fate_of_gradient(parameter: torch.Tensor) -> Literal["accumulated", "returned", "none"]:
    """What the backward that this thread runs does with `parameter`'s gradient; "none" if there will be none.

    The engine refuses to tell about a leaf whose gradient torch.autograd.grad returns.
    """
    if not parameter.requires_grad:
        return "none"
    before = torch.is_grad_enabled()
    torch._C._set_grad_enabled(True)  # `torch.enable_grad()` takes four calls
    try:
        view: Any = parameter.view_as(parameter)  # as `torch.autograd.graph.get_gradient_edge` does, in half the time
    finally:
        torch._C._set_grad_enabled(before)
    accumulator = view.grad_fn.next_functions[0][0]
    try:
        return "accumulated" if torch._C._will_engine_execute_node(accumulator) else "none"
    except RuntimeError as error:
        if "autograd.grad" not in str(error):
            raise
        return "returned"


def backward_accumulates_nothing() -> bool:
    """Whether the backward that this thread runs is a torch.autograd.grad, of whatever tensors. Walks the graph.

    A backward evaluates all that it can reach, down to a leaf that it accumulates into, or would if that had not been
    frozen since the forward.
    """
    accumulators = [node for node in _nodes_from([evaluating_node()]) if hasattr(node, "variable")]
    return bool(accumulators) and not any(map(_is_evaluated_to_accumulate, accumulators))


def _is_evaluated_to_accumulate(accumulator: Any) -> bool:
    if accumulator.variable.requires_grad:
        return backward_will_accumulate(accumulator.variable)
    evaluated: bool = torch._C._will_engine_execute_node(accumulator)  # torch.autograd.grad takes nothing frozen
    return evaluated


def _nodes_from(roots: Iterable[Any]) -> Iterator[Any]:
    open_nodes = [*roots]
    seen = set(open_nodes)
    while open_nodes:
        node = open_nodes.pop()
        if node is None:
            continue
        yield node
        following = {next_node for next_node, _ in node.next_functions} - seen
        seen |= following
        open_nodes += following


def in_distributed_backward() -> bool:
    """Whether the backward whose hook or node runs here is torch.distributed.autograd's.

    Its engine evaluates nodes in a thread of its own, where its context is not to be seen, and notes none of them.
    """
    return current_graph_task() != -1 and evaluating_node() is None


def in_reentrant_checkpoint() -> bool:
    """Whether the running backward has reached a checkpoint(..., use_reentrant=True), which runs its forward again."""
    node = evaluating_node()
    return node is not None and "CheckpointFunction" in node.name()


# Runs a callback when the backward that this thread runs, or its reentrant inner one, has evaluated all nodes.
call_at_end_of_backward: Callable[[Callable[[], None]], None] = torch.autograd.Variable._execution_engine.queue_callback


class FailedBackward:
    """A backward, or a torch.autograd.grad, that an exception has ended, as it was called."""

    def __init__(self, roots: Sequence[Any], inputs: Sequence[Any], *, accumulates: bool) -> None:
        """`inputs` are the leaves whose gradients were asked for; all that can be reached where there are none.

        A torch.autograd.grad does not accumulate.
        """
        self._roots, self._inputs, self.accumulates = roots, inputs, accumulates

    @functools.cached_property
    def leaves(self) -> set[int]:
        """The ids of the tensors that it was to bring a gradient. Walks the graph, whose edges outlast a backward."""
        if self._inputs:
            return {*map(id, self._inputs)}
        nodes = [root.grad_fn if isinstance(root, torch.Tensor) else root.node for root in self._roots]
        return {id(node.variable) for node in _nodes_from(nodes) if hasattr(node, "variable")}


def tell_of_failed_backwards(tell: Callable[[FailedBackward], None]) -> None:
    """Let `tell` be called in the thread that has called a backward which an exception ended, when it has.

    Whatever raised it, before any hook of this package or after. Autograd has no hook for that: what all backwards are
    handed to is one object, whose place another of its kind takes for the rest of the process.
    """
    kind: Any = type(torch.autograd.Variable._execution_engine)

    class TellingEngine(kind):
        def run_backward(self, roots: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
            try:
                return super().run_backward(roots, *args, **kwargs)
            except BaseException:
                if current_graph_task() == -1:  # not a reentrant one, inside of another
                    inputs = args[3] if len(args) > 3 else kwargs.get("inputs", ())
                    tell(FailedBackward(roots, inputs, accumulates=kwargs.get("accumulate_grad", True)))
                raise

    torch.autograd.Variable._execution_engine = TellingEngine()


# Whether the backward that this thread runs was asked for with retain_graph or create_graph.
keeps_graph: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph


def slots_of(node: Any, outputs: Sequence[Any]) -> list[int | None]:
    """Which of the gradients that come to `node` is that of each output; None where this cannot be told.

    An output that is a view of what the node has made hangs on it through the nodes of its views.
    """
    return [_slot_of(node, output) for output in outputs]


def _slot_of(node: Any, output: Any) -> int | None:
    if not isinstance(output, torch.Tensor) or output.grad_fn is None:
        return None
    above: Any = output.grad_fn
    slot = output.output_nr
    while above is not None and above is not node:
        if len(above.next_functions) != 1:
            return None
        ((above, slot),) = above.next_functions
    return None if above is None else slot


def register_own_prehook(node: Any, hook: Callable[..., object]) -> Any:
    """As `node.register_prehook`, in a step: not taken for a user's, for which a model would be looked through."""
    handle = node.register_prehook(hook)
    own_hooks[0] += 1
    return handle


def note_undefined(node: Any) -> None:
    """Let `undefined_at` tell, in each backward, which of the gradients that come to `node` are undefined.

    A node of a Python function is itself given zeros in their place.
    """
    undefined: list[int] = []

    def note(gradients: Sequence[torch.Tensor | None]) -> None:
        undefined[:] = [slot for slot, gradient in enumerate(gradients) if gradient is None]

    register_own_prehook(node, note)  # in each forward of a model with several outputs
    node._compiled_ddp_undefined = undefined


def undefined_at(node: Any) -> Sequence[int]:
    return getattr(node, "_compiled_ddp_undefined", ())


# The attribute by which an autograd node of a Python function keeps its call for the backward.
CALL = "_compiled_ddp_call"


DispatchMode = TorchDispatchMode


def dispatch_keys() -> tuple[Any, Any]:
    """How operators that this thread calls are dispatched now, for `dispatched_by`."""
    return torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()


def dispatched_by(keys: tuple[Any, Any]) -> contextlib.AbstractContextManager[object]:
    """Within this context operators are dispatched as where `dispatch_keys` was asked."""
    guard: contextlib.AbstractContextManager[object] = torch._C._ForceDispatchKeyGuard(*keys)
    return guard


# Within this context operators are dispatched as if there were no autograd, of which they ask nothing either. Where
# gradients are off that changes no result, and spares every operator a layer: `wait_tensor` one in Python.
below_autograd: Callable[[], contextlib.AbstractContextManager[object]] = torch._C._AutoDispatchBelowAutograd


# Whether torch.profiler, torch.autograd.profiler or its emit_nvtx records in this process.
profiler_is_on: Callable[[], bool] = functools.partial(getattr, torch.autograd.profiler, "_is_profiler_enabled")


# Whether this thread is inside of a transform of torch.func: grad, vmap, jvp or another.
transforms_are_active: Callable[[], bool] = torch._C._are_functorch_transforms_active


def not_reached(result: torch.Tensor, named: Mapping[str, torch.Tensor]) -> list[str]:
    """The names of those leaves that the derivative of `result` does not come to, within torch.func's grad too."""
    if result.grad_fn is None:
        return [*named]
    leaves = [getattr(node, "variable", None) for node in _nodes_from([result.grad_fn])]
    reached = {id(leaf) for leaf in leaves}
    return [name for name, tensor in named.items() if id(tensor) not in reached]


def without_transforms(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that transforms of torch.func have wrapped, once or several times; any other one as it is."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


_HAS_RPC = rpc.is_available()


# Whether torch.distributed.rpc runs in this process. In C: asked in every step.
rpc_is_set_up: Callable[[], bool] = rpc.api._is_current_rpc_agent_set if _HAS_RPC else bool


def in_distributed_autograd() -> bool:
    """Whether this thread is in a torch.distributed.autograd context, whose backward leaves .grad alone."""
    if not rpc_is_set_up():
        return False
    try:
        distributed_autograd._current_context()
    except RuntimeError:  # there is none
        return False
    return True
