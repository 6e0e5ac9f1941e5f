"""Dynamo: keeping it out of this package, and what it knows of a captured graph."""

import contextlib
import copy
import functools
import re
import unittest.mock
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
from torch.fx import GraphModule

_WHY_UNTRACED = (
    "compiled_ddp looks at the backward that autograd runs and talks to other ranks, which no graph can hold. Compile "
    "the step without fullgraph=True: its graph ends before the wrapper and begins again behind it, and compile_ddp "
    "makes graphs of the model by itself (compile_ddp(model, fullgraph=True) if they are to be one)"
)

# What `torch.compiler.disable` has made of a function, that function: for who is called where Dynamo is off already.
without_disable: Callable[[Callable[..., Any]], Callable[..., Any]] = torch._dynamo.eval_frame.innermost_fn

P = ParamSpec("P")

T = TypeVar("T")

of_this_thread = torch._C._dynamo.eval_frame.get_eval_frame_callback  # None where Dynamo does not trace


def leave_out_of_traces(*packages: str) -> None:
    """Let Dynamo trace no frame of these packages, whoever has compiled what has led there."""
    for package in packages:
        torch._dynamo.trace_rules.add(package)


def untraced(
    function: Callable[P, T], *, tell: Callable[[], None] | None = None, why: str = _WHY_UNTRACED
) -> Callable[P, T]:
    """`function`, where Dynamo traces nothing of what it calls either: for all that torch, or compiled code, may call.

    [Note: never traced] Dynamo looks at every frame that runs below compiled code, also at the hooks that autograd
    calls in a backward below it. Those of this package it leaves alone (`leave_out_of_traces`), but not what they call:
    torch's own library, others, user hooks. So what is called from outside of the package switches Dynamo off, if it
    is on; and then calls `tell` first. Where a graph must not break, Dynamo's error says `why` it would.
    """
    switched_off: Callable[P, T] = torch.compiler.disable(function, reason=why)

    @functools.wraps(switched_off)  # with the marks by which Dynamo, where it traces a call, knows what is disabled
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if of_this_thread() is None:
            return function(*args, **kwargs)  # in a quarter of a microsecond more, where switching takes 1.3
        if tell is not None:
            tell()
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
        if of_this_thread() is None:
            return forward(*args, **kwargs)
        if torch._dynamo.config.trace_autograd_ops and torch.is_grad_enabled():
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


# Whether what runs here has been called by compiled autograd, in place of a node or hook.
in_compiled_autograd: Callable[[], bool] = functools.partial(
    getattr, torch._dynamo.compiled_autograd, "in_compiled_autograd_region"
)


def guard_of(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """Tells of as many tensors whether each has the type, dtype, device, shape, strides and requires_grad of these now.

    In a tenth of a microsecond for each. It is Dynamo's own guard, which refuses more than that: tensors that operators
    would treat in another way in this thread, as under autocast or in inference mode.
    """
    make: Any = torch._C._dynamo.guards.TensorGuards  # whose stub takes a list for all tensors, and not one for each
    sizes, strides = [[*tensor.shape] for tensor in tensors], [[*tensor.stride()] for tensor in tensors]
    check: Callable[..., bool] = make(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
    return check


def asks_for_another_capture(error: BaseException) -> bool:
    """Whether Dynamo is to act on what a backend has raised, as nothing has failed."""
    return isinstance(error, torch._dynamo.exc.RestartAnalysis | torch._dynamo.exc.SkipFrame)


_NUMBER_OF_CAPTURE = re.compile(r"^\d+/\d+: ")


def why_captured_again() -> Callable[[], str]:
    """Asked where Dynamo captures, tells later, in any thread, which guard of what it has captured before fails.

    "" where it has captured nothing before, or does not know that yet; else the first of them in Dynamo's words.
    """
    context = torch._dynamo.utils.get_metrics_context()

    def ask() -> str:
        reason = context._metrics.get("recompile_reason") if context.in_progress() else None
        if reason is None:
            return ""
        first = str(reason).partition("\n")[0]
        return _NUMBER_OF_CAPTURE.sub("", first).strip()

    return ask


def name_of_higher_order(operator: object) -> str:
    """The name of an operator that takes graphs as arguments; "" for any other operator."""
    return operator.name() if isinstance(operator, torch._ops.HigherOrderOperator) else ""


def is_operator(target: object) -> bool:
    """Whether `target`, of a node in a graph, is an operator of a library, as `torch.ops` has them."""
    return isinstance(target, torch._ops.OpOverload | torch._ops.OpOverloadPacket)


def library_of(operator: Any) -> str:
    """The namespace of an operator: "aten", as a rule."""
    packet = operator.overloadpacket if isinstance(operator, torch._ops.OpOverload) else operator
    name: str = packet._qualified_op_name
    return name.partition("::")[0]


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


def size_hint(value: Any) -> Any:
    """The number that a symbolic size had when it was captured; any other value as it is."""
    return value.node.hint if isinstance(value, torch.SymInt) else value


def captured_inputs(graph_module: GraphModule) -> list[Any]:
    """The fake inputs of a graph captured by Dynamo."""
    return [node.meta["example_value"] for node in graph_module.graph.find_nodes(op="placeholder")]


class CaptureState:
    """The ambient state under which a graph was captured, to compile it again under the same."""

    def __init__(self, device_types: Sequence[str]) -> None:
        from torch._dynamo.symbolic_convert import TensorifyState

        self._context = torch._guards.TracingContext.try_get()
        self._constant_floats = frozenset(TensorifyState.force_specializations)
        self._autocast = [
            (device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)) for device in device_types
        ]
        self._attention_kernels = _enabled_attention_kernels()

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Fake tensors and symbolic shapes, autocast, attention kernels, gradients enabled, as they were at capture."""
        from torch._dynamo.symbolic_convert import TensorifyState

        with contextlib.ExitStack() as stack:
            stack.enter_context(torch._guards.tracing(self._context))
            # Floats that were symbols at first (dynamic=True); AOTAutograd asks for a new capture at any other one.
            floats = set(self._constant_floats)
            stack.enter_context(unittest.mock.patch.object(TensorifyState, "force_specializations", floats))
            stack.enter_context(torch.enable_grad())
            for device, dtype, enabled in self._autocast:
                stack.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled))
            stack.callback(_enable_attention_kernels, _enabled_attention_kernels())
            _enable_attention_kernels(self._attention_kernels)
            yield


# What `torch.nn.attention.sdpa_kernel` turns: whether a kernel may be chosen, and how that is said.
_ATTENTION_KERNELS: Sequence[tuple[Callable[[], bool], Callable[[bool], None]]] = (
    (torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp),
    (torch.backends.cuda.mem_efficient_sdp_enabled, torch.backends.cuda.enable_mem_efficient_sdp),
    (torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.enable_math_sdp),
    (torch.backends.cuda.cudnn_sdp_enabled, torch.backends.cuda.enable_cudnn_sdp),
)


def _enabled_attention_kernels() -> list[bool]:
    return [is_enabled() for is_enabled, _ in _ATTENTION_KERNELS]


def _enable_attention_kernels(wanted: Sequence[bool]) -> None:
    for (_, enable), is_wanted in zip(_ATTENTION_KERNELS, wanted, strict=True):
        enable(is_wanted)
