"""The sum over ranks of a tree's gradients, as an operator: eager, in a graph, and under torch.func's transforms."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from compiled_ddp.passes.ops import all_reduce_in_place, wait_tensor
from compiled_ddp.plan import BucketPlan, GradientSpec
from compiled_ddp.planning.assignment import assign_buckets


@functools.lru_cache(maxsize=256)
def plan_of(
    gradients: tuple[GradientSpec, ...],
    order: tuple[int, ...],
    capacities_bytes: tuple[float, ...],
    world_size: int,
    passengers: int,
) -> BucketPlan:
    """The buckets of these gradients, filled in this `order`, with so many elements of the user's at the end."""
    in_order = [gradients[index] for index in order]
    return assign_buckets(
        in_order, capacities_bytes=capacities_bytes, world_size=world_size, reduction="sum", passengers=passengers
    )


def spec_of(index: int, size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> GradientSpec:
    """A gradient as it lies in its bucket: contiguous, whatever strides this rank's has."""
    stride = torch.empty(size, dtype=torch.float32, device="meta").stride()
    return GradientSpec(index, size, stride, dtype, device)


@torch.library.impl("compiled_ddp::sum_over_ranks", "CompositeExplicitAutograd")
def _sum_over_ranks(
    gradients: Sequence[Tensor],
    passengers: Sequence[Tensor],
    leading: Tensor,
    order: Sequence[int],
    capacities_bytes: Sequence[float],
    world_size: int,
    group_name: str,
) -> list[Tensor]:
    """All buckets launched one after the other, then awaited; the results are views of them."""
    specs = tuple(spec_of(index, tuple(g.shape), g.dtype, g.device) for index, g in enumerate(gradients))
    ridden = sum(passenger.numel() for passenger in passengers)
    plan = plan_of(specs, tuple(order), tuple(capacities_bytes), world_size, ridden)
    used = torch.ones(len(gradients), dtype=torch.float32, device=leading.device)
    flat_buffers = []
    for bucket in plan.buckets:
        parts = [gradients[index].reshape(-1) for index in bucket.indices]
        if bucket.riders is not None:
            parts += [part.to(bucket.device).reshape(-1) for part in (leading, used, *passengers)]
        flat_buffers.append(all_reduce_in_place(torch.cat(parts), "sum", group_name))
    views: dict[int, Tensor] = {}
    for bucket, flat in zip(plan.buckets, flat_buffers, strict=True):
        wait_tensor(flat)
        views |= {gradient.index: gradient.view(flat) for gradient in bucket.gradients}
    riders = plan.riders.view(flat_buffers[-1])
    first_passenger = plan.riders.numel - ridden
    sums = riders[first_passenger:].split([passenger.numel() for passenger in passengers])
    shaped = [part.view(passenger.shape) for part, passenger in zip(sums, passengers, strict=True)]
    return [*(views[index] for index in range(len(gradients))), *shaped, riders[: leading.numel()]]


Reduce = Callable[[Sequence[Tensor], Sequence[Tensor]], Sequence[Tensor]]  # gradients, passengers -> their sums


class SumOverRanks(torch.autograd.Function):
    """[Note: a sum is its own adjoint]

    Gradients here are those of the sum over ranks of what each rank differentiates. A tensor of one rank goes into the
    sum on every rank, so its cotangent is the sum of those on all ranks: the same operator. It is linear, so its
    tangent is the same operator too. A batch of it is the sum of the batched tensors: one all-reduce for each bucket.
    """

    @staticmethod
    def forward(reduce: Reduce, gradients: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The sums of the first so many `gradients` and of the passengers that follow them."""
        return tuple(reduce(tensors[:gradients], tensors[gradients:]))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: object) -> None:
        ctx.all_but_the_tensors = inputs[:2]

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        return (None, None, *SumOverRanks.apply(*ctx.all_but_the_tensors, *cotangents))  # type: ignore[no-untyped-call]

    @staticmethod
    def jvp(ctx: Any, _: object, __: object, *tangents: Tensor) -> Any:
        return SumOverRanks.apply(*ctx.all_but_the_tensors, *tangents)  # type: ignore[no-untyped-call]

    @staticmethod
    def vmap(_: object, in_dims: Sequence[int | None], reduce: Reduce, *rest: Any) -> Any:
        gradients, *tensors = rest
        dims = in_dims[2:]
        batched = [tensor if dim is None else tensor.movedim(dim, 0) for tensor, dim in zip(tensors, dims, strict=True)]
        return SumOverRanks.apply(reduce, gradients, *batched), tuple(None if d is None else 0 for d in dims)  # type: ignore[no-untyped-call]
