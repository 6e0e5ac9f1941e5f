"""CUDA code without a GPU: what Inductor writes for a backward, for tests. Nothing of it is run.

The model is traced on the CPU, as AOTAutograd needs a driver for another device. Its backward graph, as Inductor is
given it, is moved to fake CUDA tensors, and Inductor writes Triton and the code around it for an H100 that is
pretended. Needs triton; seen to work with torch 2.13.0 (CPU wheel) and triton 3.9.0.
"""

import contextlib
import copy
import functools
import importlib
import itertools
import unittest.mock
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_aggregate

from compiled_ddp.torch_private.dynamo import size_hint

CUDA = torch.device("cuda", 0)
# Of an H100 SXM, as NVIDIA publishes them.
PROPERTIES = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3",
    major=9,
    minor=0,
    total_memory=80 * 2**30,
    multi_processor_count=132,
    warp_size=32,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    regs_per_multiprocessor=65536,
    shared_memory_per_block=48 * 2**10,
    shared_memory_per_block_optin=227 * 2**10,
    shared_memory_per_multiprocessor=228 * 2**10,
    L2_cache_size=50 * 2**20,
)


@contextlib.contextmanager
def pretended_gpu() -> Iterator[None]:
    """Within this context Inductor and triton take this machine for one with an H100."""
    target = importlib.import_module("triton.backends.compiler").GPUTarget("cuda", 90, 32)
    driver = importlib.import_module("triton.runtime.driver").driver
    stream = SimpleNamespace(cuda_stream=0, device=CUDA, stream_id=0)
    of_cuda: dict[str, Callable[..., object]] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "current_stream": lambda *_: stream,
        "synchronize": lambda *_: None,
        "set_device": lambda *_: None,
        "_exchange_device": lambda *_: 0,
        "_maybe_exchange_device": lambda *_: 0,
        "_lazy_init": lambda: None,
        "get_rng_state": lambda *_: torch.zeros(16, dtype=torch.uint8, device="cpu"),
        "set_rng_state": lambda *_: None,
        "_get_device_properties": lambda *_: PROPERTIES,  # not there in a build without CUDA
        "get_device_properties": lambda *_: PROPERTIES,
        "get_device_capability": lambda *_: (9, 0),
    }
    drivers = SimpleNamespace(
        get_current_target=lambda: target,
        get_current_device=lambda: 0,
        get_current_stream=lambda *_: 0,
        get_device_interface=lambda: torch.cuda,
        get_active_torch_device=lambda: CUDA,
    )
    answers = _remembered_answers()
    with contextlib.ExitStack() as stack:
        for function in answers:
            stack.callback(function.cache_clear)
        for name, pretended in of_cuda.items():
            stack.enter_context(unittest.mock.patch.object(torch.cuda, name, pretended, create=True))
        stack.enter_context(unittest.mock.patch.object(torch.cuda.random, "_lazy_init"))
        stack.enter_context(unittest.mock.patch.object(torch.version, "cuda", "12.6"))
        stack.enter_context(unittest.mock.patch.object(driver, "_active", drivers))
        # A backward of fake tensors on a GPU needs its context, which none runs here; 2.11 asks for it before a driver.
        stack.enter_context(unittest.mock.patch("torch._subclasses.fake_tensor.init_gpu_context"))
        for name, operator in (
            ("__invert__", torch.ops.aten.bitwise_not.default),
            ("copy_", torch.ops.aten.copy_.default),
        ):
            # Torch's own guard the device first, which a build without CUDA has no guard for.
            unguarded = functools.partialmethod(_call, operator)
            stack.enter_context(unittest.mock.patch.object(Tensor, name, unguarded, create=True))
        for function in answers:
            function.cache_clear()
        yield


def _call(tensor: Tensor, operator: Callable[..., Tensor], *args: Any) -> Tensor:
    return operator(tensor, *args)


def _remembered_answers() -> list[Any]:
    """What asks once about this machine, and is to ask again when a pretence begins and when it ends."""
    from torch._inductor import utils
    from torch._inductor.codecache import CacheBase
    from torch._inductor.runtime.hints import DeviceProperties
    from torch.utils import _triton

    functions = (*vars(_triton).values(), *vars(utils).values(), CacheBase.get_system, DeviceProperties.create)
    return [function for function in functions if callable(getattr(function, "cache_clear", None))]


def backward_graph(
    model: Callable[..., Tensor], batch: Sequence[Tensor], dynamic: bool | None, options: Mapping[str, Any]
) -> tuple[GraphModule, list[Any]]:
    """The graph of the backward and its inputs, on the CPU, as Inductor would compile them under these options.

    Nothing is computed, so that real sizes cost no more than small ones.
    """
    from torch._inductor.compile_fx import compile_fx

    found: list[tuple[GraphModule, list[Any]]] = []

    def keep(graph_module: GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
        if options.get("is_backward"):
            found.append((copy.deepcopy(graph_module), list(inputs)))

        outputs: Any = graph_module.graph.output_node().args[0]

        def run(_: list[Any]) -> Any:
            return [_like_the_result(output) for output in outputs]

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    torch._dynamo.reset()
    with torch._functorch.config.patch(enable_autograd_cache=False):
        backend = functools.partial(compile_fx, inner_compile=keep, config_patches=dict(options))
        compiled = torch.compile(model, backend=backend, dynamic=dynamic)
        compiled(*batch).backward()
    (backward,) = found
    return backward


def _like_the_result(output: Any) -> Any:
    """Memory that nothing is computed into, of the size of what this node of a traced graph would return."""
    value = output.meta["val"] if isinstance(output, Node) else output
    if isinstance(value, Tensor):
        size, stride = ([size_hint(number) for number in numbers] for numbers in (value.shape, value.stride()))
        return torch.empty_strided(size, stride, dtype=value.dtype, device=value.device)
    return size_hint(value)


@contextlib.contextmanager
def tracing_in(mode: Any) -> Iterator[None]:
    """Within this context graphs are compiled with the fake tensors of `mode`."""
    from torch._guards import TracingContext, tracing

    with tracing(TracingContext(mode)):
        yield


def move_to_cuda(graph_module: GraphModule, inputs: Sequence[Any]) -> tuple[Any, list[Any]]:
    """Make the graph one of CUDA tensors; the mode of its fake values, and its inputs."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv
    from torch.fx.passes.fake_tensor_prop import FakeTensorProp

    symbolic = [value for value in inputs if isinstance(value, torch.SymInt)]
    shapes = symbolic[0].node.shape_env if symbolic else ShapeEnv()
    mode = FakeTensorMode(shape_env=shapes)

    def moved(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        with mode:
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=CUDA)

    for node in graph_module.graph.nodes:
        node.args, node.kwargs = (
            map_aggregate(given, lambda value: CUDA if isinstance(value, torch.device) else value)
            for given in (node.args, node.kwargs)
        )
    graph_module.recompile()
    on_cuda = [moved(value) for value in inputs]
    FakeTensorProp(graph_module, mode).propagate_dont_convert_inputs(*on_cuda)
    return mode, on_cuda


class _Written(Exception):
    """The code is there, and is not to be loaded."""


def code_of(compiling: Callable[[], object], options: Mapping[str, Any], *, templates: bool = False) -> str:
    """What Inductor writes, under these options of its own, when `compiling` lets it compile a graph.

    Where it would time kernels to choose among them (`max_autotune`), which needs a GPU, all of Triton's templates are
    taken to be faster than what libraries bring if `templates`, or else slower, and what can be fused with one is.
    """
    from torch._inductor import config
    from torch._inductor.graph import GraphLowering

    texts: list[str] = []

    def write(lowering: GraphLowering) -> None:
        code, _ = lowering.codegen()
        texts.append(code.value)
        raise _Written

    uncached = {"fx_graph_cache": False, "compile_threads": 1}
    stopping = unittest.mock.patch.object(GraphLowering, "_compile_to_module", write)
    with stopping, _pretended_timings(templates), config.patch({**uncached, **options}):
        try:
            compiling()
        except Exception:  # Inductor's own kind, whatever it was made of
            if not texts:
                raise
    return texts[0]


@contextlib.contextmanager
def _pretended_timings(templates: bool) -> Iterator[None]:
    """In here Inductor times no kernels: each takes a millisecond, the slower ones among its choices two.

    Of sizes that it would try one after the other it keeps the first. Of each template it sees the first two
    configurations, as equal ones take most of the time: some do not fit every shape.
    """
    from torch._inductor.choices import InductorChoices
    from torch._inductor.ir import ChoiceCaller
    from torch._inductor.runtime.coordinate_descent_tuner import CoordescTuner
    from torch._inductor.scheduler import Scheduler
    from torch._inductor.select_algorithm import AlgorithmSelectorCache, TritonTemplateCaller

    def timings(*arguments: Any, **_: object) -> dict[Any, float]:
        (choices,) = (given for given in arguments if isinstance(given, list) and isinstance(given[0], ChoiceCaller))
        return {choice: 1.0 if isinstance(choice, TritonTemplateCaller) == templates else 2.0 for choice in choices}

    of_all = InductorChoices._finalize_template_configs

    def of_few(
        self: InductorChoices, of_templates: Mapping[str, Iterator[Any]], *others: Any, **more: Any
    ) -> list[Any]:
        first = {name: itertools.islice(configurations, 2) for name, configurations in of_templates.items()}
        return of_all(self, first, *others, **more)  # type: ignore[arg-type]

    with (
        unittest.mock.patch.object(InductorChoices, "_finalize_template_configs", of_few),
        unittest.mock.patch.object(AlgorithmSelectorCache, "do_autotuning", timings),
        unittest.mock.patch.object(CoordescTuner, "autotune_single_field", lambda _, first, *__: first, create=True),
        unittest.mock.patch.object(Scheduler, "compile_kernel", return_value=(None, None)),
        unittest.mock.patch.object(Scheduler, "benchmark_fused_nodes", return_value=(1.0, "")),
        unittest.mock.patch.object(Scheduler, "benchmark_codegened_module", return_value=(1.0, "")),
    ):
        yield
