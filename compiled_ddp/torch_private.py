"""Every use of a private torch API, in one place, each with the versions it was checked on.

All tests ran on torch 2.11.0, 2.12.1, 2.13.0 and 2.14.1 (docs/limits.md, "Versions of torch"). What takes a GPU did not
run; there the sources were compared. On another version of `SUPPORTED_TORCH`, a name that is missing is an
AttributeError or ImportError from this module. What stands in for something of torch's, or goes before it, is called
with what torch gives: an argument that it does not know is passed on.

| name | used for |
|---|---|
| `torch._C`: `_current_graph_task_id`, `_current_autograd_node` | where a backward stands |
| `torch._C._will_engine_execute_node` | the same |
| `torch.autograd.Variable._execution_engine` | the end of a backward |
| `torch._C._storage_Use_Count` | whether anybody else holds a flat buffer |
| `torch._C.Future` | what a communication hook may return |
| `Tensor._backward_hooks`, `Tensor._post_accumulate_grad_hooks` | what users have registered |
| `torch._inductor.compile_fx` and its `inner_compile` | rewriting the backward graph before Inductor |
| `torch._inductor.config`, `torch._inductor.list_mode_options` | options, communication passes, use of CUDA graphs |
| `torch._inductor.custom_graph_pass` | an identity in the caches' keys |
| `torch._dynamo.backends.common.aot_autograd`, `torch._dynamo.backends.debugging.boxed_nop` | `backend="aot_eager"` |
| `torch._functorch._aot_autograd.descriptors`, in an output's `meta["desc"]` | which output is whose gradient |
| `CompiledFunction._backward_impl` of AOTAutograd | choosing a backward when it starts |
| `get_or_compile` of the backward's compiler, in the closure of `_backward_impl` | compiling a backward ahead |
| `torch._C._autograd._get_current_graph_task_keep_graph` | several backwards of one forward |
| `CompiledFunction.metadata.bw_donated_idxs` | the same |
| `torch._functorch._aot_autograd.runtime_wrappers.AutogradLazyBackwardCompileInfo` | the traced backward graph |
| `CompiledFunction._lazy_backward_info`, `bw_compiler` and `disable_amp` in that closure | compiling it again |
| `torch._functorch._aot_autograd.utils.call_func_at_runtime_with_args` | running what that makes |
| `torch._functorch.config` (`enable_autograd_cache`) | a graph that is not in AOTAutograd's cache |
| `torch._guards`, `GraphModule._param_name_to_source`, `Node._dynamo_source` | compiling a captured graph again |
| `torch._dynamo.symbolic_convert.TensorifyState` | the same, where floats are dynamic |
| `torch._inductor.decomposition`, `torch._subclasses.FakeTensorMode` | tracing a communication hook |
| `torch._C._DisableAutocast` | tracing and running one in the dtypes that it names |
| `UntypedStorage._cdata` | which results of a communication hook share memory with its arguments |
| `torch._inductor`: `ir`, `lowering`, `virtualized` | producing gradients inside their bucket |
| `torch._C`: `_get_mkldnn_enabled`, `_set_mkldnn_enabled` | capturing recurrent layers |
| `torch._dynamo.config` | capturing a model as it is |
| `torch._dynamo.optimize`, `torch._dynamo.trace_rules.check` | captures that several wrappers share |
| `torch._dynamo.exc.RestartAnalysis`, `torch._dynamo.exc.SkipFrame` | what a backend hands on to Dynamo |
| the warning `torch._dynamo hit config.…` of the logger `torch._dynamo.convert_frame` | naming a recompile limit |
| `torch._ops.HigherOrderOperator`, `AccumulateGrad.variable` | which inputs reach which outputs of a captured graph |
| `Node.meta["example_value"]`, with the autograd graph of Dynamo's fake tensors | the same |
| `torch._dynamo.OptimizedModule`, `Module._compiled_call_impl` | models that are compiled already |
| `torch.distributed.distributed_c10d`: `_new_process_group_helper`, `_world` | a communicator's name, on every rank |
| `torch._C._distributed_c10d`: `_register_process_group`, `_unregister_process_group` | a name that all graphs share |
| `torch.distributed.distributed_c10d`: `_get_default_group`, `_get_default_store` | the same |
| `torch.distributed.distributed_c10d._get_split_source`, `ProcessGroup.bound_device_id` | one of some ranks alone |
| `ProcessGroupGloo.options`, `distributed_c10d.ProcessGroupGloo` | how many collectives gloo runs at once |
| `torch.distributed._broadcast_coalesced` | parameters and buffers |
| `ProcessGroup._get_backend` | a group's timeout, and which kinds of devices it is for |
| `ProcessGroup._device_types`, `Backend._get_sequence_number_for_group` | how many collectives a rank has launched |
| `Joinable._join_config` | whether a join is under way |
| `torch.distributed.utils._to_kwargs` | moving inputs to the model's GPU |
| `torch.autograd.profiler._is_profiler_enabled` | whether launches and waits need their names |
| `torch.distributed.rpc.api._is_current_rpc_agent_set` | refusing distributed autograd |
| `torch.distributed.autograd._current_context` | the same |
| `Module._ddp_params_and_buffers_to_ignore` | which parameters and buffers DDP leaves alone |
| `Tensor._in_backward_optimizers` | refusing optimizers that step in the backward |
| `torch.nn.parallel.DistributedDataParallel._active_ddp_module` | refusing it around a wrapper |
| `torch.nn.utils.stateless._functional_call` | parameters that others stand in for during a call |
| `torch._C._functorch`, `torch._C._are_functorch_transforms_active` | a forward inside of torch.func's transforms |
| `Tensor._version` | whether somebody has changed a gradient in place |
| `torch.utils._python_dispatch.TorchDispatchMode` | looking at a graph's collectives while it runs |
| `torch._C._dynamo.eval_frame.get_eval_frame_callback` | whether Dynamo looks at what runs here |
| `torch._dynamo.trace_rules.add` | keeping this package out of all traces |
| `torch._dynamo.config.trace_autograd_ops` | refusing a backward that Dynamo would drop |
| `torch._dynamo.compiled_autograd`, `CompiledFunction._compiled_autograd_key` | refusing compiled autograd |
| `torch._dynamo.symbolic_convert` | tests: what Dynamo traces |
| `torch._dynamo.utils`, `torch._inductor.utils` | tests: counters, generated code |

Where versions differ: gloo's constructor has an argument more from 2.14 on, `compile_fx_inner` from 2.12 on. Inductor
takes several custom passes from 2.13 on, and passes that are told of inference from 2.12 on. In 2.11 `_backward_impl`
itself compiles, and Dynamo does not look at a parameter again that is in its old place. Its backward's compiler is in
`aot_config` up to 2.12. Captures are told apart (`isolate_recompiles`) from 2.13 on.
"""

import contextlib
import copy
import functools
import hashlib
import inspect
import itertools
import linecache
import logging
import sys
import types
import unittest.mock
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, NoReturn, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import autograd as distributed_autograd
from torch.distributed import distributed_c10d, rpc
from torch.distributed.algorithms.join import Joinable
from torch.distributed.utils import _to_kwargs
from torch.fx import GraphModule
from torch.nn.utils import stateless
from torch.utils._python_dispatch import TorchDispatchMode

# Rewrites a backward graph in place, given its (fake) inputs; returns them with those it appended.
RewriteBackward = Callable[[GraphModule, Sequence[Any]], Sequence[Any]]

SUPPORTED_TORCH = (2, 11), (2, 15)  # from, below


def check_torch_version(version: str = torch.__version__) -> None:
    """Raise RuntimeError unless `version` is one that the names in this module exist in."""
    (lowest, beyond), found = SUPPORTED_TORCH, _minor_version(version)
    if not lowest <= found < beyond:
        lowest_name, beyond_name = (".".join(map(str, bound)) for bound in (lowest, beyond))
        newer = ", or look for a newer compiled_ddp" if found >= beyond else ""
        raise RuntimeError(
            f"compiled_ddp supports torch >= {lowest_name} and < {beyond_name}, found {version}. Install a supported "
            f"torch, pip install 'torch>={lowest_name},<{beyond_name}'{newer}: it uses private parts of torch, which "
            "other versions may have changed."
        )


def _minor_version(version: str = torch.__version__) -> tuple[int, int]:
    major, minor = (int(part) for part in version.split(".")[:2])
    return major, minor


# ---- inside of the user's torch.compile ------------------------------------------------------------------------------

_WHY_UNTRACED = (
    "compiled_ddp looks at the backward that autograd runs and talks to other ranks, which no graph can hold. Compile "
    "the step without fullgraph=True: its graph ends before the wrapper and begins again behind it, and compile_ddp "
    "makes graphs of the model by itself (compile_ddp(model, fullgraph=True) if they are to be one)"
)

P = ParamSpec("P")
T = TypeVar("T")

_dynamo_of_this_thread = torch._C._dynamo.eval_frame.get_eval_frame_callback  # None where it does not trace


def leave_out_of_traces(*packages: str) -> None:
    """Let Dynamo trace no frame of these packages, whoever has compiled what has led there."""
    for package in packages:
        torch._dynamo.trace_rules.add(package)


def untraced(function: Callable[P, T]) -> Callable[P, T]:
    """`function`, where Dynamo traces nothing of what it calls either: for all that torch, or compiled code, may call.

    [Note: never traced] Dynamo looks at every frame that runs below compiled code, also at the hooks that autograd
    calls in a backward below it. Those of this package it leaves alone (`leave_out_of_traces`), but not what they call:
    torch's own library, others, users' hooks. So what is called from outside of the package switches Dynamo off, if it
    is on.
    """
    switched_off: Callable[P, T] = torch.compiler.disable(function, reason=_WHY_UNTRACED)

    @functools.wraps(switched_off)  # with the marks by which Dynamo, where it traces a call, knows what is disabled
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if _dynamo_of_this_thread() is None:
            return function(*args, **kwargs)  # in a quarter of a microsecond more, where switching takes 1.3
        return switched_off(*args, **kwargs)

    return call


def untraced_forward(forward: Callable[P, T]) -> Callable[P, T]:
    """`untraced`, of a wrapper's forward. Raises RuntimeError where Dynamo would drop the backward that follows it.

    That is so with `torch._dynamo.config.trace_autograd_ops` (torch 2.11 to 2.14): of a loss.backward() it makes the
    gradients of those leaves that its graph holds. Where there is none, as the graph has begun behind the wrapper, it
    makes nothing at all.
    """
    without_dynamo = untraced(forward)

    @functools.wraps(without_dynamo)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        traced = _dynamo_of_this_thread() is not None
        if traced and torch._dynamo.config.trace_autograd_ops and torch.is_grad_enabled():
            raise RuntimeError(
                "torch.compile is around this forward with torch._dynamo.config.trace_autograd_ops, with which a "
                "loss.backward() in there would compute nothing. Set it to False, or compile what is around the "
                "wrapper only."
            )
        return without_dynamo(*args, **kwargs)

    return call


COMPILED_AUTOGRAD = (
    "compiled autograd (torch._dynamo.config.compiled_autograd) runs this backward. It takes backward graphs apart and "
    "calls hooks at other times than autograd does, so the gradients would not be averaged: turn it off around the "
    "backwards of compile_ddp and EagerDDP."
)


def in_compiled_autograd() -> bool:
    """Whether what runs here has been called by compiled autograd, in place of a node or hook."""
    return torch._dynamo.compiled_autograd.in_compiled_autograd_region


# ---- where a backward stands -----------------------------------------------------------------------------------------


def current_graph_task() -> int:
    """Id of the backward that this thread runs, -1 outside of one. A reentrant backward has an id of its own."""
    return torch._C._current_graph_task_id()


def evaluating_node() -> Any | None:
    """The autograd node that this thread is evaluating; inside a reentrant backward's callback, its outer node."""
    return torch._C._current_autograd_node()


def backward_will_execute(node: Any) -> bool:
    """Whether the backward that this thread runs will evaluate, or has evaluated, `node`.

    The engine does not count a single root among the nodes it will execute; it is the node under evaluation then.
    """
    return node is evaluating_node() or torch._C._will_engine_execute_node(node)


def backward_will_accumulate(parameter: torch.Tensor) -> bool:
    """Whether the backward that this thread runs will bring `parameter` a gradient."""
    return fate_of_gradient(parameter) == "accumulated"


def fate_of_gradient(parameter: torch.Tensor) -> Literal["accumulated", "returned", "none"]:
    """What the backward that this thread runs does with `parameter`'s gradient; "none" if there will be none.

    The engine refuses to tell about a leaf whose gradient torch.autograd.grad returns.
    """
    if not parameter.requires_grad:
        return "none"
    accumulator = torch.autograd.graph.get_gradient_edge(parameter).node
    try:
        return "accumulated" if torch._C._will_engine_execute_node(accumulator) else "none"
    except RuntimeError as error:
        if "autograd.grad" not in str(error):
            raise
        return "returned"


def backward_accumulates_nothing() -> bool:
    """Whether the backward that this thread runs is a torch.autograd.grad, of whatever tensors. Walks the graph.

    A backward evaluates all that it can reach, down to a leaf that it accumulates into.
    """
    leaves = [node.variable for node in _nodes_from_here() if hasattr(node, "variable")]  # AccumulateGrad
    return bool(leaves) and not any(backward_will_accumulate(leaf) for leaf in leaves)


def _nodes_from_here() -> Iterator[Any]:
    open_nodes = [evaluating_node()]
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


def call_at_end_of_backward(callback: Callable[[], None]) -> None:
    """Run `callback` when the backward that this thread runs, or its reentrant inner one, has evaluated all nodes."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


# ---- compiling a captured graph --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rewriting:
    """How a backward graph is changed before it is compiled.

    `identity` enters the caches' keys: it must change whenever `rewrite` would rewrite otherwise, or the backward is
    compiled otherwise than by plain torch.compile.
    """

    identity: str = ""
    rewrite: RewriteBackward | None = None


def compile_captured(
    graph_module: GraphModule,
    example_inputs: Sequence[Any],
    *,
    backend: str,
    options: Mapping[str, Any],
    rewriting: Callable[[], Rewriting],
    cached: bool,
) -> Callable[..., Any]:
    """Compile a graph captured by Dynamo. `graph_module` is consumed.

    `rewriting` is asked whenever a backward is compiled, and now, for what the first one will be. The forward graph is
    compiled exactly as plain torch.compile does, and shares its cache entry. Without `cached`, or where sizes are
    symbolic, AOTAutograd traces the graph even if it has an entry for it.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(_recurrent_layers_in_ops(graph_module))
        # An entry has no graph to compile other backwards from.
        if not cached or any(map(_is_symbolic, captured_inputs(graph_module))):
            stack.enter_context(torch._functorch.config.patch(enable_autograd_cache=False))
        if backend == "aot_eager":
            return _compile_aot_eager(graph_module, example_inputs, rewriting)
        return _compile_inductor(graph_module, example_inputs, rewriting, dict(options))


def _is_symbolic(value: object) -> bool:
    sizes = value.shape if isinstance(value, torch.Tensor) else (value,)
    return any(isinstance(size, torch.SymInt | torch.SymFloat | torch.SymBool) for size in sizes)


def asks_for_another_capture(error: BaseException) -> bool:
    """Whether Dynamo is to act on what a backend has raised, as nothing has failed."""
    return isinstance(error, torch._dynamo.exc.RestartAnalysis | torch._dynamo.exc.SkipFrame)


_RECURRENT = (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)


@contextlib.contextmanager
def _recurrent_layers_in_ops(graph_module: GraphModule) -> Iterator[None]:
    """Trace nn.LSTM and its kin step by step: AOTAutograd cannot partition oneDNN's fused layers (torch 2.13)."""
    if not any(node.target in _RECURRENT for node in graph_module.graph.nodes):
        yield
        return
    enabled = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(enabled)


def _compile_aot_eager(
    graph_module: GraphModule, example_inputs: Sequence[Any], rewriting: Callable[[], Rewriting]
) -> Callable[..., Any]:
    from functorch.compile import min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.backends.debugging import boxed_nop

    def compile_backward(backward: GraphModule, inputs: Sequence[Any], *args: Any, **kwargs: Any) -> Callable[..., Any]:
        rewrite = rewriting().rewrite
        if rewrite is not None:
            inputs = rewrite(backward, inputs)
        return boxed_nop(backward, list(inputs), *args, **kwargs)

    compiler = aot_autograd(
        fw_compiler=boxed_nop,
        bw_compiler=compile_backward,
        partition_fn=min_cut_rematerialization_partition,
        keep_inference_input_mutations=True,
    )
    return compiler(graph_module, example_inputs)


_OVERLAP = {
    "reorder_for_compute_comm_overlap": True,
    "reorder_for_compute_comm_overlap_passes": ["sink_waits", "raise_comms"],
}
# All ranks gather a hash of a graph with collectives in it, in the middle of compiling, and wait there for a rank that
# has it in its cache, or whose compiler fails. Torch 2.12 does so by default, 2.11 never.
_COMPARES_GRAPHS = "aten_distributed_optimizations.spmd_check"


def _compile_inductor(
    graph_module: GraphModule,
    example_inputs: Sequence[Any],
    rewriting: Callable[[], Rewriting],
    options: dict[str, Any],
) -> Callable[..., Any]:
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    users_pass = options.get("post_grad_custom_pre_pass", config.post_grad_custom_pre_pass)
    users_own = {"post_grad_custom_pre_pass": users_pass}

    def identified(identity: str) -> dict[str, Any]:
        return {"post_grad_custom_pre_pass": _with_cache_identity(users_pass, identity)} if identity else users_own

    compares_graphs = _COMPARES_GRAPHS in config.get_config_copy()
    reducing = _OVERLAP | ({_COMPARES_GRAPHS: False} if compares_graphs else {})

    def compile_inner(inner: GraphModule, inputs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        now = rewriting() if kwargs.get("is_backward") else Rewriting()
        if now.rewrite is not None:
            inputs = now.rewrite(inner, inputs)
        with config.patch(identified(now.identity) | (reducing if now.rewrite is not None else {})):
            return compile_fx_inner(inner, inputs, *args, **kwargs)

    _register_pack_lowering()
    first = rewriting().identity
    patches = options | identified(first) if first else options
    return _callable(compile_fx(graph_module, example_inputs, inner_compile=compile_inner, config_patches=patches))


def _with_cache_identity(users_pass: Any, cache_identity: str) -> Any:
    """The user's `post_grad_custom_pre_pass`, and with it our identity in the keys of the caches.

    Up to torch 2.12 it is one pass, for which ours stands, with the same arguments; from 2.13 on there may be several.
    """
    from torch._inductor import custom_graph_pass
    from torch._inductor.custom_graph_pass import CustomGraphPass

    takes_several = hasattr(custom_graph_pass, "get_custom_graph_passes")
    stands_for = None if takes_several else users_pass
    # Which arguments a pass is called with goes by its class; in torch 2.11 there is one kind.
    inference_aware: Any = getattr(custom_graph_pass, "CustomInferenceAwareGraphPass", CustomGraphPass)
    kind: Any = inference_aware if isinstance(stands_for, inference_aware) else CustomGraphPass

    class CacheIdentity(kind):
        """Rewrites nothing but what the user's own pass does."""

        def __call__(self, *args: Any, **kwargs: Any) -> None:
            if stands_for is not None:
                stands_for(*args, **kwargs)

        def uuid(self) -> Any:
            """None, which is for nothing to be cached, where the user's pass has no identity."""
            users_identity = stands_for.uuid() if isinstance(stands_for, CustomGraphPass) else None
            if stands_for is not None and users_identity is None:
                return None
            return cache_identity, _own_source_hash(), users_identity

    if takes_several:
        return [*custom_graph_pass.get_custom_graph_passes(users_pass), CacheIdentity()]
    return CacheIdentity()


@functools.cache
def _own_source_hash() -> str:
    """The lowering of `pack` is in this file, and a cached kernel must not outlive it."""
    return hashlib.sha256(Path(__file__).read_bytes()).hexdigest()


def _callable(compiled: object) -> Callable[..., Any]:
    """What compile_fx returns for a graph that runs in this process; its other results are of ahead-of-time modes."""
    assert callable(compiled)
    return compiled


def inductor_options(mode: str | None, options: Mapping[str, Any] | None, dynamic: bool | None) -> dict[str, Any]:
    """Inductor's config patches for torch.compile's `mode` and `options`.

    Raises RuntimeError for an unknown mode, ValueError for an unknown option.
    """
    import torch._inductor
    from torch._inductor import config

    patches = torch._inductor.list_mode_options(mode, dynamic) if mode and mode != "default" else {}
    patches = {**patches, **{key.replace("-", "_"): value for key, value in (options or {}).items()}}
    known = config.get_config_copy() if patches else {}
    unknown = [key for key in patches if key not in known]
    if unknown:
        raise ValueError(
            f"options has {unknown[0]!r}, which Inductor does not know; see torch._inductor.list_options()."
        )
    return patches


def uses_cuda_graphs(options: Mapping[str, Any], device: torch.device) -> bool:
    """Whether Inductor, with these config patches, replays what it compiles for `device` as CUDA graphs."""
    from torch._inductor import config

    return device.type == "cuda" and bool(options.get("triton.cudagraphs", config.triton.cudagraphs))


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


def memory_of(tensor: torch.Tensor) -> int:
    """What is equal for tensors that share memory, also for fake ones, which have no address."""
    return int(tensor.untyped_storage()._cdata)


def without_autocast() -> contextlib.AbstractContextManager[None]:
    """In here no operator converts what it is given, on any kind of device."""
    context: contextlib.AbstractContextManager[None] = torch._C._DisableAutocast()
    return context


def name_of_higher_order(operator: object) -> str:
    """Of an operator of a captured graph that has graphs among its arguments; "" of any other."""
    return operator.name() if isinstance(operator, torch._ops.HigherOrderOperator) else ""


def gradient_output_positions(backward: torch.fx.Graph) -> dict[int, int]:
    """Which output of a backward graph is the gradient of which input of the captured graph.

    AOTAutograd's partitioner describes each output as a `GradAOTOutput` of a `PlainAOTInput`; outputs for inputs that
    want no gradient have no description. One that has may be None.
    """
    from torch._functorch._aot_autograd.descriptors import GradAOTOutput, PlainAOTInput

    descriptions = backward.output_node().meta.get("desc", ())
    return {
        description.grad_of.idx: position
        for position, description in enumerate(descriptions)
        if isinstance(description, GradAOTOutput) and isinstance(description.grad_of, PlainAOTInput)
    }


def inputs_with_gradient(compiled_function: type[torch.autograd.Function]) -> Set[int] | None:
    """The inputs of the captured graph to which its backward, as it was traced, brings a gradient.

    None where AOTAutograd took the function from its cache, and so has no graph.
    """
    from torch._functorch._aot_autograd.runtime_wrappers import AutogradLazyBackwardCompileInfo

    traced: Any = compiled_function._lazy_backward_info  # type: ignore[attr-defined]
    if not isinstance(traced, AutogradLazyBackwardCompileInfo):
        return None
    backward: Any = traced.bw_module
    (outputs,) = backward.graph.output_node().args
    positions = gradient_output_positions(backward.graph)
    return {place for place, position in positions.items() if outputs[position] is not None}


# ---- choosing a backward when it starts ------------------------------------------------------------------------------


def compiled_function_of(compiled: Callable[..., Any]) -> type[torch.autograd.Function] | None:
    """AOTAutograd's autograd.Function behind a compiled callable; None for a graph without a backward.

    AOTAutograd keeps it in the closures of its runtime wrappers, which are searched here; the shape of those closures
    differs between a compilation and a cache hit.
    """
    seen: set[int] = set()
    pending: list[Any] = [compiled]
    while pending:
        candidate = pending.pop()
        if id(candidate) in seen:
            continue
        seen.add(id(candidate))
        if isinstance(candidate, type):
            if issubclass(candidate, torch.autograd.Function) and hasattr(candidate, "_backward_impl"):
                return candidate
        elif isinstance(candidate, types.FunctionType):
            pending += _named_cells_of(candidate).values()
        elif isinstance(candidate, types.MethodType | types.BuiltinMethodType):
            pending.append(candidate.__self__)
        elif isinstance(candidate, functools.partial):
            pending += [candidate.func, *candidate.args]
        elif hasattr(candidate, "compiled_fn"):
            pending.append(candidate.compiled_fn)
    return None


def _named_cells_of(function: Any) -> dict[str, Any]:
    """What a function's closure holds, but for empty cells."""
    contents = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):
            contents[name] = cell.cell_contents
    return contents


BackwardImplementation = Callable[[Any, list[Any]], Any]  # (ctx, saved tensors and tangents) -> gradients


def backward_implementation(compiled_function: type[torch.autograd.Function]) -> BackwardImplementation:
    return compiled_function._backward_impl  # type: ignore[attr-defined,no-any-return]


def replace_backward_implementation(
    compiled_function: type[torch.autograd.Function], implementation: BackwardImplementation
) -> None:
    """Run `implementation` as the backward of `compiled_function`, between AOTAutograd's prologue and epilogue.

    Compiled autograd, which would run AOTAutograd's own one without it, is refused.
    """
    compiled_function._backward_impl = staticmethod(untraced(implementation))  # type: ignore[attr-defined]
    with_key: Any = compiled_function
    with_key._compiled_autograd_key = staticmethod(_refuse_compiled_autograd)


def _refuse_compiled_autograd(_: object) -> NoReturn:
    """Compiled autograd asks every node for its key before it traces any."""
    raise RuntimeError(COMPILED_AUTOGRAD)


def compile_backward_now(implementation: BackwardImplementation) -> bool:
    """Compile a backward that AOTAutograd would compile when it first runs; returns whether there was need to.

    It does so for static shapes; where sizes are symbolic it compiles the backward along with the forward.
    """
    parts = _named_cells_of(implementation).values()
    compilers = [part for part in parts if hasattr(part, "get_or_compile")]
    (has_compiled,) = compilers or [part for part in parts if hasattr(part, "compiled_bw")]
    if has_compiled.compiled_bw is not None:
        return False
    with torch.no_grad():
        if compilers:
            has_compiled.get_or_compile(saved_tensors_use_once=True)
        else:
            _run_without_its_graph(implementation)
    return True


def _run_without_its_graph(implementation: Any) -> None:
    """Compile a backward of torch 2.11, where compiling and running are one function: leave out the call at its end."""
    names = implementation.__globals__ | {"call_func_at_runtime_with_args": lambda *args, **kwargs: None}
    compile_alone = types.FunctionType(implementation.__code__, names, closure=implementation.__closure__)
    context = types.SimpleNamespace(maybe_clear_saved_tensors=lambda: None)
    autograd: Any = torch._C._autograd  # outside of a backward it says that the graph is kept
    with unittest.mock.patch.object(autograd, "_get_current_graph_task_keep_graph", return_value=False):
        compile_alone(context, [])


_ANOTHER_BACKWARD = "compiled_ddp.another_backward"  # the name of a phase, in what Dynamo notes of its times


class TracedBackward:
    """The backward graph that AOTAutograd has traced for a compiled function, to be compiled in several ways."""

    def __init__(
        self, compiled_function: type[torch.autograd.Function], implementation: BackwardImplementation
    ) -> None:
        """`implementation` is AOTAutograd's own one.

        Raises LookupError where AOTAutograd took the function from its cache, and so has no graph.
        """
        from torch._functorch._aot_autograd.runtime_wrappers import AutogradLazyBackwardCompileInfo

        traced: Any = compiled_function._lazy_backward_info  # type: ignore[attr-defined]
        if not isinstance(traced, AutogradLazyBackwardCompileInfo):
            raise LookupError("the backward graph is in AOTAutograd's cache, compiled")
        cells = _named_cells_of(implementation)
        holder = cells.get("backward_compiler", types.SimpleNamespace(**cells))  # torch 2.11 has none
        with_compiler = holder if hasattr(holder, "bw_compiler") else holder.aot_config  # the latter up to torch 2.12
        self._compiler: Callable[..., Any] = with_compiler.bw_compiler
        self._without_autocast: bool = cells["disable_amp"]
        self._traced = traced
        self._graph_module = copy.deepcopy(traced.bw_module)  # which loses its meta data when it is cached
        self.inputs = len(traced.placeholder_list)

    def compile(self) -> BackwardImplementation:
        """Compile it as AOTAutograd would, whatever autocast and tracing is under way."""
        from torch._dynamo.utils import dynamo_timed

        traced = self._traced
        with contextlib.ExitStack() as stack:
            stack.enter_context(dynamo_timed(_ANOTHER_BACKWARD))
            stack.enter_context(torch._guards.tracing(traced.saved_context))
            stack.enter_context(torch._guards.compile_context(traced.saved_compile_context))
            if self._without_autocast:
                stack.enter_context(without_autocast())
            stack.enter_context(torch.no_grad())
            compiled = self._compiler(copy.deepcopy(self._graph_module), traced.placeholder_list)
        return self._implementation(compiled)

    def uncompiled(self) -> BackwardImplementation:
        """The graph itself, run operator by operator."""
        from functorch.compile import make_boxed_func

        return self._implementation(make_boxed_func(copy.deepcopy(self._graph_module)))

    def spare_saved_tensors(self) -> None:
        """What is compiled from now on leaves saved tensors as they are."""
        metadata = getattr(self._traced.saved_context, "fw_metadata", None)
        if metadata is not None:
            metadata.bw_donated_idxs = []

    def _implementation(self, compiled: Callable[..., Any]) -> BackwardImplementation:
        from torch._functorch._aot_autograd.utils import call_func_at_runtime_with_args

        def run(context: Any, saved_and_tangents: list[Any]) -> Any:
            context.maybe_clear_saved_tensors()
            return call_func_at_runtime_with_args(
                compiled, saved_and_tangents, steal_args=True, disable_amp=self._without_autocast
            )

        return run


def keeps_graph() -> bool:
    """Whether the backward that this thread runs was asked for with retain_graph or create_graph."""
    return torch._C._autograd._get_current_graph_task_keep_graph()


def overwrites_saved_tensors(compiled_function: type[torch.autograd.Function]) -> bool:
    """Whether a compiled backward may reuse the memory of saved tensors, and so run only once after each forward."""
    return bool(compiled_function.metadata.bw_donated_idxs)  # type: ignore[attr-defined]


# Belongs into the cache identity of what is compiled to leave saved tensors as they are: the key of Inductor's cache
# leaves out what a backward may overwrite (torch 2.13), so that it would be served code that overwrites.
SPARING = "spares saved tensors"


def allow_several_backwards(compiled_function: type[torch.autograd.Function]) -> None:
    """Tell AOTAutograd that the function's backwards leave saved tensors as they are, and its compilers to see to it.

    Where nothing may be overwritten it finds None instead of an empty list (torch 2.13), and refuses retain_graph.
    """
    compiled_function.metadata.bw_donated_idxs = []  # type: ignore[attr-defined]


def node_of(compiled_function: type[torch.autograd.Function], outputs: Sequence[Any]) -> Any | None:
    """The autograd node that a call of `compiled_function` made, found behind the call's outputs.

    An output that is a view of another tensor hangs on the node through the nodes of its views.
    """
    pending = [output.grad_fn for output in outputs if isinstance(output, torch.Tensor) and output.grad_fn is not None]
    for _ in range(64):
        if not pending:
            break
        node = pending.pop(0)
        if getattr(type(node), "_forward_cls", None) is compiled_function:
            return node
        pending += [following for following, _ in node.next_functions if following is not None]
    return None


def check_without_backward(inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
    """Raise RuntimeError if outputs of a graph hang on a backward, and `compiled_function_of` has found none.

    Not on that of an earlier graph, by which an input has come here that is handed on.
    """
    earlier, nodes = (
        {value.grad_fn for value in values if isinstance(value, torch.Tensor)} for values in (inputs, outputs)
    )
    if any(hasattr(getattr(type(node), "_forward_cls", None), "_backward_impl") for node in nodes - earlier):
        raise RuntimeError(
            f"torch {torch.__version__} keeps a graph's compiled backward where compiled_ddp does not find it, and its "
            "gradients would stay local. Set COMPILED_DDP_MODE=hooks, or take another torch, and report this."
        )


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


def note_undefined(node: Any) -> None:
    """Let `undefined_at` tell, in each backward, which of the gradients that come to `node` are undefined.

    A node of a Python function is itself given zeros in their place.
    """
    undefined: list[int] = []

    def note(gradients: Sequence[torch.Tensor | None]) -> None:
        undefined[:] = [slot for slot, gradient in enumerate(gradients) if gradient is None]

    node.register_prehook(note)
    node._compiled_ddp_undefined = undefined


def undefined_at(node: Any) -> Sequence[int]:
    return getattr(node, "_compiled_ddp_undefined", ())


def attach(node: Any, call: object) -> None:
    """Keep `call` with an autograd node of a Python function, for its backward."""
    node._compiled_ddp_call = call


def attached(node: Any) -> Any | None:
    return getattr(node, "_compiled_ddp_call", None)


def storage_holders(tensor: torch.Tensor) -> int:
    """How many tensors, and other objects, hold `tensor`'s storage; a number to be compared with an earlier one."""
    storage = tensor.untyped_storage()
    # All of Python shares one object for a storage, which counts once however often it is held.
    return int(torch._C._storage_Use_Count(storage._cdata)) + sys.getrefcount(storage)


def version_of(tensor: torch.Tensor) -> int:
    """A number that grows with each change of `tensor` in place."""
    return tensor._version


def has_tensor_hooks(parameter: torch.Tensor) -> bool:
    """Whether Tensor.register_hook was called on `parameter`, by anybody but `register_own_hook`."""
    hooks: Any = parameter._backward_hooks  # asked of every parameter in every step
    return bool(hooks) and any(not hasattr(hook, "of_compiled_ddp") for hook in hooks.values())


def register_own_hook(parameter: torch.Tensor, hook: Callable[[torch.Tensor | None], None]) -> Any:
    """`parameter.register_hook(hook)`, for a hook that takes None for an undefined gradient; returns the handle."""
    marked: Any = functools.partial(hook)
    marked.of_compiled_ddp = True
    return parameter.register_hook(marked)


def copy_captured(graph_module: GraphModule) -> GraphModule:
    """A copy of a graph captured by Dynamo that AOTAutograd will partition in the same way.

    A deepcopy loses the sources that Dynamo notes; without them AOTAutograd does not know which inputs are parameters,
    which are free to save, and saves other tensors for backward.
    """
    copied = copy.deepcopy(graph_module)
    for original, node in zip(graph_module.graph.nodes, copied.graph.nodes, strict=True):
        if hasattr(original, "_dynamo_source"):
            node._dynamo_source = original._dynamo_source
    copied.meta.update(graph_module.meta)
    if hasattr(graph_module, "_param_name_to_source"):
        copied._param_name_to_source = graph_module._param_name_to_source
    return copied


def captured_inputs(graph_module: GraphModule) -> list[Any]:
    """The fake inputs of a graph captured by Dynamo."""
    return [node.meta["example_value"] for node in graph_module.graph.find_nodes(op="placeholder")]


def post_accumulate_hooks(parameter: torch.Tensor) -> dict[int, Callable[[torch.Tensor], Any]]:
    """What register_post_accumulate_grad_hook was called with, by the ids of the handles; autograd reads it anew."""
    hooks: dict[int, Callable[[torch.Tensor], Any]] | None = parameter._post_accumulate_grad_hooks
    return {} if hooks is None else hooks


class CaptureState:
    """The ambient state under which a graph was captured, to compile it again under the same."""

    def __init__(self, device_types: Sequence[str]) -> None:
        from torch._dynamo.symbolic_convert import TensorifyState

        self._context = torch._guards.TracingContext.try_get()
        self._constant_floats = frozenset(TensorifyState.force_specializations)
        self._autocast = [
            (device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)) for device in device_types
        ]

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Fake tensors and symbolic shapes, autocast, and gradients enabled, as they were at capture."""
        from torch._dynamo.symbolic_convert import TensorifyState

        with contextlib.ExitStack() as stack:
            stack.enter_context(torch._guards.tracing(self._context))
            # Floats that were symbols at first (dynamic=True); AOTAutograd asks for a new capture at any other one.
            floats = set(self._constant_floats)
            stack.enter_context(unittest.mock.patch.object(TensorifyState, "force_specializations", floats))
            stack.enter_context(torch.enable_grad())
            for device, dtype, enabled in self._autocast:
                stack.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled))
            yield


# ---- process groups --------------------------------------------------------------------------------------------------


GLOO_COLLECTIVES_IN_FLIGHT = 4  # docs/benchmarks.md, "Collectives in flight"


def _with_concurrent_gloo() -> contextlib.AbstractContextManager[object]:
    """Make groups whose gloo backend has `GLOO_COLLECTIVES_IN_FLIGHT` threads, each running one collective at a time.

    torch gives it two for each device, and takes no options for it. A small all-reduce is bound by the latency of its
    steps; with four under way the link does not idle between them.
    """
    if not dist.is_gloo_available():
        return contextlib.nullcontext()
    gloo: Any = dist.ProcessGroupGloo

    # Not a subclass: a group whose class is Python's was not always torn down in order, and then ended the process with
    # "terminate called without an active exception" (2 of 10 times, where groups are made and destroyed quickly).
    class MakesGloo(type):
        def __instancecheck__(cls, candidate: object) -> bool:
            return isinstance(candidate, gloo)

    class ConcurrentGloo(metaclass=MakesGloo):
        def __new__(cls, store: dist.Store, rank: int, size: int, *args: Any, **kwargs: Any) -> Any:
            # What torch makes of the rest, another set of arguments in every version, is read from a group of one.
            options = gloo(dist.HashStore(), 0, 1, *args, **kwargs).options
            options._threads = max(options._threads, GLOO_COLLECTIVES_IN_FLIGHT)
            return gloo(store, rank, size, options)

    return unittest.mock.patch.object(distributed_c10d, "ProcessGroupGloo", ConcurrentGloo)


def new_group_named(
    name: str, ranks: Sequence[int], *, parent: dist.ProcessGroup, timeout: timedelta
) -> tuple[dist.ProcessGroup, str]:
    """Make a process group of the global `ranks`, with `parent`'s backend, under a name of our choice.

    Only its members call this. torch's own `new_group` counts names up, and the name is part of a compiled graph and
    so of its cache key; its local variant hashes in the number of groups that a rank happens to know.
    """
    group_name = distributed_c10d.GroupName(name)
    backend, _ = distributed_c10d._world.pg_map[parent]
    # ncclCommSplit is a collective of all ranks of the default group, which is split where it is bound to a device.
    without_split = unittest.mock.patch.object(distributed_c10d, "_get_split_source", return_value=None)
    with _with_concurrent_gloo(), without_split if len(ranks) < dist.get_world_size() else contextlib.nullcontext():
        group, _ = distributed_c10d._new_process_group_helper(
            len(ranks),
            list(ranks).index(dist.get_rank()),
            list(ranks),
            backend,
            default_store(),
            group_name,
            timeout=timeout,
            device_id=distributed_c10d._get_default_group().bound_device_id,
            group_desc="compiled_ddp",
        )
    distributed_c10d._world.pg_group_ranks[group] = {
        global_rank: group_rank for group_rank, global_rank in enumerate(ranks)
    }
    _our_groups.add(group)
    return group, group_name


_our_groups: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()


def moved(
    args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A forward's arguments with all tensors on `device`, those in lists, tuples and dicts too, as torch's DDP does."""
    inputs, keywords = _to_kwargs(args, kwargs, device, True)
    return (inputs[0], keywords[0]) if inputs else (args, kwargs)


def check_backends(group: dist.ProcessGroup, devices: Sequence[torch.device]) -> None:
    """Raise ValueError where `group` cannot reduce tensors of all these devices."""
    for kind in sorted({device.type for device in devices}):
        try:
            group._get_backend(torch.device(kind))
        except RuntimeError as error:
            raise ValueError(
                f"parameters are on {kind}, for which the process group ({dist.get_backend_config(group)}) has no "
                'backend: name one for each kind of device, as in init_process_group("cpu:gloo,cuda:nccl").'
            ) from error
    bound = distributed_c10d._get_default_group().bound_device_id
    if bound is not None and any(device.type == bound.type and device != bound for device in devices):
        raise ValueError(
            f"parameters are on {', '.join(map(str, devices))}, and init_process_group(device_id=...) has bound this "
            f"process to {bound}: put the model there, or leave device_id out."
        )


def is_joining(joinable: Joinable) -> bool:
    """Whether torch's `Join` has been entered with `joinable`, and not with enable=False."""
    return bool(joinable._join_config.enable)


def name_group(group: dist.ProcessGroup, name: str) -> None:
    """Let graphs find `group` under `name` too, and no other one any more. Forgotten when all groups are destroyed."""
    forget_group_name(name)
    torch._C._distributed_c10d._register_process_group(distributed_c10d.GroupName(name), group)


def forget_group_name(name: str) -> None:
    """Let graphs find no group under `name`."""
    torch._C._distributed_c10d._unregister_process_group(distributed_c10d.GroupName(name))


def is_registered(group: dist.ProcessGroup) -> bool:
    """Whether `group` is one of those that torch.distributed was initialised with, or that were made since."""
    return group in distributed_c10d._world.pg_map


def default_store() -> dist.Store:
    return distributed_c10d._get_default_store()


def group_timeout(group: dist.ProcessGroup) -> timedelta:
    """The timeout that the user gave to `group`."""
    device = torch.device("cuda" if "cuda" in dist.get_backend_config(group) and torch.cuda.is_available() else "cpu")
    with contextlib.suppress(RuntimeError):  # no backend for this device
        return group._get_backend(device).options._timeout
    return distributed_c10d.default_pg_timeout


def with_own_connection(store: dist.Store) -> dist.Store:
    """The same store for use in another thread, where blocking calls on `store` do not hold it up."""
    clone: dist.Store = store.clone()  # type: ignore[attr-defined]
    return clone


def collectives_launched(group: dist.ProcessGroup) -> int:
    """How many collectives this rank has launched on `group`; 0 where the backend does not count."""
    return sum(number for backend in _backends(group) if (number := _launched_on(backend)) is not None)


def launch_counter(group: dist.ProcessGroup) -> Callable[[dist.ProcessGroup], int]:
    """`collectives_launched` for this group, as fast as it can be told: in a third of a microsecond."""
    one_backend = len(_backends(group)) == 1 and counts_collectives(group)
    if not one_backend:
        return collectives_launched
    return type(group)._get_sequence_number_for_group  # type: ignore[attr-defined, no-any-return]


def collectives_of_others() -> int:
    """How many collectives this rank has launched on groups that `new_group_named` has not made."""
    return sum(_counter_of(group)(group) for group in distributed_c10d._world.pg_map if group not in _our_groups)


def _counter_of(group: dist.ProcessGroup) -> Callable[[dist.ProcessGroup], int]:
    counter = _counters.get(group)
    if counter is None:
        counter = _counters[group] = launch_counter(group)
    return counter


_counters: weakref.WeakKeyDictionary[dist.ProcessGroup, Callable[[dist.ProcessGroup], int]] = (
    weakref.WeakKeyDictionary()
)


def counts_collectives(group: dist.ProcessGroup) -> bool:
    """Whether `collectives_launched` tells of every collective on `group`."""
    return all(_launched_on(backend) is not None for backend in _backends(group))


def _backends(group: dist.ProcessGroup) -> list[Any]:
    """A group's backends, each once: one may be there for several kinds of devices."""
    return list({id(backend): backend for backend in map(group._get_backend, group._device_types)}.values())


def _launched_on(backend: Any) -> int | None:
    with contextlib.suppress(RuntimeError):
        return int(backend._get_sequence_number_for_group())
    return None


BROADCAST_BYTES = 250 * 1024 * 1024  # as torch's DDP


def broadcast_coalesced(group: dist.ProcessGroup, tensors: list[torch.Tensor], *, source: int) -> None:
    """Overwrite `tensors` with those of group rank `source`, in pieces of at most `BROADCAST_BYTES`."""
    dist._broadcast_coalesced(group, tensors, BROADCAST_BYTES, source)


AnyFuture = torch._C.Future  # what `then` and collectives return; torch.futures.Future is a subclass


# ---- looking at what runs --------------------------------------------------------------------------------------------

DispatchMode = TorchDispatchMode


def profiler_is_on() -> bool:
    """Whether torch.profiler, torch.autograd.profiler or its emit_nvtx records in this process."""
    return torch.autograd.profiler._is_profiler_enabled


# ---- producing gradients inside their bucket -------------------------------------------------------------------------


@functools.cache
def _register_pack_lowering() -> None:
    """Teach Inductor to place the parts of `compiled_ddp::pack` inside the packed buffer.

    Each part becomes a ReinterpretView of the buffer; a producer whose output Inductor allocates writes there, any
    other part is copied. The same as ConcatKernel's lowering of aten.cat, for parts of any rank; and the buffer itself
    may be a view of donated memory.
    """
    from torch._inductor import ir
    from torch._inductor.lowering import register_lowering
    from torch._inductor.virtualized import V

    @register_lowering(torch.ops.compiled_ddp.pack.default, type_promotion_kind=None)
    def lower_pack(parts: list[ir.TensorBox], into: ir.TensorBox | None = None) -> ir.TensorBox:
        sizes = [list(part.get_size()) for part in parts]
        numels = [V.graph.sizevars.guard_int(ir.sympy_product(size)) for size in sizes]
        layout = ir.FixedLayout(
            device=parts[0].get_device_or_error(), dtype=parts[0].get_dtype(), size=[sum(numels)], stride=[1]
        )
        place_of_all: ir.Layout = layout
        if into is not None:
            into.realize()
            place_of_all = ir.NonOwningLayout(ir.ReinterpretView(data=into.data, layout=layout))
        kernel = ir.ConcatKernel(name=None, layout=place_of_all, inputs=[])
        storage = ir.StorageBox(kernel)
        offset = 0
        placed = []
        for part, size, numel in zip(parts, sizes, numels, strict=True):
            stride = ir.FlexibleLayout.contiguous_strides(size)
            place = ir.FixedLayout(layout.device, layout.dtype, size, stride, offset)
            placed.append(ir.ConcatKernel.realize_into(part, ir.ReinterpretView(data=storage, layout=place)))
            offset += numel
        kernel.name = V.graph.register_buffer(kernel)
        kernel.inputs = ir.ConcatKernel.unwrap_storage(placed)
        V.graph.register_operation(kernel)
        return ir.TensorBox(storage)


# ---- the user's module -----------------------------------------------------------------------------------------------


def without_compile_wrapper(module: torch.nn.Module) -> torch.nn.Module:
    """The module behind torch.compile(module); any other module as it is."""
    while isinstance(module, torch._dynamo.OptimizedModule):
        module = module._orig_mod
    return module


def without_compile_prefixes(name: str) -> str:
    """The name of a parameter or buffer without what torch.compile(module) adds to it."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def given_by_functional_calls() -> list[object]:
    """What the `torch.func.functional_call`s under way in this thread have put into their modules.

    Each holds what it was given in a local variable of its frame.
    """
    given: list[object] = []
    frame: types.FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is stateless._functional_call.__code__:
            given += frame.f_locals["parameters_and_buffers"].values()
        frame = frame.f_back
    return given


def transforms_are_active() -> bool:
    """Whether this thread is inside of a transform of torch.func: grad, vmap, jvp or another."""
    return torch._C._are_functorch_transforms_active()


def without_transforms(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that transforms of torch.func have wrapped, once or several times; any other one as it is."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def running_ddp() -> torch.nn.parallel.DistributedDataParallel | None:
    """torch's DistributedDataParallel whose forward this process runs."""
    return torch.nn.parallel.DistributedDataParallel._active_ddp_module


def names_to_ignore(module: torch.nn.Module) -> Sequence[str]:
    """The parameters and buffers that torch's DistributedDataParallel is told to leave alone in `module`."""
    return tuple(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))


def has_optimizer_in_backward(parameter: torch.Tensor) -> bool:
    """Whether torch.distributed.optim's `_apply_optimizer_in_backward` was called on `parameter`."""
    return hasattr(parameter, "_in_backward_optimizers")


def is_distributed_tensor(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is a DTensor; imports nothing, as there is none before its module has been imported."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def in_distributed_autograd() -> bool:
    """Whether this thread is in a torch.distributed.autograd context, whose backward leaves .grad alone."""
    if not rpc.is_available() or not rpc.api._is_current_rpc_agent_set():
        return False
    try:
        distributed_autograd._current_context()
    except RuntimeError:  # there is none
        return False
    return True


def without_own_compilation(module: torch.nn.Module) -> torch.nn.Module:
    """Undo model.compile(), which would compile the module's call a second time inside ours."""
    module._compiled_call_impl = None
    return module


class Capture:
    """A way for Dynamo to run modules: those that share one share what it captures, and compiles by `backend`."""

    def __init__(
        self,
        backend: Callable[[GraphModule, Sequence[Any]], Callable[..., Any]],
        *,
        fullgraph: bool,
        dynamic: bool | None,
    ) -> None:
        """`fullgraph` and `dynamic` as in torch.compile."""
        # From torch 2.13 on, graphs of other ways through the same code do not count for Dynamo's recompile limit.
        knows_isolation = "isolate_recompiles" in inspect.signature(torch.compile).parameters
        apart: dict[str, Any] = {"isolate_recompiles": True} if knows_isolation else {}
        self._context: Any = torch._dynamo.optimize(backend=backend, nopython=fullgraph, dynamic=dynamic, **apart)
        self._entry: Callable[..., Any] = self._context(_entry_function())

    def of(self, module: torch.nn.Module) -> Callable[..., Any]:
        """`module`, run in this way, in the state that it is in at each call."""
        if not isinstance(module.forward, types.MethodType) or torch._dynamo.trace_rules.check(module.forward):
            run: Callable[..., Any] = functools.partial(self._entry, module)  # [Note: an entry's own code]
        else:
            run = self._context(module)
        return _captured_whole(run, module)


# [Note: an entry's own code] Dynamo does not capture the forward of torch's own modules when that is called from the
# outside; torch.compile then puts one function around each, the same for all. What Dynamo knows of sizes that change
# goes by code: two such models of other sizes are one model of dynamic sizes to it. A function of its own, with code of
# its own, for all modules that may share graphs keeps them apart.
_ENTRY = "def forward(module, /, *args, **kwargs):\n    return module(*args, **kwargs)\n"
_entries = itertools.count()


def _entry_function() -> Callable[..., Any]:
    filename = f"<entry {next(_entries)} of compiled_ddp>"
    linecache.cache[filename] = len(_ENTRY), None, _ENTRY.splitlines(keepends=True), filename  # Dynamo looks for it
    names: dict[str, Any] = {}
    exec(compile(_ENTRY, filename, "exec"), names)
    entry: Callable[..., Any] = names["forward"]
    return entry


def _captured_whole(run: Callable[..., Any], module: torch.nn.Module) -> Callable[..., Any]:
    """`run` under the settings by which Dynamo captures all of `module`.

    It leaves nn.LSTM, nn.GRU and nn.RNN to eager by default. torch 2.11 also takes a parameter for unchanged as long as
    it is in the same place: an unfrozen one would get no gradient, and one of other strides would go into an old graph.
    """
    settings: dict[str, Any] = {}
    if any(isinstance(part, torch.nn.RNNBase) for part in module.modules()):
        settings["allow_rnn"] = True
    if _minor_version() == (2, 11):
        settings["skip_tensor_guards_with_matching_dict_tags"] = False
    if not settings:
        return run

    def call(*args: Any, **kwargs: Any) -> Any:
        with torch._dynamo.config.patch(settings):
            return run(*args, **kwargs)

    return call


class RecompileLimits(logging.Handler):
    """Notes what Dynamo has given up capturing in this process, because it had been captured too often.

    It does so for code, whoever runs it: also for a model of the same class that was not captured so far.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.notes: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if isinstance(record.msg, str) and record.msg.startswith("torch._dynamo hit config.%s"):
            limit, value, function, *_ = record.args if isinstance(record.args, tuple) else ("?", "?", "?")
            self.notes.append(f"{function} has been captured as often as torch._dynamo.config.{limit} ({value}) allows")

    def given_up_in(self, module: torch.nn.Module) -> list[str]:
        """Those of the notes that are about the forward of `module` or of a part of it."""
        # Looked up without asking the class: TorchScript's has one that only objects have.
        forwards = {inspect.getattr_static(type(part), "forward") for part in module.modules()}
        codes = [forward.__code__ for forward in forwards if isinstance(forward, types.FunctionType)]
        places = [f"({code.co_filename}:{code.co_firstlineno})" for code in codes]
        return [note for note in self.notes if any(place in note for place in places)]


@functools.cache
def recompile_limits() -> RecompileLimits:
    limits = RecompileLimits()
    logging.getLogger("torch._dynamo.convert_frame").addHandler(limits)
    return limits


# ---- for tests -------------------------------------------------------------------------------------------------------


def inductor_compares_graphs() -> contextlib.AbstractContextManager[None]:
    """In here Inductor is told to compare ranks' graphs, from torch 2.12 on."""
    from torch._inductor import config

    patch: contextlib.AbstractContextManager[None] = config.patch({_COMPARES_GRAPHS: True})
    return patch


def generated_code(run: Callable[[], object]) -> list[str]:
    """The Python sources that Inductor generates while `run()` compiles, caches aside, in order of compilation."""
    from torch._inductor.utils import run_and_get_code

    _, sources = run_and_get_code(run)
    return list(sources)


def compilations() -> int:
    """How often this process has compiled so far: captures, forwards, and backwards that were left for later."""
    from torch._dynamo.utils import compilation_time_metrics

    phases = ("_compile.compile_inner", "create_aot_dispatcher_function", "backward._backward_impl", _ANOTHER_BACKWARD)
    return sum(len(compilation_time_metrics.get(phase, ())) for phase in phases)


@contextlib.contextmanager
def noting_traced_code() -> Iterator[list[types.CodeType]]:
    """Yields the list of all code that Dynamo begins to trace in here: frames that run, and what it inlines in them."""
    from torch._dynamo.symbolic_convert import InstructionTranslatorBase

    traced: list[types.CodeType] = []
    begin = InstructionTranslatorBase.__init__

    def note_and_begin(translator: Any, *args: Any, **kwargs: Any) -> None:
        begin(translator, *args, **kwargs)
        traced.append(translator.f_code)

    with unittest.mock.patch.object(InstructionTranslatorBase, "__init__", note_and_begin):
        yield traced


@contextlib.contextmanager
def compiled_autograd(backend: str) -> Iterator[None]:
    """Backwards in here are traced as a whole, and compiled by `backend`."""
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend=backend)):
        yield


@contextlib.contextmanager
def inner_compiler_replaced(compile_inner: Callable[..., Any]) -> Iterator[None]:
    """`compile_inner` is called in place of Inductor's compiler of a forward or backward graph, given that first."""
    from torch._inductor import compile_fx

    replaced = functools.partial(compile_inner, compile_fx.compile_fx_inner)
    with unittest.mock.patch.object(compile_fx, "compile_fx_inner", replaced):
        yield


def compiler_counters() -> dict[str, dict[str, int]]:
    """Dynamo's and Inductor's counters so far: cache hits and misses, graphs captured."""
    from torch._dynamo.utils import counters

    return {group: dict(values) for group, values in counters.items()}


def gloo_options(group: dist.ProcessGroup) -> Any:
    """What a group's gloo was made with: `_threads`, `_timeout`, `_devices`."""
    return group._get_backend(torch.device("cpu")).options


def custom_graph_passes(note: Callable[[torch.fx.Graph], None]) -> dict[str, Any]:
    """Everything that this torch takes as Inductor's `post_grad_custom_pre_pass`, by a name; each calls `note`."""
    from torch._inductor import custom_graph_pass

    class Pass(custom_graph_pass.CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            note(graph)

        def uuid(self) -> Any:
            return "notes"

    kinds: dict[str, Any] = {"function": note, "pass": Pass()}
    if hasattr(custom_graph_pass, "CustomInferenceAwareGraphPass"):

        class InferenceAwarePass(custom_graph_pass.CustomInferenceAwareGraphPass):
            def __call__(self, graph: torch.fx.Graph, is_inference: bool) -> None:  # type: ignore[override]
                note(graph)

            def uuid(self) -> Any:
                return "notes, aware of inference"

        kinds["inference-aware pass"] = InferenceAwarePass()
    if hasattr(custom_graph_pass, "get_custom_graph_passes"):
        kinds["several"] = list(kinds.values())
    return kinds
