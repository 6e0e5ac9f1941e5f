"""torch.distributed.checkpoint: what it asks a module that is in its way."""


class LookedThrough:
    """A module that torch.distributed.checkpoint looks through: to it, what `module` holds stands here itself.

    Its state_dict() and named_parameters() must have such names too. The hook is `StateDictOptions.dsd_fqn_modifiers`,
    by default a method of this name (the same in torch 2.11 to 2.14): from what stands behind, to the child it is in.
    """

    def _fqn_modifiers(self) -> dict[str, str]:
        return dict.fromkeys(self._names_behind(), "module")

    def _names_behind(self) -> list[str]:
        """The names of parameters, buffers and submodules in `module` that are looked up there."""
        raise NotImplementedError
