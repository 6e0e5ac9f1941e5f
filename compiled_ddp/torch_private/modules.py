"""The user's module: what torch.compile, functional calls, DDP and others have made of it."""

import functools
import operator
import sys
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.distributed.algorithms.join import Joinable
from torch.distributed.utils import _to_kwargs
from torch.nn.utils import _named_member_accessor, stateless


def moved(
    args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A forward's arguments with all tensors on `device`, those in lists, tuples and dicts too, as torch's DDP does."""
    inputs, keywords = _to_kwargs(args, kwargs, device, True)
    return (inputs[0], keywords[0]) if inputs else (args, kwargs)


# Whether torch's `Join` has been entered with a joinable, and not with enable=False.
is_joining: Callable[[Joinable], bool] = operator.attrgetter("_join_config.enable")


def without_compile_wrapper(module: torch.nn.Module) -> torch.nn.Module:
    """The module behind torch.compile(module); any other module as it is."""
    while isinstance(module, torch._dynamo.OptimizedModule):
        module = module._orig_mod
    return module


def compile_wrappers(module: torch.nn.Module) -> list[torch.nn.Module]:
    """What torch.compile has put around a module, from the outside in; nothing for any other module."""
    found: list[torch.nn.Module] = []
    while isinstance(module, torch._dynamo.OptimizedModule):
        found.append(module)
        module = module._orig_mod
    return found


def without_compile_prefixes(name: str) -> str:
    """The name of a parameter or buffer without what torch.compile(module) adds to it."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


# A number that grows with each hook that anybody in this process registers, on whatever it is; asked in every step.
hooks_registered: Callable[[], int] = functools.partial(getattr, torch.utils.hooks.RemovableHandle, "next_id")

# How many of them this package registers in steps, which are not around any module; in a list, to be counted up.
own_hooks = [0]
own_hooks_registered: Callable[[], int] = functools.partial(operator.itemgetter(0), own_hooks)


def hooks_around(parts: Iterable[torch.nn.Module]) -> dict[tuple[int, str], dict[int, Any]]:
    """What is called around these parts of a model, by their places and the kinds of hooks; no empty ones.

    At place -1 are the hooks of all modules there are. TorchScript's modules hide theirs, from Dynamo too.
    """
    of_all = vars(torch.nn.modules.module)
    found = {(-1, kind): of_all[f"_global{kind}"] for kind in _HOOKS if of_all[f"_global{kind}"]}
    for place, part in enumerate(parts):
        own = vars(part)
        if any(map(own.get, _HOOKS)):  # in C, as few have any
            found |= {(place, kind): own[kind] for kind in _HOOKS if own.get(kind)}
    return found


def hooks_around_all() -> list[dict[int, Any]]:
    """Where those of all modules there are stand, each kind by itself."""
    return [vars(torch.nn.modules.module)[f"_global{kind}"] for kind in _HOOKS]


_HOOKS = "_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks"


def given_by_functional_calls() -> list[object]:
    """What the `torch.func.functional_call`s under way in this thread have put into their modules.

    Each holds what it was given in a local variable of its frame.
    """
    return [
        value
        for frame in _callers()
        if frame.f_code is stateless._functional_call.__code__
        for value in frame.f_locals["parameters_and_buffers"].values()
    ]


def names_to_replace() -> Collection[str]:
    """The names that a `torch.func.functional_call` was given, where it asks the module for its names; else nothing."""
    for frame in _callers():
        if frame.f_code is stateless._untie_named_tensors_map.__code__:
            return tuple(frame.f_locals["parameters_and_buffers"])
        if frame.f_code is _named_member_accessor.NamedMemberAccessor.check_keys.__code__:
            return tuple(frame.f_locals["keys"])
    return ()


def versions_being_loaded() -> dict[str, Any]:
    """The versions of modules, by their names, in the state dict that `nn.Module.load_state_dict` loads now.

    What is changed in it is what the modules that follow are told.
    """
    for frame in _callers():
        if frame.f_code is torch.nn.Module.load_state_dict.__code__:
            return frame.f_locals.get("metadata") or {}
    return {}


def is_replacing() -> bool:
    """Whether a `torch.func.functional_call` puts a tensor into its module, or puts the module's own one back."""
    return any(frame.f_code is _named_member_accessor.swap_tensor.__code__ for frame in _callers())


def _callers() -> Iterator[types.FrameType]:
    """The frames of this thread, from the innermost on."""
    frame: types.FrameType | None = sys._getframe()
    while frame is not None:
        yield frame
        frame = frame.f_back


# torch's DistributedDataParallel whose forward this process runs. In C: asked in every step.
running_ddp: Callable[[], torch.nn.parallel.DistributedDataParallel | None] = functools.partial(
    getattr, torch.nn.parallel.DistributedDataParallel, "_active_ddp_module"
)


def names_to_ignore(module: torch.nn.Module) -> Sequence[str]:
    """The parameters and buffers that torch's DistributedDataParallel is told to leave alone in `module`."""
    return tuple(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
