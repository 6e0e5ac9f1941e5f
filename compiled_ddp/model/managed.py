"""Which parameters and buffers of a model its wrapper looks after: none to ignore, and none of a wrapper inside.

Modules may give others by methods of their own in the place of nn.Module's `named_parameters()` and its like: a
parameter kept in a plain list, which no module has registered, for one, or not what one has. Few models have any:
others are asked for nothing but their classes.
"""

import functools
import inspect
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn

from compiled_ddp import torch_private

# ---- what modules give by methods of their own -----------------------------------------------------------------------


def has_own(part: nn.Module, method: str) -> bool:
    """Whether `part`, or its class, has another `method` than nn.Module."""
    return getattr(type(part), method, None) is not getattr(nn.Module, method) or method in vars(part)


def given_parameters(parts: Sequence[tuple[str, nn.Module]]) -> Iterator[tuple[str, nn.Parameter]]:
    """What methods of their own give as parameters of these `parts`, which come by name; registered ones too.

    Those that have no name, as `parameters()` alone gives them, come last and are called by their places in it.
    """
    own = [(prefix, part) for prefix, part in parts if has_own(part, "named_parameters") or has_own(part, "parameters")]
    if not own:
        return
    named = {id(parameter) for _, part in parts for parameter in part._parameters.values()}
    for prefix, part in own:
        for name, parameter in _given(part, "named_parameters"):
            if _is_parameter(parameter):
                named.add(id(parameter))
                yield joined(prefix, name), parameter
    for prefix, part in own:
        for place, parameter in enumerate(_given(part, "parameters")):
            if _is_parameter(parameter) and id(parameter) not in named:
                yield joined(prefix, f"parameters()[{place}]"), parameter


def every_parameter(module: nn.Module) -> Iterator[nn.Parameter]:
    """What `module` and all its parts have registered, then what methods of their own give: each once."""
    parts = [*module.named_modules()]
    registered = (parameter for _, part in parts for parameter in part._parameters.values() if parameter is not None)
    known: set[int] = set()
    for parameter in itertools.chain(registered, (parameter for _, parameter in given_parameters(parts))):
        if id(parameter) not in known:
            known.add(id(parameter))
            yield parameter


def _given(part: nn.Module, method: str) -> Iterable[Any]:
    """What a `method` of its own gives of `part` alone, or with its submodules if it cannot tell these apart."""
    if has_own(part, method):
        give = getattr(part, method)
        for arguments in ({"recurse": False}, {}):
            if _takes(give, arguments):
                yield from give(**arguments)
                return  # without either it takes what only its caller knows


def _takes(method: Any, arguments: dict[str, Any]) -> bool:
    try:
        inspect.signature(method).bind(**arguments)
    except TypeError:
        return False
    return True


def _is_parameter(given: object) -> bool:
    """Whether gradients are accumulated in it; `parameters()` may give an optimizer's groups, say."""
    return isinstance(given, torch.Tensor) and given.is_leaf


def joined(prefix: str, name: str) -> str:
    """The name in the model of what a module called `prefix` calls `name`."""
    return f"{prefix}.{name}" if prefix else name


# ---- what is managed -------------------------------------------------------------------------------------------------

_Tensor = TypeVar("_Tensor", bound=torch.Tensor)


@dataclass(frozen=True)
class Contents:
    """The parameters and buffers that a wrapper looks after, as they were at one moment.

    Each once, by name, in registration order. To look through a model takes time by the number of its modules.
    """

    parameters: dict[str, nn.Parameter]
    buffers: dict[str, torch.Tensor]
    sparse: frozenset[str]  # the trained parameters with a sparse gradient
    embeddings: frozenset[str] = frozenset()  # those with another one that embeddings alone use: most rows may be zero

    @functools.cached_property
    def trained(self) -> dict[str, nn.Parameter]:
        """The parameters that require a gradient."""
        return _trained(self.parameters)

    @functools.cached_property
    def by_rows(self) -> dict[str, nn.Parameter]:
        """The embeddings' weights whose gradients may be summed by rows, by name.

        On the CPU, where the host knows which rows are not zero without making a device wait.
        """
        return {
            name: weight
            for name, weight in self.trained.items()
            if name in self.embeddings
            if weight.is_cpu and weight.dim() == 2 and weight.is_contiguous() and weight.numel() > 0
            if not weight.is_complex()
        }

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

    As for DDP, that is also what a module's own `named_parameters()` gives, and of buffers what the model's own
    `named_buffers()` does and no other. Unlike there, parameters that such a method leaves out, or that a module's own
    `parameters()` alone gives, are not left alone: ranks would silently train them apart.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.ignored = tuple(torch_private.modules.names_to_ignore(module))
        self._ignored = frozenset(map(_plain, self.ignored))

    def contents(self) -> Contents:
        """All of it, as it is now."""
        parameters = self.parameters()
        trained = _trained(parameters)
        return Contents(parameters, self.buffers(), *map(frozenset, self._of_embeddings(trained)))

    def parameters(self) -> dict[str, nn.Parameter]:
        """By name, each once: those registered, in that order, then those that modules' own methods give besides."""
        parts = [*self.modules()]
        registered = ((joined(prefix, key), p) for prefix, part in parts for key, p in part._parameters.items())
        return self._those_once(itertools.chain(registered, self._given(parts)))

    def _given(self, parts: Sequence[tuple[str, nn.Module]]) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters that methods of their own give of `parts`, but for those of wrappers inside."""
        given = [*given_parameters(parts)]
        inside = given and {id(p) for wrapper in self.wrappers_inside().values() for p in every_parameter(wrapper)}
        return ((name, parameter) for name, parameter in given if id(parameter) not in inside)

    def trained(self) -> dict[str, nn.Parameter]:
        """The parameters that require a gradient."""
        return _trained(self.parameters())

    def devices(self) -> list[torch.device]:
        """Where the trained parameters are, in registration order."""
        return list(dict.fromkeys(parameter.device for parameter in self.trained().values()))

    def sparse(self) -> set[str]:
        """The names of those with a sparse gradient; as for torch's DDP, what an embedding says of its weight."""
        sparse, _ = self._of_embeddings(self.trained())
        return sparse

    def _of_embeddings(self, trained: Mapping[str, nn.Parameter]) -> tuple[set[str], set[str]]:
        """The names of the weights with a sparse gradient, and of all others that no other kind of module has too.

        Such a one is not tied to the last layer's weight, say.
        """
        sparse, dense, others = set[int](), set[int](), set[int]()
        for _, part in self.modules():
            if produces_sparse_gradient(part):
                sparse.add(id(part.weight))
            elif isinstance(part, _EMBEDDINGS):
                dense.add(id(part._parameters.get("weight")))
            else:
                others.update(map(id, part._parameters.values()))
        alone = dense.difference(sparse, others)
        names = [(name, id(parameter)) for name, parameter in trained.items()] if sparse or alone else []
        return {name for name, each in names if each in sparse}, {name for name, each in names if each in alone}

    def buffers(self) -> dict[str, torch.Tensor]:
        """By name, each once, in registration order, or what the model's own `named_buffers()` gives, as for DDP."""
        bare = torch_private.modules.without_compile_wrapper(self.module)
        if self.gives_buffers_itself:
            inside = {id(buffer) for wrapper in self.wrappers_inside().values() for buffer in wrapper.buffers()}
            return self._those_once((name, b) for name, b in bare.named_buffers() if id(b) not in inside)
        return self._those_once(
            (joined(prefix, key), buffer) for prefix, part in self.modules() for key, buffer in part._buffers.items()
        )

    @property
    def gives_buffers_itself(self) -> bool:
        """Whether the model's own `named_buffers()` gives them, which may give others at any time."""
        return has_own(torch_private.modules.without_compile_wrapper(self.module), "named_buffers")

    def _those_once(self, named: Iterable[tuple[str, _Tensor | None]]) -> dict[str, _Tensor]:
        found: dict[str, _Tensor] = {}
        known: set[int] = set()
        for name, tensor in named:
            if tensor is not None and id(tensor) not in known and self._is_own(name):
                known.add(id(tensor))
                found[_another_than(found, name) if name in found else name] = tensor
        return found

    def left_alone(self) -> dict[str, nn.Parameter]:
        """The other parameters of the model, by name."""
        own = {id(parameter) for parameter in self.parameters().values()}
        registered = nn.Module.named_parameters(self.module)  # a method of the model's own may leave out some
        every = itertools.chain(registered, given_parameters([*self.module.named_modules()]))
        return {name: parameter for name, parameter in every if id(parameter) not in own}

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

    def _is_own(self, name: str) -> bool:
        return not self._ignored or _plain(name) not in self._ignored


def _trained(parameters: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}


_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)


def produces_sparse_gradient(module: nn.Module) -> bool:
    """Whether the gradient of `module.weight` is sparse."""
    return isinstance(module, _EMBEDDINGS) and module.sparse


def is_wrapper(module: nn.Module) -> bool:
    """Whether `module` reduces the gradients of what it holds: a wrapper of ours or torch's."""
    bare = torch_private.modules.without_compile_wrapper(module)
    # Of the type: another module may hand on the attributes of a wrapper that it holds.
    is_ours = getattr(type(bare), "is_compiled_ddp_wrapper", False)
    return is_ours or isinstance(bare, nn.parallel.DistributedDataParallel)


def _another_than(known: Mapping[str, object], name: str) -> str:
    """What to call one of several things to which a module's own methods give the same name."""
    return next(free for number in itertools.count(2) if (free := f"{name} ({number})") not in known)


def _plain(name: str) -> str:
    """A name as the model has it that was not compiled; for its own parameters DDP's documentation writes ".weight"."""
    return torch_private.modules.without_compile_prefixes(name).removeprefix(".")
