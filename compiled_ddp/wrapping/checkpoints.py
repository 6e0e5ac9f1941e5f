"""What a wrapper's checkpoints are: those of the bare model, for torch.save and torch.distributed.checkpoint."""

from collections.abc import Mapping
from typing import Any

from compiled_ddp import torch_private
from compiled_ddp.model.state_keys import bare_keys_in_state, bare_state
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
        return self.module.load_state_dict(bare_state(state_dict, list(self.module.state_dict())), strict=strict)

    def _check_loadable(self, state_dict: object, *, assign: bool) -> None:
        if assign:
            raise ValueError(
                "assign=True would replace the parameters whose gradients are reduced: load without it, or load into "
                "the module before wrapping it."
            )
        if not isinstance(state_dict, Mapping):
            raise TypeError(f"load_state_dict() takes what state_dict() has returned, found {state_dict!r}.")

    def _name_state(self) -> None:
        """Let state dicts have the bare model's keys."""
        bare_keys_in_state(self)
