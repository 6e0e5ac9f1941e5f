"""The mean of a functional step's reductions, taken where its derivatives begin: there it costs nothing."""

import functools
import operator
from collections.abc import Collection, Sequence

import torch
from torch.fx import Graph, Node

from compiled_ddp.passes.graph_edit import emit
from compiled_ddp.passes.ops import sum_over_ranks
from compiled_ddp.passes.prove_linearity import prove_linearity

_aten = torch.ops.aten
_MUL, _SEED = _aten.mul.Tensor, _aten.ones_like.default
_MOST_SEEDS = 16  # that are tried for a reduction, the last ones first


def scale_seeds(graph: Graph) -> None:
    """Move the factor of a reduction's gradients to the seed of their derivative, where nothing else changes.

    Assumes a step as it was traced: a derivative begins with `ones_like` of the loss, and each gradient is multiplied
    by 1/world before it is summed. So

        ones_like -> ... -> gradient -> mul(1 / world) -> sum_over_ranks

    becomes

        ones_like -> mul(1 / world) -> ... -> gradient -> sum_over_ranks

    Does nothing with a reduction whose gradients are not all multiplied by one factor, or not all proven linear in one
    seed, or where that leads to something besides them.
    """
    graph.eliminate_dead_code()
    for reduction in graph.find_nodes(op="call_function", target=sum_over_ranks):
        scaled: Sequence[Node] = reduction.args[0]
        factor = _common_factor(scaled)
        seed = None if factor is None else _seed_of(graph, reduction, [_unscaled(node) for node in scaled])
        if factor is None or seed is None:
            continue
        _scale(graph, seed, factor)
        reduction.update_arg(0, [_unscaled(node) for node in scaled])
        graph.eliminate_dead_code()


def _common_factor(gradients: Sequence[Node]) -> float | None:
    factors = {node.args[1] if node.target is _MUL else None for node in gradients}
    (factor, *others) = factors
    return factor if not others and isinstance(factor, float) else None


def _unscaled(scaled: Node) -> Node:
    gradient = scaled.args[0]
    assert isinstance(gradient, Node)
    return gradient


def _seed_of(graph: Graph, reduction: Node, gradients: Sequence[Node]) -> Node | None:
    """What to scale in place of the gradients; None where nothing is known to be the same."""
    ancestors = _ancestors(reduction)
    seeds: list[Node] = [node for node in graph.nodes if node.target is _SEED and node in ancestors]
    for seed in reversed(seeds[-_MOST_SEEDS:]):
        if (
            not _leads_elsewhere(seed, reduction, ancestors)
            and prove_linearity(graph, [seed], gradients, own_launches=[reduction]).proven
        ):
            return seed
    return None


def _ancestors(node: Node) -> set[Node]:
    found, ahead = {node}, [node]
    while ahead:
        new = set(ahead.pop().all_input_nodes) - found
        found |= new
        ahead += new
    return found


def _leads_elsewhere(seed: Node, reduction: Node, ancestors: Collection[Node]) -> bool:
    """Whether anything depends on `seed` besides the gradients of this reduction, and what they come from."""
    found, ahead = {seed}, [seed]
    while ahead:
        new = set(ahead.pop().users) - found - {reduction}
        found |= new
        ahead += new
    _, passengers, leading = reduction.args[:3]
    return not found.issubset(ancestors) or not found.isdisjoint([*passengers, leading])  # type: ignore[misc]


def _scale(graph: Graph, seed: Node, factor: float) -> None:
    with graph.inserting_after(seed):
        scaled = emit(graph, _MUL, seed, factor)
    scaled.meta.update(seed.meta)
    seed.replace_all_uses_with(scaled, delete_user_cb=functools.partial(operator.is_not, scaled))
