"""The sum over ranks of a tree's gradients, as an operator: eager, in a graph, and under torch.func's transforms."""

import contextlib
import contextvars
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.fx import GraphModule, Node

from compiled_ddp.functional.shares import launch_scatter, rows_of_bucket
from compiled_ddp.keywords import check_switches, suggests_keywords
from compiled_ddp.passes.ops import all_reduce_in_place, wait_tensor
from compiled_ddp.passes.step_pipeline import StepPipeline, prepare_step
from compiled_ddp.passes.unfold_sums import find_sums
from compiled_ddp.plan import BucketPlan, GradientSpec, contiguous_stride
from compiled_ddp.planning.assignment import place_buckets
from compiled_ddp.ranks.launch_observer import profiled

# ---- the operator ----------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=256)
def plan_of(
    gradients: tuple[GradientSpec, ...],
    order: tuple[int, ...],
    lengths: tuple[int, ...],
    world_size: int,
    passengers: int,
    *,
    is_scattered: bool = False,
    whole: bool = False,
    by_hook: bool = False,
) -> BucketPlan:
    """The buckets of these gradients, so many in each in this `order`, with so many elements of the user's at the end.

    Where the last one has none, or a communication hook reduces the others, the riders have a bucket of their own.
    """
    in_order = iter([gradients[index] for index in order])
    buckets = [[*itertools.islice(in_order, length)] for length in lengths if length]
    return place_buckets(
        buckets,
        world_size,
        riders_apart=not lengths[-1],
        reduction="hook" if by_hook else "sum",
        passengers=passengers,
        is_scattered=is_scattered,
        whole=whole,
    )


def spec_of(index: int, size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> GradientSpec:
    """A gradient as it lies in its bucket: contiguous, whatever strides this rank's has."""
    return GradientSpec(index, size, contiguous_stride(size), dtype, device)


_bucket_name: contextvars.ContextVar[Callable[[int], str]] = contextvars.ContextVar(
    "bucket_name", default="bucket {}".format
)


@contextlib.contextmanager
def naming_buckets(name: Callable[[int], str]) -> Iterator[None]:
    """Let profiles of the operator that runs in here call its buckets so, by their positions."""
    token = _bucket_name.set(name)
    try:
        yield
    finally:
        _bucket_name.reset(token)


@torch.library.impl("compiled_ddp::sum_over_ranks", "CompositeExplicitAutograd")
def _sum_over_ranks(
    gradients: Sequence[Tensor],
    passengers: Sequence[Tensor],
    leading: Tensor,
    order: Sequence[int],
    lengths: Sequence[int],
    world_size: int,
    group_name: str,
    scattered_by: str = "",
    whole: bool = False,
    kept: Sequence[Tensor] | None = None,
) -> list[Tensor]:
    """All buckets launched one after the other, then awaited; the results are views of them."""
    assert kept is None, "a hook's program is run by graphs alone"
    specs = tuple(spec_of(index, tuple(g.shape), g.dtype, g.device) for index, g in enumerate(gradients))
    ridden = sum(passenger.numel() for passenger in passengers)
    of_all = specs, tuple(order), tuple(lengths), world_size, ridden
    plan = plan_of(*of_all, is_scattered=bool(scattered_by), whole=whole)
    used = torch.ones(len(gradients), dtype=torch.float32, device=leading.device)
    name, launched = _bucket_name.get(), []
    for position, bucket in enumerate(plan.buckets):
        with profiled("fold", name, position):
            if bucket.ranks > 1:
                flat = rows_of_bucket(bucket, gradients)
            else:
                parts = [gradients[index].reshape(-1) for index in bucket.indices]
                if bucket.riders is not None:
                    parts += [part.to(bucket.device).reshape(-1) for part in (leading, used, *passengers)]
                flat = torch.cat(parts)
        with profiled("launch", name, position):
            if bucket.ranks > 1:
                launched.append(launch_scatter(bucket, flat, group_name, scattered_by))
            else:
                launched.append(all_reduce_in_place(flat, "sum", group_name))
    views: dict[int, Tensor] = {}
    for position, (bucket, flat) in enumerate(zip(plan.buckets, launched, strict=True)):
        with profiled("wait for", name, position):
            wait_tensor(flat)
        if bucket.ranks > 1:
            views |= {index: flat[begin:end] for index, begin, end in bucket.shares}
        else:
            views |= {gradient.index: gradient.view(flat) for gradient in bucket.gradients}
    riders = plan.riders.view(launched[plan.place_of_riders])
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


# ---- graphs that others have traced: their reductions launched early and awaited late --------------------------------


@suggests_keywords
def overlap(graph_module: GraphModule, *, in_place: bool = False) -> GraphModule:
    """Rewrite `graph_module`, in place, so that its reductions overlap with computation; returns it.

    Each bucket is launched right after its last gradient, and awaited where its sum is first read. The graph is one of
    a function that calls `grad` or `grad_and_value`, from make_fx or as AOTAutograd passes it to its compiler. A graph
    that mutates something before its end keeps its order.

    Args:
        in_place: let all-reduces overwrite their buckets, which saves a copy in a graph that is run as it is. Keep the
            default for a compiler that does so by itself, such as Inductor.

    Raises TypeError for anything but a graph, ValueError for a graph without a reduction. On one rank there is none,
    and the graph stays as it is.
    """
    check_switches(in_place=in_place)
    if not isinstance(graph_module, GraphModule):
        raise TypeError(f"graph_module must be a torch.fx.GraphModule, as make_fx returns, found {graph_module!r}.")
    sums = find_sums(graph_module.graph)
    if not sums and not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return graph_module
    if not sums:
        raise ValueError(
            "overlap() found no reduction in this graph: give it the graph of a function that calls "
            "compiled_ddp.functional.grad or grad_and_value, before any other pass has taken it apart."
        )
    prepare_step(graph_module.graph)
    StepPipeline(tuple(map(_planned, sums)), in_place=in_place).run(graph_module.graph)
    graph_module.recompile()
    return graph_module


def _planned(reduction: Node) -> tuple[BucketPlan, str]:
    """The plan of a reduction as it is traced, and the group that it is launched on."""
    gradients, passengers, _, order, lengths, world_size, group_name = reduction.args[:7]
    values = [node.meta["val"] for node in _nodes(gradients)]
    specs = tuple(spec_of(index, tuple(g.shape), g.dtype, g.device) for index, g in enumerate(values))
    ridden = sum(node.meta["val"].numel() for node in _nodes(passengers))
    assert isinstance(order, Sequence) and isinstance(lengths, Sequence)
    assert isinstance(world_size, int) and isinstance(group_name, str)
    return plan_of(specs, tuple(order), tuple(lengths), world_size, ridden), group_name


def _nodes(values: object) -> list[Node]:
    assert isinstance(values, Sequence)
    return [value for value in values if isinstance(value, Node)]
