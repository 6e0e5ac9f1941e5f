"""Differentiable collectives inside a loss. Their adjoints take the sum of all ranks' losses as the objective.

Every rank launches the same ones, in the same order. What repeats is expected; else ranks compare what they are about
to launch, and raise RuntimeError on every rank, by name, where that is not the same: another collective, shape, dtype,
source or function. So they do where another rank raises in the meantime, or a wait fails.

[Note: adjoints] `grad` on each rank differentiates the sum of what all ranks return; its mean divides at the end. So
each collective has its plain transpose. What one rank gives to all gets the sum of all ranks' cotangents: also where
these are equal everywhere, as then each rank's loss is one of the sum's terms. No cotangent is taken for replicated.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from compiled_ddp import torch_private
from compiled_ddp.comm_hooks import Ranks
from compiled_ddp.functional.loss_group import LossGroup
from compiled_ddp.functional.random_state import folded_in
from compiled_ddp.functional.session import current_loss_call, current_session
from compiled_ddp.functional.unit import break_off
from compiled_ddp.functional.wanted import LossCollective
from compiled_ddp.users_code import warn_user


def rank() -> int:
    """This rank's number in the group of the gradient function that calls the loss, or in the default group."""
    return dist.get_rank(_group()) if _group() is not None else 0


def world_size() -> int:
    """The number of ranks in the group of the gradient function that calls the loss, or in the default group."""
    return dist.get_world_size(_group()) if _group() is not None else 1


def all_reduce(x: Tensor, op: Literal["mean", "sum"] = "mean") -> Tensor:
    """Return the mean or sum of `x` over ranks, in the shape of `x`.

    Adjoint: the mean, or sum, of all ranks' cotangents.
    """
    if not isinstance(x, Tensor):
        raise _told("all_reduce", _no_tensor("all_reduce", x))
    if op not in ("mean", "sum"):
        raise _told("all_reduce", ValueError(f'op must be "mean" or "sum", found {op!r}.'))
    _tell_of_no_ranks("all_reduce")
    if world_size() == 1:
        return x
    summed: Tensor = _Sum.apply(_ranks(f'all_reduce("{op}")'), x)  # type: ignore[no-untyped-call]
    return summed / world_size() if op == "mean" else summed


def all_gather(x: Tensor) -> Tensor:
    """Concatenate every rank's `x` along the first dimension, in rank order; scalars become a vector.

    `x` must have the same shape on every rank; otherwise all raise RuntimeError. Adjoint: this rank's rows of the sum
    of all ranks' cotangents.
    """
    if not isinstance(x, Tensor):
        raise _told("all_gather", _no_tensor("all_gather", x))
    _tell_of_no_ranks("all_gather")
    if world_size() == 1:
        return x if x.dim() else x[None]
    stacked: Tensor = _Gather.apply(_ranks("all_gather"), rank(), x)  # type: ignore[no-untyped-call]
    return stacked.flatten(0, 1) if x.dim() else stacked


def broadcast(tree: Any, src: int = 0) -> Any:
    """Replace the tensors of a tree by those of rank `src`; numbers and texts stay this rank's.

    Tensors are told apart by their paths in the tree; ranks raise RuntimeError where these differ.
    Adjoint: on rank `src` the sum of all ranks' cotangents, zeros elsewhere.

    Raises TypeError for a module or another object that holds tensors, and where there is no tensor.
    """
    given: object = src
    if isinstance(given, bool) or not isinstance(given, int) or not 0 <= given < world_size():
        raise _told("broadcast", ValueError(f"src must be a rank below {world_size()}, found {src!r}."))
    named = torch_private.trees.named_leaves(tree)
    for path, leaf in named:
        if isinstance(leaf, nn.Module) or any(
            isinstance(each, Tensor) for each in getattr(leaf, "__dict__", {}).values()
        ):
            raise _told("broadcast", _not_sent(path, leaf))
    if not any(isinstance(leaf, Tensor) for _, leaf in named):
        raise _told("broadcast", TypeError(f"broadcast finds no tensor in its tree, found {tree!r}."))
    _tell_of_no_ranks("broadcast")
    if world_size() == 1:
        return tree
    _, structure = torch_private.trees.flatten(tree)
    sent = [leaf for _, leaf in named]
    # In the order of their paths, as dicts may have been filled in another one elsewhere.
    for place in sorted(range(len(named)), key=lambda place: named[place][0]):
        path, leaf = named[place]
        if isinstance(leaf, Tensor):
            what = f"broadcast(src={src})" + (f" of {path}" if path else "")
            sent[place] = _of_source(_ranks(what), leaf, rank() == src)
    return torch_private.trees.unflatten(sent, structure)


def _not_sent(path: str, leaf: object) -> TypeError:
    remedy = (
        "send dict(module.named_parameters()), and its buffers, and load what comes"
        if isinstance(leaf, nn.Module)
        else "send a dict or a NamedTuple of them, or register its class as a pytree (torch.export.register_dataclass)"
    )
    place = f"at {path} of its tree" if path else "as its tree"
    return TypeError(
        f"broadcast takes a tree of tensors, found a {type(leaf).__name__} {place}, whose tensors it does not see: "
        f"{remedy}."
    )


def fold_in_rank(generator: torch.Generator) -> torch.Generator:
    """Derive a generator of this rank's own from `generator`, which advances by one number on every rank.

    For dropout or noise that differs between ranks, from a generator that is the same on all of them.
    """
    if not isinstance(generator, torch.Generator):
        raise TypeError(f"generator must be a torch.Generator, found {generator!r}.")
    _tell_of_no_ranks("fold_in_rank")
    session = current_session()
    if session is not None:
        return session.generators.fold_in(generator, rank())
    with torch_private.tracing.outside_of_traces():
        return folded_in(generator, rank())


def _tell_of_no_ranks(collective: str) -> None:
    """Warn, once for each collective, where torch.distributed is not there; a gradient function has told of it."""
    if current_loss_call() is None and _group() is None:
        _warn_of_no_ranks(collective)


@functools.cache
def _warn_of_no_ranks(collective: str) -> None:
    warn_user(
        f"{collective} takes this process for the only one, as torch.distributed is not initialised: call "
        "init_process_group before, if there are others."
    )


def _group() -> dist.ProcessGroup | None:
    if not dist.is_available() or not dist.is_initialized():
        return None
    call = current_loss_call()
    return dist.group.WORLD if call is None or call.process_group is None else call.process_group


def _no_tensor(collective: str, x: object) -> TypeError:
    return TypeError(f"{collective} takes a tensor, x, found {x!r}: for a tree map it over the leaves.")


def _told(collective: str, error: Exception) -> Exception:
    """`error`, of which the other ranks know, that may wait in this collective.

    In a loss, and in a step that is traced, those tell that call it.
    """
    group = _group()
    is_told = current_loss_call() is not None or torch_private.tracing.is_tracing()
    if group is not None and world_size() > 1 and not is_told:
        agreements = LossGroup.of(group).agreements
        if agreements.ranks.is_gloo:  # elsewhere nothing ends their wait
            break_off((), agreements, collective, error)
    return error


@dataclass(frozen=True)
class _LossRanks:
    """The ranks that collectives of one kind meet."""

    what: str
    group: LossGroup | None  # None where they are traced by others, who launch on the user's own group
    ranks: Ranks

    def adjoint(self) -> "_LossRanks":
        return replace(self, what=f"the adjoint of {self.what}")

    def tangent(self) -> "_LossRanks":
        return replace(self, what=f"the tangent of {self.what}")

    def all_reduce(self, x: Tensor) -> Tensor:
        return self._launched(x.shape, self.ranks.all_reduce, x.contiguous())

    def all_gather(self, x: Tensor) -> Tensor:
        """Gather `x` of every rank; shape (world, *x.shape)."""
        return self._launched(x.shape, self.ranks.all_gather, x.contiguous()[None])

    def _launched(self, shape: Sequence[int], launch: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        call, session = current_loss_call(), current_session()
        collective = LossCollective(self.what, tuple(shape), x.dtype)
        if call is not None:
            collective = replace(collective, function=call.function, number=call.number_of_next())
        if self.group is None:
            return launch(x)
        if session is None:
            with self.group.launching([collective]):
                return launch(x)
        result = launch(x)
        session.note_loss_collective(self.group, collective, result)
        return result


def _ranks(what: str) -> _LossRanks:
    group = _group()
    assert group is not None, "asked of a rank that is alone"
    is_others_trace = current_session() is None and torch_private.tracing.is_tracing()
    loss_group = None if is_others_trace else LossGroup.of(group)
    name = group.group_name if loss_group is None else loss_group.name
    place = dist.get_rank(group) if dist.get_backend(group) == "gloo" else None  # where gathers are sums
    return _LossRanks(what, loss_group, Ranks(dist.get_world_size(group), name, place))


def _of_source(ranks: _LossRanks, tensor: Tensor, is_source: bool) -> Tensor:
    number = tensor.to(torch.uint8) if tensor.dtype == torch.bool else tensor
    given: Tensor = _FromSource.apply(ranks, is_source, number)  # type: ignore[no-untyped-call]
    return given.to(tensor.dtype)


class _Sum(torch.autograd.Function):
    """[Note: adjoints]"""

    @staticmethod
    def forward(ranks: _LossRanks, x: Tensor) -> Tensor:
        return ranks.all_reduce(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: object) -> None:
        ctx.ranks_of_sum = inputs[0]

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Any:
        return None, _Sum.apply(ctx.ranks_of_sum.adjoint(), cotangent)  # type: ignore[no-untyped-call]

    @staticmethod
    def jvp(ctx: Any, _: object, tangent: Tensor) -> Any:
        return _Sum.apply(ctx.ranks_of_sum.tangent(), tangent)  # type: ignore[no-untyped-call]

    @staticmethod
    def vmap(_: object, in_dims: Sequence[int | None], ranks: _LossRanks, x: Tensor) -> Any:
        (_, dim) = in_dims
        assert dim is not None, "nothing is batched"
        return _Sum.apply(ranks, x.movedim(dim, 0)), 0  # type: ignore[no-untyped-call]


class _Gather(torch.autograd.Function):
    """Gathers `x` of every rank, shape (world, *x.shape). [Note: adjoints]"""

    @staticmethod
    def forward(ranks: _LossRanks, own: int, x: Tensor) -> Tensor:
        return ranks.all_gather(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: object) -> None:
        ctx.ranks_of_gather, ctx.own_row = inputs[:2]

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Any:
        return None, None, _Sum.apply(ctx.ranks_of_gather.adjoint(), cotangent)[ctx.own_row]  # type: ignore[no-untyped-call]

    @staticmethod
    def jvp(ctx: Any, _: object, __: object, tangent: Tensor) -> Any:
        return _Gather.apply(ctx.ranks_of_gather.tangent(), ctx.own_row, tangent)  # type: ignore[no-untyped-call]

    @staticmethod
    def vmap(_: object, in_dims: Sequence[int | None], ranks: _LossRanks, own: int, x: Tensor) -> Any:
        dim = in_dims[2]
        assert dim is not None, "nothing is batched"
        return _Gather.apply(ranks, own, x.movedim(dim, 0)), 1  # type: ignore[no-untyped-call]


class _FromSource(torch.autograd.Function):
    """On every rank it hangs on that rank's tensor, so that every rank takes part in its backward. [Note: adjoints]"""

    @staticmethod
    def forward(ranks: _LossRanks, is_source: bool, x: Tensor) -> Tensor:
        return ranks.all_reduce(x if is_source else torch.zeros_like(x))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: object) -> None:
        ctx.ranks_of_broadcast, ctx.is_source = inputs[:2]

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Any:
        summed = _Sum.apply(ctx.ranks_of_broadcast.adjoint(), cotangent)  # type: ignore[no-untyped-call]
        return None, None, summed if ctx.is_source else torch.zeros_like(summed)

    @staticmethod
    def jvp(ctx: Any, _: object, __: object, tangent: Tensor) -> Any:
        return _FromSource.apply(ctx.ranks_of_broadcast.tangent(), ctx.is_source, tangent)  # type: ignore[no-untyped-call]

    @staticmethod
    def vmap(_: object, in_dims: Sequence[int | None], ranks: _LossRanks, is_source: bool, x: Tensor) -> Any:
        dim = in_dims[2]
        assert dim is not None, "nothing is batched"
        return _FromSource.apply(ranks, is_source, x.movedim(dim, 0)), 0  # type: ignore[no-untyped-call]
