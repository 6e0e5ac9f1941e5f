"""What modules give by methods of their own in the place of nn.Module's `named_parameters()` and its like.

Such a method may give what no module has registered, a parameter kept in a plain list for one, or leave out what one
has. Few models have any: others are asked for nothing but their classes.
"""

import inspect
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn


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
