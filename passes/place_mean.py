"""Where the mean over ranks is taken: on the tangents, at no cost, if that is proven to be the same."""

from collections.abc import Mapping, Sequence

import torch
from torch.fx import Graph, Node

from compiled_ddp.passes.graph_edit import emit, output_values, set_output_values
from compiled_ddp.passes.insert_all_reduces import read_reductions
from compiled_ddp.passes.ops import wait_tensor
from compiled_ddp.passes.prove_linearity import LinearityProof, prove_linearity
from compiled_ddp.plan import BucketPlan

_mul = torch.ops.aten.mul.Tensor


def place_mean(
    graph: Graph, plan: BucketPlan, *, tangents: Sequence[Node], output_positions: Mapping[int, int]
) -> LinearityProof:
    """Move the factor 1/world from every gradient to the tangents, and tell whether that was right to do.

    Assumes the naive program. Where every output is proven linear in the tangents, the tangents are scaled once and
    the gradients' own scaling goes; outputs that are not planned gradients (of activations, of inputs) are scaled
    back.

    Does nothing, and says why, without the proof; and where scaling back would round, which is where there are such
    outputs and the world size is no power of two.
    """
    if not plan.buckets:
        return LinearityProof(False, "the plan is empty")
    reductions = read_reductions(graph, plan, output_positions)
    reduced = {reduction.wait for reduction in reductions}
    others = [node for node in output_values(graph)[:-1] if node is not None and node not in reduced]
    if others and plan.world_size & (plan.world_size - 1):
        return LinearityProof(False, f"{others[0].name}: not a parameter's gradient, and 1/world would round it")
    proof = prove_linearity(graph, tangents, [*(reduction.local for reduction in reductions), *others])
    if not proof.proven:
        return proof
    for tangent in tangents:
        _scale(graph, tangent, 1.0 / plan.world_size)
    for reduction in reductions:
        assert reduction.mean is not None
        reduction.mean.replace_all_uses_with(reduction.local)
        graph.erase_node(reduction.mean)
    _scale_back(graph, set(others), float(plan.world_size))
    return proof


def _scale(graph: Graph, tangent: Node, factor: float) -> None:
    first_other = next(node for node in graph.nodes if node.op != "placeholder")
    with graph.inserting_before(first_other):
        scaled = emit(graph, _mul, tangent, factor)
    tangent.replace_all_uses_with(scaled, delete_user_cb=lambda user: user is not scaled)


def _scale_back(graph: Graph, others: set[Node], factor: float) -> None:
    outputs = output_values(graph)
    with graph.inserting_before(graph.output_node()):
        for position, node in enumerate(outputs):
            if node is not None and node in others and node.target is not wait_tensor:
                outputs[position] = emit(graph, _mul, node, factor)
    set_output_values(graph, outputs)
