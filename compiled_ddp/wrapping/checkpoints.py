"""What a wrapper's checkpoints are: those of the bare model, for torch.save and torch.distributed.checkpoint."""

from collections.abc import Mapping
from typing import Any

from compiled_ddp import torch_private
from compiled_ddp.model.state_keys import bare_keys_in_state, bare_state, with_ddps_prefix
from compiled_ddp.wrapping.parts import HasParts


class Checkpointed(HasParts):
    """The part of a wrapper that is about them."""

    @torch_private.dynamo.untraced
    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load what the bare module, or any wrapper of it, has saved: keys may carry `module.` and `_orig_mod.`.

        Missing and unexpected keys are reported under the bare module's names. Raises ValueError for `assign=True`,
        which would put other parameters in the place of those that are reduced.
        """
        self._check_loadable(state_dict, assign=assign)
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
        entries = [name for name, entry in state_dict.items() if self._is_state(entry)]
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
