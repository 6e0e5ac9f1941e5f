"""Every use of a private torch API, in one place, each with the versions it was checked on.

All tests ran on torch 2.11.0, 2.12.1, 2.13.0 and 2.14.1 (docs/limits.md, "Versions of torch"). What takes a GPU did not
run; there the sources were compared. On another version of `SUPPORTED_TORCH`, a name that is missing is an
AttributeError or ImportError from this module. What stands in for something of torch's, or goes before it, is called
with what torch gives: an argument that it does not know is passed on.

| name | used for |
|---|---|
| `torch._C`: `_current_graph_task_id`, `_current_autograd_node` | where a backward stands |
| `torch._C._will_engine_execute_node` | the same |
| `torch._C._set_grad_enabled` | looking for what accumulates a parameter's gradient, in each backward |
| `torch.autograd.Variable._execution_engine` | the end of a backward |
| `torch._foreach_copy_`, `torch._foreach_mul_` | filling a bucket by one call |
| `torch._C._storage_Use_Count` | whether anybody else holds a flat buffer |
| `torch._C.Future` | what a communication hook may return |
| `Tensor._backward_hooks`, `Tensor._post_accumulate_grad_hooks` | what users have registered |
| `torch._inductor.compile_fx` and its `inner_compile` | rewriting the backward graph before Inductor |
| `torch._inductor.config`, `torch._inductor.list_mode_options` | options, communication passes, use of CUDA graphs |
| `torch._inductor.custom_graph_pass` | an identity in the caches' keys |
| `torch._dynamo.backends.common.aot_autograd`, `torch._dynamo.backends.debugging.boxed_nop` | `backend="aot_eager"` |
| `torch._functorch._aot_autograd.descriptors`, in an output's `meta["desc"]` | which output is whose gradient |
| `CompiledFunction.maybe_subclass_metadata`, its `grad_input_metas` | the same, where a gradient is a tensor subclass |
| `torch._functorch._aot_autograd.schemas.PlainTensorMeta` | the same |
| `CompiledFunction._backward_impl` of AOTAutograd | choosing a backward when it starts |
| `get_or_compile` of the backward's compiler, in the closure of `_backward_impl` | compiling a backward ahead |
| `torch._C._autograd._get_current_graph_task_keep_graph` | several backwards of one forward |
| `CompiledFunction.metadata.bw_donated_idxs` | the same |
| `CompiledFunction.metadata.input_info` | whether a compiled graph has the inputs of the captured one |
| `torch._functorch._aot_autograd.runtime_wrappers.AutogradLazyBackwardCompileInfo` | the traced backward graph |
| `CompiledFunction._lazy_backward_info`, `bw_compiler` and `disable_amp` in that closure | compiling it again |
| `torch._functorch._aot_autograd.utils.call_func_at_runtime_with_args` | running what that makes |
| `torch._functorch.config` (`enable_autograd_cache`) | a graph that is not in AOTAutograd's cache |
| `torch._guards`, `GraphModule._param_name_to_source`, `Node._dynamo_source` | compiling a captured graph again |
| `torch._dynamo.symbolic_convert.TensorifyState` | the same, where floats are dynamic |
| `torch._inductor.decomposition`, `torch._subclasses.FakeTensorMode` | tracing a communication hook |
| `torch._C._DisableAutocast` | tracing and running one in the dtypes that it names |
| `Generator._cdata` | which generator an operator in a trace draws from |
| `UntypedStorage._cdata` | which results of a communication hook share memory with its arguments |
| `torch._inductor`: `ir`, `lowering`, `virtualized` | producing gradients inside their bucket |
| `torch._C`: `_get_mkldnn_enabled`, `_set_mkldnn_enabled` | capturing recurrent layers |
| `torch._dynamo.config` | capturing a model as it is |
| `torch._dynamo.optimize`, `torch._dynamo.trace_rules.check` | captures that several wrappers share |
| `torch._dynamo.eval_frame.OptimizeContext.callback` | how Python is set up while Dynamo captures |
| `torch._dynamo.exc.RestartAnalysis`, `torch._dynamo.exc.SkipFrame` | what a backend hands on to Dynamo |
| the warning `torch._dynamo hit config.…` of the logger `torch._dynamo.convert_frame` | naming a recompile limit |
| `torch._dynamo.utils.get_metrics_context`, `MetricsContext._metrics` | which guard has failed, in messages |
| `torch._ops.HigherOrderOperator`, `AccumulateGrad.variable` | which inputs reach which outputs of a captured graph |
| `Node.meta["example_value"]`, with the autograd graph of Dynamo's fake tensors | the same |
| `torch._dynamo.OptimizedModule`, `Module._compiled_call_impl` | models that are compiled already |
| `torch.utils.hooks.RemovableHandle.next_id`, `Module._forward_hooks` and its like | hooks that come later |
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
| `torch.nn.utils.stateless._untie_named_tensors_map`, `torch.nn.utils._named_member_accessor` | their names |
| `_fqn_modifiers` of a module | names in torch.distributed.checkpoint |
| `torch._C._functorch`, `torch._C._are_functorch_transforms_active` | a forward inside of torch.func's transforms |
| `Tensor._version` | whether somebody has changed a gradient in place |
| `torch.utils._python_dispatch.TorchDispatchMode` | looking at a graph's collectives while it runs |
| `torch._C`: `_dispatch_tls_local_include_set`, `_dispatch_tls_local_exclude_set` | what the look leaves alone |
| `torch._C._ForceDispatchKeyGuard` | the same |
| `torch._C._dynamo.eval_frame.get_eval_frame_callback` | whether Dynamo looks at what runs here |
| `torch._dynamo.eval_frame.innermost_fn` | calling a compiled forward where Dynamo is off |
| `torch.distributed.distributed_c10d.AllreduceOptions` | an all-reduce without the checks of what users pass |
| `torch._C._dynamo.guards.TensorGuards` | whether parameters are of the kind that they were |
| `torch._dynamo.trace_rules.add` | keeping this package out of all traces |
| `torch._dynamo.config.trace_autograd_ops` | refusing a backward that Dynamo would drop |
| `torch._dynamo.compiled_autograd`, `CompiledFunction._compiled_autograd_key` | refusing compiled autograd |
| `torch.utils._pytree` | trees of tensors, as torch.func takes them |
| `torch._subclasses.fake_tensor.init_gpu_context` | CUDA code without a GPU, for tests; patched by name |
| `torch._subclasses.fake_tensor.FakeTensorMode` | tracing a functional step |
| `torch.utils._python_dispatch`: `_disable_current_modes`, `_get_current_dispatch_mode_stack` | the same |
| `torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack` | the same |
| `torch._C`: `DispatchKey.ZeroTensor`, `DispatchKeySet`, `_dispatch_keyset_full_after` | tracing forward mode |
| `torch._dynamo.symbolic_convert` | tests: what Dynamo traces |
| `torch.testing._internal.two_tensor.TwoTensor` | tests: a tensor subclass |
| `torch._dynamo.utils`, `torch._inductor.utils` | tests: counters, generated code |
| `torch._inductor.graph.GraphLowering`, `torch.testing._internal.distributed.fake_pg` | tests: code for CUDA |
| `torch._inductor`: `scheduler.Scheduler`, `select_algorithm`, `ir.ChoiceCaller` | the same |
| `torch._inductor.codecache.CacheBase`, `torch._inductor.runtime.hints.DeviceProperties` | the same |
| `torch.utils._triton`, `torch._guards.TracingContext`, `torch._dynamo.reset` | the same |
| `torch.cuda._sanitizer.cuda_sanitizer`, `torch._inductor.cudagraph_trees.get_manager` | `make gpu`: races, graphs |
| `Node._replace_input_with`, `Node._update_args_kwargs` | tests: what passes do to nodes |

Where versions differ: gloo's constructor has an argument more from 2.14 on, `compile_fx_inner` from 2.12 on. Inductor
takes several custom passes from 2.13 on, and passes that are told of inference from 2.12 on. In 2.11 `_backward_impl`
itself compiles, and Dynamo does not look at a parameter again that is in its old place. Its backward's compiler is in
`aot_config` up to 2.12. Captures are told apart (`isolate_recompiles`) from 2.13 on.
"""

from compiled_ddp.torch_private import (
    aot,
    autograd,
    captures,
    checkpoints,
    compiler_options,
    dynamo,
    for_tests,
    groups,
    inductor,
    modules,
    packing,
    subclasses,
    tensors,
    tracing,
    trees,
    versions,
)

# Here, as whatever of this package may run below compiled code imports this one.
dynamo.leave_out_of_traces("compiled_ddp", "compiled_ddp.passes")

__all__ = [
    "aot",
    "autograd",
    "captures",
    "checkpoints",
    "compiler_options",
    "dynamo",
    "for_tests",
    "groups",
    "inductor",
    "modules",
    "packing",
    "subclasses",
    "tensors",
    "tracing",
    "trees",
    "versions",
]
