"""An optimizer's state in shares: each rank keeps its own, and `state_dict()` has the whole.

What of a parameter's state is of the parameter's shape is kept as this rank's share of it, of another number of
dimensions, so that one is never taken for the other: `optimizer.load_state_dict` may bring the whole at any time.
"""

import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from compiled_ddp import torch_private
from compiled_ddp.functional.reduction import GradientReduction
from compiled_ddp.functional.shares import gather, rows_of, scattered_by
from compiled_ddp.functional.unit import agree_apart
from compiled_ddp.plan import share_elements, whole_of

State = dict[str, Any]


_known: "weakref.WeakKeyDictionary[torch.optim.Optimizer, weakref.ref[ShardedState]]" = weakref.WeakKeyDictionary()


class ShardedState:
    """The state of one optimizer, which is gathered where the optimizer is asked for it, or steps by itself.

    All sharded steps of an optimizer have the same one, for as long as that lives.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, reduction: GradientReduction) -> None:
        """Shared among the ranks of `reduction`. Registers hooks with the optimizer, which keep it."""
        self._reduction, self._is_torn = reduction, False
        optimizer.register_state_dict_post_hook(self._fill, prepend=True)
        optimizer.register_load_state_dict_post_hook(self._note_loaded)
        torch_private.optimizers.register_own_step_pre_hook(optimizer, self._leave)

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer, reduction: GradientReduction) -> "ShardedState":
        """The one that this optimizer has, or a new one."""
        reference = _known.get(optimizer)
        found = None if reference is None else reference()
        if found is None:
            found = cls(optimizer, reduction)
            _known[optimizer] = weakref.ref(found)
        return found

    @property
    def ranks(self) -> int:
        return self._reduction.world_size

    def take_over(self, reduction: GradientReduction) -> None:
        """From now on it is shared by this one's ranks: its step is about to make shares of it, or to change them."""
        self._reduction = reduction

    def note_torn(self) -> None:
        """An update has raised when it had changed shares: those of some buckets are the new ones, others the old."""
        self._is_torn = True

    def refuse_torn(self) -> None:
        """Raise RuntimeError while they are torn."""
        if self._is_torn:
            raise RuntimeError(
                f"rank {self._reduction.global_rank}: an update has raised an error when this rank had updated its "
                "shares of some buckets, and so the optimizer's state is neither the old one nor the new one. On every "
                "rank load a checkpoint, by model.load_state_dict() and optimizer.load_state_dict(), or make model, "
                "optimizer and step anew."
            )

    def _note_loaded(self, _: torch.optim.Optimizer) -> None:
        self._is_torn = False

    def share_like(self, parameter: Tensor) -> Tensor:
        """Memory for a share of what is like this parameter."""
        return torch.empty(self._size(parameter), dtype=parameter.dtype, device=parameter.device)

    def own(self, value: Tensor, parameter: Tensor) -> Tensor:
        """This rank's share of the whole, or what is one. Raises ValueError for what is neither."""
        if value.shape == parameter.shape:
            return rows_of(value, self.ranks)[self._reduction.own_rank].clone().view(self._size(parameter))
        if value.shape != self._size(parameter):
            raise ValueError(
                f"the optimizer's state has a tensor of shape {tuple(value.shape)} for a parameter of shape "
                f"{tuple(parameter.shape)}: neither the whole, nor the share {tuple(self._size(parameter))} of one of "
                f"{self.ranks} ranks. Call optimizer.state_dict() among the ranks that have trained with it, and load "
                "what it returns."
            )
        return value

    # ---- where it is asked for ---------------------------------------------------------------------------------------

    def _fill(self, optimizer: torch.optim.Optimizer, state_dict: State) -> State:
        """What `optimizer.state_dict()` returns: the same on every rank, with the whole of each tensor."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        state = {key: (own, parameters[key]) for key, own in state_dict["state"].items() if isinstance(key, int)}
        if not any(self._shares_in(own, parameter) for own, parameter in state.values()):
            return state_dict
        self._agree("optimizer.state_dict()")
        whole = {key: self._whole(own, parameter) for key, (own, parameter) in state.items()}
        return {**state_dict, "state": {**state_dict["state"], **whole}}

    def _leave(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Before the optimizer's own `step()`: let it find its state as it has left it."""
        if any(self._shares_in(own, parameter) for parameter, own in optimizer.state.items()):
            self._agree("optimizer.step()")
            for parameter, own in optimizer.state.items():
                own.update(self._whole(own, parameter))

    def _agree(self, what: str) -> None:
        if not (dist.is_initialized() and self._reduction.communicators):
            raise RuntimeError(
                f"{what} gathers the optimizer's state, which lies in shares on all ranks, and torch.distributed "
                "has been shut down since the latest step: call it on every rank before destroy_process_group(), or, "
                "where it is initialised again with as many ranks, behind a step."
            )
        try:
            self.refuse_torn()
        except RuntimeError as error:
            self._reduction.break_off(error)
            raise
        agree_apart(self._reduction.communicator, f"the gathering of the optimizer's state for {what}", what)

    def _whole(self, own: State, parameter: Tensor) -> State:
        """A collective for each share, in the order in which the state has them."""
        shares = self._shares_in(own, parameter)
        group = self._reduction.communicator.process_group
        gathered = {
            name: whole_of(
                gather(own[name].reshape(-1), self.ranks, group.group_name, scattered_by(group, own[name].device)),
                parameter.shape,
            )
            for name in shares
        }
        return {**own, **gathered}

    def _shares_in(self, own: State, parameter: Tensor) -> list[str]:
        size = self._size(parameter)
        return [name for name, value in own.items() if isinstance(value, Tensor) and value.shape == size]

    def _size(self, parameter: Tensor) -> torch.Size:
        share = share_elements(parameter.numel(), self.ranks)
        return torch.Size((1, share) if parameter.dim() == 1 else (share,))
