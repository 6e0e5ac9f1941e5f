"""What a wrapper consists of, for the groups of methods that its class is made of."""

import torch
import torch.distributed as dist
from torch import nn

from compiled_ddp.model.managed import ManagedState
from compiled_ddp.step.runtime import Runtime
from compiled_ddp.wrapping.lifecycle import Lifecycle
from compiled_ddp.wrapping.settings import Settings
from compiled_ddp.wrapping.switches import Switches


class HasParts(nn.Module):
    """A wrapper, in use or not, as far as all of its methods know it."""

    module: nn.Module
    _lifecycle: Lifecycle
    _settings: Settings
    _switches: Switches
    _managed: ManagedState  # what this wrapper looks after
    _runtime: Runtime

    def _check_in_use(self) -> None:
        """Raise RuntimeError for what only a wrapper in use can do."""
        if self._lifecycle is not Lifecycle.IN_USE:
            raise RuntimeError(self._lifecycle.why_not_in_use(type(self).__name__))

    def _why_not_graph(self) -> str | None:
        """Why hooks reduce everything; None where graphs take part."""
        raise NotImplementedError

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The group that the wrapper was made for; it reduces on a communicator of its own, made from this one."""
        return self._runtime.communicator.ranks.group()

    @property
    def device(self) -> torch.device:
        """Where the trained parameters are."""
        trained = (
            self._managed.trained().values() if self._lifecycle is Lifecycle.COPY else self._runtime.parameters.tensors
        )
        return next(iter(trained)).device
