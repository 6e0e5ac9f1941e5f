"""Every use of a private torch API, in one place, each with the versions it was checked on.

All tests ran on one release of each version from `versions.OLDEST` to `versions.NEWEST` (docs/limits.md, "Versions of
torch"). What takes a GPU did not run; there the sources were compared. On a newer version the names in `names` are
looked for, and a wrapper is refused with a list of those that have moved. What stands in for something of torch's, or
goes before it, is called with what torch gives: an argument that it does not know is passed on.

Beside `names`, which can be looked for, these are used:

| name | used for |
|---|---|
| `torch._inductor.compile_fx` and its `inner_compile` | rewriting the backward graph before Inductor |
| `torch._functorch._aot_autograd.descriptors`, in an output's `meta["desc"]` | which output is whose gradient |
| `CompiledFunction.maybe_subclass_metadata`, its `grad_input_metas` | the same, where a gradient is a tensor subclass |
| `CompiledFunction._backward_impl` of AOTAutograd | choosing a backward when it starts |
| `get_or_compile` of the backward's compiler, in the closure of `_backward_impl` | compiling a backward ahead |
| `CompiledFunction.metadata.bw_donated_idxs` | several backwards of one forward |
| `CompiledFunction.metadata.input_info` | whether a compiled graph has the inputs of the captured one |
| `CachedAutogradLazyBackwardCompileInfo.bw_module_fn`, read by name | the same where AOTAutograd has it in its cache |
| `CompiledFunction._lazy_backward_info`, `bw_compiler` and `disable_amp` in that closure | compiling it again |
| `torch._functorch.config` (`enable_autograd_cache`) | a graph that is not in AOTAutograd's cache |
| `GraphModule._param_name_to_source`, `Node._dynamo_source` | compiling a captured graph again |
| `__dynamo_disable` of `torch.utils.checkpoint.checkpoint` | what a whole step does in its place |
| `torch._dynamo.eval_frame.OptimizeContext.callback` | how Python is set up while Dynamo captures |
| the warning `torch._dynamo hit config.…` of the logger `torch._dynamo.convert_frame` | naming a recompile limit |
| `MetricsContext._metrics` | which guard has failed, in messages; compiling a backward while a forward is compiled |
| `AccumulateGrad.variable` | which inputs reach which outputs of a captured graph |
| `Node.meta["example_value"]`, with the autograd graph of fake tensors | which inputs reach which outputs |
| `torch.utils.hooks.RemovableHandle.next_id`, `Module._forward_hooks` and its like | hooks that come later |
| `Backend._get_sequence_number_for_group` | how many collectives a rank has launched |
| `Joinable._join_config` | whether a join is under way |
| `Module._ddp_params_and_buffers_to_ignore` | which parameters and buffers DDP leaves alone |
| `Tensor._in_backward_optimizers` | refusing optimizers that step in the backward |
| `_fqn_modifiers` of a module | names in torch.distributed.checkpoint |
| `CompiledFunction._compiled_autograd_key` | refusing compiled autograd |
| `torch._subclasses.fake_tensor.init_gpu_context` | CUDA code without a GPU, for tests; patched by name |
| `torch._dynamo.utils`: `compilation_time_metrics`, `counters` | where a first step's seconds go, in `compare` |
| `torch._dynamo.symbolic_convert` | tests: what Dynamo traces |
| `torch.testing._internal.two_tensor.TwoTensor` | tests: a tensor subclass |
| `torch._dynamo.utils`, `torch._inductor.utils` | tests: counters, generated code |
| `torch._inductor.graph.GraphLowering`, `torch.testing._internal.distributed.fake_pg` | tests: code for CUDA |
| `torch._inductor`: `scheduler.Scheduler`, `select_algorithm`, `ir.ChoiceCaller` | the same |
| `torch._inductor`: `choices.InductorChoices` | the same |
| `torch._inductor.runtime.coordinate_descent_tuner.CoordescTuner` | the same |
| `torch._inductor.codecache.PyCodeCache` | filling what generated code allocates; tests: changing the code |
| `torch._inductor.codecache.CacheBase`, `torch._inductor.runtime.hints.DeviceProperties` | the same |
| `torch.utils._triton`, `torch._guards.TracingContext`, `torch._dynamo.reset` | the same |
| `torch.cuda._sanitizer.cuda_sanitizer`, `torch._inductor.cudagraph_trees.get_manager` | `make gpu`: races, graphs |
| `torch.distributed._composable.replicate_with_fsdp.replicate` | benchmarks: what torch offers beside DDP |
| `torch._inductor.fx_passes.overlap_manual_scheduling.manual_overlap_bucketing` | the same |
| `torch._dynamo.lookup_backend` | benchmarks: how often something was compiled |
| `Node._replace_input_with`, `Node._update_args_kwargs` | tests: what passes do to nodes |

Where versions differ: gloo's constructor has an argument more from 2.14 on, `compile_fx_inner` from 2.12 on. Inductor
takes several custom passes from 2.13 on, and passes that are told of inference from 2.12 on. In 2.11 `_backward_impl`
itself compiles, and Dynamo does not look at a parameter again that is in its old place. Mix-order reductions write into
views from 2.15 on. Its backward's compiler is in `aot_config` up to 2.12. Captures are told apart
(`isolate_recompiles`) from 2.13 on.
"""

from compiled_ddp.torch_private import names, versions

try:
    from compiled_ddp.torch_private import (
        aot,
        autograd,
        cache_artifacts,
        captures,
        checkpoints,
        compile_times,
        compiler_cache,
        compiler_options,
        dynamo,
        exchanges,
        for_benchmarks,
        for_tests,
        groups,
        inductor,
        modules,
        optimizers,
        packing,
        subclasses,
        tensors,
        tracing,
        trees,
        vector_checks,
    )
except (AttributeError, ImportError) as error:
    raise ImportError(versions.where_names_have_moved([str(error)])) from error

# Here, as whatever of this package may run below compiled code imports this one.
dynamo.leave_out_of_traces("compiled_ddp", "compiled_ddp.passes")

__all__ = [
    "aot",
    "autograd",
    "cache_artifacts",
    "captures",
    "checkpoints",
    "compile_times",
    "compiler_cache",
    "compiler_options",
    "dynamo",
    "exchanges",
    "for_benchmarks",
    "for_tests",
    "groups",
    "inductor",
    "modules",
    "names",
    "optimizers",
    "packing",
    "subclasses",
    "tensors",
    "tracing",
    "trees",
    "vector_checks",
    "versions",
]
