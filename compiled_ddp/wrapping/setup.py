"""What ranks check, agree on and broadcast before a wrapper's first step, and where its model has changed since."""

import math
from collections.abc import Callable, Collection

import torch
from torch import nn

from compiled_ddp import torch_private
from compiled_ddp.environment import check_environment
from compiled_ddp.model.checks import (
    broadcast_tensors,
    check_layouts,
    check_model,
    check_parts,
    check_writable,
    describe_model,
)
from compiled_ddp.model.managed import Contents, ManagedState
from compiled_ddp.model.owners import owner_of
from compiled_ddp.options import Mode, mode_from_environment
from compiled_ddp.ranks.agreement import Description, agree_on_description
from compiled_ddp.ranks.communicator import Communicator
from compiled_ddp.ranks.link_speed import bucket_cap_for, measure_bytes_per_second
from compiled_ddp.ranks.rank_group import RankGroup
from compiled_ddp.reducers.traced_hook import check_hook
from compiled_ddp.wrapping.ddp_arguments import check_ddp_arguments, input_device
from compiled_ddp.wrapping.settings import Settings


class Setup:
    """What all ranks must have in common, and what rank 0 gives to the others."""

    managed_state: ManagedState  # what the wrapper looks after
    contents: Contents  # all of it, when it was checked last
    mode: Mode

    def __init__(self, wrapper: str, settings: Settings, ranks: RankGroup, check_devices: Callable[[], None]) -> None:
        """`wrapper` is the name of its class; `check_devices` raises for devices that this class cannot use."""
        self._wrapper, self._settings, self._ranks, self._check_devices_too = wrapper, settings, ranks, check_devices
        self.link_bytes_per_second: float | None = None  # unless it was measured

    def agree(
        self,
        module: nn.Module,
        check_and_describe: Callable[[nn.Module], Description],
        wrong_group: Exception | None,
    ) -> None:
        """Check and compare the model, or raise on every rank; a wrapper that it has already is closed then.

        `wrong_group` is the error of a rank that was given no ranks to average over.
        """
        before = owner_of(module)

        def describe() -> Description:
            if wrong_group is not None:
                raise wrong_group
            if before is not None:
                before.make_way()
            description = check_and_describe(module)
            if before is not None:
                before.warn_of(self._wrapper)  # which may be an error: then it is one on every rank
            return description

        agree_on_description(self._ranks, describe, failure="the model was not wrapped")
        if before is not None:
            before.be_replaced()

    def check_and_describe(self, module: nn.Module) -> Description:
        """Collect what ranks compare at construction. Raises an error that says what to do if `module` does not fit."""
        check_environment()
        options, ddp_arguments = self._settings.options, self._settings.ddp_arguments
        options.check()
        self.managed_state, self.contents = check_model(module, self._wrapper)
        check_layouts(self.contents, options)
        if options.init_sync:
            check_writable(self.contents)
        check_ddp_arguments(ddp_arguments, module, self._wrapper)
        self._settings.move_inputs_to(input_device(ddp_arguments, self.contents.devices))
        self._check_devices()
        self._check_hook()
        sparse = self.contents.sparse
        if sparse and (options.comm_hook is not None or options.scaling is not None):
            raise ValueError(
                f"parameter {min(sparse)} has a sparse gradient, which takes part in no communication hook and in none "
                "of apex's scalings: pass sparse=False to its embedding."
            )
        self.mode = mode_from_environment()
        return {"wrapper": [self._wrapper], **describe_model(self.contents, options, self.mode)}

    def check_and_describe_parts(self, known_sparse: Collection[str]) -> Description:
        """The same of a model that has changed, in which `known_sparse` had sparse gradients before."""
        self.contents = self.managed_state.contents()
        check_parts(self.managed_state, self.contents)
        check_layouts(self.contents, self._settings.options)
        self._check_devices()
        self._check_hook()
        added = sorted(self.contents.sparse.difference(known_sparse))
        if added:
            raise ValueError(
                f"parameter {added[0]} with a sparse gradient was added or unfrozen after the model was wrapped: call "
                "unwrap() and wrap the model again."
            )
        return describe_model(self.contents, self._settings.options, self.mode)

    def _check_devices(self) -> None:
        broadcast = (tensor.device for tensor in broadcast_tensors(self.contents, self._settings.options).values())
        torch_private.groups.check_backends(self._ranks.process_group, [*self.contents.devices, *broadcast])
        self._check_devices_too()

    def _check_hook(self) -> None:
        if self._settings.options.comm_hook is not None:
            check_hook(self._settings.options.comm_hook, self.dense())

    def dense(self) -> dict[str, nn.Parameter]:
        """The trained parameters with dense gradients, by name."""
        sparse = self.contents.sparse
        return {name: parameter for name, parameter in self.contents.trained.items() if name not in sparse}

    def sparse(self) -> dict[str, nn.Parameter]:
        """Those with sparse ones."""
        sparse = self.contents.sparse
        return {name: parameter for name, parameter in self.contents.trained.items() if name in sparse}

    def synchronise_state(self, communicator: Communicator) -> None:
        """Give every rank the parameters and buffers of rank 0, by DDP's rule."""
        if self._settings.options.init_sync:
            tensors: list[torch.Tensor] = list(self.contents.parameters.values())
            if self._settings.options.synchronise_buffers_at_init:
                tensors += self.contents.buffers.values()
            self.broadcast(tensors, communicator)

    @torch.no_grad()
    def broadcast(self, tensors: Collection[torch.Tensor], communicator: Communicator) -> None:
        """Overwrite `tensors` by rank 0's."""
        communicator.broadcast([tensor.detach() for tensor in tensors])

    def choose_bucket_cap(self, communicator: Communicator) -> None:
        """Keep the user's size of a bucket, or take the one that fits the link, which is measured."""
        options = self._settings.options
        given = (options.bucket_cap_mb, options.bucket_cap_mb_list or None, options.bucket_rule)
        if any(size is not None for size in given):
            return
        if communicator.world_size == 1:
            self._settings.choose_bucket_cap(bucket_cap_for(math.inf))
            return
        with communicator.explaining("the link could not be measured"):
            device = next(iter(self.dense().values())).device
            self.link_bytes_per_second = measure_bytes_per_second(communicator, device)
        self._settings.choose_bucket_cap(bucket_cap_for(self.link_bytes_per_second))
