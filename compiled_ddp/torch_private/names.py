"""The private names of torch that this package uses and that can be looked for before anything runs, by what for.

What stands in objects (a node's `meta`, attributes of AOTAutograd's function) is listed in this package's docstring.
"""

import importlib
from collections.abc import Mapping

NAMES: Mapping[str, tuple[str, ...]] = {
    "where a backward stands": (
        "torch._C._current_graph_task_id",
        "torch._C._current_autograd_node",
        "torch._C._will_engine_execute_node",
    ),
    "looking for what accumulates a parameter's gradient, in each backward": ("torch._C._set_grad_enabled",),
    "the end of a backward; one that fails before it reaches a hook": ("torch.autograd.Variable._execution_engine",),
    "filling a bucket by one call": (
        "torch._foreach_copy_",
        "torch._foreach_mul_",
    ),
    "whether anybody else holds a flat buffer": ("torch._C._storage_Use_Count",),
    "what a communication hook may return": ("torch._C.Future",),
    "what users have registered": (
        "torch.Tensor._backward_hooks",
        "torch.Tensor._post_accumulate_grad_hooks",
    ),
    "rewriting the backward graph before Inductor": ("torch._inductor.compile_fx",),
    "options, communication passes, use of CUDA graphs": (
        "torch._inductor.config",
        "torch._inductor.list_mode_options",
    ),
    "an identity in the caches' keys": ("torch._inductor.custom_graph_pass",),
    "one rank that compiles for all of its host": (
        "torch._inductor.runtime.cache_dir_utils.cache_dir",
        "torch._inductor.cpu_vec_isa.VecISA.check_build",
        "torch._inductor.cpp_builder.get_cpp_compiler",
    ),
    "what was found in the cache": ("torch._dynamo.utils.counters",),
    "one host that compiles for all of a job": (
        "torch.compiler._cache.AppendingByteSerializer",
        "torch.compiler._cache.CacheArtifactManager._seen_artifacts",
        "torch.compiler._cache._serialize_single_cache",
        "torch._inductor.codecache.CppCodeCache.cache",
    ),
    "many ranks that one process pretends": ("torch.testing._internal.distributed.fake_pg.FakeStore",),
    'backend="aot_eager"': (
        "torch._dynamo.backends.common.aot_autograd",
        "torch._dynamo.backends.debugging.boxed_nop",
    ),
    "which output is whose gradient": ("torch._functorch._aot_autograd.descriptors",),
    "which output is whose gradient, where that is a tensor subclass": (
        "torch._functorch._aot_autograd.schemas.PlainTensorMeta",
    ),
    "several backwards of one forward": ("torch._C._autograd._get_current_graph_task_keep_graph",),
    "the traced backward graph": ("torch._functorch._aot_autograd.runtime_wrappers.AutogradLazyBackwardCompileInfo",),
    "which autograd node a call of a graph has made": ("torch.autograd._get_sequence_nr",),
    "running a backward that was compiled again": (
        "torch._functorch._aot_autograd.utils.call_func_at_runtime_with_args",
    ),
    "a graph that is not in AOTAutograd's cache": ("torch._functorch.config",),
    "compiling a captured graph again": ("torch._guards",),
    "compiling a captured graph again, where floats are dynamic": ("torch._dynamo.symbolic_convert.TensorifyState",),
    "tracing a communication hook": (
        "torch._inductor.decomposition",
        "torch._subclasses.FakeTensorMode",
    ),
    "tracing and running one in the dtypes that it names": ("torch._C._DisableAutocast",),
    "which generator an operator in a trace draws from": ("torch.Generator._cdata",),
    "which results of a communication hook share memory with its arguments": ("torch.UntypedStorage._cdata",),
    "producing gradients inside their bucket": (
        "torch._inductor.ir",
        "torch._inductor.lowering",
        "torch._inductor.virtualized",
    ),
    "capturing recurrent layers": (
        "torch._C._get_mkldnn_enabled",
        "torch._C._set_mkldnn_enabled",
    ),
    "capturing a model as it is": ("torch._dynamo.config",),
    "captures that several wrappers share": (
        "torch._dynamo.optimize",
        "torch._dynamo.trace_rules.check",
    ),
    "what a backend hands on to Dynamo": (
        "torch._dynamo.exc.RestartAnalysis",
        "torch._dynamo.exc.SkipFrame",
    ),
    "which guard has failed, in messages": ("torch._dynamo.utils.get_metrics_context",),
    "which inputs reach which outputs of a captured graph": ("torch._ops.HigherOrderOperator",),
    "models that are compiled already": (
        "torch._dynamo.OptimizedModule",
        "torch.nn.Module._compiled_call_impl",
    ),
    "hooks that come later": ("torch.utils.hooks.RemovableHandle.next_id",),
    "a communicator's name, on every rank": (
        "torch.distributed.distributed_c10d._new_process_group_helper",
        "torch.distributed.distributed_c10d._world",
    ),
    "a name that all graphs share": (
        "torch._C._distributed_c10d._register_process_group",
        "torch._C._distributed_c10d._unregister_process_group",
    ),
    "when an all-reduce in a graph has ended": ("torch._C._distributed_c10d._register_work",),
    "sending beside a profiler": ("torch.autograd._enable_record_function",),
    "the group of a collective in a graph": ("torch.distributed.distributed_c10d._resolve_process_group",),
    "the group that all ranks have": (
        "torch.distributed.distributed_c10d._get_default_group",
        "torch.distributed.distributed_c10d._get_default_store",
    ),
    "one of some ranks alone": (
        "torch.distributed.distributed_c10d._get_split_source",
        "torch.distributed.ProcessGroup.bound_device_id",
    ),
    "how many collectives gloo runs at once": (
        "torch.distributed.ProcessGroupGloo.options",
        "torch.distributed.distributed_c10d.ProcessGroupGloo",
    ),
    "parameters and buffers": ("torch.distributed._broadcast_coalesced",),
    "a group's timeout, and which kinds of devices it is for": ("torch.distributed.ProcessGroup._get_backend",),
    "how many collectives a rank has launched": ("torch.distributed.ProcessGroup._device_types",),
    "moving inputs to the model's GPU": ("torch.distributed.utils._to_kwargs",),
    "whether launches and waits need their names": ("torch.autograd.profiler._is_profiler_enabled",),
    "refusing distributed autograd": (
        "torch.distributed.rpc.api._is_current_rpc_agent_set",
        "torch.distributed.autograd._current_context",
    ),
    "refusing torch's DDP around a wrapper": ("torch.nn.parallel.DistributedDataParallel._active_ddp_module",),
    "parameters that others stand in for during a call": ("torch.nn.utils.stateless._functional_call",),
    "the names of parameters that others stand in for": (
        "torch.nn.utils.stateless._untie_named_tensors_map",
        "torch.nn.utils._named_member_accessor",
    ),
    "a forward inside of torch.func's transforms": (
        "torch._C._functorch",
        "torch._C._are_functorch_transforms_active",
    ),
    "whether somebody has changed a gradient in place": ("torch.Tensor._version",),
    "looking at a graph's collectives while it runs": ("torch.utils._python_dispatch.TorchDispatchMode",),
    "what the look leaves alone": (
        "torch._C._dispatch_tls_local_include_set",
        "torch._C._dispatch_tls_local_exclude_set",
        "torch._C._ForceDispatchKeyGuard",
    ),
    "running a graph's collectives without autograd's layer": (
        "torch._C._AutoDispatchBelowAutograd",
        "torch._ops.OpOverloadPacket",
    ),
    "whether Dynamo looks at what runs here": ("torch._C._dynamo.eval_frame.get_eval_frame_callback",),
    "calling a compiled forward where Dynamo is off": ("torch._dynamo.eval_frame.innermost_fn",),
    "an all-reduce without the checks of what users pass": ("torch.distributed.distributed_c10d.AllreduceOptions",),
    "whether parameters are of the kind that they were": ("torch._C._dynamo.guards.TensorGuards",),
    "keeping this package out of all traces": ("torch._dynamo.trace_rules.add",),
    "refusing a backward that Dynamo would drop": ("torch._dynamo.config.trace_autograd_ops",),
    "refusing compiled autograd": ("torch._dynamo.compiled_autograd",),
    "trees of tensors, as torch.func takes them": ("torch.utils._pytree",),
    "a functional step that asks for a value": (
        "torch._subclasses.fake_tensor.DataDependentOutputException",
        "torch._subclasses.fake_tensor.DynamicOutputShapeException",
        "torch.fx.experimental.symbolic_shapes.GuardOnDataDependentSymNode",
    ),
    "tracing a functional step": (
        "torch._subclasses.fake_tensor.FakeTensorMode",
        "torch.utils._python_dispatch._disable_current_modes",
        "torch._C._len_torch_dispatch_stack",
        "torch._C._len_torch_function_stack",
        "torch.overrides._pop_mode_temporarily",
        "torch.compiler._is_compiling_flag",
        "torch._ops._len_torch_dispatch_stack_pre_dispatch",
        "torch._C._functorch.peek_interpreter_stack",
        "torch.utils._python_dispatch._get_current_dispatch_mode_stack",
        "torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack",
    ),
    "tracing forward mode": (
        "torch._C.DispatchKey.ZeroTensor",
        "torch._C.DispatchKeySet",
        "torch._C._dispatch_keyset_full_after",
    ),
    "counting a step of an optimizer": ("torch._foreach_copy_",),
    "hooks around an optimizer's step": (
        "torch.optim.optimizer._global_optimizer_pre_hooks",
        "torch.optim.optimizer._global_optimizer_post_hooks",
    ),
    "filling what generated code allocates": ("torch._inductor.codecache.PyCodeCache",),
}


def find(name: str) -> object:
    """What stands under a dotted name. Raises ImportError or AttributeError."""
    parts = name.split(".")
    found: object = importlib.import_module(parts[0])
    for number, part in enumerate(parts[1:], start=2):
        # torch.optim takes the names of its modules away again.
        is_there = hasattr(found, part)
        found = getattr(found, part) if is_there else importlib.import_module(".".join(parts[:number]))
    return found


def moved() -> list[str]:
    """The names that this torch lacks, each with its use. Takes some seconds: it imports torch's compiler."""
    return [f"{name} ({use})" for use, names in NAMES.items() for name in names if not _exists(name)]


def _exists(name: str) -> bool:
    try:
        find(name)
    except (ImportError, AttributeError):
        return False
    return True
