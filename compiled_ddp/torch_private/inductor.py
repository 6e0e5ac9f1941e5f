"""Compiling a captured graph, with a backward that is rewritten."""

import contextlib
import functools
import hashlib
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule

from compiled_ddp.telling.slow_work import part_of_slow_work
from compiled_ddp.torch_private import packing
from compiled_ddp.torch_private.dynamo import captured_inputs
from compiled_ddp.torch_private.tensors import without_autocast

# What a compiled program depends on besides its graph, the options and how its backward is rewritten: this file, and
# the lowering of `pack`.
SOURCES = (Path(__file__), Path(packing.__file__))


@functools.cache
def source_hash() -> str:
    """What changes whenever a program might be compiled otherwise for what stands in these files."""
    return hashlib.sha256(b"".join(source.read_bytes() for source in SOURCES)).hexdigest()


# Rewrites a backward graph in place, given its (fake) inputs; returns them with those it appended. The module's code is
# not made anew.
RewriteBackward = Callable[[GraphModule, Sequence[Any]], Sequence[Any]]


@dataclass(frozen=True)
class Rewriting:
    """How a backward graph is changed before it is compiled.

    `identity` enters the caches' keys: it must change whenever `rewrite` would rewrite otherwise, or the backward is
    compiled otherwise than by plain torch.compile.
    """

    identity: str = ""
    rewrite: RewriteBackward | None = None
    name: str = "local"  # in messages


def rewriting_by(run: Callable[..., None], identity: str, name: str) -> Rewriting:
    """By `run(graph, output_positions=...)`, which may append inputs; the others are as in `Rewriting`."""

    def rewrite(backward: GraphModule, inputs: Sequence[Any]) -> Sequence[Any]:
        run(backward.graph, output_positions=gradient_output_positions(backward.graph))
        placeholders = backward.graph.find_nodes(op="placeholder")
        return [*inputs, *(node.meta["val"] for node in placeholders[len(inputs) :])]

    return Rewriting(identity, rewrite, name)


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


def rewriting_step(run: Callable[[torch.fx.Graph], object], identity: str) -> Rewriting:
    """By `run(graph)`, of a whole step; `identity` is as in `Rewriting`."""

    def rewrite(step: GraphModule, inputs: Sequence[Any]) -> Sequence[Any]:
        run(step.graph)
        return inputs

    return Rewriting(identity, rewrite)


def compile_step(
    graph_module: GraphModule,
    example_inputs: Sequence[Any],
    *,
    backend: str,
    options: Mapping[str, Any],
    rewriting: Rewriting,
) -> Callable[..., Any]:
    """Compile a graph that make_fx has traced, of a whole step without a backward of its own.

    Autocast's casts are in it; those who run it see to it that there are no others.
    """

    def always() -> Rewriting:
        return rewriting

    # With a C++ wrapper Inductor takes the placeholders' values for the inputs if any has one, and what was added to
    # the graph after tracing has none (torch 2.13, `_extract_inputs_from_exported_gm`).
    for placeholder in graph_module.graph.find_nodes(op="placeholder"):
        placeholder.meta.pop("val", None)
    with torch.no_grad(), without_autocast():
        if backend == "aot_eager":
            return _compile_aot_eager(graph_module, example_inputs, always, whole=True)
        with _without_symbols() as as_fake:
            fake_inputs = [*map(as_fake, example_inputs)]
            return _compile_inductor(graph_module, fake_inputs, always, dict(options), whole=True)


@contextlib.contextmanager
def _without_symbols() -> Iterator[Callable[[Any], Any]]:
    """What torch's caches ask for where no graph of Dynamo's is compiled; what inputs are to be in there.

    AOTAutograd makes symbols of the sizes of tensors that are not fake, whatever `static_shapes` says: those that
    nothing fixes would be in generated code, and floats made of one, as by a mean, an error (torch 2.13,
    `_tensorify_python_scalars`).
    """
    from torch._guards import TracingContext, tracing
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    mode = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True, allow_non_fake_inputs=True)
    with tracing(TracingContext(mode)):
        yield lambda each: mode.from_tensor(each, static_shapes=True) if isinstance(each, torch.Tensor) else each


def _is_symbolic(value: object) -> bool:
    sizes = value.shape if isinstance(value, torch.Tensor) else (value,)
    return any(isinstance(size, torch.SymInt | torch.SymFloat | torch.SymBool) for size in sizes)


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
    graph_module: GraphModule,
    example_inputs: Sequence[Any],
    rewriting: Callable[[], Rewriting],
    *,
    whole: bool = False,
) -> Callable[..., Any]:
    """Rewrites what is compiled without a backward, if the graph is a `whole` step, else backwards."""
    from functorch.compile import min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.backends.debugging import boxed_nop

    def compile_rewritten(
        backward: GraphModule, inputs: Sequence[Any], *args: Any, **kwargs: Any
    ) -> Callable[..., Any]:
        now = rewriting()
        with contextlib.nullcontext() if whole else part_of_slow_work(f"backward ({now.name})"):
            if now.rewrite is not None:
                inputs = now.rewrite(backward, inputs)  # boxed_nop recompiles
            return boxed_nop(backward, list(inputs), *args, **kwargs)

    compiler = aot_autograd(
        fw_compiler=boxed_nop,
        bw_compiler=compile_rewritten,
        inference_compiler=compile_rewritten if whole else boxed_nop,
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

# Moves launches earlier and waits later, from torch 2.14 on and by default: of what the passes have placed it moves
# nothing (docs/how-it-works.md), and compiling takes its time.
MOVES_COLLECTIVES = "aten_distributed_optimizations.enable_simple_overlap"


def reducing_options() -> dict[str, Any]:
    """Inductor's options for a graph that launches all-reduces."""
    from torch._inductor import config

    known = config.get_config_copy()
    return _OVERLAP | dict.fromkeys({_COMPARES_GRAPHS, MOVES_COLLECTIVES} & known.keys(), False)


def compile_rewritten(
    inner: GraphModule, inputs: Sequence[Any], rewriting: Rewriting, *args: Any, **kwargs: Any
) -> Callable[..., Any]:
    """Compile a graph that Inductor's first half has made, after it has been rewritten; other arguments are Inductor's.

    Where gradients are to be packed, `packing.register_pack_lowering` has been called.
    """
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner

    if rewriting.rewrite is None:
        return _callable(compile_fx_inner(inner, inputs, *args, **kwargs))
    inputs = rewriting.rewrite(inner, inputs)
    inner.recompile()
    with config.patch(reducing_options()):
        return _callable(compile_fx_inner(inner, inputs, *args, **kwargs))


def _compile_inductor(
    graph_module: GraphModule,
    example_inputs: Sequence[Any],
    rewriting: Callable[[], Rewriting],
    options: dict[str, Any],
    *,
    whole: bool = False,
) -> Callable[..., Any]:
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx

    users_pass = options.get("post_grad_custom_pre_pass", config.post_grad_custom_pre_pass)
    users_own = {"post_grad_custom_pre_pass": users_pass}

    def identified(identity: str) -> dict[str, Any]:
        return {"post_grad_custom_pre_pass": _with_cache_identity(users_pass, identity)} if identity else users_own

    def compile_inner(inner: GraphModule, inputs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        is_backward = bool(kwargs.get("is_backward"))
        now = rewriting() if whole or is_backward else Rewriting()
        part = part_of_slow_work(f"backward ({now.name})") if is_backward else contextlib.nullcontext()
        overwritten = _overwritten() if is_backward else ""
        with part, config.patch(identified(now.identity + overwritten)):
            return compile_rewritten(inner, inputs, now, *args, **kwargs)

    packing.register_pack_lowering()
    first = rewriting().identity
    patches = options | identified(first) if first else options
    return _callable(compile_fx(graph_module, example_inputs, inner_compile=compile_inner, config_patches=patches))


def _overwritten() -> str:
    """What the backward that is being compiled may overwrite, of the tensors saved for it; "" where that is nothing.

    The key of Inductor's cache leaves it out (torch 2.13). A backward of the same operators would be served code that
    overwrites what it must not: an output of its forward, or what a second backward (retain_graph) will read.
    """
    context: Any = torch._guards.TracingContext.try_get()
    metadata = None if context is None else context.fw_metadata
    donated = getattr(metadata, "bw_donated_idxs", None)
    return f" overwrites {donated}" if donated else ""


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
            return cache_identity, source_hash(), users_identity

    if takes_several:
        return [*custom_graph_pass.get_custom_graph_passes(users_pass), CacheIdentity()]
    return CacheIdentity()


_NOTHING_TO_FILL: tuple[Collection[tuple[int, torch.dtype]], Callable[[torch.Tensor], object]] = (), torch.Tensor.zero_


class _OfThread(threading.local):
    filling = _NOTHING_TO_FILL


class _Allocating:
    """What generated modules allocate with, replaced while any thread runs in `allocations_filled`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._replaced: list[tuple[Any, str, Callable[..., torch.Tensor]]] = []
        self._of_thread = _OfThread()

    @contextlib.contextmanager
    def filled(
        self, kinds: Collection[tuple[int, torch.dtype]], fill: Callable[[torch.Tensor], object]
    ) -> Iterator[None]:
        with self._lock:
            self._users += 1
            self._replace()
        before, self._of_thread.filling = self._of_thread.filling, (kinds, fill)
        try:
            yield
        finally:
            self._of_thread.filling = before
            with self._lock:
                self._users -= 1
                if not self._users:
                    self._restore()

    def _replace(self) -> None:
        from torch._inductor.codecache import PyCodeCache

        done = {(id(module), name) for module, name, _ in self._replaced}
        for module in PyCodeCache.modules:
            for name, allocate in [*vars(module).items()]:
                if name.startswith("empty_strided_") and (id(module), name) not in done:
                    setattr(module, name, self._filling(allocate))
                    self._replaced.append((module, name, allocate))

    def _restore(self) -> None:
        while self._replaced:
            setattr(*self._replaced.pop())

    def _filling(self, allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def allocate_filled(size: Any, stride: Any, dtype: torch.dtype, *others: Any) -> torch.Tensor:
            memory = allocate(size, stride, dtype, *others)
            kinds, fill = self._of_thread.filling
            if len(size) == 1 and (size[0], dtype) in kinds:
                fill(memory)
            return memory

        return allocate_filled


_allocating = _Allocating()


def allocations_filled(
    kinds: Collection[tuple[int, torch.dtype]], fill: Callable[[torch.Tensor], object]
) -> contextlib.AbstractContextManager[None]:
    """In this context and thread generated code gets one-dimensional memory of these sizes and dtypes filled.

    That are flat buffers, where the code allocates them; C++ code allocates its own.
    """
    return _allocating.filled(kinds, fill)


# What Inductor draws by itself, from a seed and an element's place: other numbers than these operators draw eagerly.
RANDOM = ("prims::inductor_random", "prims::inductor_randint")


def drawn(operator: Any, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> torch.Tensor:
    """What one of those with a name in `RANDOM` is in compiled code. Compiles it, once for each size."""
    (seed,) = (argument for argument in arguments if isinstance(argument, torch.Tensor))
    others = tuple(
        None if argument is seed else tuple(argument) if isinstance(argument, list | torch.Size) else argument
        for argument in arguments
    )
    (values,) = _drawing(operator, others, tuple(keywords.items()), seed.device, tuple(seed.shape))(seed)
    return values  # type: ignore[no-any-return]


@functools.lru_cache(maxsize=64)
def _drawing(
    operator: Any,
    others: tuple[Any, ...],
    keywords: tuple[tuple[str, Any], ...],
    device: torch.device,
    seed_shape: tuple[int, ...],
) -> Callable[..., Any]:
    """A compiled call of `operator` that takes the seed, in place of the argument that is None."""
    from torch._inductor.compile_fx import compile_fx

    graph = torch.fx.Graph()
    seed = graph.placeholder("seed")
    arguments = [seed if argument is None else argument for argument in others]
    arguments = [list(argument) if isinstance(argument, tuple) else argument for argument in arguments]
    graph.output((graph.call_function(operator, tuple(arguments), dict(keywords)),))
    example = torch.zeros(seed_shape, dtype=torch.int64, device=device)
    return _callable(compile_fx(GraphModule(torch.nn.Module(), graph), [example]))


def _callable(compiled: object) -> Callable[..., Any]:
    """What compile_fx returns for a graph that runs in this process; its other results are of ahead-of-time modes."""
    assert callable(compiled)
    return compiled
