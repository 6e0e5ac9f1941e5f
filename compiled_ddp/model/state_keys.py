"""Keys of state dicts: those of the bare module are saved, and those of any wrapper of it are accepted."""

import itertools
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import nn

from compiled_ddp import torch_private

# Components of state_dict keys that wrappers add and that no module of the user need have.
_WRAPPER_PREFIXES = ("module", "_orig_mod")


def bare_keys_in_state(wrapper: nn.Module) -> None:
    """Let `wrapper`, also as a part of a larger module, save the bare module's keys and load those of any wrapper."""
    wrapper.register_load_state_dict_pre_hook(accept_wrapped_keys)
    wrapper.register_state_dict_post_hook(strip_own_prefix)


@torch_private.dynamo.untraced
def strip_own_prefix(wrapper: nn.Module, state: dict[str, Any], prefix: str, metadata: object) -> None:
    """Take "module." off the wrapper's own keys in `state`, and torch.compile's prefix: a post-hook of state_dict()."""
    module = wrapper.module
    assert isinstance(module, nn.Module)
    own = f"{prefix}module." + "_orig_mod." * len(torch_private.modules.compile_wrappers(module))
    # First all out, then all in: a bare key may begin with "module." itself.
    moved = {prefix + key[len(own) :]: state.pop(key) for key in list(state) if key.startswith(own)}
    state.update(moved)
    versions = getattr(state, "_metadata", None)
    if versions is not None:
        own_versions = [key for key in versions if f"{key}.".startswith(own)]
        for around in [key for key in versions if f"{prefix}module." <= f"{key}." < own and own.startswith(f"{key}.")]:
            del versions[around]
        versions.update({f"{prefix}{key[len(own) :]}".rstrip("."): versions.pop(key) for key in own_versions})


@torch_private.dynamo.untraced
def accept_wrapped_keys(wrapper: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
    """Rename the keys under `prefix` to the wrapper's own, where it is loaded as part of a larger module.

    And the versions of modules. What a user has put on the wrapper itself keeps its name.
    """
    module = wrapper.module
    assert isinstance(module, nn.Module)
    bare_keys = list(module.state_dict())
    own = {*wrapper._parameters, *wrapper._buffers, *wrapper._modules}.difference({"module"}, bare_keys)
    below = [key for key in state if key.startswith(prefix) and key[len(prefix) :].partition(".")[0] not in own]
    saved = OrderedDict((key[len(prefix) :], state.pop(key)) for key in below)
    versions = torch_private.modules.versions_being_loaded()
    saved._metadata = OrderedDict(  # type: ignore[attr-defined]
        (key[len(prefix) :], version) for key, version in versions.items() if f"{key}.".startswith(prefix)
    )
    found = bare_state(saved, bare_keys)
    state.update({f"{prefix}module.{key}": value for key, value in found.items()})
    renamed = found._metadata  # type: ignore[attr-defined]
    versions.update({f"{prefix}module.{key}".rstrip("."): version for key, version in renamed.items()})


def with_ddps_prefix(state: Mapping[str, Any]) -> dict[str, Any]:
    """The bare model's `state` as torch's DistributedDataParallel of it has it, the versions of modules too."""
    prefixed = OrderedDict((f"module.{key}", value) for key, value in state.items())
    versions = getattr(state, "_metadata", None)
    if versions is not None:
        renamed = {f"module.{key}".rstrip("."): version for key, version in versions.items()}
        prefixed._metadata = OrderedDict({"": {"version": 1}, **renamed})  # type: ignore[attr-defined]
    return prefixed


def bare_state(saved: Mapping[str, Any], bare_keys: Sequence[str]) -> dict[str, Any]:
    """`saved` under the names of `bare_keys`, whatever wrappers it was saved from; other keys as they are.

    The prefix that all saved keys share is taken off as far as this makes more of them fit, so that a module which
    has a submodule called "module" is told from a wrapper. Then wrappers inside the model are looked through, where
    that is not ambiguous. The versions of modules (`state_dict()._metadata`) are renamed alike.
    """
    known = set(bare_keys)
    prefix = wrapper_prefix(saved, known)
    through: dict[str, list[str]] = {}
    for key in bare_keys:
        through.setdefault(_without_wrappers(key), []).append(key)

    there = {key.removeprefix(prefix) for key in saved}

    def bare(key: str) -> str:
        key = key.removeprefix(prefix)
        candidates = through.get(_without_wrappers(key), [])
        is_meant = key not in known and len(candidates) == 1 and candidates[0] not in there
        return candidates[0] if is_meant else key

    state = OrderedDict((bare(key), value) for key, value in saved.items())
    versions = getattr(saved, "_metadata", None)
    if versions is not None:
        renamed = {f"{key}.".removeprefix(prefix).rstrip("."): version for key, version in versions.items()}
        state._metadata = OrderedDict(renamed)  # type: ignore[attr-defined]
    return state


def wrapper_prefix(names: Collection[str], bare_names: Collection[str]) -> str:
    """What wrappers have put before all `names`, as far as more of them are among `bare_names` without it."""
    return max(_wrapper_prefixes(names), key=lambda prefix: sum(name[len(prefix) :] in bare_names for name in names))


def _wrapper_prefixes(keys: Collection[str]) -> list[str]:
    """The prefixes made of wrappers' names alone that all `keys` begin with, shortest first."""
    first = next(iter(keys), "").split(".")
    wrappers = itertools.takewhile(lambda part: part in _WRAPPER_PREFIXES, first)
    prefixes = ["", *itertools.accumulate(f"{part}." for part in wrappers)]
    return [prefix for prefix in prefixes if all(key.startswith(prefix) for key in keys)]


def _without_wrappers(key: str) -> str:
    return ".".join(part for part in key.split(".") if part not in _WRAPPER_PREFIXES)
