"""Which parameters and buffers of a model its wrapper looks after: none to ignore, and none of a wrapper inside."""

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import nn

from compiled_ddp import torch_private

_Tensor = TypeVar("_Tensor", bound=torch.Tensor)


@dataclass(frozen=True)
class Contents:
    """The parameters and buffers that a wrapper looks after, as they were at one moment.

    Each once, by name, in registration order. To look through a model takes time by the number of its modules.
    """

    parameters: dict[str, nn.Parameter]
    buffers: dict[str, torch.Tensor]
    sparse: frozenset[str]  # the trained parameters with a sparse gradient

    @functools.cached_property
    def trained(self) -> dict[str, nn.Parameter]:
        """Those of the parameters that require a gradient."""
        return _trained(self.parameters)

    @functools.cached_property
    def devices(self) -> list[torch.device]:
        """Where the trained parameters are."""
        return list(dict.fromkeys(parameter.device for parameter in self.trained.values()))


class ManagedState:
    """What a wrapper reduces, broadcasts and compares between ranks.

    Left alone are the names in the module's `_ddp_params_and_buffers_to_ignore`, the attribute that torch's
    DistributedDataParallel reads too (`_set_params_and_buffers_to_ignore_for_model` sets it); they are read here once,
    as there. A tied parameter is left alone if all of its names are. So is what a wrapper inside the model wraps: that
    one looks after it.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.ignored = tuple(torch_private.modules.names_to_ignore(module))
        self._ignored = frozenset(map(_plain, self.ignored))

    def contents(self) -> Contents:
        """All of it, as it is now."""
        parameters = self.parameters()
        sparse = self._sparse_of(_trained(parameters))
        return Contents(parameters, self.buffers(), frozenset(sparse))

    def parameters(self) -> dict[str, nn.Parameter]:
        """By name, each once, in registration order."""
        return self._named(lambda owner: owner._parameters)

    def trained(self) -> dict[str, nn.Parameter]:
        """Those of the parameters that require a gradient."""
        return _trained(self.parameters())

    def devices(self) -> list[torch.device]:
        """Where the trained parameters are, in registration order."""
        return list(dict.fromkeys(parameter.device for parameter in self.trained().values()))

    def sparse(self) -> set[str]:
        """The names of those with a sparse gradient; as for torch's DDP, what an embedding says of its weight."""
        return self._sparse_of(self.trained())

    def _sparse_of(self, trained: Mapping[str, nn.Parameter]) -> set[str]:
        weights = {id(part.weight) for _, part in self.modules() if produces_sparse_gradient(part)}
        return {name for name, parameter in trained.items() if id(parameter) in weights} if weights else set()

    def buffers(self) -> dict[str, torch.Tensor]:
        """By name, each once, in registration order."""
        return self._named(lambda owner: owner._buffers)

    def _named(self, of_module: Callable[[nn.Module], Mapping[str, _Tensor | None]]) -> dict[str, _Tensor]:
        found: dict[str, _Tensor] = {}
        known: set[int] = set()
        for prefix, owner in self.modules():
            for key, tensor in of_module(owner).items():
                if tensor is not None and id(tensor) not in known and self._is_own(prefix, key):
                    known.add(id(tensor))
                    found[_joined(prefix, key)] = tensor
        return found

    def left_alone(self) -> dict[str, nn.Parameter]:
        """The other parameters of the model, by name."""
        own = {id(parameter) for parameter in self.parameters().values()}
        return {name: parameter for name, parameter in self.module.named_parameters() if id(parameter) not in own}

    def wrappers_inside(self) -> dict[str, nn.Module]:
        """The outermost wrappers inside the model, by name, in registration order."""
        return {name: part for name, part in self._outermost() if self._is_inside(part)}

    def modules(self) -> Iterator[tuple[str, nn.Module]]:
        """The modules outside of such wrappers, by name."""
        return ((name, part) for name, part in self._outermost() if not self._is_inside(part))

    def _outermost(self) -> Iterator[tuple[str, nn.Module]]:
        """All modules but those inside of such wrappers, by name."""
        wrapper: str | None = None  # whose parts come right behind it
        for name, part in self.module.named_modules():
            if wrapper is None or not f"{name}.".startswith(f"{wrapper}."):  # its module may have its name
                wrapper = name if self._is_inside(part) else None
                yield name, part

    def _is_inside(self, part: nn.Module) -> bool:
        return part is not self.module and is_wrapper(part)

    def _is_own(self, prefix: str, key: str) -> bool:
        return not self._ignored or _plain(_joined(prefix, key)) not in self._ignored


def _trained(parameters: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}


def produces_sparse_gradient(module: nn.Module) -> bool:
    """Whether the gradient of `module.weight` is sparse."""
    return isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse


def is_wrapper(module: nn.Module) -> bool:
    """Whether `module` reduces the gradients of what it holds: a wrapper of ours or torch's."""
    bare = torch_private.modules.without_compile_wrapper(module)
    # Of the type: another module may hand on the attributes of a wrapper that it holds.
    is_ours = getattr(type(bare), "is_compiled_ddp_wrapper", False)
    return is_ours or isinstance(bare, nn.parallel.DistributedDataParallel)


def _joined(prefix: str, key: str) -> str:
    return f"{prefix}.{key}" if prefix else key


def _plain(name: str) -> str:
    """A name as the model has it that was not compiled; for its own parameters DDP's documentation writes ".weight"."""
    return torch_private.modules.without_compile_prefixes(name).removeprefix(".")
