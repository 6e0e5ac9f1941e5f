"""Where the mean over ranks is taken: on the tangents, at no cost, if that is proven to be the same."""

import functools
import operator
from collections.abc import Mapping, Sequence

import torch
from torch.fx import Graph, Node

from compiled_ddp.passes.graph_edit import emit, output_values, set_output_values
from compiled_ddp.passes.insert_all_reduces import ReducedGradient, read_reductions, times
from compiled_ddp.passes.ops import is_launch
from compiled_ddp.passes.prove_linearity import LinearityProof, prove_linearity
from compiled_ddp.plan import BucketPlan

_mul = torch.ops.aten.mul.Tensor


def place_mean(
    graph: Graph,
    plan: BucketPlan,
    *,
    group_name: str,
    tangents: Sequence[Node],
    output_positions: Mapping[int, int],
) -> LinearityProof:
    """Move the factor of every gradient, 1/world or a weight, to the tangents, and tell whether that was right to do.

    Assumes the naive program. Where every output is proven linear in the tangents, the tangents are scaled once and
    the gradients' own scaling goes; outputs that are not planned gradients (of activations, of inputs) are scaled
    back.

    Does nothing, and says why, without the proof; and where scaling back would round, which is where there are such
    outputs and the factor is a weight, or the world size no power of two.
    """
    if not plan.buckets:
        return LinearityProof(False, "the plan is empty")
    if plan.reduction != "weighted" and plan.share == 1.0:
        return LinearityProof(False, "there is no factor")
    reductions = read_reductions(graph, plan, output_positions)
    outputs = output_values(graph)
    # The riders are the last output; what else is not reduced belongs to activations and inputs.
    others = sorted(set(range(len(outputs) - 1)) - {output_positions[r.gradient.index] for r in reductions})
    other_nodes = [node for position in others if (node := outputs[position]) is not None]
    if other_nodes and (plan.reduction == "weighted" or plan.world_size & (plan.world_size - 1)):
        return LinearityProof(
            False, f"{other_nodes[0].name}: not a parameter's gradient, and the factor would round it"
        )
    local = [reduction.local for reduction in reductions]
    launches = [node for node in graph.nodes if is_launch(node, group_name)]
    proof = prove_linearity(graph, tangents, [*local, *other_nodes], own_launches=launches)
    if proof.proven:
        share = _share_of(reductions)
        _scale(graph, tangents, share)
        for reduction in reductions:
            _drop_mean(graph, reduction)
        _scale_back(graph, others, float(plan.world_size))
    return proof


def _share_of(reductions: Sequence[ReducedGradient]) -> float | Node:
    """The factor that the naive program gives to every gradient."""
    mean = reductions[0].mean
    assert mean is not None
    return mean.args[1]  # type: ignore[return-value]


def _scale(graph: Graph, tangents: Sequence[Node], factor: float | Node) -> None:
    first = next(node for node in graph.nodes if node.op != "placeholder" and node is not factor)
    for tangent in tangents:
        with graph.inserting_before(first):
            scaled = times(graph, tangent, factor)
        first = scaled if scaled.args[0] is tangent else scaled.args[0]  # the product, which a cast may follow
        tangent.replace_all_uses_with(scaled, delete_user_cb=functools.partial(operator.is_not, first))


def _drop_mean(graph: Graph, reduction: ReducedGradient) -> None:
    # Not `reduction.local`: where that was a tangent, the mean now reads the scaled one.
    assert reduction.mean is not None
    scaled = reduction.mean.args[0]
    assert isinstance(scaled, Node)
    reduction.mean.replace_all_uses_with(scaled)
    graph.erase_node(reduction.mean)


def _scale_back(graph: Graph, positions: Sequence[int], factor: float) -> None:
    outputs = output_values(graph)
    with graph.inserting_before(graph.output_node()):
        for position in positions:
            node = outputs[position]
            if node is not None:
                outputs[position] = emit(graph, _mul, node, factor)
    set_output_values(graph, outputs)
