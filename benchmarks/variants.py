"""What is compared: how each wrapper is put around a model, and which floor its row is measured against."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

Floor = Literal["eager", "compiled"]


@dataclass(frozen=True)
class Variant:
    """One row of the table.

    `wrap` turns a bare model into the module that is trained. A row that does not communicate is the floor of its
    kind. `bucket_bytes` reads, after a backward, the size of each all-reduce of the wrapped module, if it can tell.
    `unwrap` is what has to be called before a wrapped module can be freed, if anything.
    """

    name: str
    floor: Floor
    wrap: Callable[[nn.Module], nn.Module]
    communicates: bool = True
    bucket_bytes: Callable[[nn.Module], list[int]] | None = None
    unwrap: Callable[[nn.Module], object] | None = None
    by_default: bool = True  # whether it is a row where no variants are asked for

    @property
    def label(self) -> str:
        """The name as part of an identifier or of a path."""
        return re.sub(r"\W+", "_", self.name).strip("_")


def _torch_ddp(model: nn.Module, options: dict[str, Any]) -> DistributedDataParallel:
    return DistributedDataParallel(model, gradient_as_bucket_view=True, **options)


def _torch_ddp_in_float16(model: nn.Module, options: dict[str, Any]) -> nn.Module:
    wrapper = _torch_ddp(model, options)
    wrapper.register_comm_hook(None, fp16_compress_hook)
    return wrapper


def _eager_ddp(model: nn.Module, options: dict[str, Any]) -> nn.Module:
    from compiled_ddp import EagerDDP

    return EagerDDP(model, **options)


def _compile_ddp_in_float16(model: nn.Module, options: dict[str, Any]) -> nn.Module:
    from compiled_ddp.comm_hooks import fp16_compress

    return _compile_ddp(model, {**options, "comm_hook": fp16_compress})


def _compile_ddp(model: nn.Module, options: dict[str, Any]) -> nn.Module:
    from compiled_ddp import compile_ddp

    return compile_ddp(model, **options)


def _ours(
    name: str,
    floor: Floor,
    wrap: Callable[[nn.Module, dict[str, Any]], nn.Module],
    options: dict[str, Any],
    *,
    bucket_bytes: Callable[[nn.Module], list[int]] | None = None,
    by_default: bool = True,
) -> Variant:
    wrapped = partial(wrap, options=options)
    return Variant(name, floor, wrapped, bucket_bytes=bucket_bytes, unwrap=_unwrap, by_default=by_default)


def _functional(model: nn.Module, options: dict[str, Any], backend: str | None) -> nn.Module:
    from benchmarks.functional_module import FunctionalModule

    return FunctionalModule(model, backend=backend, **options)


def _planned_bytes(module: nn.Module) -> list[int]:
    return [bucket.nbytes for bucket in module.plan.buckets]


def _unwrap(module: nn.Module) -> nn.Module:
    return module.unwrap()


def make_variants(
    bucket_cap_mb: float | None = None, *, find_unused_parameters: bool = False, backend: str = "inductor"
) -> dict[str, Variant]:
    """All variants by name, in the order of the table. A given `bucket_cap_mb` holds for every wrapper, torch's too.

    `find_unused_parameters` is for torch's DDP alone. `backend` is that of every compiled variant.
    """
    options: dict[str, Any] = {} if bucket_cap_mb is None else {"bucket_cap_mb": bucket_cap_mb}
    of_torch = {**options, "find_unused_parameters": find_unused_parameters}
    compiled = partial(torch.compile, backend=backend)
    of_compile_ddp, given_back = {**options, "backend": backend}, {"keep_buffers": False}
    variants = (
        Variant("no communication, eager", "eager", lambda model: model, communicates=False),
        Variant("no communication, compiled", "compiled", compiled, communicates=False),
        Variant("torch DDP", "eager", lambda model: _torch_ddp(model, of_torch)),
        Variant("torch.compile(DDP)", "compiled", lambda model: compiled(_torch_ddp(model, of_torch))),
        Variant("DDP(torch.compile)", "compiled", lambda model: _torch_ddp(compiled(model), of_torch)),
        _ours("EagerDDP", "eager", _eager_ddp, options, bucket_bytes=_planned_bytes),
        _ours("compile_ddp", "compiled", _compile_ddp, of_compile_ddp, bucket_bytes=_planned_bytes),
        Variant("functional, eager", "eager", lambda model: _functional(model, options, None), by_default=False),
        Variant(
            "functional, compiled", "compiled", lambda model: _functional(model, options, backend), by_default=False
        ),
        _ours("EagerDDP, buffers given back", "eager", _eager_ddp, options | given_back, by_default=False),
        _ours(
            "compile_ddp, buffers given back", "compiled", _compile_ddp, of_compile_ddp | given_back, by_default=False
        ),
        Variant("torch DDP, float16", "eager", lambda model: _torch_ddp_in_float16(model, of_torch), by_default=False),
        _ours("compile_ddp, float16", "compiled", _compile_ddp_in_float16, of_compile_ddp, by_default=False),
    )
    return {variant.name: variant for variant in variants}
