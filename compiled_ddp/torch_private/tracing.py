"""Tracing a function into a graph without running it."""

import contextlib
import inspect
import unittest.mock
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._ops import _len_torch_dispatch_stack_pre_dispatch
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot

from compiled_ddp.torch_private.autograd import without_transforms
from compiled_ddp.torch_private.tensors import without_autocast

_aten = torch.ops.aten


def trace_functional(function: Callable[..., Any], inputs: Sequence[torch.Tensor]) -> GraphModule:
    """The graph of `function`, without mutations, in the operators that Inductor takes. Nothing is computed."""
    from torch._inductor.decomposition import select_decomp_table
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    # What `function` closes over becomes a constant.
    with without_autocast(), torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True) as mode:
        functional = torch.func.functionalize(function, remove="mutations")
        traced = make_fx(functional, decomposition_table=select_decomp_table())
        graph_module: GraphModule = traced(*(mode.from_tensor(value) for value in inputs))
    graph_module.graph.eliminate_dead_code()
    return graph_module


def is_tracing() -> bool:
    """Whether operators are written into a graph of make_fx's, or run on tensors without values."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    return get_proxy_mode() is not None or any(
        isinstance(mode, FakeTensorMode) for mode in _get_current_dispatch_mode_stack()
    )


@contextlib.contextmanager
def below_transforms() -> Iterator[None]:
    """In here operators are traced, but not transformed."""
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    with temporarily_clear_interpreter_stack():
        yield


@contextlib.contextmanager
def recording_nodes() -> Iterator[list[torch.fx.Node]]:
    """Yields a list that has, in the end, the nodes that were traced in here, in order."""
    mode = get_proxy_mode()
    assert mode is not None, "nothing is traced"
    graph = mode.tracer.graph
    before = set(graph.nodes)
    found: list[torch.fx.Node] = []
    yield found
    found += [node for node in graph.nodes if node not in before]


def node_of(tensor: torch.Tensor) -> torch.fx.Node | None:
    """What computes a tensor in the current trace; None for one that the trace does not know."""
    mode = get_proxy_mode()
    assert mode is not None, "nothing is traced"
    traced = get_proxy_slot(without_transforms(tensor), mode.tracer, None)
    return None if traced is None else traced.proxy.node


_SAME_VALUES = frozenset(
    getattr(_aten, name)
    for name in (
        *("_to_copy", "alias", "clone", "detach", "lift_fresh_copy", "permute", "t", "transpose"),
        *("_unsafe_view", "reshape", "squeeze", "unsqueeze", "view"),
    )
)


def origin_of(tensor: torch.Tensor) -> "torch.fx.Node | torch.Tensor":
    """The node whose values this traced tensor has, cast or laid out in another way; itself if it is not traced."""
    node = node_of(tensor)
    while node is not None and getattr(node.target, "overloadpacket", None) in _SAME_VALUES:
        (node,) = node.all_input_nodes
    return tensor if node is None else node


def label_launch(awaited: torch.Tensor, key: str, value: object) -> None:
    """Write `value` into the meta of the collective whose result, or a view of it, this traced tensor is."""
    node = node_of(awaited)
    while node is not None and node.target is not torch.ops._c10d_functional.wait_tensor.default:
        (node,) = node.all_input_nodes
    assert node is not None, "not the result of a collective"
    (launch,) = node.all_input_nodes
    launch.meta["custom"] = launch.meta.get("custom", {}) | {key: value}


def labels_of(graph: torch.fx.Graph) -> list[tuple[str, str]]:
    """What nodes are labelled with (`meta["custom"]`), by name: no cache of a compiler's looks at it."""
    labelled = [(node.name, node.meta["custom"]) for node in graph.nodes if node.meta.get("custom")]
    return [(name, repr(sorted(label.items()))) for name, label in labelled]


_CPU = torch.device("cpu")


def default_device() -> torch.device:
    """As `torch.get_default_device`, which takes 15 us to find no mode that sets one; without any it is the CPU."""
    return torch.get_default_device() if torch._C._len_torch_function_stack() else _CPU


@contextlib.contextmanager
def outside_of_traces() -> Iterator[None]:
    """In here operators run at once, on tensors with values, whatever is traced or transformed around."""
    if not (
        torch._C._len_torch_function_stack()
        or torch._C._len_torch_dispatch_stack()
        or _len_torch_dispatch_stack_pre_dispatch()
        or torch._C._functorch.peek_interpreter_stack() is not None
    ):  # as in most calls: what is below takes 20 us
        with torch.no_grad():
            yield
        return
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
    from torch.overrides import _pop_mode_temporarily
    from torch.utils._python_dispatch import _disable_current_modes

    with contextlib.ExitStack() as stack:
        for _ in range(torch._C._len_torch_function_stack()):  # modes that a trace sees tensors by, or a user's
            stack.enter_context(_pop_mode_temporarily())
        stack.enter_context(temporarily_clear_interpreter_stack())
        stack.enter_context(_disable_current_modes())
        stack.enter_context(torch.no_grad())
        yield


def trace_without_mutations(
    function: Callable[..., Any], inputs: Sequence[torch.Tensor]
) -> tuple[GraphModule, list[torch.Tensor]]:
    """The graph of `function`, which takes tensors and returns a list of them, below all transforms of torch.func.

    What it closes over becomes further inputs, which are returned. Nothing is computed. Libraries are told that this is
    a compiler, as torch.export tells them: transformers looks at the values of a mask otherwise.
    """
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    told = unittest.mock.patch.object(torch.compiler, "_is_compiling_flag", True)
    # Anomaly mode looks for NaN in gradients, which have no values here.
    unseen = torch.autograd.set_detect_anomaly(torch.is_anomaly_enabled(), check_nan=False)
    zeros, fake = _traceable_zeros(), FakeTensorMode(allow_non_fake_inputs=True)
    with told, unseen, zeros, fake as mode, torch.no_grad():
        graph_module: GraphModule = make_fx(function)(*(mode.from_tensor(value) for value in inputs))
    for node in graph_module.graph.find_nodes(op="call_function", target=_aten._efficientzerotensor.default):
        node.target = _aten.zeros.default
    return graph_module, _lift_constants(graph_module)


@contextlib.contextmanager
def checkpointing_by(call: Callable[[Callable[..., Any], Sequence[Any], Mapping[str, Any]], Any]) -> Iterator[None]:
    """In here `torch.utils.checkpoint.checkpoint(function, *args)` is `call(function, args, kwargs)`.

    However that is reached: models keep the function, or a partial of it. It looks at what Dynamo is to leave alone.
    """
    from torch.utils import checkpoint

    def called(
        function: Callable[..., Any],
        *args: Any,
        use_reentrant: object = None,
        context_fn: object = None,
        determinism_check: object = None,
        debug: object = None,
        early_stop: object = None,
        preserve_rng_state: object = None,
        **kwargs: Any,
    ) -> Any:
        return call(function, args, kwargs)

    with unittest.mock.patch.object(inspect.unwrap(checkpoint.checkpoint), "__dynamo_disable", called, create=True):
        yield


def depends_on_values(error: BaseException) -> bool:
    """Whether this is what a trace raises where Python, or the shape of a result, depends on what is computed."""
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    kinds = DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode
    return isinstance(error, kinds)


@contextlib.contextmanager
def _traceable_zeros() -> Iterator[None]:
    """In here views of the zeros that forward-mode derivatives take for missing tangents are traced as any view.

    torch 2.13's own kernels make them by themselves, below traces: of a tensor without values a bare one on "meta".
    """
    zero = torch._C.DispatchKey.ZeroTensor
    below = torch._C._dispatch_keyset_full_after(zero)
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators", UserWarning)
        for view in (_aten.view.default, _aten._reshape_alias.default, _aten.as_strided.default):
            library.impl(view, _redispatched(view, below), zero.name, with_keyset=True, allow_override=True)
    try:
        yield
    finally:
        library._destroy()


def _redispatched(view: torch._ops.OpOverload, below: torch._C.DispatchKeySet) -> Callable[..., torch.Tensor]:
    def kernel(keys: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> torch.Tensor:
        viewed: torch.Tensor = view.redispatch(keys & below, *args, **kwargs)
        return viewed

    return kernel


def _lift_constants(graph_module: GraphModule) -> list[torch.Tensor]:
    graph = graph_module.graph
    first_other = next(node for node in graph.nodes if node.op != "placeholder")
    lifted: dict[str, torch.fx.Node] = {}
    constants: list[torch.Tensor] = []
    read = graph.find_nodes(op="get_attr")
    tensors = [node for node in read if isinstance(getattr(graph_module, node.target), torch.Tensor)]
    for node in tensors:
        if node.target not in lifted:
            with graph.inserting_before(first_other):
                lifted[node.target] = graph.placeholder(f"constant_{len(constants)}")
            constants.append(getattr(graph_module, node.target))
        node.replace_all_uses_with(lifted[node.target])
    for node in tensors:  # `first_other` may be one of them
        graph.erase_node(node)
    graph_module.recompile()
    return constants
