"""What is compared here: what anybody can compare on a model, and rows of this project's own."""

from functools import partial

from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

from benchmarks import torch_rows
from benchmarks.functional_module import FunctionalModule
from compiled_ddp import comm_hooks
from compiled_ddp.tools.comparison import variants
from compiled_ddp.tools.comparison.variants import Variant, WrapperOptions, of_this_package

SIZES_MB = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 25.0, 50.0)  # that planned buckets are held against
CUDA_GRAPHS = "reduce-overhead"  # torch.compile's mode


def make_variants(
    bucket_cap_mb: float | None = None, *, find_unused_parameters: bool = False, backend: str = "inductor"
) -> dict[str, Variant]:
    """All variants by name, in the order of the table. A given `bucket_cap_mb` holds for every wrapper, torch's too.

    `find_unused_parameters` is for torch's DDP alone. `backend` is that of every compiled variant.
    """
    options = WrapperOptions(bucket_cap_mb, find_unused_parameters, backend)
    further = partial(of_this_package, by_default=False)
    copied = partial(options.torch_ddp, gradient_as_bucket_view=False)  # torch's own default
    in_cuda_graphs = partial(options.compiled, mode=CUDA_GRAPHS)
    own = (
        *torch_rows.make_rows(options),
        Variant("functional, eager", "eager", partial(_functional, options, backend=None), by_default=False),
        Variant("functional, compiled", "compiled", partial(_functional, options, backend=backend), by_default=False),
        Variant("torch DDP, gradients copied", "eager", copied, by_default=False),
        Variant("no communication, CUDA graphs", "compiled", in_cuda_graphs, communicates=False, by_default=False),
        further("compile_ddp, CUDA graphs", "compiled", options.compile_ddp, mode=CUDA_GRAPHS),
        further("EagerDDP, buffers given back", "eager", options.eager_ddp, keep_buffers=False),
        further("compile_ddp, buffers given back", "compiled", options.compile_ddp, keep_buffers=False),
        *(further(f"EagerDDP, {size:g} MiB", "eager", options.eager_ddp, bucket_cap_mb=size) for size in SIZES_MB),
        *(
            further(f"compile_ddp, {size:g} MiB", "compiled", options.compile_ddp, bucket_cap_mb=size)
            for size in SIZES_MB
        ),
        *(
            further(f"{name}, {what}", kind, wrap, embedding_rows=by_rows)
            for name, kind, wrap in (
                ("EagerDDP", "eager", options.eager_ddp),
                ("compile_ddp", "compiled", options.compile_ddp),
            )
            for what, by_rows in (("whole embeddings", False), ("embeddings by rows", True))
        ),
        Variant("torch DDP, float16", "eager", partial(_torch_ddp_in_float16, options), by_default=False),
        further("compile_ddp, float16", "compiled", options.compile_ddp, comm_hook=comm_hooks.fp16_compress),
        Variant("torch DDP, PowerSGD", "eager", partial(_torch_ddp_by_powersgd, options), by_default=False),
        further("compile_ddp, PowerSGD", "compiled", options.compile_ddp, comm_hook=comm_hooks.PowerSGD()),
    )
    return variants.make_variants(options) | {variant.name: variant for variant in own}


def _torch_ddp_in_float16(options: WrapperOptions, model: nn.Module) -> nn.Module:
    wrapper = options.torch_ddp(model)
    wrapper.register_comm_hook(None, fp16_compress_hook)
    return wrapper


def _torch_ddp_by_powersgd(options: WrapperOptions, model: nn.Module) -> nn.Module:
    """Each parameter's matrix by one of rank 2; torch 2.13's hook for whole buckets fails in an assertion."""
    wrapper = options.torch_ddp(model)
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
    wrapper.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return wrapper


def _functional(options: WrapperOptions, model: nn.Module, backend: str | None) -> nn.Module:
    return FunctionalModule(model, backend=backend, **options.of_ours())
