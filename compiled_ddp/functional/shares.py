"""Shares of tensors, one for each rank: how they are made, summed up and put together again, run as they are.

`passes.scatter_buckets` puts the same into a graph. See there for why gloo's are exchanges.
"""

import itertools
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from compiled_ddp import torch_private
from compiled_ddp.passes.ops import (
    all_gather,
    all_reduce,
    exchange_of_all,
    exchange_of_sums,
    gather_shares,
    reduce_scatter,
    sum_numbers,
    wait_tensor,
)
from compiled_ddp.plan import Bucket, share_elements, whole_of


def scattered_by(group: dist.ProcessGroup, device: torch.device) -> str:
    """What a group scatters sums of tensors on this device by: as `sum_over_ranks` is told it."""
    return "exchange" if device.type == "cpu" or dist.get_backend(group) == "gloo" else "reduce_scatter"


def rows_of(tensor: Tensor, ranks: int) -> Tensor:
    """A row for each rank, shape (ranks, `share_elements`), filled up with zeros."""
    missing = ranks * share_elements(tensor.numel(), ranks) - tensor.numel()
    flat = tensor.reshape(-1)
    if missing:
        flat = torch.nn.functional.pad(flat, (0, missing))
    return flat.view(ranks, -1)


def rows_of_bucket(bucket: Bucket, tensors: Sequence[Tensor]) -> Tensor:
    """The matrix that is its flat buffer, of tensors by the places of its gradients."""
    if not bucket.whole:
        return torch.cat([rows_of(tensors[index], bucket.ranks) for index in bucket.indices], dim=1)
    flat = torch.cat([tensors[index].reshape(-1) for index in bucket.indices])
    return torch.nn.functional.pad(flat, (0, bucket.numel - flat.numel())).view(bucket.ranks, -1)


def own_row(tensor: Tensor, ranks: int, rank: Tensor) -> Tensor:
    """The share of the rank whose number is `rank`, of shape (1,): read when a graph runs, so that ranks share it."""
    return rows_of(tensor, ranks).index_select(0, rank).view(-1)


# ---- over ranks ------------------------------------------------------------------------------------------------------


def launch_scatter(bucket: Bucket, rows: Tensor, group_name: str, by: str) -> Tensor:
    """Start to sum a bucket's rows of all ranks, each for the rank that it is of."""
    if by == "reduce_scatter":
        launched: Tensor = reduce_scatter(rows, "sum", bucket.ranks, group_name)
    else:
        launched = exchange_of_sums(rows, bucket.ranks, 0, group_name)
    return launched.view(-1)


@torch.library.impl("compiled_ddp::exchange_of_sums", "CompositeExplicitAutograd")
def _exchange_of_sums(sent: Tensor, ranks: int, _: int, group_name: str) -> Tensor:
    return torch_private.exchanges.exchange_of_sums(torch_private.groups.group_called(group_name), sent, ranks)


@torch.library.impl("compiled_ddp::exchange_of_sums_into", "CompositeExplicitAutograd")
def _exchange_of_sums_into(sent: Tensor, received: Tensor, summed: Tensor, _: object, group_name: str) -> None:
    group = torch_private.groups.group_called(group_name)
    torch_private.exchanges.start_exchange_of_sums(group, sent, received, summed)


@torch.library.impl("compiled_ddp::exchange_of_all", "CompositeExplicitAutograd")
def _exchange_of_all(share: Tensor, ranks: int, _: int, group_name: str) -> Tensor:
    return torch_private.exchanges.exchange_of_all(torch_private.groups.group_called(group_name), share, ranks)


@torch.library.impl("compiled_ddp::exchange_of_all_into", "CompositeExplicitAutograd")
def _exchange_of_all_into(share: Tensor, received: Tensor, _: object, group_name: str) -> None:
    group = torch_private.groups.group_called(group_name)
    torch_private.exchanges.start_exchange_of_all(group, share, received)


def gather(share: Tensor, ranks: int, group_name: str, by: str) -> Tensor:
    """The `share`, one-dimensional, of each rank: shape (ranks, share)."""
    if by == "reduce_scatter":
        gathered: Tensor = wait_tensor(all_gather(share, ranks, group_name))
    else:
        gathered = wait_tensor(exchange_of_all(share, ranks, 0, group_name))
    return gathered.view(ranks, -1)


def _buckets(order: Sequence[int], lengths: Sequence[int]) -> list[list[int]]:
    """The tensors of each bucket that has some, by their places."""
    in_order = iter(order)
    return [[*itertools.islice(in_order, length)] for length in lengths if length]


@torch.library.impl("compiled_ddp::gather_shares", "CompositeExplicitAutograd")
def _gather_shares(
    shares: Sequence[Tensor], order: Sequence[int], lengths: Sequence[int], world_size: int, group_name: str, by: str
) -> list[Tensor]:
    found: dict[int, Tensor] = {}
    for bucket in _buckets(order, lengths):
        gathered = gather(torch.cat([shares[index] for index in bucket]), world_size, group_name, by)
        parts = gathered.split([shares[index].numel() for index in bucket], dim=1)
        found |= {index: part.reshape(-1) for index, part in zip(bucket, parts, strict=True)}
    return [found[index] for index in range(len(shares))]


@torch.library.impl("compiled_ddp::sum_numbers", "CompositeExplicitAutograd")
def _sum_numbers(numbers: Tensor, group_name: str) -> Tensor:
    summed: Tensor = wait_tensor(all_reduce(numbers, "sum", group_name))
    return summed


def gathered_in_trace(shares: Sequence[Tensor], sizes: Sequence[torch.Size], ranks: int, by: str) -> list[Tensor]:
    """Tensors of these sizes, of the shares of all ranks: in a step that is traced, whose plan is not known yet."""
    places = list(range(len(shares)))
    rows: list[Tensor] = gather_shares(list(shares), places, [1] * len(places), ranks, "", by)
    return [whole_of(each, size) for each, size in zip(rows, sizes, strict=True)]


def summed_in_trace(numbers: Tensor) -> Tensor:
    """The sum over ranks of a few numbers, likewise."""
    summed: Tensor = sum_numbers(numbers, "")
    return summed
