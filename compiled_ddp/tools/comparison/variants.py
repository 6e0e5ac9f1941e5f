"""What is compared: how each wrapper is put around a model, and which floor its row is measured against."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from compiled_ddp.compiled import compile_ddp
from compiled_ddp.eager import EagerDDP
from compiled_ddp.options import Backend
from compiled_ddp.tools.comparison.arguments import WARMED_UP
from compiled_ddp.wrapper import DataParallelWrapper

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
    warms_up: bool = False  # whether `warmup()` is called before the first step

    @property
    def label(self) -> str:
        """The name as part of an identifier or of a path."""
        return re.sub(r"\W+", "_", self.name).strip("_")


@dataclass(frozen=True)
class WrapperOptions:
    """Arguments of the wrappers; of one that is None each takes its own default.

    `find_unused_parameters` is for torch's DDP alone, `backend` for every compiled variant.
    """

    bucket_cap_mb: float | None = None
    find_unused_parameters: bool = False
    backend: Backend = "inductor"

    def of_ours(self) -> dict[str, Any]:
        """Keywords of both our wrappers."""
        return {} if self.bucket_cap_mb is None else {"bucket_cap_mb": self.bucket_cap_mb}

    def torch_ddp(self, model: nn.Module, **further: Any) -> DistributedDataParallel:
        """Torch's wrapper around `model`."""
        unused = self.find_unused_parameters
        options = {**self.of_ours(), "find_unused_parameters": unused, "gradient_as_bucket_view": True, **further}
        return DistributedDataParallel(model, **options)

    def compiled(self, model: nn.Module, **further: Any) -> nn.Module:
        """Plain torch.compile around `model`."""
        module = torch.compile(model, backend=self.backend, **further)
        assert isinstance(module, nn.Module)
        return module

    def eager_ddp(self, model: nn.Module, **further: Any) -> nn.Module:
        """`EagerDDP` around `model`."""
        return EagerDDP(model, **self.of_ours(), **further)

    def compile_ddp(self, model: nn.Module, **further: Any) -> nn.Module:
        """`compile_ddp` around `model`."""
        return compile_ddp(model, backend=self.backend, **self.of_ours(), **further)


def of_this_package(
    name: str,
    floor: Floor,
    wrap: Callable[..., nn.Module],
    *,
    by_default: bool = True,
    warms_up: bool = False,
    **further: Any,
) -> Variant:
    """A row of one of our wrappers, which can tell its buckets; `further` is passed to `wrap`."""
    wrapped = partial(wrap, **further) if further else wrap
    return Variant(
        name,
        floor,
        wrapped,
        bucket_bytes=_planned_bytes,
        unwrap=_unwrap,
        by_default=by_default,
        warms_up=warms_up,
    )


def make_variants(options: WrapperOptions) -> dict[str, Variant]:
    """What anybody can compare on a model, by name, in the order of the table."""
    variants = (
        Variant("no communication, eager", "eager", lambda model: model, communicates=False),
        Variant("no communication, compiled", "compiled", options.compiled, communicates=False),
        Variant("torch DDP", "eager", options.torch_ddp),
        Variant("torch.compile(DDP)", "compiled", lambda model: options.compiled(options.torch_ddp(model))),
        Variant("DDP(torch.compile)", "compiled", lambda model: options.torch_ddp(options.compiled(model))),
        of_this_package("EagerDDP", "eager", options.eager_ddp),
        of_this_package("compile_ddp", "compiled", options.compile_ddp),
        of_this_package(WARMED_UP, "compiled", options.compile_ddp, warms_up=True),
    )
    return {variant.name: variant for variant in variants}


def _planned_bytes(module: nn.Module) -> list[int]:
    assert isinstance(module, DataParallelWrapper)
    return [bucket.nbytes for bucket in module.plan.buckets] if module.plan is not None else []


def _unwrap(module: nn.Module) -> nn.Module:
    assert isinstance(module, DataParallelWrapper)
    return module.unwrap()
