"""Folding at no cost: a matrix product adds the gradient that is pending, and scales it, as it writes its result."""

from collections.abc import Mapping

import torch
from torch.fx import Graph, Node

from compiled_ddp.passes.graph_edit import emit
from compiled_ddp.passes.insert_all_reduces import ReducedGradient, read_reductions
from compiled_ddp.plan import BucketPlan

_aten = torch.ops.aten
_mm, _addmm, _mul = _aten.mm.default, _aten.addmm.default, _aten.mul.Tensor


def fold_into_products(graph: Graph, plan: BucketPlan, *, output_positions: Mapping[int, int]) -> None:
    """Replace the product, the scaling and the sum of a folded gradient by one `addmm`.

    Assumes the naive program with pending gradients, the mean placed. Of each gradient that is a product,

        a, b -> mm [-> mean] -> fold (add the pending gradient's share) -> all_reduce

    becomes

        pending, a, b -> addmm(beta=share [, alpha=share]) -> all_reduce

    which reads the pending gradient once, where a compiler would scale it in a kernel of its own. It rounds less, and
    what is a power of two as the sum would.

    Does nothing to gradients that are no products, to products that something else reads too, and where the share is a
    weight, which no operator takes as a scalar.
    """
    for reduction in read_reductions(graph, plan, output_positions):
        if reduction.fold is not None and _is_product_of_its_own(reduction):
            _fold(graph, reduction, reduction.fold)


def _is_product_of_its_own(reduction: ReducedGradient) -> bool:
    local, mean, fold = reduction.local, reduction.mean, reduction.fold
    is_read_once = mean is None or list(mean.users) == [fold]  # else it is a factor of the user's, like the share
    return local.target is _mm and is_read_once and list(local.users) == [mean or fold]


def _fold(graph: Graph, reduction: ReducedGradient, fold: Node) -> None:
    pending, beta = _pending_and_share(fold.args[1])
    alpha = 1.0 if reduction.mean is None else reduction.mean.args[1]
    if isinstance(alpha, Node) or isinstance(beta, Node):
        return
    with graph.inserting_before(fold):
        product = emit(graph, _addmm, pending, *reduction.local.args, beta=beta, alpha=alpha)
    fold.replace_all_uses_with(product)
    for node in (fold, reduction.mean, reduction.local, fold.args[1]):
        if isinstance(node, Node) and node.op != "placeholder":
            graph.erase_node(node)


def _pending_and_share(node: object) -> tuple[object, object]:
    """Of `pending_<index>`, or of its product with a share."""
    assert isinstance(node, Node)
    return (node.args[0], node.args[1]) if node.target is _mul else (node, 1.0)
