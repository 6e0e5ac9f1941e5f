"""What tests alone ask of torch."""

import contextlib
import functools
import itertools
import types
import unittest.mock
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from compiled_ddp.torch_private.aot import _ANOTHER_BACKWARD
from compiled_ddp.torch_private.inductor import _COMPARES_GRAPHS


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
def noting_edits() -> Iterator[list[int]]:
    """Yields a list: for each change of a graph's node in here, of how many inputs it has, all of which that reads."""
    edits: list[int] = []

    def noted(edit: Callable[..., Any]) -> Callable[..., Any]:
        def note_and_edit(node: torch.fx.Node, *args: Any) -> Any:
            result = edit(node, *args)
            edits.append(len(node.all_input_nodes))
            return result

        return note_and_edit

    with contextlib.ExitStack() as stack:
        for name in ("_replace_input_with", "_update_args_kwargs"):
            patch = unittest.mock.patch.object(torch.fx.Node, name, noted(getattr(torch.fx.Node, name)))
            stack.enter_context(patch)
        yield edits


def forget_fake_results() -> None:
    """Fake tensors keep the results of operators, for the process; from here on they find none."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    FakeTensorMode.cache_clear()


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


@contextlib.contextmanager
def generated_code_changed(change: Callable[[str], str]) -> Iterator[None]:
    """Run what `change` makes of the code that Inductor generates, which then is in no cache."""
    from torch._inductor import config
    from torch._inductor.codecache import PyCodeCache

    write = PyCodeCache.write

    def write_changed(source_code: str, *args: Any, **kwargs: Any) -> Any:
        return write(change(source_code), *args, **kwargs)

    with unittest.mock.patch.object(PyCodeCache, "write", write_changed), config.patch(force_disable_caches=True):
        yield


def generated_modules_are(modules: list[Any]) -> contextlib.AbstractContextManager[object]:
    """Within this context Inductor has generated these alone."""
    from torch._inductor.codecache import PyCodeCache

    return unittest.mock.patch.object(PyCodeCache, "modules", modules)


def compiler_counters() -> dict[str, dict[str, int]]:
    """Dynamo's and Inductor's counters so far: cache hits and misses, graphs captured."""
    from torch._dynamo.utils import counters

    return {group: dict(values) for group, values in counters.items()}


def recorded_cuda_graphs(device_index: int) -> int:
    """How many CUDA graphs Inductor has recorded in this thread on the GPU with this index, and still holds."""
    from torch._inductor.cudagraph_trees import get_manager

    manager = get_manager(device_index, create_if_none_exists=False)
    found, of_level = 0, [] if manager is None else [node for nodes in manager.roots.values() for node in nodes]
    while of_level:
        found += len(of_level)
        of_level = [below for node in of_level for nodes in node.children.values() for below in nodes]
    return found


@contextlib.contextmanager
def stream_sanitizer() -> Iterator[None]:
    """torch's CUDA sanitizer is on in here. Nothing is captured meanwhile: Dynamo stands back for dispatch modes.

    TORCH_CUDA_SANITIZER, which is documented, has it on for the whole process, so that no captured graph would run.
    """
    from torch.cuda._sanitizer import cuda_sanitizer

    cuda_sanitizer.enable()
    try:
        yield
    finally:
        cuda_sanitizer.disable()


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


def peak_bytes(run: Callable[[], object]) -> int:
    """How much memory on the CPU `run` has at once, of what it allocates."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    assert profile.profiler is not None and profile.profiler.kineto_results is not None
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = itertools.accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns()))
    return max(live, default=0)


def register_without_names(container: type, flatten: Callable[[Any], Any], build: Callable[[Any, Any], Any]) -> None:
    """Let trees have this kind of container, which does not name its leaves."""
    from torch.utils import _pytree

    _pytree.register_pytree_node(container, flatten, build)


def two_tensors(first: torch.Tensor, second: torch.Tensor) -> Any:
    """A tensor subclass that AOTAutograd takes apart, with `a` and `b`: each operator is run with both."""
    from torch.testing._internal.two_tensor import TwoTensor

    return TwoTensor(first, second)
