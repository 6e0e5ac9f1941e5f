"""Uneven inputs, as the users of a wrapper and torch's `Join` ask for them."""

import contextlib
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Joinable

from compiled_ddp.keywords import suggests_keywords
from compiled_ddp.step.join import JoinContext, UnevenInputs, WrapperJoinHook
from compiled_ddp.wrapping.forwards import Forwards
from compiled_ddp.wrapping.parts import HasParts


class TakesUnevenInputs(HasParts, Joinable):
    """The part of a wrapper that is about them."""

    _uneven: UnevenInputs
    _forwards: Forwards

    @suggests_keywords
    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> contextlib.AbstractContextManager[None]:
        """Train on as many batches as each rank has, as under torch's DDP.

            with ddp.join():
                for x, y in batches:  # fewer on some rank
                    ddp(x, y).backward()
                    optimizer.step()
                    optimizer.zero_grad()

        A rank that leaves the loop takes part in the others' backwards with zeros, until all have left. Then every
        rank takes the parameters, and the buffers if forwards synchronise them, of the last one to leave. For an
        optimizer that communicates (ZeroRedundancyOptimizer) use torch's `Join([ddp, optimizer])`.

        Args:
            divide_by_initial_world_size: divide sums of gradients by the number of all ranks; False divides by the
                number of those that still have data. Without effect on sums, weighted means and communication hooks.
            enable: False does nothing, for data that is known to be even.
            throw_on_early_termination: raise RuntimeError on every rank as soon as one has left, instead of going on.

        In it buffers come from the first rank that still has data, in forwards that are synchronised.
        """
        self._check_in_use()
        context: contextlib.AbstractContextManager[None] = JoinContext(
            self,
            self._uneven,
            self._follow,
            enable=enable,
            throw_on_early_termination=throw_on_early_termination,
            divide_by_initial_world_size=divide_by_initial_world_size,
        )
        return context

    def join_hook(self, **kwargs: Any) -> WrapperJoinHook:
        """What torch's `Join` calls. Takes `divide_by_initial_world_size`, as `join` does."""
        self._check_in_use()
        if self._runtime.reduction.sparse.names or self._managed.wrappers_inside():
            raise RuntimeError(
                "join() takes no model with sparse gradients, and none with wrapped modules inside: give every rank "
                "the same number of batches, or call skip_step() on those that have run out."
            )
        self._uneven.divide_by(initial_world_size=bool(kwargs.get("divide_by_initial_world_size", True)))
        return WrapperJoinHook(self._uneven, self._follow, self._take_final_model)

    @property
    def join_device(self) -> torch.device:
        return self.device

    @property
    def join_process_group(self) -> dist.ProcessGroup | None:
        """The process group on which torch's `Join` counts the ranks that still have data."""
        return self.process_group

    def _follow(self) -> None:
        self._runtime.finish_broken_backward()
        self._uneven.shadow(self._forwards.broadcast_buffers, self._runtime.shadow_backward)

    @torch.no_grad()
    def _take_final_model(self, is_last_joiner: bool) -> None:
        tensors = [parameter.data for parameter in self._managed.parameters().values()]
        if self._settings.options.synchronise_buffers_in_forward:
            tensors += [buffer.data for buffer in self._managed.buffers().values()]
        self._runtime.communicator.broadcast(tensors, source=self._uneven.last_of(is_last_joiner))
        self._switches.refresh_buffers(True)
