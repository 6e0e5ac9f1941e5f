"""A step's reductions as the naive program: one all-reduce and one wait for every gradient, where it is produced."""

from collections.abc import Sequence

import torch
from torch.fx import Graph, Node

from compiled_ddp.passes.graph_edit import (
    emit,
    erase_with_results,
    output_values,
    replace_nodes,
    results_of,
    set_output_values,
)
from compiled_ddp.passes.ops import all_reduce, sum_over_ranks, wait_tensor
from compiled_ddp.plan import FIRST_USED, BucketPlan

_aten = torch.ops.aten


def find_sums(graph: Graph) -> list[Node]:
    """The reductions that a traced step asks for, in order."""
    return graph.find_nodes(op="call_function", target=sum_over_ranks)


def arrival_order(reduction: Node) -> list[int]:
    """The gradients of a reduction in the order in which the graph produces them."""
    place = {node: number for number, node in enumerate(reduction.graph.nodes)}
    gradients: Sequence[Node] = reduction.args[0]  # type: ignore[assignment]
    return sorted(range(len(gradients)), key=lambda index: (place[gradients[index]], index))


def unfold_sum(graph: Graph, plan: BucketPlan, *, reduction: Node, group_name: str) -> dict[int, int]:
    """Replace one `sum_over_ranks` by what it means; returns where each gradient is among the outputs.

    Assumes a plan of the gradients of this `reduction`, by their places in it. Then

        gradients, passengers, leading -> sum_over_ranks -> getitem

    becomes

        gradient -> all_reduce -> wait
        leading, ones, passengers -> cat (the riders) -> all_reduce -> wait -> slice

    The waits are appended to the graph's outputs, those of the gradients and last the riders', as other passes look for
    them there; `drop_outputs` takes them away again.
    """
    gradients: Sequence[Node] = reduction.args[0]  # type: ignore[assignment]
    results = results_of(reduction)
    riders = emit_riders(graph, plan, reduction)
    waits = [_emit_reduction(graph, gradient, group_name) for gradient in gradients]
    riders_wait = _emit_reduction(graph, riders, group_name)
    replace_nodes(graph, {results[index]: wait for index, wait in enumerate(waits) if index in results})
    replace_riders(graph, reduction, results, riders_wait, len(gradients))
    outputs = output_values(graph)
    set_output_values(graph, [*outputs, *waits, riders_wait])
    erase_with_results(graph, reduction)
    return {index: len(outputs) + index for index in range(len(gradients))}


def unfold_kept(graph: Graph, reduction: Node) -> list[tuple[Node, Node]]:
    """What a communication hook keeps of all buckets, and what stands for what becomes of it: copies, until its program
    is there. Takes the results of these from one `sum_over_ranks`.
    """
    gradients, passengers = reduction.args[:2]
    kept: Sequence[Node] = reduction.args[9]  # type: ignore[assignment]
    first = len(gradients) + len(passengers) + 1  # type: ignore[arg-type]
    results = results_of(reduction)
    pairs = []
    for number, node in enumerate(kept):
        with graph.inserting_before(reduction):
            pairs.append((node, emit(graph, _aten.clone.default, node)))
        if first + number in results:
            results[first + number].replace_all_uses_with(pairs[-1][1])
    return pairs


def drop_outputs(graph: Graph, number: int) -> None:
    """Take the last `number` outputs away."""
    set_output_values(graph, output_values(graph)[:-number])


def emit_riders(graph: Graph, plan: BucketPlan, reduction: Node) -> Node:
    """The riders, right behind the last of what they are made of."""
    _, passengers, leading = reduction.args[:3]
    parts: list[Node] = [leading, *passengers]  # type: ignore[list-item, misc]
    place = {node: number for number, node in enumerate(graph.nodes)}
    with graph.inserting_before(_behind(graph, max(parts, key=place.__getitem__))):
        device = plan.buckets[plan.place_of_riders].device
        used = emit(graph, _aten.full.default, [len(plan.indices)], 1.0, dtype=torch.float32, device=device)
        flat = [emit(graph, _aten.reshape.default, part, [-1]) for part in parts[1:]]
        return emit(graph, _aten.cat.default, [parts[0], used, *flat])


def _emit_reduction(graph: Graph, value: Node, group_name: str) -> Node:
    with graph.inserting_before(_behind(graph, value)):
        return emit(graph, wait_tensor, emit(graph, all_reduce, value, "sum", group_name))


def _behind(graph: Graph, node: Node) -> Node:
    """What stands behind a node, and behind all inputs."""
    if node.op == "placeholder":
        behind: Node = next(other for other in graph.nodes if other.op != "placeholder")
        return behind
    return node.next


def replace_riders(graph: Graph, reduction: Node, results: dict[int, Node], riders: Node, gradients: int) -> None:
    """Let the sums of passengers and of the leading riders be parts of the summed riders."""
    passengers: Sequence[Node] = reduction.args[1]  # type: ignore[assignment]
    sizes = [node.meta["val"].shape for node in passengers]
    ends = [FIRST_USED + gradients]
    with graph.inserting_before(reduction):
        for number, size in enumerate(sizes):
            ends.append(ends[-1] + size.numel())
            if gradients + number in results:
                part = emit(graph, _aten.slice.Tensor, riders, 0, ends[-2], ends[-1])
                shaped = emit(graph, _aten.reshape.default, part, list(size))
                results[gradients + number].replace_all_uses_with(shaped)
        if gradients + len(sizes) in results:
            first = emit(graph, _aten.slice.Tensor, riders, 0, 0, FIRST_USED)
            results[gradients + len(sizes)].replace_all_uses_with(first)
