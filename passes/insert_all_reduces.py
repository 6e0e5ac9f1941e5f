"""The naive program: one all-reduce and one wait for every gradient, right where the gradient is produced.

It is the meaning that all other passes keep, and the reference they are tested against.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from compiled_ddp.passes.graph_edit import add_placeholders, emit, output_values, set_output_values
from compiled_ddp.passes.ops import all_reduce, wait_tensor
from compiled_ddp.plan import WEIGHT, Bucket, BucketPlan, Gradient

_aten = torch.ops.aten
_mul, _add, _select = _aten.mul.Tensor, _aten.add.Tensor, _aten.select.int


@dataclass(frozen=True)
class ReducedGradient:
    """One gradient's part of the naive program.

    local_grad [-> mean (mul by the share)] [-> fold (add a pending gradient's share)] -> all_reduce -> wait
        [-> normalised (mul by the inverse of the weights' sum)] -> output

    `mean` is None in a sum, and once the mean has moved to the tangents; `normalised` belongs to a weighted mean.
    """

    gradient: Gradient
    local: Node
    mean: Node | None
    fold: Node | None
    launch: Node
    wait: Node
    normalised: Node | None = None


def insert_all_reduces(
    graph: Graph, plan: BucketPlan, *, group_name: str, output_positions: Mapping[int, int], fold: bool = False
) -> None:
    """Reduce every planned gradient of a backward graph, on its own, to its mean, sum or weighted mean over ranks.

    Assumes that `output_positions` maps each of the plan's indices to its place among the graph's outputs, and that
    a None there is a gradient known to be zero. A gradient of another dtype than its bucket's is cast to that, as
    autograd would cast it: [Note: a dtype of its own].

    Appends one input, the riders (float32, `plan.riders.numel` elements), and one output, the riders' sum over
    ranks. With `fold`, appends one more input per gradient in plan order: a pending gradient that an earlier
    backward left unreduced, which joins this one's before the reduction.

    Does nothing for an empty plan.
    """
    if not plan.buckets:
        return
    outputs = output_values(graph)
    riders = _add_rider_placeholder(graph, plan)
    pending = _add_pending_placeholders(graph, plan) if fold else {}
    share = emit_share(graph, plan, riders)
    first_after_inputs = next(node for node in graph.nodes if node.op != "placeholder" and node is not share)
    for bucket, gradient in plan.gradients:
        position = output_positions[gradient.index]
        local = outputs[position]
        if local is not None:
            local = _of_dtype(graph, local, bucket.dtype, first_after_inputs)
        else:
            with graph.inserting_before(first_after_inputs):
                local = _emit_zeros(graph, bucket, gradient)
        with graph.inserting_before(first_after_inputs if local.op == "placeholder" else local.next):
            reduced = times(graph, local, share)
            unreduced = pending.get(gradient.index)
            if unreduced is not None:
                reduced = emit(graph, _add, reduced, times(graph, unreduced, share))
            outputs[position] = _emit_reduction(graph, reduced, group_name)
    with graph.inserting_before(graph.output_node()):
        reduced_riders = _emit_reduction(graph, riders, group_name)
        outputs.append(reduced_riders)
        if plan.reduction == "weighted":
            inverse = _emit_inverse_of_weights(graph, reduced_riders)
            for _, gradient in plan.gradients:
                position = output_positions[gradient.index]
                outputs[position] = emit(graph, _mul, outputs[position], inverse)
    replaced = dict.fromkeys(filter(None, output_values(graph)))
    set_output_values(graph, outputs)
    for node in replaced:
        if node.target in _CASTS and not node.users:  # as what it casts is reduced in its place
            graph.erase_node(node)


def emit_share(graph: Graph, plan: BucketPlan, riders: Node) -> float | Node:
    """The factor of this rank's gradients before they are summed up; a node, right behind the inputs, for a weight."""
    if plan.reduction != "weighted":
        return plan.share
    first_other = next(node for node in graph.nodes if node.op != "placeholder")
    with graph.inserting_before(first_other):
        return emit(graph, _select, riders, 0, WEIGHT)


# [Note: a dtype of its own] Autograd casts what reaches a parameter to its grad_dtype. AOTAutograd (2.11 to 2.14) knows
# no grad_dtype and ends a traced backward with a cast to the parameter's own dtype. What it casts is taken from before
# that where it is of the bucket's dtype already, as in eager mode, and as Inductor does with two casts in a row.
_convert = torch.ops.prims.convert_element_type.default
_CASTS = (_aten._to_copy.default, _convert)


def _of_dtype(graph: Graph, gradient: Node, dtype: torch.dtype, first_after_inputs: Node) -> Node:
    value = gradient.meta.get("val")
    if value is None or value.dtype == dtype:
        return gradient
    (source, *_) = gradient.args or (None,)
    if gradient.target in _CASTS and isinstance(source, Node) and gradient.kwargs.keys() <= {"dtype"}:
        before = source.meta.get("val")
        if before is not None and before.dtype == dtype:
            return source
    with graph.inserting_before(first_after_inputs if gradient.op == "placeholder" else gradient.next):
        cast = emit(graph, _convert, gradient, dtype)
    cast.meta["val"] = value.to(dtype)
    return cast


def times(graph: Graph, value: Node, factor: float | Node) -> Node:
    """The product, of the dtype of `value`: if that has no dimension, as a weight has none, it would be promoted."""
    if factor == 1.0:
        return value
    product, tensor = emit(graph, _mul, value, factor), value.meta.get("val")
    if not isinstance(factor, Node) or tensor is None or tensor.dim() > 0:
        return product
    return emit(graph, _convert, product, tensor.dtype)


def _emit_inverse_of_weights(graph: Graph, riders: Node) -> Node:
    """In float64, as hooks have it: of no dimension, it leaves gradients of float32 what they are."""
    weights = emit(graph, _convert, emit(graph, _select, riders, 0, WEIGHT), torch.float64)
    positive, zero = emit(graph, _aten.gt.Scalar, weights, 0.0), emit(graph, _mul, weights, 0.0)
    return emit(graph, _aten.where.self, positive, emit(graph, _aten.reciprocal.default, weights), zero)


def read_reductions(graph: Graph, plan: BucketPlan, output_positions: Mapping[int, int]) -> list[ReducedGradient]:
    """Match the naive program back, one `ReducedGradient` per gradient in plan order; see there for the pattern."""
    outputs = output_values(graph)
    reductions = []
    for _, gradient in plan.gradients:
        wait, normalised = outputs[output_positions[gradient.index]], None
        if plan.reduction == "weighted":
            assert wait is not None
            normalised, wait = wait, _producer(wait)
        assert wait is not None and wait.target is wait_tensor, f"gradient {gradient.index} is not waited for"
        launch = _producer(wait)
        assert launch.target is all_reduce, f"gradient {gradient.index} is not reduced"
        local = _producer(launch)
        fold = mean = None
        if local.target is _add and _is_pending_share(local.args[1]):
            fold, local = local, _producer(local)
        product = _without_cast(local, plan)
        if product.target is _mul and _is_share(product.args[1], plan) and not _is_pending_share(product):
            mean, local = product, _producer(product)
        reductions.append(ReducedGradient(gradient, local, mean, fold, launch, wait, normalised))
    return reductions


def _producer(node: Node) -> Node:
    producer = node.args[0]
    assert isinstance(producer, Node)
    return producer


def _is_share(factor: object, plan: BucketPlan) -> bool:
    if plan.reduction == "weighted":
        return isinstance(factor, Node) and factor.target is _select and _producer(factor).name == "riders"
    return factor == plan.share != 1.0


def _without_cast(node: Node, plan: BucketPlan) -> Node:
    """What `times` has multiplied by a weight, before the cast behind that, if there is one."""
    is_cast = plan.reduction == "weighted" and node.target is _convert and _producer(node).target is _mul
    return _producer(node) if is_cast else node


def _is_pending_share(node: object) -> bool:
    """Whether `node` is `pending_<index>`, or a share of it."""
    if not isinstance(node, Node):
        return False
    if node.target is _convert and _producer(node).target is _mul:
        node = _producer(node)
    value = _producer(node) if node.target is _mul else node
    return value.op == "placeholder" and value.name.startswith("pending_")


def _add_rider_placeholder(graph: Graph, plan: BucketPlan) -> Node:
    last = plan.buckets[-1]
    values = {"riders": lambda: torch.empty(plan.riders.numel, dtype=last.dtype, device=last.device)}
    (riders,) = add_placeholders(graph, values)
    return riders


def _add_pending_placeholders(graph: Graph, plan: BucketPlan) -> dict[int, Node]:
    values = {f"pending_{g.index}": functools.partial(_like, bucket, g) for bucket, g in plan.gradients}
    return dict(zip(plan.indices, add_placeholders(graph, values), strict=True))


def _like(bucket: Bucket, gradient: Gradient) -> torch.Tensor:
    return torch.empty_strided(gradient.size, gradient.stride, dtype=bucket.dtype, device=bucket.device)


def _emit_zeros(graph: Graph, bucket: Bucket, gradient: Gradient) -> Node:
    zeros = torch.ops.aten.full.default
    return emit(graph, zeros, list(gradient.size), 0.0, dtype=bucket.dtype, device=bucket.device)


def _emit_reduction(graph: Graph, value: Node, group_name: str) -> Node:
    launch = emit(graph, all_reduce, value, "sum", group_name)
    return emit(graph, wait_tensor, launch)
