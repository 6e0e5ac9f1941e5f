"""AOTAutograd: the compiled function behind a captured graph, and the backwards that can be made from its trace."""

import contextlib
import copy
import functools
import itertools
import types
import unittest.mock
from collections.abc import Callable, Iterator, Sequence, Set
from typing import Any, NoReturn

import torch
from torch.fx import GraphModule

from compiled_ddp.torch_private.dynamo import COMPILED_AUTOGRAD, untraced
from compiled_ddp.torch_private.inductor import gradient_output_positions
from compiled_ddp.torch_private.tensors import without_autocast


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


def compiled_function_of(compiled: Callable[..., Any]) -> type[torch.autograd.Function] | None:
    """AOTAutograd's autograd.Function behind a compiled callable; None for a graph without a backward.

    AOTAutograd keeps it in the closures of its runtime wrappers, which are searched here; the shape of those closures
    differs between a compilation and a cache hit. Wrappers that it writes as source (torch 2.13) have no closure, but
    name what they wrap.
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
            pending += [*_named_cells_of(candidate).values(), getattr(candidate, "__wrapped__", None)]
        elif isinstance(candidate, types.MethodType | types.BuiltinMethodType):
            pending.append(candidate.__self__)
        elif isinstance(candidate, functools.partial):
            pending += [candidate.func, *candidate.args]
        elif hasattr(candidate, "compiled_fn"):
            pending.append(candidate.compiled_fn)
    return None


def _named_cells_of(function: Any) -> dict[str, Any]:
    """What a function's closure holds, except empty cells."""
    contents = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):
            contents[name] = cell.cell_contents
    return contents


def merges_inputs(compiled_function: type[torch.autograd.Function], inputs: int) -> bool:
    """Whether AOTAutograd gives the function other inputs than the captured graph has, which has that many.

    Of inputs that share memory it makes a single one, where the graph overwrites one of them, and puts it first.
    """
    of_function: Sequence[Any] = compiled_function.metadata.input_info  # type: ignore[attr-defined]
    return len(of_function) != inputs


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
    with torch.no_grad(), _metrics_apart():
        if compilers:
            has_compiled.get_or_compile(saved_tensors_use_once=True)
        else:
            _run_without_its_graph(implementation)
    return True


@contextlib.contextmanager
def _metrics_apart() -> Iterator[None]:
    """Where a forward is being compiled, which what Dynamo notes of a backward would stand in the way of, and raise."""
    from torch._dynamo.utils import dynamo_timed, get_metrics_context

    context: Any = get_metrics_context()
    within = dynamo_timed(_BACKWARD_WITHIN_FORWARD) if context.in_progress() else contextlib.nullcontext()
    before, context._metrics = context._metrics, {}
    try:
        with within:
            yield
    finally:
        context._metrics = before


def _run_without_its_graph(implementation: Any) -> None:
    """Compile a backward of torch 2.11, where compiling and running are one function: leave out the call at its end."""
    names = implementation.__globals__ | {"call_func_at_runtime_with_args": lambda *args, **kwargs: None}
    compile_alone = types.FunctionType(implementation.__code__, names, closure=implementation.__closure__)
    context = types.SimpleNamespace(maybe_clear_saved_tensors=lambda: None)
    autograd: Any = torch._C._autograd  # outside of a backward it says that the graph is kept
    with unittest.mock.patch.object(autograd, "_get_current_graph_task_keep_graph", return_value=False):
        compile_alone(context, [])


# The names of phases, in what Dynamo notes of its times.
_ANOTHER_BACKWARD = "compiled_ddp.another_backward"
_BACKWARD_WITHIN_FORWARD = "compiled_ddp.backward_within_forward"


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
        graph_module: Any = traced.bw_module
        self._graph_module: GraphModule = graph_module
        # Which AOTAutograd takes away when it caches the function (torch 2.13). The graph itself stays as it is.
        self._meta = dict(graph_module.meta)
        self._meta_of_nodes = [dict(node.meta) for node in graph_module.graph.nodes]
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
            compiled = self._compiler(self._copy(), traced.placeholder_list)
        return self._implementation(compiled)

    def uncompiled(self) -> BackwardImplementation:
        """The graph itself, run operator by operator."""
        from functorch.compile import make_boxed_func

        return self._implementation(make_boxed_func(self._copy()))

    def _copy(self) -> GraphModule:
        """The graph as it was traced, for a compiler to consume."""
        copied = copy.deepcopy(self._graph_module)
        copied.meta = copy.deepcopy(self._meta)
        for node, meta in zip(copied.graph.nodes, self._meta_of_nodes, strict=True):
            node.meta = dict(meta)
        return copied

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


def traced_backward_graph(
    compiled_function: type[torch.autograd.Function], implementation: BackwardImplementation
) -> tuple[GraphModule, bool]:
    """The backward graph that AOTAutograd has traced, to be run, and whether it runs without autocast.

    Where AOTAutograd took the function from its cache, the graph is there too, for compiled autograd. `implementation`
    is AOTAutograd's own one. Raises LookupError where there is none.
    """
    info: Any = compiled_function._lazy_backward_info  # type: ignore[attr-defined]
    make = getattr(info, "bw_module_fn", None)
    graph_module = getattr(info, "bw_module", None) if make is None else make()
    if not isinstance(graph_module, GraphModule):
        raise LookupError("AOTAutograd has kept no backward graph")
    return graph_module, bool(_named_cells_of(implementation)["disable_amp"])


def overwrites_saved_tensors(compiled_function: type[torch.autograd.Function]) -> bool:
    """Whether a compiled backward may reuse the memory of saved tensors, and so run only once after each forward."""
    return bool(compiled_function.metadata.bw_donated_idxs)  # type: ignore[attr-defined]


def allow_several_backwards(compiled_function: type[torch.autograd.Function]) -> None:
    """Tell AOTAutograd that the function's backwards leave saved tensors as they are, and its compilers to see to it.

    Where nothing may be overwritten it finds None instead of an empty list (torch 2.13), and refuses retain_graph.
    """
    compiled_function.metadata.bw_donated_idxs = []  # type: ignore[attr-defined]


# What the next autograd node that this thread makes will be called, by numbers that grow.
next_node: Callable[[], int] = torch.autograd._get_sequence_nr


def node_of(compiled_function: type[torch.autograd.Function], outputs: Sequence[Any], first_node: int) -> Any | None:
    """The autograd node that a call of `compiled_function` made, found behind the call's outputs.

    An output that is a view of another tensor hangs on the node through the nodes of its views. `first_node` is what
    `next_node` has told before the call: an input that is handed on may hang on an earlier call of the same function.
    """
    pending = [*map(getattr, outputs, itertools.repeat("grad_fn"), itertools.repeat(None))]  # in C, in every forward
    while pending:
        node = pending.pop(0)
        if node is None or node._sequence_nr() < first_node:
            continue
        if getattr(type(node), "_forward_cls", None) is compiled_function:
            return node
        pending += [following for following, _ in node.next_functions]
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
