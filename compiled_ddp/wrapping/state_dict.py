"""Names of parameters, buffers and submodules, and checkpoints: those of the bare model.

[Note: one set of names] An entry of named_parameters() is looked up in a state dict (averages of parameters,
torch.distributed.checkpoint), a module's name with a parameter's behind it in named_parameters() (groups for weight
decay), and a name is followed to what it names (get_submodule and setattr, `torch.func.functional_call`). So either
all of them have `module.`, as torch's DistributedDataParallel, or none has, also where the wrapper is part of a larger
module. Here none has; names with `module.` are understood too.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from compiled_ddp import torch_private
from compiled_ddp.model.state_keys import bare_keys_in_state, bare_state, with_ddps_prefix, wrapper_prefix
from compiled_ddp.wrapping.parts import HasParts

_MEMBERS = (torch.Tensor, nn.Module, type(None))
_KINDS = ("_parameters", "_buffers", "_modules")


class BareNames(torch_private.checkpoints.LookedThrough, HasParts):
    """The part of a wrapper that is about names and checkpoints."""

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """The modules with the names that they have in the bare model; the wrapper and that model share one."""
        if not remove_duplicate and self._is_called_by_ddps_names(prefix):
            yield from super().named_modules(memo, prefix, remove_duplicate)
            return
        memo = set() if memo is None else memo
        if self in memo:
            return
        compiled = torch_private.modules.compile_wrappers(self.module)
        for part in (self, *compiled):
            if remove_duplicate:
                memo.add(part)
            yield prefix, part
        yield from self._bare().named_modules(memo, prefix, remove_duplicate)
        for name, part in super().named_children():
            if part is not self.module:  # the user's own, besides
                yield from part.named_modules(memo, f"{prefix}.{name}".removeprefix("."), remove_duplicate)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """As in other modules; by the shortest way, as zero_grad() asks for them in every step."""
        if recurse and len(self._modules) == 1 and not self._parameters:
            return self._modules["module"].parameters()  # type: ignore[union-attr]  # spares a call of __getattr__
        return super().parameters(recurse)

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """The bare model as `module`, and what the user has added to the wrapper."""
        for name, child in super().named_children():
            yield name, self._bare() if child is self.module else child

    def children(self) -> Iterator[nn.Module]:
        """The module, with what torch.compile has put around it, and what the user has added to the wrapper."""
        children = super().named_children()
        return (child for _, child in children)

    def get_submodule(self, target: str) -> nn.Module:
        """The submodule of that name in the bare model, or of DDP's name for it, with `module.`."""
        if target.partition(".")[0] in self._bare()._modules:
            try:
                return self._bare().get_submodule(target)
            except AttributeError:
                if not target.startswith("module."):
                    raise
        return super().get_submodule(target)

    def get_buffer(self, target: str) -> torch.Tensor:
        """The buffer of that name in the bare model, or of DDP's name for it, with `module.`."""
        return self._bare().get_buffer(target) if target in self._bare()._buffers else super().get_buffer(target)

    def __setattr__(self, name: str, value: Any) -> None:
        """On the model what the model has by this name, and the wrapper not: it is read from there, too."""
        if not self._stands_behind(name):
            super().__setattr__(name, value)
            return
        bare = self._bare()
        members = next((members for kind in _KINDS if name in (members := getattr(bare, kind))), None)
        if members is not None and isinstance(value, _MEMBERS) and torch_private.modules.is_replacing():
            members[name] = value  # any tensor in a parameter's place, as in other modules
        else:
            setattr(bare, name, value)

    def _stands_behind(self, name: str) -> bool:
        """Whether the model has an attribute of this name that is no private one, and the wrapper has none."""
        own = vars(self)
        if name.startswith("_") or "module" not in own.get("_modules", ()) or name in own or hasattr(type(self), name):
            return False
        return not any(name in own[kind] for kind in _KINDS) and hasattr(self._bare(), name)

    def _names_behind(self) -> list[str]:
        bare = self._bare()
        return [*bare._modules, *bare._parameters, *bare._buffers]

    def _bare(self) -> nn.Module:
        return torch_private.modules.without_compile_wrapper(self.module)

    def _is_called_by_ddps_names(self, prefix: str) -> bool:
        """Whether a functional_call asks for all names, for those that it was given, and these have `module.`.

        Raises ValueError where the model has a submodule of that name, and its names are meant: the functional_call
        would take them for DDP's.
        """
        start = f"{prefix}." if prefix else ""
        given = [name[len(start) :] for name in torch_private.modules.names_to_replace() if name.startswith(start)]
        if not any(name.startswith("module.") for name in given):
            return False
        bare = self._bare()
        known = {name for names in (bare.named_parameters, bare.named_buffers) for name, _ in names()}
        if "module" not in bare._modules or wrapper_prefix(given, known):
            return True
        raise ValueError(
            f"the {type(bare).__name__} has a submodule called 'module', so that a functional_call of its "
            f"{type(self).__name__} would take {next(name for name in given if name.startswith('module.'))!r} for "
            "another: put 'module.' before all names, or call it on .module."
        )

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    @torch_private.dynamo.untraced
    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load what the bare module, or any wrapper of it, has saved: keys may carry `module.` and `_orig_mod.`.

        Missing and unexpected keys are reported under the bare module's names. Raises ValueError for `assign=True`,
        which would put other parameters in the place of those that are reduced.
        """
        self._check_loadable(state_dict, assign=assign)
        hooks = len(self._load_state_dict_pre_hooks) + len(self._load_state_dict_post_hooks)
        if hooks > 1 or self._parameters or self._buffers or len(self._modules) > 1:  # the user's own, of the wrapper
            return super().load_state_dict(state_dict, strict=strict)
        bare = torch_private.modules.without_compile_wrapper(self.module)
        return bare.load_state_dict(bare_state(state_dict, list(bare.state_dict())), strict=strict)

    @torch_private.dynamo.untraced
    def state_dict_for_ddp(self) -> dict[str, Any]:
        """`state_dict()` with `module.` before each key: loads into torch's DistributedDataParallel(model), strictly.

        For a script that goes back to torch's class. What a wrapper inside the model holds has the bare model's names.
        """
        return with_ddps_prefix(self.state_dict())

    def _check_loadable(self, state_dict: object, *, assign: bool) -> None:
        if assign:
            raise ValueError(
                "assign=True would replace the parameters whose gradients are reduced: load without it, or load into "
                "the module before wrapping it."
            )
        if not isinstance(state_dict, Mapping):
            raise TypeError(f"load_state_dict() takes what state_dict() has returned, found {state_dict!r}.")
        of_users = "_extra_state"  # torch's name for what a module saves besides, of whatever form
        entries = [n for n, entry in state_dict.items() if self._is_state(entry) and n.rpartition(".")[2] != of_users]
        if entries:
            raise ValueError(
                f"load_state_dict() takes the model's state alone, and found it as one entry of a checkpoint, beside "
                f"{sorted(map(str, state_dict.keys() - set(entries)))}: load checkpoint[{entries[0]!r}]."
            )

    def _is_state(self, entry: object) -> bool:
        """Whether `entry` is a mapping with keys of the model, whatever wrapper it was saved from."""
        if not isinstance(entry, Mapping) or not all(isinstance(key, str) for key in entry):
            return False
        bare_keys = list(self.module.state_dict())
        return not set(bare_keys).isdisjoint(bare_state(entry, bare_keys))

    def _name_state(self) -> None:
        """Let state dicts have the bare model's keys."""
        bare_keys_in_state(self)
