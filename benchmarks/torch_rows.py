"""Rows of what torch itself offers beside DDP: `replicate`, and Inductor's own ways to bucket and place all-reduces.

torch replicate           a block's gradients in one all-reduce each, launched by hooks: FSDP2 without shards
torch.compile(replicate)  the same, compiled
functional all-reduces    one for each gradient, as Inductor places them; and the same with its options:
  , bucketed              `bucket_all_reduces_fx` as it comes: buckets of up to 2000 MB
  , buckets of 25 MiB     the same with DDP's size, or `bucket_cap_mb`
  , buckets per block     `manual_overlap_bucketing` (torch 2.14): each is waited for behind the next launch
  , overlap scheduling    `aten_distributed_optimizations`: buckets and places by what operators are expected to take
"""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.functional_all_reduces import FunctionalAllReduces
from compiled_ddp import torch_private
from compiled_ddp.tools.comparison.variants import Variant, WrapperOptions

FUNCTIONAL = "functional all-reduces"
PER_BLOCK = f"{FUNCTIONAL}, buckets per block"
SCHEDULED = f"{FUNCTIONAL}, overlap scheduling"
NEEDS_TORCH = {PER_BLOCK: (2, 14)}  # older ones have it for other collectives alone
# Up to 2.14 both read the bandwidth of a GPU's memory; on the CPU 2.15 takes operators for instantaneous.
NEEDS_TORCH_ON_CPU = {PER_BLOCK: (2, 15), SCHEDULED: (2, 15)}
REDUCES_WHAT_IS_USED = ("torch replicate", "torch.compile(replicate)")  # so that all ranks must use the same parameters
DDPS_BUCKET_MB = 25.0

_BUCKETED: dict[str, Any] = {"bucket_all_reduces_fx": "all", "reorder_for_compute_comm_overlap": True}
_SCHEDULED = {"enable_overlap_scheduling": True, "collective_bucketing": True, "compute_estimator": "analytical"}


@dataclass(frozen=True)
class Here:
    """What a row may need: the installed torch and the device, unless others are named."""

    torch_version: tuple[int, int] = field(default_factory=torch_private.versions.minor_version)
    has_gpu: bool = field(default_factory=torch.cuda.is_available)


def make_rows(options: WrapperOptions, *, here: Here | None = None) -> tuple[Variant, ...]:
    """Those that can be measured here; none is a row where no variants are asked for."""
    mb = options.bucket_cap_mb or DDPS_BUCKET_MB
    of_one_size = _BUCKETED | {"bucket_all_reduces_fx_bucket_size_determinator": _Always(mb)}
    scheduled = {f"aten_distributed_optimizations.{name}": value for name, value in _SCHEDULED.items()}
    wraps = {
        "torch replicate": _replicated,
        "torch.compile(replicate)": partial(_replicated, compiled=options),
        FUNCTIONAL: partial(_functional, options, {}),
        f"{FUNCTIONAL}, bucketed": partial(_functional, options, _BUCKETED),
        f"{FUNCTIONAL}, buckets of 25 MiB": partial(_functional, options, of_one_size),
        PER_BLOCK: partial(_bucketed_per_block, options),
        SCHEDULED: partial(_functional, options, scheduled),
    }
    return tuple(
        Variant(name, "eager" if name == "torch replicate" else "compiled", wrap, by_default=False)
        for name, wrap in wraps.items()
        if not why_not(name, here=here)
    )


def why_not(name: str, *, find_unused_parameters: bool = False, here: Here | None = None) -> str:
    """Why this row cannot be measured here, in one line; empty where it can, and for every row of another kind."""
    here = here or Here()
    needed = NEEDS_TORCH.get(name, (0, 0))
    if here.torch_version < needed:
        return f"'{name}' needs torch {needed[0]}.{needed[1]}, this is {torch.__version__}"
    on_cpu = NEEDS_TORCH_ON_CPU.get(name, (0, 0))
    if not here.has_gpu and here.torch_version < on_cpu:
        return f"'{name}' needs a GPU, or torch {on_cpu[0]}.{on_cpu[1]}: this is {torch.__version__}"
    if find_unused_parameters and name in REDUCES_WHAT_IS_USED:
        return f"'{name}' needs every parameter in every step, or the same on all ranks: it reduces what has a gradient"
    return ""


def blocks_of(model: nn.Module) -> dict[str, nn.Module]:
    """By name, what stands in the outermost lists of modules and has parameters: a transformer's blocks."""
    lists = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        within = any(name.startswith(f"{block}.") for block in found)
        if isinstance(module, lists) and not within and name not in found:
            members = {f"{name}.{child}".lstrip("."): member for child, member in module.named_children()}
            found |= {child: member for child, member in members.items() if next(member.parameters(), None) is not None}
    return found


def bucket_plan(model: nn.Module) -> list[list[str]]:
    """The modules whose gradients share a bucket: those before all blocks, each block, and those behind.

    Parameters beside blocks belong to none where their module holds other modules.
    """
    blocks = blocks_of(model)
    before: list[str] = []
    behind: list[str] = []
    rest = before
    for name, module in model.named_modules():
        if name in blocks:
            rest = behind
        in_a_block = any(f"{name}.".startswith(f"{block}.") for block in blocks)
        if module._parameters and not in_a_block and not list(module.children()):
            rest.append(name)
    return [names for names in (before, *([block] for block in blocks), behind) if names]


def _replicated(model: nn.Module, compiled: WrapperOptions | None = None) -> nn.Module:
    device = next(model.parameters()).device.type
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    for block in blocks_of(model).values():
        torch_private.for_benchmarks.replicate(block, mesh)
    torch_private.for_benchmarks.replicate(model, mesh)
    return model if compiled is None else compiled.compiled(model)


def _functional(options: WrapperOptions, inductor: dict[str, Any], model: nn.Module) -> nn.Module:
    of_inductor = {"options": inductor} if options.backend == "inductor" else {}
    return options.compiled(FunctionalAllReduces(model), **of_inductor)


def _bucketed_per_block(options: WrapperOptions, model: nn.Module) -> nn.Module:
    plan = [[f"module.{name}".rstrip(".") for name in names] for names in bucket_plan(model)]
    return _functional(
        options, {"post_grad_custom_post_pass": torch_private.for_benchmarks.bucketing_by_hand(plan)}, model
    )


class _Always:
    """The size of every bucket, in MB; equal, and the same in a cache's key, where the size is."""

    def __init__(self, mb: float) -> None:
        self._mb = mb

    def __call__(self, bucket: int) -> float:
        return self._mb
